"""Arrays that lie in their file in another order than row-major, or within a larger storage, as PyTorch saves views of tensors.

Where such an array is read, it is held in memory as it is stored, until its last byte was asked for.
"""

import zlib
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from reshard_mpi.errors import IntegrityError
from reshard_mpi.storage.shown import ReadSpan


@dataclass(frozen=True)
class StridedArray:
    """An array of `shape`, with elements of `itemsize` bytes, the first at byte `first` of its storage.

    The storage is the byte range [storage_begin, storage_begin + storage_nbytes) of the file, `crc32` that of its bytes.
    `strides` are in bytes, none negative; `begin` is where the array is shown.
    """

    begin: int
    storage_begin: int
    storage_nbytes: int
    crc32: int
    first: int
    itemsize: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        return int(np.prod(self.shape, dtype=np.int64)) * self.itemsize

    @property
    def held_nbytes(self) -> int:
        return self.storage_nbytes

    @property
    def is_checked(self) -> bool:
        return True

    def open(self, read: ReadSpan, where: str) -> "OpenStrided":
        """The array, held in memory; IntegrityError at `where` when its bytes have changed since it was saved."""
        return OpenStrided(self, read, where)


class OpenStrided:
    """A strided array that is being read: the bytes of its rows, in order."""

    def __init__(self, array: StridedArray, read: ReadSpan, where: str):
        self._array = array
        storage = np.empty(array.storage_nbytes, np.uint8)
        read(array.storage_begin, storage.data)
        found = zlib.crc32(storage.data)
        if found != array.crc32:
            raise IntegrityError(
                where,
                f"the {array.storage_nbytes} bytes at {array.storage_begin} have the CRC-32 {found:08x}, the archive says "
                f"{array.crc32:08x}; they have changed since they were saved: get the file anew",
            )
        self._elements: NDArray[np.void] = np.ndarray(
            array.shape, f"V{array.itemsize}", storage, array.first, array.strides
        )

    def read(self, offset: int, into: memoryview) -> None:
        """Fill `into` with the bytes of the array, in row-major order, from `offset` on."""
        row_nbytes = self._array.nbytes // self._array.shape[0]
        first, last = offset // row_nbytes, -(-(offset + len(into)) // row_nbytes)
        rows = np.ascontiguousarray(self._elements[first:last]).view(np.uint8).reshape(-1)
        into[:] = rows[offset - first * row_nbytes :][: len(into)].data

    def close(self) -> None:
        """Nothing is open."""
