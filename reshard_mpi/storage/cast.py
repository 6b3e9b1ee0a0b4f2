"""Arrays whose elements become those of another floating-point type while they are read.

Such an array is shown as if it had been saved in that type, behind the end of its file: who plans and moves knows byte spans
alone, and a span may begin and end within an element.

    file    |--- float32 ---|--- int64 ---|      shown behind it   |-- bfloat16 --|

Values are rounded to the nearest, of two to the even one, as numpy does and ml_dtypes for bfloat16; float64 becomes bfloat16 by
way of float32 there, as in PyTorch.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from reshard_mpi.storage.shown import ReadSpan

Positions = NDArray[np.int64]
Infinite = Callable[[Positions], None]  # is told where in the view finite elements begin that have become infinite
ITEMSIZES = {"float64": 8, "float32": 4, "float16": 2, "bfloat16": 2}
INFINITY = {"float16": 0x7C00, "bfloat16": 0x7F80}  # the bits of it
MOST_NBYTES = 1 << 19  # of what is converted at once, before and after: it should stay in a core's cache
COUNTING_NBYTES = 4  # of an element, to see whether it has become infinite


@dataclass(frozen=True)
class CastArray:
    """An array of `shape`, stored under `key` from byte `stored_begin` on as `stored_dtype`, shown at `begin` as `dtype`."""

    key: str
    shape: tuple[int, ...]
    stored_begin: int
    stored_dtype: str
    begin: int
    dtype: str

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * ITEMSIZES[self.dtype]

    @property
    def stored_nbytes(self) -> int:
        return math.prod(self.shape) * ITEMSIZES[self.stored_dtype]


def numpy_dtype(name: str) -> "np.dtype[Any]":
    if name != "bfloat16":
        return np.dtype(name)
    import ml_dtypes  # not needed where nothing is cast

    return np.dtype(ml_dtypes.bfloat16)


class Caster:
    """Reads cast arrays, within `nbytes` of memory; finds the finite elements that become infinite."""

    def __init__(self, nbytes: int):
        self._scratch = np.empty(max(min(nbytes, MOST_NBYTES), 64), np.uint8)

    def read(self, array: CastArray, offset: int, into: memoryview, read: ReadSpan, infinite: Infinite) -> None:
        """Fill `into` with the bytes of the array as it is shown, from `offset` within it on."""
        size, stored_size = ITEMSIZES[array.dtype], ITEMSIZES[array.stored_dtype]
        first, last = offset // size, -(-(offset + len(into)) // size)
        step = (len(self._scratch) - 8) // (size + stored_size + COUNTING_NBYTES)
        for low in range(first, last, step):
            high = min(low + step, last)
            stored = self._scratch[: (high - low) * stored_size]
            read(array.stored_begin + low * stored_size, stored.data)
            room = len(stored) + -len(stored) % 8
            cast = self._scratch[room : room + (high - low) * size]
            odd = (_convert(stored, array.stored_dtype, cast, array.dtype) + low) * size - offset
            if len(odd):
                infinite(odd[odd >= 0])  # where only the end of an element is asked for, it is counted elsewhere
            begin, end = max(low * size, offset), min(high * size, offset + len(into))
            into[begin - offset : end - offset] = cast[begin - low * size : end - low * size].data


def _convert(stored: NDArray[np.uint8], stored_dtype: str, cast: NDArray[np.uint8], dtype: str) -> Positions:
    """Fill `cast` with the values that are `stored`; the positions of those that were finite, and aren't any more."""
    values = stored.view(numpy_dtype(stored_dtype))
    converted = cast.view(numpy_dtype(dtype))
    with np.errstate(all="ignore"):
        converted[...] = values
    if dtype in INFINITY:  # much faster on bits
        infinite = (cast.view(np.uint16) & 0x7FFF) == INFINITY[dtype]
    else:
        infinite = np.isinf(converted)
    at = np.flatnonzero(infinite)
    return at[np.isfinite(values[at])] if len(at) else at
