"""The harness of tests/mpi, tried from outside: what would hang ends, soon, with the right message."""

import shutil
import time

import pytest

from tests.mpirun import CHECKOUT, run_python_mpi

PYTEST = ("-m", "mpi4py", "-m", "pytest", "-p", "no:cacheprovider", "-q", "-rA")

HEADER = """
import pytest
from mpi4py import MPI
comm = MPI.COMM_WORLD
"""

FAILS_BEFORE_A_BARRIER = """
def test_fails():
    assert comm.rank != 1, "odd one out"
    comm.Barrier()
"""

NEVER_ARRIVES = """
@pytest.mark.timeout(2)
def test_hangs():
    if comm.rank == 1:
        comm.recv(source=0, tag=77)  # nobody sends it
"""

# A small broadcast doesn't wait for its receivers: rank 0 is through while the message is still under way.
FAILS_BEFORE_A_MESSAGE_IS_TAKEN = """
def test_fails():
    assert comm.rank != 1, "odd one out"
    comm.bcast("of the first test", root=0)

def test_next():
    assert comm.bcast("of the second test", root=0) == "of the second test"
"""

FAILS_ON_ALL_RANKS = """
def test_fails():
    assert comm.allreduce(1) == 0

def test_next():
    comm.Barrier()
"""

SKIPS_ON_ONE_RANK = """
def test_skips():
    if comm.rank == 1:
        pytest.skip("on a whim")
"""

MISSPELT_KEYWORD = """
@pytest.mark.mpi(minsize=2)
def test_nothing():
    pass
"""

DIFFERS_BETWEEN_RANKS = """
@pytest.mark.parametrize("value", range(comm.rank + 1))
def test_nothing(value):
    pass
"""

DOESN_T_IMPORT_ON_ONE_RANK = """
if comm.rank == 1:
    import no_such_module
def test_nothing():
    comm.Barrier()
"""


def run_tests(folder, source, mpi="mpich", options=("--with-mpi",)):
    """Run a test file beside a copy of the harness, on 2 ranks; returns the job and what it printed."""
    shutil.copy(CHECKOUT / "tests" / "mpi" / "conftest.py", folder)
    (folder / "test_it.py").write_text(HEADER + source)
    env = {"MPI_TEST_GRACE_S": "2"}
    start = time.monotonic()
    done = run_python_mpi(2, *PYTEST, *options, "test_it.py", mpi=mpi, cwd=folder, env=env)
    # Grace and timeout are 2 s; the rest is starting.
    assert time.monotonic() - start < 30
    return done, done.stdout + done.stderr


def test_a_rank_that_fails_while_others_wait_aborts_with_its_own_traceback(tmp_path, mpi):
    done, output = run_tests(tmp_path, FAILS_BEFORE_A_BARRIER, mpi)
    assert done.returncode != 0
    assert "[rank 1 of 2] test_it.py::test_fails failed here, and other ranks hang in it" in output
    assert "AssertionError: odd one out" in output


def test_a_rank_that_never_arrives_says_where_it_is(tmp_path, mpi):
    done, output = run_tests(tmp_path, NEVER_ARRIVES, mpi)
    assert done.returncode != 0
    assert "[rank 1 of 2] test_it.py::test_hangs: not done after 2 s" in output
    assert "comm.recv(source=0, tag=77)" in output


def test_a_test_after_a_message_was_left_behind_is_not_run(tmp_path, mpi):
    done, output = run_tests(tmp_path, FAILS_BEFORE_A_MESSAGE_IS_TAKEN, mpi)
    assert done.returncode != 0
    assert "AssertionError: odd one out" in output
    assert "failed on ranks [1] of 2 only" in output
    assert "test_next" not in output


def test_a_failure_on_all_ranks_is_reported_once_and_the_next_test_runs(tmp_path):
    done, output = run_tests(tmp_path, FAILS_ON_ALL_RANKS)
    assert done.returncode != 0
    assert output.count("1 failed, 1 passed") == 1


@pytest.mark.parametrize(
    ("source", "message"),
    [
        (SKIPS_ON_ONE_RANK, "skipped, which the other ranks can't know"),
        (MISSPELT_KEYWORD, "only mpi(min_size=N) is known"),
        (DIFFERS_BETWEEN_RANKS, "the ranks collected different tests (as many as [1, 2])"),
        (DOESN_T_IMPORT_ON_ONE_RANK, "No module named 'no_such_module'"),
    ],
    ids=["skip", "keyword", "collection", "import"],
)
def test_what_ranks_must_not_do_is_refused(tmp_path, source, message):
    done, output = run_tests(tmp_path, source)
    assert done.returncode != 0
    assert message in output


def test_pytest_under_mpirun_without_its_option_is_refused():
    done = run_python_mpi(2, *PYTEST, "tests/mpi", cwd=CHECKOUT)
    assert done.returncode != 0
    assert "but without --with-mpi" in done.stderr
