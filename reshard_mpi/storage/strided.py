"""Arrays that lie in their file in another order than row-major, as PyTorch saves a transposed tensor.

Such an array is shown as if it lay in row-major order behind the end of its file: whoever plans and reads knows byte spans alone.
Where such a span is read, the array is held in memory as it is stored, until its last byte was asked for.
"""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

ReadSpan = Callable[[int, memoryview], None]  # fills the view with the bytes of the file from an offset on


@dataclass(frozen=True)
class StridedArray:
    """An array of `shape`, with elements of `itemsize` bytes, the first at byte `first` of the file.

    `strides` are in bytes, none negative; `begin` is where it is shown.
    """

    begin: int
    first: int
    itemsize: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        return int(np.prod(self.shape, dtype=np.int64)) * self.itemsize

    @property
    def span_nbytes(self) -> int:
        """Bytes of the file from its first element to its last."""
        return sum((n - 1) * stride for n, stride in zip(self.shape, self.strides, strict=True)) + self.itemsize

    def open(self, read: ReadSpan) -> "OpenStrided":
        return OpenStrided(self, read)


class OpenStrided:
    """A strided array that is being read: the bytes of its rows, in order."""

    def __init__(self, array: StridedArray, read: ReadSpan):
        self._array = array
        span = np.empty(array.span_nbytes, np.uint8)
        read(array.first, span.data)
        self._elements: NDArray[np.void] = np.ndarray(array.shape, f"V{array.itemsize}", span, 0, array.strides)

    def read(self, offset: int, into: memoryview) -> None:
        """Fill `into` with the bytes of the array, in row-major order, from `offset` on."""
        row_nbytes = self._array.nbytes // self._array.shape[0]
        first, last = offset // row_nbytes, -(-(offset + len(into)) // row_nbytes)
        rows = np.ascontiguousarray(self._elements[first:last]).view(np.uint8).reshape(-1)
        into[:] = rows[offset - first * row_nbytes :][: len(into)].data
