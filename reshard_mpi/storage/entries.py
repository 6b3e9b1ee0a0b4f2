"""What a checkpoint holds beside tensors: pickled objects, which are kept as the bytes that they are, and never looked into."""

import hashlib
import os
import struct
import zipfile
import zlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple
from urllib.parse import quote

from reshard_mpi.errors import InputError, IntegrityError, names, storage_error
from reshard_mpi.storage.files import COPY_NBYTES, Files, create_file, open_regular, sync_folder

FOLDER = "bytes"  # beside the shards
SUFFIX = ".pt"
LONGEST_NAME = 200  # of a file; file systems allow 255 bytes


class Entry(NamedTuple):
    """An object by its name, and the byte range of a file that holds it; no file: nothing says where it is."""

    name: str
    file: str
    offset: int
    nbytes: int


def left_out(folder: Path, entries: Sequence[Entry]) -> Iterator[str]:
    """The warning that entries are not kept, if there are any."""
    if entries:
        said = (
            "1 entry that is no tensor is" if len(entries) == 1 else f"{len(entries)} entries that are no tensors are"
        )
        yield f"{folder}: {said} left out: {names(entry.name for entry in entries)} (reshard --keep-bytes keeps them)"


def check_entries(folder: Path, entries: Sequence[Entry]) -> None:
    """InputError when one can't be kept as it is said to lie."""
    for entry in entries:
        where = f"{folder / entry.file}: entry {entry.name}"
        if not entry.file:
            raise InputError(where, "is stored nowhere; save the checkpoint anew")
        fd = open_regular(folder, entry.file, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
        try:
            size = os.fstat(fd).st_size
        finally:
            os.close(fd)
        if entry.offset + entry.nbytes > size:
            end = entry.offset + entry.nbytes
            raise InputError(where, f"ends at byte {end}, the file at {size}; it is truncated: copy it anew")


def copy_entries(folder: Path, entries: Sequence[Entry], out: Path, checking: bool) -> None:
    """Each entry as a file of its own in `out`/bytes, durable when this returns.

    `checking`: IntegrityError for an archive that doesn't hold its CRC-32. What torch saves is one; other bytes have none.
    """
    if not entries:
        return
    try:
        (out / FOLDER).mkdir()
    except OSError as error:
        raise storage_error(out / FOLDER, error, "make") from error
    buffer = memoryview(bytearray(COPY_NBYTES))
    with Files(folder) as source, Files(out / FOLDER, os.O_RDWR) as target:
        for entry in entries:
            name = file_name(entry.name)
            create_file(out / FOLDER / name, entry.nbytes, b"")
            for first in range(0, entry.nbytes, COPY_NBYTES):
                part = buffer[: entry.nbytes - first]
                source.read(entry.file, entry.offset + first, part)
                target.write(name, first, part)
            target.sync(name)
            if checking and not _is_sound(out / FOLDER / name):
                where = f"{folder / entry.file}: entry {entry.name}"
                raise IntegrityError(
                    where, "doesn't hold the CRC-32 of its archive; its bytes have changed: get it anew"
                )
    sync_folder(out / FOLDER)


def _is_sound(path: Path) -> bool:
    """Does every part of an archive hold its CRC-32? Of what is none there is no telling."""
    try:
        with path.open("rb") as file:
            if file.read(4) != b"PK\x03\x04":
                return True
        with zipfile.ZipFile(path) as archive:
            return archive.testzip() is None
    except OSError as error:
        raise storage_error(path, error, "read") from error
    except (zipfile.BadZipFile, EOFError, NotImplementedError, RuntimeError, ValueError, struct.error, zlib.error):
        return False


def file_name(name: str) -> str:
    """The file of an entry: its name with all escaped that could mean something in a path; long ones are cut, and told apart.

    >>> file_name("optim.param_groups.0"), file_name("../a/b")
    ('optim.param_groups.0.pt', '..%2Fa%2Fb.pt')
    """
    escaped = quote(name, safe="", errors="surrogatepass")
    if len(escaped) > LONGEST_NAME:
        digest = hashlib.sha256(name.encode(errors="surrogatepass")).hexdigest()
        escaped = f"{escaped[: LONGEST_NAME - len(digest) - 1]}~{digest}"
    return escaped + SUFFIX
