"""Standard output and standard error, as a caller may have left them: closed, full, or without anybody who still reads.

What can't be said on standard error is no reason to stop, nor for another exit code.
"""

import os
import sys
from contextlib import suppress
from typing import Any, TextIO

from reshard_mpi.errors import storage_error


def open_closed_streams() -> None:
    """Open /dev/null for each of the three that is closed.

    Else files opened next would get their numbers, and what libraries print would go into those files.
    """
    for fd, (name, mode) in enumerate((("stdin", "r"), ("stdout", "w"), ("stderr", "w"))):
        try:
            os.fstat(fd)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # gets the lowest number that is free
            setattr(sys, name, open(fd, mode))


def say(text: str) -> None:
    """Write a line to standard output; StorageError when that isn't possible, but not when nobody reads any more (`| head`)."""
    try:
        sys.stdout.write(text + "\n")
        sys.stdout.flush()
    except OSError as error:
        _drop(sys.stdout)
        if not isinstance(error, BrokenPipeError):
            raise storage_error("standard output", error, "write to") from error


class StandardError:
    """sys.stderr, for tqdm too, but that it never fails."""

    def write(self, text: str) -> None:
        try:
            sys.stderr.write(text)
            sys.stderr.flush()
        except OSError:
            _drop(sys.stderr)

    def flush(self) -> None:
        """Nothing is left to be flushed."""

    def __getattr__(self, name: str) -> Any:
        return getattr(sys.stderr, name)


stderr = StandardError()


def _drop(stream: TextIO) -> None:
    """Let go of what could not be written: Python would try again at its end, and change the exit code to 120."""
    with suppress(OSError):
        kept, nowhere = os.dup(stream.fileno()), os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, stream.fileno())
        try:
            stream.flush()
        finally:
            os.dup2(kept, stream.fileno())
            os.close(kept)
            os.close(nowhere)
