"""Arrays that lie in their file in another order than row-major, as PyTorch saves a transposed tensor.

Where such an array is read, it is held in memory as it is stored, until its last byte was asked for.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from reshard_mpi.storage.shown import ReadSpan


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
    def held_nbytes(self) -> int:
        """Bytes of the file from its first element to its last."""
        return sum((n - 1) * stride for n, stride in zip(self.shape, self.strides, strict=True)) + self.itemsize

    def open(self, read: ReadSpan) -> "OpenStrided":
        return OpenStrided(self, read)


class OpenStrided:
    """A strided array that is being read: the bytes of its rows, in order."""

    def __init__(self, array: StridedArray, read: ReadSpan):
        self._array = array
        span = np.empty(array.held_nbytes, np.uint8)
        read(array.first, span.data)
        self._elements: NDArray[np.void] = np.ndarray(array.shape, f"V{array.itemsize}", span, 0, array.strides)

    def read(self, offset: int, into: memoryview) -> None:
        """Fill `into` with the bytes of the array, in row-major order, from `offset` on."""
        row_nbytes = self._array.nbytes // self._array.shape[0]
        first, last = offset // row_nbytes, -(-(offset + len(into)) // row_nbytes)
        rows = np.ascontiguousarray(self._elements[first:last]).view(np.uint8).reshape(-1)
        into[:] = rows[offset - first * row_nbytes :][: len(into)].data

    def close(self) -> None:
        """Nothing is open."""
