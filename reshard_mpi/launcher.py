"""What the environment says about who started this process, before MPI is there to ask.

One table from the launchers' variables to meaning: Hydra (MPICH) and Slurm's pmi2 set PMI_*, Open MPI OMPI_COMM_WORLD_*, Slurm
SLURM_*, torchrun RANK and WORLD_SIZE.
"""

import os
from collections.abc import Mapping
from dataclasses import dataclass

from reshard_mpi.errors import UsageError

# Innermost first: mpirun inside an sbatch script sees the variables of both.
OPEN_MPI = "mpirun of Open MPI"
_MPI_LAUNCHERS = (
    (OPEN_MPI, "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE"),
    ("mpirun of MPICH", "PMI_RANK", "PMI_SIZE"),
    ("srun", "SLURM_PROCID", "SLURM_STEP_NUM_TASKS"),
)
TORCHRUN, TORCHRUN_MARK = "torchrun", "TORCHELASTIC_RUN_ID"
NO_LAUNCHER = "no launcher"


@dataclass(frozen=True)
class Launch:
    """The launcher's name, the rank that it gave to this process, the number of processes; did srun start them?"""

    name: str
    rank: int
    nranks: int
    by_srun: bool = False


def find_launch(environment: Mapping[str, str] = os.environ) -> Launch:
    """Who started this process; one process started by nobody in particular when no launcher shows."""
    if TORCHRUN_MARK in environment:  # it is the innermost: mpirun doesn't start from within it
        launchers = [(TORCHRUN, "RANK", "WORLD_SIZE"), *_MPI_LAUNCHERS]
    else:
        launchers = [*_MPI_LAUNCHERS]
    for name, rank, nranks in launchers:
        if environment.get(rank, "").isdecimal() and environment.get(nranks, "").isdecimal():
            by_srun = environment.get("SLURM_STEP_NUM_TASKS", "1") != "1"
            return Launch(name, int(environment[rank]), int(environment[nranks]), by_srun)
    return Launch(NO_LAUNCHER, 0, 1)


def check_world(nranks: int, launch: Launch, library: str) -> None:
    """UsageError unless MPI sees as many ranks as the launcher started: N worlds of one rank would each write the same output."""
    if launch.nranks == nranks or launch.name == NO_LAUNCHER:
        return
    if launch.name == TORCHRUN:
        raise UsageError(
            launch.name, f"started {launch.nranks} processes that know nothing of each other; use mpirun or srun"
        )
    raise UsageError(
        launch.name,
        f"started {launch.nranks} processes, but {library} sees a world of {nranks}; "
        "use the mpirun of this MPI library, or the srun --mpi=TYPE that it needs (pmi2 for MPICH, pmix for Open MPI)",
    )
