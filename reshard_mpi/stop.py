"""The signals that ask for an orderly end: SIGUSR1, SIGTERM, SIGINT.

A handler does no work: it only takes note. Ranks look at the note where they agree, so that all of them stop at the same
place. A second signal ends the process at once. Python runs handlers between two calls into MPI only.
"""

import os
import signal
import threading
from types import FrameType

from reshard_mpi.errors import Interrupted

SIGNALS = (signal.SIGUSR1, signal.SIGTERM, signal.SIGINT)
# Signals come to a process, not to an object: the note is the process's.
_requested = threading.Event()
_shielded = threading.Event()


def listen() -> None:
    """Take note of the signals from now on."""
    for number in SIGNALS:
        signal.signal(number, _take_note)


def _take_note(number: int, _frame: FrameType | None) -> None:
    if _requested.is_set():
        signal.signal(number, signal.SIG_DFL)
        os.kill(os.getpid(), number)
    _requested.set()


def shield() -> None:
    """From now on it is too late to stop: the work is done, and is about to be made visible."""
    _shielded.set()


def request() -> Interrupted | None:
    """The error to agree on, if a signal asked this process to stop."""
    if _requested.is_set() and not _shielded.is_set():
        return Interrupted("job", "stopped by a signal before it was done; the same command goes on from there")
    return None
