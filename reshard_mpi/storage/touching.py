"""What the threads of this process ask of file systems: an error is told with its file, and what takes too long can be seen.

A call into a file system that doesn't answer can't be interrupted, and may last for ever: so each is noted while it is under way.
The notes are the process's, as its threads are.
"""

import time
from pathlib import Path
from threading import get_ident
from types import TracebackType
from typing import NamedTuple

from reshard_mpi.errors import storage_error


class Touch(NamedTuple):
    """Since when (time.monotonic) a thread has been trying to do `what` with the file, or folder, `path`/`name`."""

    since: float
    what: str
    path: Path
    name: str


_under_way: dict[int, Touch] = {}  # by thread


class touching:
    """While a file is opened, read, written, ...: an OSError is raised as a StorageError that says `what` we tried.

    `name` is joined to `path` only when somebody asks: a job reads a million spans.
    """

    __slots__ = ("_name", "_outer", "_path", "_what")

    def __init__(self, what: str, path: Path, name: str = ""):
        self._what, self._path, self._name = what, path, name

    def __enter__(self) -> None:
        thread = get_ident()
        self._outer = _under_way.get(thread)
        _under_way[thread] = Touch(time.monotonic(), self._what, self._path, self._name)

    def __exit__(self, _kind: type | None, error: BaseException | None, _traceback: TracebackType | None) -> None:
        if self._outer is None:
            del _under_way[get_ident()]
        else:
            _under_way[get_ident()] = self._outer._replace(since=time.monotonic())
        if isinstance(error, OSError):
            raise storage_error(self._path / self._name, error, self._what) from error


def longest_touch() -> Touch | None:
    """Of what the threads are doing with files, what was begun first."""
    return min(list(_under_way.values()), default=None, key=lambda touch: touch.since)
