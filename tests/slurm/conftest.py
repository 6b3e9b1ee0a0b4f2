"""A Slurm for the tests here, one a worker of xdist, and what they reshard."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.jobs.outcome import assert_done, write_sample
from tests.mpirun import run_mpi
from tests.slurm.cluster import Cluster, require_slurm
from tests.slurm.outcome import TARGET, digests

HERE = Path(__file__).parent


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if item.path.is_relative_to(HERE):
            item.add_marker(pytest.mark.slow)


@pytest.fixture(scope="session")
def cluster(tmp_path_factory) -> Iterator[Cluster]:
    require_slurm()
    with Cluster(tmp_path_factory.mktemp("slurm")).started() as cluster:
        yield cluster


@pytest.fixture(scope="session")
def sample(tmp_path_factory) -> Path:
    return write_sample(tmp_path_factory.mktemp("sample") / "sample", "24M")


@pytest.fixture(scope="session")
def expected(sample, tmp_path_factory) -> dict[str, str]:
    """The digests of the files that the sample becomes without Slurm, in one go."""
    out = tmp_path_factory.mktemp("expected") / "out"
    assert_done(run_mpi(2, "reshard", sample, out, *TARGET))
    return digests(out)
