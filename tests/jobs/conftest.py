"""Tests that start whole jobs with mpirun, from outside."""

from pathlib import Path

import pytest

from tests.mpirun import MPIS

HERE = Path(__file__).parent


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if item.path.is_relative_to(HERE):
            item.add_marker(pytest.mark.slow)


@pytest.fixture(params=MPIS)
def mpi(request: pytest.FixtureRequest) -> str:
    """The name of each MPI in turn, for `run_mpi(..., mpi=mpi)`."""
    return request.param
