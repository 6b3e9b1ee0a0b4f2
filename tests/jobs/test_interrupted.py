"""A job that is killed, stopped, or fails in a way nobody expected: it ends, soon, and the same command completes it."""

import contextlib
import os
import signal
import subprocess
import time
from pathlib import Path

import pytest

from tests.jobs.outcome import AT, CASES, assert_done, assert_refused, error_lines, write_sample
from tests.mpirun import run_mpi, run_python_mpi, started_python_mpi, tail, wait_for

WITHIN_S = 15.0
UNEVEN = CASES / "tp3-uneven-to-tp2"
RANK_VARIABLES = (b"PMI_RANK=", b"OMPI_COMM_WORLD_RANK=")


@pytest.fixture(scope="module")
def sample(tmp_path_factory) -> Path:
    """Large enough to be met in the middle; in rounds of 40 KiB it takes many seconds."""
    return write_sample(tmp_path_factory.mktemp("sample") / "sample", "120M")


def rank_pids(out: Path) -> dict[int, int]:
    """Rank -> process, of the job that writes `out`. MPICH's ranks are in sessions of their own."""
    found = {}
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if os.fsencode(out) not in (folder / "cmdline").read_bytes().split(b"\0"):
                continue
            for variable in (folder / "environ").read_bytes().split(b"\0"):
                if variable.startswith(RANK_VARIABLES):
                    found[int(variable.partition(b"=")[2])] = int(folder.name)
    return found


def in_mid_run(process: subprocess.Popen[str], partial: Path) -> bool:
    """Files are being written: there is more in one than its header."""
    if process.poll() is not None:
        pytest.fail(f"ended too soon\n{tail(process.stdout.read())}\n{tail(process.stderr.read())}")
    shards = list(partial.glob("rank-*"))
    if not shards:
        return False
    with open(shards[-1], "rb") as shard:
        shard.seek(1 << 16)
        return any(shard.read(1 << 12))


def ended(process: subprocess.Popen[str], since: float) -> tuple[str, str]:
    stdout, stderr = process.communicate(timeout=2 * WITHIN_S)
    assert time.monotonic() - since < WITHIN_S, f"took too long to end\n{tail(stderr)}"
    return stdout, stderr


def complete(sample: Path, out: Path, mpi: str) -> None:
    """The same command, with more memory and another number of ranks; then there is OUT and nothing else."""
    assert not out.exists()
    assert_done(run_mpi(3, "reshard", sample, out, "--target", "fsdp=2", mpi=mpi))
    assert_done(run_mpi(2, "compare", sample, out, mpi=mpi))
    assert not out.with_name("out.partial").exists()


def slow(sample: Path, out: Path) -> tuple[object, ...]:
    return ("-m", "reshard_mpi", "reshard", sample, out, "--target", "fsdp=2", "--memory", "240K", "--progress", "off")


def test_after_one_rank_was_killed_all_end_and_the_same_command_completes(tmp_path, mpi, sample):
    out = tmp_path / "out"
    with started_python_mpi(4, *slow(sample, out), mpi=mpi) as process:
        wait_for(lambda: in_mid_run(process, tmp_path / "out.partial"))
        pids = rank_pids(out)
        assert sorted(pids) == [0, 1, 2, 3]
        os.kill(pids[2], signal.SIGKILL)
        since = time.monotonic()
        ended(process, since)
        assert process.returncode != 0
        wait_for(lambda: not any(Path(f"/proc/{pid}").exists() for pid in pids.values()), within_s=WITHIN_S)
    complete(sample, out, mpi)


def test_a_signal_stops_all_ranks_together_and_the_same_command_completes(tmp_path, mpi, sample):
    out = tmp_path / "out"
    with started_python_mpi(4, *slow(sample, out), mpi=mpi) as process:
        wait_for(lambda: in_mid_run(process, tmp_path / "out.partial"))
        process.send_signal(signal.SIGUSR1)
        stdout, stderr = ended(process, time.monotonic())
    assert_refused(subprocess.CompletedProcess("", process.returncode, stdout, stderr), 75, "signal")
    complete(sample, out, mpi)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_sigterm_and_ctrl_c_do_the_same_where_the_launcher_leaves_the_time(tmp_path, sample, number):
    out = tmp_path / "out"
    with started_python_mpi(4, *slow(sample, out)) as process:
        wait_for(lambda: in_mid_run(process, tmp_path / "out.partial"))
        process.send_signal(number)
        stdout, stderr = ended(process, time.monotonic())
    assert_refused(subprocess.CompletedProcess("", process.returncode, stdout, stderr), 75, "signal")
    assert not out.exists()


PHASES = [
    # what is under way, where
    ("the source is read", "reshard_mpi.run.job:load_together"),
    ("the target is read back", "reshard_mpi.run.job:_verify_target"),
]


@pytest.mark.parametrize(("phase", "where"), PHASES, ids=[phase for phase, _ in PHASES])
def test_a_signal_is_understood_also_while(tmp_path, phase, where):
    """Not only between rounds: a scheduler doesn't ask what the job is at."""
    program = f"{AT}\nat({where!r}, None, say_and_wait)\nmain()"
    out = tmp_path / "out"
    arguments = ("reshard", UNEVEN, out, "--verify", "full", "--progress", "off")
    with started_python_mpi(2, "-c", program, *arguments, env={"NOTES": str(tmp_path)}) as process:
        wait_for((tmp_path / "waiting").exists)
        process.send_signal(signal.SIGUSR1)
        stdout, stderr = ended(process, time.monotonic())
    assert_refused(subprocess.CompletedProcess("", process.returncode, stdout, stderr), 75, "signal", out=out)
    assert_done(run_mpi(2, *arguments))


def test_a_second_signal_ends_the_job_at_once(tmp_path, sample):
    """The first one waits for the ranks to agree, which one that is held up doesn't."""
    held_up = "lambda: (say_and_wait(), time.sleep(100))"
    program = f"{AT}\nat('reshard_mpi.run.transfer:Reader.read', 1, {held_up})\nmain()"
    out = tmp_path / "out"
    arguments = ("reshard", sample, out, "--target", "tp=4", "--progress", "off")
    with started_python_mpi(3, "-c", program, *arguments, env={"NOTES": str(tmp_path)}) as process:
        wait_for((tmp_path / "waiting").exists)
        process.send_signal(signal.SIGUSR1)
        time.sleep(1)
        assert process.poll() is None
        process.send_signal(signal.SIGUSR1)
        ended(process, time.monotonic())
    assert process.returncode != 0
    assert not out.exists()
    assert_done(run_mpi(3, *arguments))


BUGS = [
    # why, where, rank
    ("between two rounds", "reshard_mpi.mpi.exchange:Exchanger.exchange", 1),
    ("in the thread that reads", "reshard_mpi.run.transfer:Reader.read", 1),
    ("in the thread that writes", "reshard_mpi.run.transfer:Writer.write", 2),
    ("on rank 0 while the others wait for its plan", "reshard_mpi.run.lead:Lead.prepare", 0),
    ("at the very end", "reshard_mpi.run.lead:Lead.commit", 0),
]


@pytest.mark.parametrize(("why", "where", "rank"), BUGS, ids=[why for why, _, _ in BUGS])
def test_an_unexpected_error_on_one_rank_ends_the_job_with_its_traceback(tmp_path, why, where, rank):
    assert_bug_ends_the_job(tmp_path, where, rank, "mpich")


def test_an_unexpected_error_ends_the_job_with_open_mpi_too(tmp_path):
    assert_bug_ends_the_job(tmp_path, BUGS[0][1], 1, "openmpi")


def assert_bug_ends_the_job(tmp_path: Path, where: str, rank: int, mpi: str) -> None:
    program = f"{AT}\nat({where!r}, {rank}, fail)\nmain()"
    out, since = tmp_path / "out", time.monotonic()
    done = run_python_mpi(3, "-c", program, "reshard", UNEVEN, out, "--progress", "off", mpi=mpi)
    assert time.monotonic() - since < WITHIN_S
    assert done.returncode == 70, done.stderr
    assert f"rank {rank} of 3" in done.stderr
    assert "RuntimeError: out of the blue" in done.stderr
    assert done.stderr.count("Traceback (most recent call last)") == 1, done.stderr
    assert not error_lines(done.stderr)
    assert not out.exists()
    assert_done(run_mpi(3, "reshard", UNEVEN, out, mpi=mpi))
