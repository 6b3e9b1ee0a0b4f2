"""The journal of OUT.partial: of which job it is, and what of it is durable already.

JSON, a line each: the first says of which job it is (whatever decides the bytes of OUT), each later one what has become durable
since. A line is synced before anything relies on it; the last one may be torn, and then doesn't count. What is noted depends
neither on the ranks nor on their memory: ranges of the bytes of tensors, in row-major order, and arrays by file and key.

What a line says is written there without a second look at the data, so every line has a CRC-32 of itself and of all before it:
one that has changed, or is missing, is seen.
"""

import json
import os
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import msgspec
from msgspec import Meta, Struct, field

from reshard_mpi.errors import UsageError
from reshard_mpi.storage.files import sync_folder

JOURNAL = "journal.jsonl"
LARGEST_JOURNAL = 1 << 30


Offset = Annotated[int, Meta(ge=0, le=(1 << 63) - 1)]
Sha256 = Annotated[str, Meta(pattern="^[0-9a-f]{64}$")]


class Durable(Struct, frozen=True, forbid_unknown_fields=True):
    """What is on the storage and synced.

    `written`: of tensors, by id, the bytes [begin, end) that are in every array of the target that holds them. `verified`: of
    source files, the keys of the arrays that were held against their digests. `digests`: of target files, by key, the SHA-256 of
    arrays in hex. `infinite`: of tensors, by id, how many elements of what is written have become infinite.
    """

    written: dict[str, list[tuple[Offset, Offset]]] = field(default_factory=dict)
    verified: dict[str, list[str]] = field(default_factory=dict)
    digests: dict[str, dict[str, Sha256]] = field(default_factory=dict)
    infinite: dict[str, Offset] = field(default_factory=dict)

    def add(self, other: "Durable") -> None:
        for tensor, ranges in other.written.items():
            self.written.setdefault(tensor, []).extend(ranges)
        for file, keys in other.verified.items():
            self.verified.setdefault(file, []).extend(keys)
        for file, digests in other.digests.items():
            self.digests.setdefault(file, {}).update(digests)
        for tensor, count in other.infinite.items():
            self.infinite[tensor] = self.infinite.get(tensor, 0) + count


class _Line(Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """One of them is there."""

    identity: dict[str, Any] | None = None
    durable: Durable | None = None
    failed: str | None = None
    replaces_out: bool = False


class _Sealed(Struct, frozen=True, forbid_unknown_fields=True):
    """A line as it stands in the file: what it says, and the CRC-32 of that and of what all lines before it say."""

    says: msgspec.Raw
    crc32: int


class Journal:
    """The journal of one job, open to be added to. An OSError is the caller's to tell."""

    def __init__(self, folder: Path, fd: int, crc32: int = 0):
        self.path, self._fd, self._crc32 = folder / JOURNAL, fd, crc32

    @classmethod
    def begun(cls, folder: Path, identity: Mapping[str, object]) -> "Journal":
        """A new journal, in the place of any that was there."""
        new = folder / f"{JOURNAL}.new"
        journal = cls(folder, os.open(new, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_APPEND | os.O_CLOEXEC, 0o666))
        journal._append(_Line(identity=dict(identity)))
        new.replace(journal.path)
        sync_folder(folder)
        return journal

    @classmethod
    def continued(cls, folder: Path, identity: Mapping[str, object]) -> "tuple[Journal | None, Durable]":
        """The journal that is there, and what it says is durable; None where there is none.

        UsageError when it is of another job, of one whose digests did not hold, or can't be understood.
        """
        path = folder / JOURNAL
        try:
            fd = os.open(path, os.O_RDWR | os.O_APPEND | os.O_CLOEXEC | os.O_NONBLOCK)
        except FileNotFoundError:
            return None, Durable()  # killed before it wrote anything
        try:
            lines, last_crc32 = _whole_lines(fd, path)
            return cls(folder, fd, last_crc32), _said(lines, path, identity)
        except BaseException:
            os.close(fd)
            raise

    def note(self, durable: Durable) -> None:
        """Return when it is on the storage that this is durable."""
        self._append(_Line(durable=durable))

    def fail(self, why: str) -> None:
        """What is here must not be continued."""
        self._append(_Line(failed=why))

    def replace_out(self) -> None:
        """All is done, and this folder is about to change places with OUT."""
        self._append(_Line(replaces_out=True))

    def _append(self, line: _Line) -> None:
        says = msgspec.json.encode(line)
        crc32 = zlib.crc32(says, self._crc32)
        text = memoryview(msgspec.json.encode(_Sealed(msgspec.Raw(says), crc32)) + b"\n")
        while text:
            text = text[os.write(self._fd, text) :]
        os.fsync(self._fd)
        self._crc32 = crc32

    def close(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1


def replaces_out(folder: Path) -> bool | None:
    """Has the job of the journal been about to put this folder in the place of another? None if it is no journal of ours.

    An OSError is the caller's to tell.
    """
    fd = os.open(folder / JOURNAL, os.O_RDWR | os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOFOLLOW)
    try:
        return any(line.replaces_out for line in _whole_lines(fd, folder / JOURNAL)[0])
    except UsageError:
        return None
    finally:
        os.close(fd)


def _whole_lines(fd: int, path: Path) -> tuple[list[_Line], int]:
    """The lines of the file, which afterwards ends with the last whole one, and its CRC-32; UsageError if they make no sense."""
    if os.fstat(fd).st_size > LARGEST_JOURNAL:
        raise _foreign(path)
    with open(fd, "rb", closefd=False) as file:
        texts = file.read().split(b"\n")
    torn = texts.pop()
    found, crc32 = [], 0
    try:
        for text in texts:
            sealed = msgspec.json.decode(text, type=_Sealed)
            crc32 = zlib.crc32(sealed.says, crc32)
            if sealed.crc32 != crc32:
                raise _foreign(path)
            found.append(msgspec.json.decode(sealed.says, type=_Line))
    except (ValueError, msgspec.ValidationError, RecursionError) as error:
        raise _foreign(path) from error
    if not found or found[0].identity is None:
        raise _foreign(path)
    if torn:
        os.ftruncate(fd, sum(len(text) + 1 for text in texts))
    return found, crc32


def _said(lines: list[_Line], path: Path, identity: Mapping[str, object]) -> Durable:
    first, *rest = lines
    assert first.identity is not None
    mine = json.loads(json.dumps(identity))  # as it is read: no tuples
    differs = sorted(key for key in mine.keys() | first.identity.keys() if mine.get(key) != first.identity.get(key))
    if differs:
        raise UsageError(
            str(path.parent), f"was left by a job with another {' and '.join(differs)}; --restart begins anew"
        )
    found = Durable()
    for line in rest:
        if line.failed is not None:
            raise UsageError(
                str(path.parent),
                "was left by this job when a digest did not hold, which can't be continued; --restart begins anew",
            )
        found.add(line.durable or Durable())
    return found


def _foreign(path: Path) -> UsageError:
    return UsageError(str(path), "can't be understood; --restart begins anew")
