"""What holds for all tests: where tests/mpi may run, and how hypothesis chooses its examples."""

import os
from pathlib import Path

import hypothesis
import pytest

MPI_TESTS = Path(__file__).parent / "mpi"

# The number of processes, as the launchers tell it: MPICH and PMI-2, Open MPI, srun.
LAUNCHER_SIZE_VARIABLES = ("PMI_SIZE", "OMPI_COMM_WORLD_SIZE", "SLURM_STEP_NUM_TASKS")

# derandomize: the same examples on all ranks, and in every run. No deadline: ranks share cores.
hypothesis.settings.register_profile("reshard", derandomize=True, deadline=None, database=None)
hypothesis.settings.load_profile("reshard")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--thorough", action="store_true", help="run all tests, as on CI: twice as long")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """A user's machine is spared the tests that say more of what others hold; pytest counts them as deselected."""
    if os.environ.get("CI") or config.getoption("--thorough"):
        return
    spared = [item for item in items if item.get_closest_marker("thorough") or item.get_closest_marker("large")]
    if spared:
        config.hook.pytest_deselected(items=spared)
        items[:] = [item for item in items if item not in set(spared)]


def pytest_configure(config: pytest.Config) -> None:
    """Refuse what would run no MPI test and still exit with 0."""
    if config.getoption("--with-mpi"):
        return
    sizes = {name: os.environ.get(name, "1") for name in LAUNCHER_SIZE_VARIABLES}
    if any(size != "1" for size in sizes.values()):
        raise pytest.UsageError(f"started by an MPI launcher ({sizes}), but without --with-mpi")
    for argument in config.args:
        path = config.invocation_params.dir / argument.split("::")[0]
        if path.resolve().is_relative_to(MPI_TESTS):
            raise pytest.UsageError(f"{argument}: needs mpirun and --with-mpi: make test-2, test-3 or test-4")


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Leave tests/mpi out of a serial run: tests/jobs/test_mpi_suite.py starts it under mpirun."""
    if collection_path == MPI_TESTS and not config.getoption("--with-mpi"):
        return True
    return None
