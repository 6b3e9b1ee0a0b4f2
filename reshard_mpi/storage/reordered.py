"""Arrays whose rows are put in another order while they are read: the heads of weights for rotary embeddings.

A head is rotated in pairs of rows. Some models store the two rows of a pair next to each other, others all first rows of a head
and then all second ones:

    interleaved   |0 1|2 3|4 5|        halves   |0 2 4|1 3 5|

Such an array is shown behind the end of its file, head by head in the order wanted; its digest is of what is stored. Where it
begins or ends within a head, the rows of it that are there are put in order: they are boxes of the head.

    rows 1..7 of two heads of 4   |1 2 3|4 5 6 7|        shown   |2 1 3|4 6 5 7|
"""

from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from reshard_mpi.boxes import Ints
from reshard_mpi.storage.shown import ReadSpan

ORDERS = ("halves", "interleaved")
BAND_NBYTES = 1 << 18  # are read at once where heads are smaller: they stay in the core's cache


def places(first: int, last: int, unit: int, to: str) -> Ints:
    """Where in a tensor its rows [first, last) go when every head of `unit` rows is put in the order `to`.

    >>> places(0, 6, 6, "halves").tolist(), places(5, 12, 6, "interleaved").tolist()
    ([0, 3, 1, 4, 2, 5], [5, 6, 8, 10, 7, 9, 11])
    """
    head, row = np.divmod(np.arange(first, last), unit)
    half = unit // 2
    within = row // 2 + row % 2 * half if to == "halves" else row % half * 2 + row // half
    return head * unit + within


@dataclass(frozen=True)
class ReorderedArray:
    """An array of `nrows` rows of `row_nbytes`, stored under `key` from byte `stored_begin` on, shown at `begin`.

    Its first row is row `first` of a tensor whose heads have `unit` rows; they are put in the order `to`.
    """

    key: str
    stored_begin: int
    begin: int
    row_nbytes: int
    nrows: int
    first: int
    unit: int
    to: str

    @property
    def nbytes(self) -> int:
        return self.nrows * self.row_nbytes

    @cached_property
    def band_nrows(self) -> int:
        """Rows of as many heads as are read at once."""
        return max(BAND_NBYTES // max(self.unit * self.row_nbytes, 1), 1) * self.unit

    @property
    def held_nbytes(self) -> int:
        return min(self.band_nrows, self.nrows) * self.row_nbytes

    def band(self, row: int) -> tuple[int, int]:
        """The rows of the array that are read together with this one."""
        low = (self.first + row) // self.band_nrows * self.band_nrows - self.first
        return max(low, 0), min(low + self.band_nrows, self.nrows)

    @property
    def is_checked(self) -> bool:
        return False

    def open(self, read: ReadSpan, where: str) -> "OpenReordered":
        return OpenReordered(self, read)


class OpenReordered:
    """A reordered array that is being read: of its heads, some are held as they are stored."""

    def __init__(self, array: ReorderedArray, read: ReadSpan):
        self._array, self._read = array, read
        self._held: tuple[int, int] = (0, 0)
        self._rows: NDArray[np.uint8] = np.empty((0, array.row_nbytes), np.uint8)
        self._order: Ints = np.empty(0, np.int64)

    def read(self, offset: int, into: memoryview) -> None:
        """Fill `into` with the bytes of the array, in the order wanted, from `offset` on."""
        row_nbytes = self._array.row_nbytes
        while len(into):
            row, within = divmod(offset, row_nbytes)
            self._hold(row)
            first, last = self._held
            if within or len(into) < row_nbytes:
                count = min(row_nbytes - within, len(into))
                into[:count] = self._rows[self._order[row - first], within : within + count].data
            else:
                order = self._order[row - first : min(last - row, len(into) // row_nbytes) + row - first]
                count = len(order) * row_nbytes
                rows = np.frombuffer(into[:count], np.uint8).reshape(len(order), row_nbytes)
                np.take(self._rows, order, axis=0, out=rows, mode="clip")  # any other mode makes a copy
            offset, into = offset + count, into[count:]

    def _hold(self, row: int) -> None:
        array = self._array
        if self._held[0] <= row < self._held[1]:
            return
        self.close()  # its memory goes before the next one's comes
        first, last = array.band(row)
        self._rows = np.empty((last - first, array.row_nbytes), np.uint8)
        self._read(array.stored_begin + first * array.row_nbytes, self._rows.reshape(-1).data)
        self._order = np.argsort(places(array.first + first, array.first + last, array.unit, array.to))
        self._held = first, last

    def close(self) -> None:
        """Let go of what is held."""
        self._held, self._rows = (0, 0), np.empty((0, self._array.row_nbytes), np.uint8)
