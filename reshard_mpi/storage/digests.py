"""SHA-256 of stored arrays, computed while their bytes pass by; of zip containers (DCP) the CRC-32 that they come with.

A digest is written `sha256:…` or `crc32:…`.
"""

import hashlib
import zlib
from collections.abc import Callable

import numpy as np

from reshard_mpi.boxes import Ints
from reshard_mpi.storage.files import COPY_NBYTES

ALGORITHMS = ("", "sha256", "crc32")  # by number: of an array without a digest, and of those with one


class Crc32:
    """The CRC-32 of zip (ISO 3309), as hashlib's objects are."""

    def __init__(self, value: int = 0):
        self._value = value

    def update(self, data: bytes | memoryview) -> None:
        self._value = zlib.crc32(data, self._value)

    def copy(self) -> "Crc32":
        return Crc32(self._value)

    def digest(self) -> bytes:
        return self._value.to_bytes(4, "big")


def new_hash(algorithm: str) -> "hashlib._Hash | Crc32":
    return Crc32() if algorithm == "crc32" else hashlib.sha256()


Read = Callable[[int, memoryview], None]  # fills the view with the array's bytes from an offset within the array on


class RunningDigest:
    """The digest of an array of `nbytes` bytes, fed with spans of it.

    It is sequential: a span that comes out of order is not taken, and read again once it is due.
    """

    def __init__(self, nbytes: int, algorithm: str = "sha256"):
        self.nbytes = nbytes
        self._position = 0
        self._hash: hashlib._Hash | Crc32 | None = new_hash(algorithm)
        self._forks: list[RunningDigest] = []

    def fork(self, at: int, nbytes: int) -> "RunningDigest":
        """The digest of another array, of `nbytes` bytes, that begins with the first `at` bytes of this one.

        It takes nothing before this one has been fed so much. To be called before this one is fed.
        """
        other = RunningDigest(nbytes)
        other._position, other._hash = at, None
        self._forks.append(other)
        self._forks.sort(key=lambda fork: -fork._position)
        return other

    def feed(self, offset: int, data: memoryview) -> int:
        """Take what is due of the bytes at `offset` within the array; returns how many bytes that was."""
        begun_at = self._position
        while self._hash is not None and offset <= self._position < offset + len(data):
            due = data[self._position - offset :]
            if self._forks:
                due = due[: self._forks[-1]._position - self._position]
            self._hash.update(due)
            self._position += len(due)
            while self._forks and self._forks[-1]._position == self._position:
                self._forks.pop()._hash = self._hash.copy()
        return self._position - begun_at

    def catch_up(self, offset: int, read: Read) -> int:
        """Take what is lacking before `offset`; returns the number of bytes that had to be read for it."""
        lacking = max(offset - self._position, 0)
        if lacking:
            assert self._hash is not None, "what it was forked from was not fed"
            buffer = memoryview(bytearray(min(COPY_NBYTES, lacking)))
            while self._position < offset:
                part = buffer[: min(len(buffer), offset - self._position)]
                read(self._position, part)
                self.feed(self._position, part)
        return lacking

    @property
    def is_complete(self) -> bool:
        return self._position == self.nbytes and self._hash is not None

    def digest(self) -> bytes:
        assert self._hash is not None and self.is_complete
        return self._hash.digest()


def digest_row(name: str | None) -> Ints:
    """The bytes of `sha256:…` or `crc32:…` as four int64, filled with zeros; zeros for none.

    >>> digest_name(digest_row("sha256:" + 64 * "7"))[:10]
    'sha256:777'
    """
    return np.frombuffer(bytes.fromhex(name.partition(":")[2] if name else "").ljust(32, b"\0"), np.int64)


def digest_name(row: Ints | bytes, algorithm: str = "sha256") -> str:
    return f"{algorithm}:{bytes(row)[: 4 if algorithm == 'crc32' else 32].hex()}"


def crc32_name(value: int) -> str:
    return digest_name(value.to_bytes(4, "big"), "crc32")


def algorithm_of(name: str | None) -> str:
    """
    >>> algorithm_of("crc32:00000000"), algorithm_of(None)
    ('crc32', '')
    """
    return name.partition(":")[0] if name else ""
