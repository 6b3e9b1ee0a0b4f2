"""The end of a job whose file system doesn't answer: a rank in such a call can't be interrupted, nor agree on anything.

A thread looks at what the others are waiting for. The first rank whose time has come says so, and ends all.
"""

import os
import sys
import threading
import time
from typing import NoReturn

from mpi4py import MPI

from reshard_mpi.cli import tell
from reshard_mpi.errors import StorageError
from reshard_mpi.storage.touching import Touch, longest_touch
from reshard_mpi.streams import stderr

LONGEST_NAP_S = 1.0
SECONDS_TO_BE_HEARD = (
    0.2  # by the launcher: Open MPI's mixes what it says of an abort into lines that are still on their way
)


def end_job(comm: MPI.Comm, code: int) -> NoReturn:
    """End all ranks with this exit code, from any thread and without the help of the other ranks."""
    sys.stdout.flush()
    stderr.flush()
    time.sleep(SECONDS_TO_BE_HEARD)
    comm.Abort(code)
    os._exit(code)  # MPICH's Abort may return


def watch(comm: MPI.Comm, seconds: float) -> None:
    """End the job with exit 5 when this rank has waited that long for one call into a file system."""
    threading.Thread(target=_watch, args=(comm, seconds), name="stall", daemon=True).start()


def _watch(comm: MPI.Comm, seconds: float) -> None:
    patience = patience_s(comm.rank, seconds)
    while True:
        touch = longest_touch()
        if touch is not None and time.monotonic() - touch.since >= patience:
            tell(_stalled(comm.rank, touch))
            end_job(comm, StorageError.exit_code)
        time.sleep(min(seconds / 8, LONGEST_NAP_S))


def patience_s(rank: int, seconds: float) -> float:
    """How long a rank waits. Where all of them do, one is to tell: it has ended the others before their time comes."""
    return seconds + min(rank, seconds)


def _stalled(rank: int, touch: Touch) -> StorageError:
    waited = f"{time.monotonic() - touch.since:.1f} s"
    return StorageError(
        str(touch.path / touch.name),
        f"rank {rank} on host {os.uname().nodename} has tried for {waited} to {touch.what} it, longer than --stall-timeout; "
        "check the file system; then the same command goes on",
    )
