"""Datasets of HDF5 files that are no byte span: chunked or compressed ones, and those in another byte order.

They are read through h5py, band by band, where a band is one row of chunks: every chunk is decompressed once when the array is
read in row-major order. h5py reads the file through our own spans, so that errors and descriptors are those of all other files.

    shape (8, 6), chunk (3, 4)      bands of rows [0, 3), [3, 6), [6, 8)
    shape (5, 8, 6), chunk (1, 3, 4)   for each index of the first axis, those bands of the second
"""

import io
import math
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np

from reshard_mpi.errors import InputError, ReshardError, StorageError
from reshard_mpi.storage.shown import ReadSpan
from reshard_mpi.storage.touching import touching

if TYPE_CHECKING:
    import h5py

T = TypeVar("T")

MOST_ROWS_NBYTES = 1 << 16  # of a band where there are no chunks


def guarded(do: Callable[[], T], where: str, spans: "SpanFile | None" = None) -> T:
    """`do()`; what h5py raises, which is any of a dozen types, as one InputError at `where`.

    What kept `spans` from being read goes first. The error keeps no frame of h5py alive, not even as its context: property lists
    of HDF5 that outlive Python's end crash it there. So this is no context manager, which would raise while handling another.
    """
    try:
        return do()
    except MemoryError:
        raise
    except ReshardError as error:
        fault = error
    except Exception as error:
        reason = str(error).split("\n")[0] or type(error).__name__
        fault = InputError(where, f"HDF5 can't read it: {reason}; the file is damaged or no HDF5 file: copy it anew")
    fault = (spans.error if spans else None) or fault
    fault.__context__ = fault.__cause__ = None
    raise fault.with_traceback(None)


class SpanFile(io.RawIOBase):
    """The `nbytes` bytes of a file from `begin` on, as a file that is read by spans; `error` is what a read failed with."""

    def __init__(self, read: ReadSpan, nbytes: int, begin: int = 0):
        self._read, self._nbytes, self._begin, self._position = read, nbytes, begin, 0
        self.error: ReshardError | None = None

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._position

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        position = offset + {io.SEEK_SET: 0, io.SEEK_CUR: self._position, io.SEEK_END: self._nbytes}[whence]
        if position < 0:
            raise ValueError("before the start")
        self._position = position
        return position

    def readinto(self, buffer: Any) -> int:
        into = memoryview(buffer).cast("B")[: max(self._nbytes - self._position, 0)]
        try:
            self._read(self._begin + self._position, into)
        except ReshardError as error:
            self.error = error
            raise
        self._position += len(into)
        return len(into)


def memory_type(file_type: "h5py.h5t.TypeID") -> "h5py.h5t.TypeID":
    """The same type in little-endian order: bytes then come as they are, whatever their values."""
    import h5py

    found = file_type.copy()
    if isinstance(found, h5py.h5t.TypeIntegerID | h5py.h5t.TypeFloatID):
        found.set_order(h5py.h5t.ORDER_LE)
    return found


@dataclass(frozen=True)
class ChunkedArray:
    """Dataset `key`, of elements of `itemsize` bytes, of a file of `file_nbytes`; `where` names it in errors.

    `shape` is that of the dataset, `chunk` that of its chunks, None where it has none.
    """

    begin: int
    key: str
    itemsize: int
    shape: tuple[int, ...]
    chunk: tuple[int, ...] | None
    file_nbytes: int
    where: str

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.itemsize

    @property
    def held_nbytes(self) -> int:
        """A band, and one chunk, both as it is stored and as it is read."""
        return self.band_nrows * self.row_nbytes + 2 * self.chunk_nbytes

    @property
    def chunk_nbytes(self) -> int:
        return math.prod(self.chunk or ()) * self.itemsize if self.chunk else 0

    @cached_property
    def axis(self) -> int:
        """The axis along which it is cut into bands: the first one along which a chunk has more than one element."""
        sizes = self.shape if self.chunk is None else tuple(map(min, self.chunk, self.shape))
        return next((axis for axis, size in enumerate(sizes) if size > 1), len(sizes) - 1)

    @cached_property
    def nrows(self) -> int:
        """Elements of the axis; 1 where there is none."""
        return self.shape[self.axis] if self.shape else 1

    @cached_property
    def row_nbytes(self) -> int:
        return math.prod(self.shape[self.axis + 1 :]) * self.itemsize if self.shape else self.itemsize

    @cached_property
    def band_nrows(self) -> int:
        if self.chunk is None:
            return min(max(MOST_ROWS_NBYTES // self.row_nbytes, 1), self.nrows)
        return min(self.chunk[self.axis], self.nrows)

    @property
    def is_checked(self) -> bool:
        return False

    def open(self, read: ReadSpan, where: str) -> "OpenChunked":
        return OpenChunked(self, read)


class OpenChunked:
    """A chunked array that is being read: whole bands go where they are wanted, of others one is held."""

    def __init__(self, array: ChunkedArray, read: ReadSpan):
        self._array, self._spans = array, SpanFile(read, array.file_nbytes)
        self._held: tuple[int, np.ndarray] | None = None  # first row, bytes
        guarded(self._open, array.where, self._spans)

    def _open(self) -> None:
        import h5py

        self._file = h5py.File(self._spans, "r")
        access = h5py.h5p.create(h5py.h5p.DATASET_ACCESS)
        access.set_chunk_cache(1, self._array.chunk_nbytes, 1.0)
        self._dataset = h5py.h5d.open(self._file.id, self._array.key.encode(), access)
        self._type = memory_type(self._dataset.get_type())

    def close(self) -> None:
        """Let go of what is held."""
        self._held = None
        guarded(self._file.close, self._array.where, self._spans)

    def read(self, offset: int, into: memoryview) -> None:
        """Fill `into` with the bytes of the array, in row-major order, from `offset` on."""
        array = self._array
        while len(into):
            prefix, row = divmod(offset // array.row_nbytes, array.nrows)
            first = row - row % array.band_nrows
            last = min(first + array.band_nrows, array.nrows)
            within = offset - (prefix * array.nrows + first) * array.row_nbytes
            if within == 0 and len(into) >= (last - first) * array.row_nbytes:
                last = self._last_of_whole_bands(first, len(into))
                count = (last - first) * array.row_nbytes
                self._read_rows(prefix, first, last, np.frombuffer(into[:count], np.uint8))
            else:
                band = self._band(prefix, first, last)
                count = min(len(band) - within, len(into))
                into[:count] = band[within : within + count].data
            offset, into = offset + count, into[count:]

    def _last_of_whole_bands(self, first: int, nbytes: int) -> int:
        """The row after the bands that begin with row `first` and are no more than `nbytes`."""
        array = self._array
        nrows = nbytes // array.row_nbytes
        return array.nrows if first + nrows >= array.nrows else first + nrows - nrows % array.band_nrows

    def _band(self, prefix: int, first: int, last: int) -> np.ndarray:
        number = prefix * self._array.nrows + first
        if self._held is None or self._held[0] != number:
            self._held = None  # its memory goes before the next one's comes
            band = np.empty((last - first) * self._array.row_nbytes, np.uint8)
            self._read_rows(prefix, first, last, band)
            self._held = number, band
        return self._held[1]

    def _read_rows(self, prefix: int, first: int, last: int, into: np.ndarray) -> None:
        import h5py

        array = self._array

        def read() -> None:
            space = self._dataset.get_space()
            if array.shape:
                leading = np.unravel_index(prefix, array.shape[: array.axis]) if array.axis else ()
                start = (*map(int, leading), first, *(0 for _ in array.shape[array.axis + 1 :]))
                count = (*(1 for _ in leading), last - first, *array.shape[array.axis + 1 :])
                space.select_hyperslab(start, count)
            self._dataset.read(h5py.h5s.create_simple((len(into) // array.itemsize,)), space, into, self._type)

        guarded(read, array.where, self._spans)


def read_descriptor(fd: int, where: str) -> ReadSpan:
    """Reads spans of an open file; StorageError at `where`."""

    def read(offset: int, into: memoryview) -> None:
        done = 0
        while done < len(into):
            with touching("read", Path(where)):
                count = os.preadv(fd, [into[done:]], offset + done)
            if not count:
                raise StorageError(where, f"ends at byte {offset + done}; it changed while it was read")
            done += count

    return read


def nchunks(shape: Sequence[int], chunk: Sequence[int]) -> int:
    """How many chunks an array of that shape has."""
    return math.prod(-(-size // part) for size, part in zip(shape, chunk, strict=True))
