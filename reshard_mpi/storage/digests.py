"""SHA-256 of stored arrays, computed while their bytes pass by."""

import hashlib
from collections.abc import Callable

import numpy as np

from reshard_mpi.boxes import Ints
from reshard_mpi.storage.files import COPY_NBYTES

Read = Callable[[int, memoryview], None]  # fills the view with the array's bytes from an offset within the array on


class RunningDigest:
    """The SHA-256 of an array of `nbytes` bytes, fed with spans of it.

    SHA-256 is sequential: a span that comes out of order is not taken, and read again once it is due.
    """

    def __init__(self, nbytes: int):
        self.nbytes = nbytes
        self._position = 0
        self._sha256: hashlib._Hash | None = hashlib.sha256()
        self._forks: list[RunningDigest] = []

    def fork(self, at: int, nbytes: int) -> "RunningDigest":
        """The digest of another array, of `nbytes` bytes, that begins with the first `at` bytes of this one.

        It takes nothing before this one has been fed so much. To be called before this one is fed.
        """
        other = RunningDigest(nbytes)
        other._position, other._sha256 = at, None
        self._forks.append(other)
        self._forks.sort(key=lambda fork: -fork._position)
        return other

    def feed(self, offset: int, data: memoryview) -> int:
        """Take what is due of the bytes at `offset` within the array; returns how many bytes that was."""
        begun_at = self._position
        while self._sha256 is not None and offset <= self._position < offset + len(data):
            due = data[self._position - offset :]
            if self._forks:
                due = due[: self._forks[-1]._position - self._position]
            self._sha256.update(due)
            self._position += len(due)
            while self._forks and self._forks[-1]._position == self._position:
                self._forks.pop()._sha256 = self._sha256.copy()
        return self._position - begun_at

    def catch_up(self, offset: int, read: Read) -> int:
        """Take what is lacking before `offset`; returns the number of bytes that had to be read for it."""
        lacking = max(offset - self._position, 0)
        if lacking:
            assert self._sha256 is not None, "what it was forked from was not fed"
            buffer = memoryview(bytearray(min(COPY_NBYTES, lacking)))
            while self._position < offset:
                part = buffer[: min(len(buffer), offset - self._position)]
                read(self._position, part)
                self.feed(self._position, part)
        return lacking

    @property
    def is_complete(self) -> bool:
        return self._position == self.nbytes

    def digest(self) -> bytes:
        assert self._sha256 is not None and self.is_complete
        return self._sha256.digest()


def digest_row(name: str | None) -> Ints:
    """`sha256:…` as four int64, zeros for none.

    >>> digest_name(digest_row("sha256:" + 64 * "7"))[:10]
    'sha256:777'
    """
    return np.frombuffer(bytes.fromhex(name.removeprefix("sha256:")) if name else bytes(32), np.int64)


def digest_name(row: Ints | bytes) -> str:
    return f"sha256:{bytes(row).hex()}"
