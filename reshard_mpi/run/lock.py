"""The lock of OUT.partial: rank 0 claims it alone, then all ranks hold it while they live.

The kernel frees it when the last of them has ended, however it ends (flock(2)). So nobody else begins while one of them may still
write, as the ranks of a job that is being ended may.
"""

import fcntl
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from reshard_mpi.errors import StorageError, UsageError
from reshard_mpi.storage.known import waited_for
from reshard_mpi.storage.touching import touching

LOCK = "lock"
PATIENCE_S = 60.0  # with ranks of the same Slurm job that are about to end


def lock_alone(folder: Path) -> int:
    """The lock of the folder, held by this process alone; UsageError when a job holds it.

    Ranks of the same Slurm job, requeued while its last run is being ended, are waited for.
    """
    lock = os.open(folder / LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
    deadline = time.monotonic() + PATIENCE_S
    while True:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            held_by = os.pread(lock, 1000, 0).decode(errors="replace").strip()
            if not _is_of_this_job(held_by) or time.monotonic() > deadline:
                os.close(lock)
                raise UsageError(
                    str(folder), f"a job is writing it ({held_by or error.strerror}); wait for it, or end it"
                ) from error
            time.sleep(0.2)
        else:
            os.ftruncate(lock, 0)
            os.pwrite(lock, holder().encode(), 0)
            os.fsync(lock)  # so that other hosts can read it
            return lock


@contextmanager
def freed_lock(folder: Path) -> Iterator[bool]:
    """Is the lock of the folder held by no job, or gone? In the block no other job gets it."""
    try:
        lock = os.open(folder / LOCK, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
    except FileNotFoundError:
        yield True
        return
    try:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            yield False
        else:
            yield True
    finally:
        os.close(lock)


def share(lock: int) -> None:
    """From here on the other ranks may hold it, too."""
    fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)


def holder() -> str:
    return f"host {os.uname().nodename}, pid {os.getpid()}, job {os.environ.get('SLURM_JOB_ID', 'none')}\n"


def _is_of_this_job(holder: str) -> bool:
    job = os.environ.get("SLURM_JOB_ID")
    return job is not None and holder.endswith(f", job {job}")


class SharedLock:
    """The lock of OUT.partial, held by a rank beside the others; UsageError when another job has got it."""

    def __init__(self, partial: Path):
        self._path = partial / LOCK
        with touching("lock", partial, LOCK):
            self._lock = waited_for(self._path, lambda: os.open(self._path, os.O_RDWR | os.O_CLOEXEC))
            try:
                fcntl.flock(self._lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
            except BlockingIOError as error:
                raise UsageError(str(partial), "another job has begun to write it; wait for it, or end it") from error

    def check_holder(self, holder: str) -> None:
        """StorageError unless rank 0 has written this into the lock: else the name leads to another folder on this host."""
        if os.pread(self._lock, 1000, 0).decode(errors="replace") != holder:
            raise StorageError(
                str(self._path.parent),
                "is not the folder that rank 0 has made; OUT must lie where all hosts see the same files",
            )

    def __enter__(self) -> "SharedLock":
        return self

    def __exit__(self, *_: object) -> None:
        os.close(self._lock)
