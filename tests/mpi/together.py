"""What tests on several ranks share: one verdict, and the command line without leaving the process.

What each rank found is gathered, rank 0 decides, and all ranks assert what it says:

    faults = [] if comm.rank else differing_files(out)
    assert not faults_of_all(comm, faults)
"""

import shutil
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from mpi4py import MPI

from reshard_mpi.cli import parse
from reshard_mpi.commands import run_together
from reshard_mpi.errors import ReshardError


def faults_of_all(comm: MPI.Intracomm, faults: Iterable[str]) -> list[str]:
    """Collective: the faults of all ranks, on all ranks."""
    rest_until_all_are_here(comm)
    gathered = comm.gather(list(faults), root=0)
    named = [f"rank {rank}: {fault}" for rank, found in enumerate(gathered or ()) for fault in found]
    return comm.bcast(named, root=0)


def rest_until_all_are_here(comm: MPI.Intracomm) -> None:
    """Collective: a barrier that leaves the cores to those who still work; MPI's own spins."""
    request = comm.Ibarrier()
    while not request.Test():
        time.sleep(0.001)


def unequal(what: str, found: Any, expected: Any) -> Iterator[str]:
    """A fault, unless they are equal."""
    if found != expected:
        yield f"{what}: {found!r}, expected {expected!r}"


def run(comm: MPI.Comm, *arguments: object) -> tuple[int, str]:
    """Collective: the exit code of a command line, and its error message."""
    try:
        return run_together(comm, parse([str(argument) for argument in arguments])), ""
    except ReshardError as error:
        return error.exit_code, str(error)


def copy_on_root(comm: MPI.Intracomm, source: Path, copy: Path) -> None:
    """Collective: `copy` is there when this returns."""
    if comm.rank == 0:
        shutil.copytree(source, copy)
    comm.Barrier()


def flip_last_bit(file: Path) -> None:
    """The last byte of a shard is the last of its last array."""
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(content)


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in sorted(folder.iterdir())}


def differing_contents(one: Path, other: Path) -> list[str]:
    """Names of files that are not the same, or not there, in both folders."""
    a, b = contents(one), contents(other)
    return [
        f"{name} differs between {one} and {other}"
        for name in sorted(a.keys() | b.keys())
        if a.get(name) != b.get(name)
    ]
