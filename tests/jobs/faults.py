"""Under mpirun: the program, with something going wrong on one rank. Not a test by itself.

    mpirun -n 3 python tests/jobs/faults.py FAULT COMMAND ...

FAULT is JSON: from the `number`-th call of the function `at` on, the first call of the function `call` (by default: of `at`
itself) that is about a file with `file` in its path goes wrong as `do` says, once, or each time. That is noted in the file
`note`.
"""

import errno
import functools
import importlib
import json
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from reshard_mpi.launcher import find_launch

Function = Callable[..., Any]


@dataclass
class Fault:
    rank: int | None  # None: each rank
    do: str
    at: str
    note: str
    number: int = 1
    call: str = ""
    file: str = ""

    def __post_init__(self) -> None:
        self._lock, self._entered, self._is_over = threading.Lock(), 0, False

    def inject(self) -> None:
        replace(self.at, self._counting)
        replace(self.call or self.at, self._failing)

    def _counting(self, function: Function) -> Function:
        def counting(*arguments: Any, **options: Any) -> Any:
            self._entered += 1
            return function(*arguments, **options)

        return counting

    def _failing(self, function: Function) -> Function:
        def failing(*arguments: Any, **options: Any) -> Any:
            if not self._is_now(arguments):
                return function(*arguments, **options)
            return DEEDS[self.do](functools.partial(function, **options), *arguments)

        return failing

    def _is_now(self, arguments: tuple[Any, ...]) -> bool:
        entered = self._entered + (not self.call)  # the call of `at` itself is yet to be counted
        with self._lock:
            if self._is_over or entered < self.number or self.file not in path_of(arguments):
                return False
            self._is_over = self.do not in AGAIN
        Path(self.note).touch()
        return True


def replace(name: str, wrap: Callable[[Function], Function]) -> None:
    module, _, path = name.partition(":")
    *parts, last = path.split(".")
    owner = functools.reduce(getattr, parts, importlib.import_module(module))
    function = getattr(owner, last)
    setattr(owner, last, functools.wraps(function)(wrap(function)))


def path_of(arguments: tuple[Any, ...]) -> str:
    """The file that a call of `os` is about."""
    first = arguments[0] if arguments else ""
    return os.readlink(f"/proc/self/fd/{first}") if isinstance(first, int) else str(first)


def error(number: int) -> Function:
    def deed(_function: Function, *arguments: Any) -> None:
        raise OSError(number, os.strerror(number), *(a for a in arguments[:1] if isinstance(a, str | Path)))

    return deed


def no_memory(_function: Function, *_: Any) -> None:
    raise MemoryError


def signalled(number: int) -> Function:
    def deed(function: Function, *arguments: Any) -> Any:
        os.kill(os.getpid(), number)
        return function(*arguments)

    return deed


def end_of_file(_function: Function, *_: Any) -> int:
    return 0


def flipped(function: Function, fd: int, buffers: list[memoryview], offset: int) -> int:
    count = function(fd, buffers, offset)
    buffers[0][count - 1] ^= 1
    return count


def killed_half_way(function: Function, fd: int, data: memoryview) -> None:
    function(fd, data[: len(data) // 2])
    os.kill(os.getpid(), signal.SIGKILL)


def sleeping(seconds: float) -> Function:
    def deed(function: Function, *arguments: Any) -> Any:
        time.sleep(seconds)
        return function(*arguments)

    return deed


DEEDS: dict[str, Function] = {
    **{name: error(getattr(errno, name)) for name in ("EACCES", "EDQUOT", "EIO", "ENOENT", "ENOSPC", "EROFS")},
    "no memory": no_memory,
    "SIGKILL": signalled(signal.SIGKILL),
    "SIGUSR1": signalled(signal.SIGUSR1),
    "end of file": end_of_file,
    "flipped": flipped,
    "killed half-way": killed_half_way,
    "slow": sleeping(0.05),
    "gone": error(errno.ENOENT),
    "stall": sleeping(1000),
}


AGAIN = ("slow", "gone")  # each time

if __name__ == "__main__":
    fault = Fault(**json.loads(sys.argv.pop(1)))
    if fault.rank in (None, find_launch().rank):
        fault.inject()
    from reshard_mpi.__main__ import main

    main()
