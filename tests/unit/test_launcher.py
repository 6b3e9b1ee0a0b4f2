"""Who started this process, told from the environment alone."""

import pytest

from reshard_mpi.errors import UsageError
from reshard_mpi.launcher import NO_LAUNCHER, Launch, check_world, find_launch

OPEN_MPI = {"OMPI_COMM_WORLD_RANK": "2", "OMPI_COMM_WORLD_SIZE": "4"}
HYDRA = {"PMI_RANK": "2", "PMI_SIZE": "4"}
SRUN = {"SLURM_PROCID": "2", "SLURM_STEP_NUM_TASKS": "4", "SLURM_NTASKS": "4", "SLURM_JOB_ID": "7"}
SRUN_OF_ONE = {"SLURM_PROCID": "0", "SLURM_STEP_NUM_TASKS": "1", "SLURM_NTASKS": "1", "SLURM_JOB_ID": "7"}
SBATCH = {"SLURM_PROCID": "0", "SLURM_NTASKS": "8", "SLURM_JOB_ID": "7"}  # the batch script itself: no step
TORCHRUN = {"TORCHELASTIC_RUN_ID": "none", "RANK": "2", "WORLD_SIZE": "4", "LOCAL_RANK": "2"}

ENVIRONMENTS = [
    ("nothing", {}, Launch(NO_LAUNCHER, 0, 1)),
    ("mpirun of Open MPI", OPEN_MPI, Launch("mpirun of Open MPI", 2, 4)),
    ("mpirun of MPICH", HYDRA, Launch("mpirun of MPICH", 2, 4)),
    ("srun --mpi=pmi2", SRUN | HYDRA, Launch("mpirun of MPICH", 2, 4, by_srun=True)),
    ("srun --mpi=pmix or none", SRUN, Launch("srun", 2, 4, by_srun=True)),
    ("sbatch, no srun: one process", SBATCH, Launch(NO_LAUNCHER, 0, 1)),
    ("mpirun of Open MPI inside sbatch", SBATCH | OPEN_MPI, Launch("mpirun of Open MPI", 2, 4)),
    ("mpirun of MPICH inside sbatch", SBATCH | HYDRA, Launch("mpirun of MPICH", 2, 4)),
    ("mpirun inside an interactive srun --pty", SRUN_OF_ONE | HYDRA, Launch("mpirun of MPICH", 2, 4)),
    ("torchrun", TORCHRUN, Launch("torchrun", 2, 4)),
    ("RANK and WORLD_SIZE of something else", {"RANK": "2", "WORLD_SIZE": "4"}, Launch(NO_LAUNCHER, 0, 1)),
    ("a rank without a size", {"PMI_RANK": "2"}, Launch(NO_LAUNCHER, 0, 1)),
    ("no numbers", {"PMI_RANK": "x", "PMI_SIZE": ""}, Launch(NO_LAUNCHER, 0, 1)),
    ("negative numbers", {"PMI_RANK": "-1", "PMI_SIZE": "4"}, Launch(NO_LAUNCHER, 0, 1)),
]


@pytest.mark.parametrize("why, environment, launch", ENVIRONMENTS, ids=[row[0] for row in ENVIRONMENTS])
def test_the_launcher_is_the_one_whose_variables_show(why, environment, launch):
    assert find_launch(environment) == launch


@pytest.mark.parametrize(
    "why, environment",
    [
        ("the usual script: srun starts one torchrun a node", SRUN_OF_ONE | TORCHRUN),
        ("with --mpi=pmi2 as the default of the site", SRUN_OF_ONE | {"PMI_RANK": "0", "PMI_SIZE": "1"} | TORCHRUN),
    ],
)
def test_torchrun_inside_srun_is_refused(why, environment):
    """Each of the four processes is a world of one, which is what srun started: only torchrun knows that there are four."""
    with pytest.raises(UsageError, match="torchrun"):
        check_world(1, find_launch(environment), "MPICH 5")


@pytest.mark.parametrize(
    "why, nranks, launch",
    [
        ("mpirun and MPI agree", 4, Launch("mpirun of MPICH", 2, 4)),
        ("one process by hand", 1, Launch(NO_LAUNCHER, 0, 1)),
        ("a launcher that we don't know", 4, Launch(NO_LAUNCHER, 0, 1)),
        ("one process by mpirun", 1, Launch("srun", 0, 1)),
    ],
)
def test_a_world_as_large_as_what_was_started_passes(why, nranks, launch):
    check_world(nranks, launch, "MPICH 5")


@pytest.mark.parametrize(
    "why, nranks, launch",
    [
        ("srun with the wrong --mpi: four worlds of one", 1, Launch("srun", 3, 4)),
        ("the mpirun of another MPI", 1, Launch("mpirun of Open MPI", 0, 4)),
        ("fewer started than seen", 8, Launch("mpirun of MPICH", 0, 4)),
    ],
)
def test_a_world_of_another_size_is_refused_with_both_numbers(why, nranks, launch):
    with pytest.raises(UsageError) as refused:
        check_world(nranks, launch, "Some MPI 4.1")
    text = str(refused.value)
    assert text.startswith(
        f"{launch.name}: started {launch.nranks} processes, but Some MPI 4.1 sees a world of {nranks}"
    )
    assert "use the mpirun of this MPI library" in text


def test_torchrun_is_told_apart_because_no_other_mpi_library_would_help():
    with pytest.raises(
        UsageError, match="torchrun: started 2 processes that know nothing of each other; use mpirun or srun"
    ):
        check_world(1, Launch("torchrun", 0, 2), "Some MPI 4.1")
