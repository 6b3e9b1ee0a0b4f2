"""Every committed case to every target, there and back, whatever the number of ranks and the MPI."""

import json
from pathlib import Path

import pytest

from tests.jobs import every_case
from tests.mpirun import MPIS, require_mpi, run_python_mpi

RANKS = (1, 2, 3, 4, 7)


def digests(folder: Path, nranks: int, *names: str, mpi: str = "mpich") -> dict[str, dict[str, str]]:
    """Of every file of every OUT and BACK, made on so many ranks."""
    folder.mkdir()
    done = run_python_mpi(nranks, every_case.__file__, folder, *names, mpi=mpi, timeout=120)
    assert (done.returncode, done.stdout) == (0, ""), f"{nranks} ranks: {done.stdout}\n{done.stderr}"
    return json.loads((folder / "digests.json").read_text())


@pytest.mark.thorough
def test_out_and_back_are_the_same_for_any_number_of_ranks(tmp_path):
    found = {nranks: digests(tmp_path / str(nranks), nranks) for nranks in RANKS}
    assert len(found[1]) == 2 * len(list(every_case.every_target(())))
    for nranks in RANKS[1:]:
        assert found[nranks] == found[1], f"what {nranks} ranks wrote differs from what one wrote"


def test_out_and_back_are_the_same_with_both_mpis(tmp_path):
    for mpi in MPIS:
        require_mpi(mpi)
    mpich, openmpi = (digests(tmp_path / mpi, 3, "tp3-uneven-to-tp2", mpi=mpi) for mpi in MPIS)
    assert mpich == openmpi
