"""How ranks agree: on errors, on values of rank 0, on the plan.

An expected error never ends one rank alone. It is caught at an agreement, gathered, and raised on all ranks as one.
"""

import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

import numpy as np
from mpi4py import MPI

from reshard_mpi import stop
from reshard_mpi.boxes import Ints
from reshard_mpi.errors import ReshardError, expected_error, first_to_tell
from reshard_mpi.mpi.hosts import on_hosts

T = TypeVar("T")
ROOT = 0
SHORTEST_PAUSE, LONGEST_PAUSE = 2e-5, 2e-3  # seconds


class Agreement:
    """Holds the expected error of this rank, if any, until all ranks agree on one."""

    def __init__(self) -> None:
        self.error: ReshardError | None = None

    @contextmanager
    def held(self) -> Iterator[None]:
        """Keep an expected error for the agreement; unexpected ones pass."""
        try:
            yield
        except ReshardError as error:
            error.host = error.host or os.uname().nodename
            self.error = self.error or error
        except Exception as error:  # of a place where we had no better words for it
            told = expected_error(error)
            if told is None:
                raise
            self.error = self.error or told


@contextmanager
def agreed(comm: MPI.Comm, stoppable: bool = True) -> Iterator[None]:
    """Collective: run the block on every rank; if it failed on any, raise the same error on all.

    The block itself must not communicate. `stoppable`: is a signal, too, an error?
    """
    agreement = Agreement()
    with agreement.held():
        yield
    raise_together(comm, agreement.error, stoppable=stoppable)


def raise_together(comm: MPI.Comm, error: ReshardError | None, asks: bool = False, stoppable: bool = True) -> bool:
    """Collective: raise on all ranks the one error that stands for those of all ranks, if there is one.

    A signal that asked any rank to stop is such an error, unless it is not `stoppable` here. Returns whether any rank `asks`.
    """
    mine = error or (stop.request() if stoppable else None)
    said, heard = np.array([mine is not None, asks], np.int32), np.empty(2, np.int32)
    await_all(comm.Iallreduce(said, heard, MPI.MAX))
    if heard[0]:
        told = first_to_tell(error for error in comm.allgather(mine) if error is not None)
        assert told is not None
        raise on_hosts(comm, told)
    return bool(heard[1])


def await_all(request: MPI.Request) -> None:
    """Return when a non-blocking collective is complete, without keeping a core busy meanwhile.

    Blocking collectives spin: while rank 0 plans, or one rank reads, the others would take its cores away where there are more
    ranks than cores. And signals are seen at once, which within a blocking call they aren't.
    """
    began = time.perf_counter()
    while not request.Test():  # the longer it has taken, the longer it may sleep
        time.sleep(min(SHORTEST_PAUSE + (time.perf_counter() - began) / 16, LONGEST_PAUSE))


def on_root(comm: MPI.Comm, function: Callable[[], T]) -> T | None:
    """Collective: call `function` on rank 0 alone; its expected error is raised on all ranks. Other ranks get None."""
    result = None
    with agreed(comm):
        if comm.rank == ROOT:
            result = function()
    return result


def root_value(comm: MPI.Comm, function: Callable[[], T]) -> T:
    """Collective: the value that `function` has on rank 0, on all ranks; it must be small, for it is pickled."""
    return comm.bcast(on_root(comm, function), root=ROOT)


def broadcast_arrays(comm: MPI.Comm, values: list[Ints | int] | None) -> list[Ints | int]:
    """Collective: rank 0's int64 arrays and integers on all ranks, as one buffer.

    Pickling a plan of 200,000 tiles took 100 times longer.
    """
    shapes = comm.bcast(
        [value.shape if isinstance(value, np.ndarray) else None for value in values] if values is not None else None,
        root=ROOT,
    )
    if values is not None:
        flat = np.concatenate([np.empty(0, np.int64), *(np.ravel(np.asarray(value, np.int64)) for value in values)])
    else:
        flat = np.empty(sum(1 if shape is None else int(np.prod(shape)) for shape in shapes), np.int64)
    for first in range(0, len(flat), 1 << 24):  # counts of a message stay far below 2**31
        comm.Bcast(flat[first : first + (1 << 24)], root=ROOT)
    found: list[Ints | int] = []
    position = 0
    for shape in shapes:
        size = 1 if shape is None else int(np.prod(shape))
        part = flat[position : position + size]
        found.append(int(part[0]) if shape is None else part.reshape(shape))
        position += size
    return found


def gather_all(comm: MPI.Comm, value: Any) -> list[Any]:
    """Collective: the values of all ranks, on rank 0; an empty list elsewhere."""
    return comm.gather(value, root=ROOT) or []
