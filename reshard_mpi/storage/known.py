"""Files that are known to be there, opened on a host that may see them late, or see others under their names.

Another rank has made such a file, or has looked at it. A client of a network file system goes on for a while with what it
remembers of a folder; opening the folder makes it ask anew, as NFS promises (close-to-open consistency).
"""

import os
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from reshard_mpi.errors import StorageError, may_come

PATIENCE_S = 3.0
_given_up: set[Path] = set()  # what this process has waited for in vain, which it does once
NS = 10**9


class Stamp(NamedTuple):
    """Length of a file, and when it was last changed, as far as that is known."""

    nbytes: int
    changed_ns: int | None = None

    @classmethod
    def of(cls, status: os.stat_result) -> "Stamp":
        return cls(status.st_size, status.st_mtime_ns)

    def fits(self, other: "Stamp") -> bool:
        """Are they of one file? Not all clients of a file system tell parts of a second alike."""
        if None in (self.changed_ns, other.changed_ns):
            return self.nbytes == other.nbytes
        assert self.changed_ns is not None and other.changed_ns is not None
        return (self.nbytes, self.changed_ns // NS) == (other.nbytes, other.changed_ns // NS)


Known = Mapping[str, Stamp]  # files that are there, by name


def opened_as_known(path: Path, stamp: Stamp, opened: Callable[[], int]) -> int:
    """What `opened` returns, a descriptor of the file `path`, once it is there as it is known to be; StorageError if it isn't."""
    return waited_for(path, lambda: _compared(opened(), path, stamp))


def waited_for(path: Path, opened: Callable[[], int]) -> int:
    """What `opened` returns, a descriptor of the file `path`, which is there and may be seen late: it is waited for a little."""
    patient_until = time.monotonic() + PATIENCE_S
    while True:
        try:
            return opened()
        except (OSError, StorageError) as error:
            if not may_come(error):
                raise
            if path in _given_up or time.monotonic() >= patient_until:
                _given_up.add(path)
                raise
        time.sleep(PATIENCE_S / 32)
        ask_anew(path)


def _compared(fd: int, path: Path, stamp: Stamp) -> int:
    found = Stamp.of(os.fstat(fd))
    if found.fits(stamp):
        return fd
    os.close(fd)
    error = StorageError(
        str(path),
        f"isn't the file that it was before ({found.nbytes} bytes, expected {stamp.nbytes}; or its time differs): it was "
        "changed meanwhile, or hosts see different files under this name",
    )
    error.may_come = True
    raise error


def ask_anew(path: Path) -> None:
    """Have a network file system find out what is under this name now."""
    for folder in (path.parent.parent, path.parent):
        with suppress(OSError):
            os.close(os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC))
