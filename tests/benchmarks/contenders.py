"""The programs that are compared, as command lines.

A contender writes the folder `OUT`. Ours tells the seconds of its data path in `REPORT`, a peer on stdout, as the last
line; `cp` is all data path. Open MPI and MPICH come from two environments, as in the tests.
"""

import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from itertools import product
from pathlib import Path

from tests.benchmarks.works import Work
from tests.mpirun import MPIS, job_environ, mpi_environment

GIB = 1 << 30
TORCH_VARIABLES = {"OMP_NUM_THREADS": "1"}  # as torchrun sets it: ranks share the cores


@dataclass(frozen=True)
class Task:
    """Where a work lies. dcp: the source as DCP saves it. out: to be written. report, rendezvous: files not there yet."""

    work: Work
    nbytes: int
    source: Path
    dcp: Path
    out: Path
    report: Path
    rendezvous: Path


@dataclass(frozen=True)
class Contender:
    """command: of a task. memory: bytes that its processes hold, of a task. cannot: why not this work, else empty."""

    name: str
    about: str
    command: Callable[[Task], list[str]]
    environ: dict[str, str]
    memory: Callable[[Task], int]
    check: Callable[[Task], list[str]]
    cannot: Callable[[Work], str] = lambda work: ""
    needs_dcp: bool = False
    is_ours: bool = False


def all_contenders() -> dict[str, Contender]:
    """name -> contender, of those that this machine has the MPI for."""
    found = [_cp(), _cp_sync(), *_ours(), _naive(), *_consolidations(), _dcp()]
    return {contender.name: contender for contender in found}


def launcher() -> tuple[list[str], dict[str, str]]:
    """(mpirun, environment) of the running Python; the peers on torch are started with it."""
    for mpi in MPIS:
        found = mpi_environment(mpi)
        if found and found[0] == Path(sys.executable):
            return [str(found[1]), "-n"], job_environ(found[1], {})
    raise SystemExit("benchmarks: no mpirun beside this Python; make bench makes .venv")


def peer(module: str, *arguments: object) -> list[str]:
    """A program of this package."""
    return [sys.executable, "-m", f"tests.benchmarks.{module}", *map(str, arguments)]


def check_shards(task: Task) -> list[str]:
    return peer("check", task.source, task.out, task.work.target)


def check_dcp(task: Task) -> list[str]:
    return peer("dcp", "check", task.source, task.out, task.work.target)


def write_dcp(task: Task) -> list[str]:
    return [*launcher()[0], "4", *peer("dcp", "write", task.source, task.dcp, task.rendezvous)]


def _cp() -> Contender:
    return Contender(
        "cp",
        "cp -r of the source: the yardstick",
        lambda task: ["cp", "-r", str(task.source), str(task.out)],
        launcher()[1],
        lambda task: 0,
        lambda task: ["diff", "-rq", str(task.source), str(task.out)],
    )


def _cp_sync() -> Contender:
    script = 'cp -r "$1" "$2" && sync "$2"/*'
    return Contender(
        "cp+sync",
        "cp -r, then fsync of each file, which ours and DCP do too (on tmpfs: the same as cp)",
        lambda task: ["sh", "-c", script, "sh", str(task.source), str(task.out)],
        launcher()[1],
        lambda task: 0,
        lambda task: ["diff", "-rq", str(task.source), str(task.out)],
    )


def _ours() -> list[Contender]:
    """ours-RANKS-VERIFY[-owner][-MPI]; with MPICH and several writers a file where the name says nothing else."""
    verifies = ("none", "source", "full")
    variants = [
        *product((1, 2, 4), verifies, ("shared",), ("mpich",)),
        *product((4,), verifies, ("owner",), ("mpich",)),
        *product((4,), verifies, ("shared",), ("openmpi",)),
    ]
    return [_our(*variant, *found) for variant in variants if (found := mpi_environment(variant[3]))]


def _our(nranks: int, verify: str, writers: str, mpi: str, python: Path, mpirun: Path) -> Contender:
    name = "-".join(["ours", str(nranks), verify, *{"owner"} & {writers}, *{"openmpi"} & {mpi}])

    def command(task: Task) -> list[str]:
        options = ["--target", task.work.target, "--verify", verify, "--writers", writers, "--progress", "off"]
        reshard = ["-m", "reshard_mpi", "reshard", task.source, task.out, *options, "--report", task.report]
        return [str(word) for word in (mpirun, "-n", nranks, python, *reshard)]

    return Contender(
        name,
        f"reshard_mpi on {nranks} ranks of {mpi}, --verify {verify} --writers {writers}",
        command,
        job_environ(mpirun, {}),
        lambda task: nranks * (400 << 20),
        check_shards,
        is_ours=True,
    )


def _naive() -> Contender:
    return Contender(
        "naive",
        "numpy and safetensors, one process, everything in memory, nothing checked",
        lambda task: peer("naive", task.source, task.out, task.work.target),
        launcher()[1],
        lambda task: 3 * task.nbytes // 2,
        check_shards,
    )


def _consolidations() -> list[Contender]:
    mpirun, environ = launcher()

    def one(nthreads: int, task: Task) -> list[str]:
        return peer("consolidate", "one", task.source, task.out, task.work.target, nthreads)

    def every(nranks: int, task: Task) -> list[str]:
        ranks = peer("consolidate", "every", task.source, task.out, task.work.target, task.rendezvous)
        return [*mpirun, str(nranks), *ranks]

    kinds = [
        ("consolidate", "PyTorch's safetensors consolidation, one process", partial(one, 1), _whole_only),
        ("consolidate-threads", "the same, 4 threads that take a file each", partial(one, 4), _several_files_only),
        *(
            (
                f"consolidate-{nranks}",
                f"the same on every rank, {nranks} gloo ranks that take a file each",
                partial(every, nranks),
                _several_files_only,
            )
            for nranks in (2, 4)
        ),
    ]
    return [
        Contender(name, about, command, environ | TORCH_VARIABLES, _consolidation_memory, check_shards, cannot=cannot)
        for name, about, command, cannot in kinds
    ]


def _consolidation_memory(task: Task) -> int:
    """A tensor and one of its parts at a time; the sample's tensors are small."""
    return GIB + (0 if task.work.source == "llama" else 3 * task.nbytes // 2)


def _whole_only(work: Work) -> str:
    return "" if work.target in ("single", "pp=4") else "writes whole tensors only"


def _several_files_only(work: Work) -> str:
    return _whole_only(work) or ("" if work.target != "single" else "one file is the work of one thread or rank")


def _dcp() -> Contender:
    mpirun, environ = launcher()

    def command(task: Task) -> list[str]:
        nranks = "1" if task.work.target == "single" else "4"
        ranks = peer("dcp", "reshard", task.source, task.dcp, task.out, task.work.target, task.rendezvous)
        return [*mpirun, nranks, *ranks]

    return Contender(
        "dcp",
        "PyTorch's distributed checkpoint: load into the target's DTensors and save, a gloo rank a target shard",
        command,
        environ | TORCH_VARIABLES,
        lambda task: GIB + 3 * task.nbytes // 2,
        check_dcp,
        needs_dcp=True,
    )
