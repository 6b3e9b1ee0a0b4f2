"""The same command goes on where a job was stopped or killed, with any ranks and memory, and OUT is as if nothing had been."""

import contextlib
import filecmp
import json
import os
import random
import shutil
import signal
import subprocess
import time
from pathlib import Path

import numpy as np
import pytest

from tests.jobs.outcome import AT, assert_done, assert_refused, run_alone, write_sample
from tests.jobs.test_interrupted import rank_pids
from tests.mpirun import require_mpi, run_mpi, run_python_mpi, started_python_mpi, wait_for
from tests.reference.fragments import sha256, shard_name
from tests.reference.shards import StoredArray, write_shard
from tests.unit.journals import said, sealed
from tests.unit.manifests import manifest, tensor, text_of

# A program that gets SIGUSR1 when rank 1 is about to move for the fourth time.
STOPPED_ON_THE_WAY = f"""{AT}
import signal
moves = iter(range(10**9))
def stop():
    if next(moves) == 3:
        os.kill(os.getpid(), signal.SIGUSR1)
at("reshard_mpi.mpi.exchange:Exchanger.exchange", 1, stop)
main()
"""
NOTING = ("--journal-every", 0, "--progress", "off")
SMALL = ("--memory", "1M")  # some ten rounds for the sample


@pytest.fixture(scope="module")
def sample(tmp_path_factory) -> Path:
    return write_sample(tmp_path_factory.mktemp("sample") / "sample", "8M", dp=2)


def assert_equal_folders(a: Path, b: Path) -> None:
    names = sorted(entry.name for entry in a.iterdir())
    assert names == sorted(entry.name for entry in b.iterdir())
    for name in names:
        assert filecmp.cmp(a / name, b / name, shallow=False), name


def stopped(sample: Path, out: Path, *options: object, nranks: int = 3) -> None:
    """A job that stops after a few of its rounds."""
    arguments = ("reshard", sample, out, *options, *SMALL, *NOTING)
    done = run_python_mpi(nranks, "-c", STOPPED_ON_THE_WAY, *arguments)
    assert_refused(done, 75, "signal", "goes on from there", out=out)
    assert (out.with_name("out.partial") / "journal.jsonl").is_file()


def durable_in(partial: Path) -> list[dict]:
    """What the lines of the journal say to be durable."""
    return [says.get("durable", {}) for says in said((partial / "journal.jsonl").read_bytes())]


def continued(nranks: int, report: Path, *arguments: object, mpi: str = "mpich") -> dict:
    """The report of a job that must have gone on, and have read less than everything for it."""
    done = assert_done(run_mpi(nranks, *arguments, "--report", report, "--progress", "off", mpi=mpi))
    facts = json.loads(report.read_text())
    assert facts["continued_nbytes"] > 0
    assert "continued: " in done
    return facts


JOBS = [
    # what, ranks that go on, options
    ("several files", 5, ("--target", "tp=4")),
    ("one file", 2, ("--target", "single")),
    ("one writer a file", 5, ("--target", "tp=3", "--writers", "owner")),
    ("nothing hashed", 2, ("--target", "tp=4", "--verify", "none")),
    ("read back", 1, ("--target", "fsdp=2", "--verify", "full")),
    ("cast and renamed", 2, ("--target", "tp=4", "--cast", "float32", "--rename", "^model=>m")),
    ("HDF5", 4, ("--target", "tp=3", "--format", "hdf5")),
    ("Hugging Face", 5, ("--format", "hf", "--max-shard-size", "2MB", "--target", "single")),
    ("padded", 4, ("--target", "tp=4", "--layout", "padded.toml")),
    ("rows reordered", 2, ("--target", "tp=4", "--layout", "permuted.toml")),
    ("rows reordered, read back", 4, ("--target", "tp=4", "--layout", "permuted.toml", "--verify", "full")),
]
LAYOUTS = {
    "padded.toml": '[padding]\n"embed_tokens.weight" = { multiple = 7 }\n"lm_head.weight" = { multiple = 1000 }\n',
    "permuted.toml": """
[[operations]]
permute = "model.embed_tokens.weight"
unit = 16
to = "halves"
""",
}


@pytest.mark.parametrize(("what", "nranks", "options"), JOBS, ids=[what for what, *_ in JOBS])
def test_after_a_signal_the_same_command_goes_on(tmp_path, sample, what, nranks, options):
    for name, text in LAYOUTS.items():
        (tmp_path / name).write_text(text)
    options = tuple(tmp_path / option if option in LAYOUTS else option for option in options)
    out, expected = tmp_path / "out", tmp_path / "expected"
    assert_done(run_mpi(3, "reshard", sample, expected, *options, "--progress", "off"))
    stopped(sample, out, *options)
    facts = continued(nranks, tmp_path / "report", "reshard", sample, out, *options, "--memory", "1500K")
    whole = sum(entry.stat().st_size for entry in out.iterdir())
    assert facts["phases"]["write"]["nbytes"] <= whole - facts["continued_nbytes"]
    assert_equal_folders(expected, out)
    assert not out.with_name("out.partial").exists()


def test_what_became_infinite_is_told_of_all_the_runs_of_a_job(tmp_path):
    sample, out = tmp_path / "sample", tmp_path / "out"
    values = np.ones((2, 4096, 1024), "f4")
    values[:, ::3, 5] = 1e9  # more than a float16 can be
    write_halves(sample, values)
    options = ("--target", "tp=4", "--cast", "float16")
    for nranks in (3, 2, 4):
        stopped(sample, out, *options, nranks=nranks)
    noted = durable_in(tmp_path / "out.partial")
    assert sum("w" in durable.get("infinite", {}) for durable in noted) > 3
    done = run_mpi(2, "reshard", sample, out, *options, *SMALL, "--report", tmp_path / "report")
    assert_done(done)
    count = int((values > 65504).sum())
    assert json.loads((tmp_path / "report").read_text())["infinite"] == [{"tensor": "w", "count": count}]
    assert f"w: {count} elements" in done.stderr


def write_halves(folder: Path, values: np.ndarray) -> None:
    """A tensor, of which two ranks hold one half each."""
    _, nrows, ncolumns = values.shape
    shape, axes = (2 * nrows, ncolumns), {"tp": 2}
    held = {(rank,): [((rank * nrows, 0), (nrows, ncolumns))] for rank in range(2)}
    fragments = tensor("w", shape, held, axes)
    folder.mkdir()
    for rank, fragment in enumerate(fragments):
        raw = values[rank].tobytes()
        fragment["fragment_digest"] = sha256(raw)
        write_shard(
            folder / shard_name(rank), {fragment["payload_key"]: StoredArray("float32", [nrows, ncolumns], raw)}
        )
    (folder / "case.json").write_bytes(text_of(manifest(axes, fragments)))


def test_it_goes_on_again_and_again(tmp_path, sample):
    out, expected = tmp_path / "out", tmp_path / "expected"
    assert_done(run_mpi(3, "reshard", sample, expected, "--target", "tp=4"))
    there = []
    for nranks in (3, 2, 4):
        stopped(sample, out, "--target", "tp=4", nranks=nranks)
        parts = [durable.get("written", {}) for durable in durable_in(tmp_path / "out.partial")]
        there.append(sum(end - begin for written in parts for ranges in written.values() for begin, end in ranges))
    assert there == sorted(set(there)), "each run adds to what is there"
    continued(1, tmp_path / "report", "reshard", sample, out, "--target", "tp=4", *SMALL)
    assert_equal_folders(expected, out)


@pytest.mark.parametrize("verify", ["source", "full", "none"])
def test_what_failed_at_the_very_end_moves_nothing_again(tmp_path, sample, verify):
    out, expected = tmp_path / "out", tmp_path / "expected"
    command = ("reshard", sample, out, "--target", "tp=4", "--verify", verify)
    assert_done(run_mpi(3, "reshard", sample, expected, *command[3:], "--progress", "off"))
    failing = f'{AT}\nat("reshard_mpi.run.lead:Lead.commit", 0, fail)\nmain()'
    assert run_python_mpi(3, "-c", failing, *command, *NOTING).returncode == 70
    facts = continued(2, tmp_path / "report", *command)
    assert facts["phases"]["write"]["nbytes"] == facts["phases"]["read"]["nbytes"] == 0
    assert facts["phases"]["hash"]["nbytes"] == 0
    assert_equal_folders(expected, out)


# Each rank says when its shards are synced, the slowest last; rank 0, when it is about to note.
SAYING = """
import os, time
from mpi4py import MPI
from reshard_mpi.__main__ import main
from reshard_mpi.run.journal import Journal
from reshard_mpi.run.transfer import Writer
said = os.open(os.environ["SAID"], os.O_WRONLY | os.O_CREAT | os.O_APPEND)
sync, note = Writer.sync, Journal.note
def synced(self):
    time.sleep(0.02 * MPI.COMM_WORLD.rank)
    sync(self)
    os.write(said, b"s")
def noted(self, durable):
    os.write(said, b"n")
    note(self, durable)
Writer.sync, Journal.note = synced, noted
main()
"""


def test_what_is_noted_has_been_synced_by_all_ranks_before(tmp_path, sample):
    """Whatever a crash leaves, what the journal says is there."""
    arguments = ("reshard", sample, tmp_path / "out", "--target", "tp=4", *SMALL, *NOTING)
    assert_done(run_python_mpi(3, "-c", SAYING, *arguments, env={"SAID": str(tmp_path / "said")}))
    said = (tmp_path / "said").read_text()
    assert said.count("n") > 3
    assert set(said.rpartition("n")[0].split("n")) <= {"sss", "ssssss"}


# Killed


KILLS = 4
MORE = [("mpich", 2), ("mpich", 3), ("openmpi", 1), ("openmpi", 2)]


@pytest.mark.parametrize(
    ("mpi", "seed"),
    [("mpich", 1), *(pytest.param(mpi, seed, marks=pytest.mark.thorough) for mpi, seed in MORE)],
)
def test_killed_at_random_moments_it_ends_with_the_same_bytes(tmp_path, mpi, seed):
    """Twenty kills in all, of one rank or of all of them; what each has left is completed, and goes on to be killed again."""
    dice = random.Random(seed)
    sample = write_sample(tmp_path / "sample", "24M", seed=seed)
    out, expected = tmp_path / "out", tmp_path / "expected"
    command = ("reshard", sample, out, "--target", "tp=4")
    assert_done(run_mpi(4, "reshard", sample, expected, "--target", "tp=4", "--progress", "off", mpi=mpi))
    killed = 0
    for _ in range(4 * KILLS):
        if killed == KILLS:
            break
        memory = dice.choice(["150K", "200K"])
        if kill_at_random(dice, tmp_path, (*command, "--memory", memory, *NOTING), mpi):
            killed += 1
            assert_completed_in_a_copy(tmp_path / "out.partial", tmp_path / f"copy-{killed}", command, expected)
        assert not out.exists()
    assert killed == KILLS
    continued(dice.choice([1, 2, 3, 5]), tmp_path / "report", *command, "--memory", "2M", mpi=mpi)
    assert_equal_folders(expected, out)


def assert_completed_in_a_copy(partial: Path, copy: Path, command: tuple[object, ...], expected: Path) -> None:
    """What a killed job has left goes on elsewhere, and is left to be killed again."""
    shutil.copytree(partial, copy.with_name(f"{copy.name}.partial"))
    elsewhere = [copy if word == partial.with_suffix("") else word for word in command]
    # In larger rounds than those that were noted, what is noted of a round may be of no use.
    done = run_alone(*elsewhere, "--memory", "150K", "--progress", "off")
    assert "continued: " in assert_done(done)
    assert_equal_folders(expected, copy)


def kill_at_random(dice: random.Random, folder: Path, command: tuple[object, ...], mpi: str) -> bool:
    """Start the command, and kill one rank or all of them after it has noted something new; was it killed in time?"""
    journal = folder / "out.partial" / "journal.jsonl"
    nranks = dice.choice([2, 3, 4])
    before = nnotes(journal)
    with started_python_mpi(nranks, "-m", "reshard_mpi", *command, mpi=mpi) as process:
        wait_for(lambda: process.poll() is not None or nnotes(journal) > before)
        time.sleep(dice.uniform(0, 0.15))
        pids = list(rank_pids(folder / "out").values())
        for pid in dice.sample(pids, dice.choice([1, len(pids)])) if pids else []:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        process.communicate(timeout=30)
        wait_for(lambda: not any(Path(f"/proc/{pid}").exists() for pid in pids))
        return process.returncode != 0


def nnotes(journal: Path) -> int:
    return journal.read_text().count('"durable"') if journal.exists() else 0


# What must not be continued


def touch(sample: Path, partial: Path) -> None:
    os.utime(sample / "rank-00001.safetensors", ns=(1, 1))


def grow(sample: Path, partial: Path) -> None:
    """A longer header: its length alone says so."""
    shard = sample / "rank-00001.safetensors"
    times, content = (shard.stat().st_atime_ns, shard.stat().st_mtime_ns), shard.read_bytes()
    length = int.from_bytes(content[:8], "little")
    header = content[8 : 8 + length] + b" " * 8
    shard.write_bytes(len(header).to_bytes(8, "little") + header + content[8 + length :])
    os.utime(shard, ns=times)


def lengthen(sample: Path, partial: Path) -> None:
    with open(sample / "case.json", "a") as file:
        file.write("\n")


def of_another_version(sample: Path, partial: Path) -> None:
    journal = partial / "journal.jsonl"
    first, *rest = said(journal.read_bytes())
    first["identity"]["version"] += ".1"
    journal.write_bytes(sealed(*(json.dumps(says).encode() for says in (first, *rest))))


def cut_target(sample: Path, partial: Path) -> None:
    os.truncate(partial / "rank-00001.safetensors", 100_000)


def remove_target(sample: Path, partial: Path) -> None:
    (partial / "rank-00001.safetensors").unlink()


def other_header(sample: Path, partial: Path) -> None:
    with open(partial / "rank-00001.safetensors", "r+b") as file:
        file.seek(20)
        file.write(b"?")


CHANGES = [
    # what has happened meanwhile, how, exit code, words
    ("a shard of the source was written again", touch, 2, ("another source files", "--restart")),
    ("a shard of the source is longer", grow, 2, ("another source files", "--restart")),
    ("the manifest was changed", lengthen, 2, ("another manifest", "--restart")),
    ("the program is another one", of_another_version, 2, ("another version", "--restart")),
    ("a target file is shorter", cut_target, 2, ("rank-00001.safetensors", "--restart")),
    ("a target file is gone", remove_target, 5, ("rank-00001.safetensors",)),
    ("a target file has another header", other_header, 2, ("rank-00001.safetensors", "--restart")),
]


@pytest.mark.parametrize(("what", "change", "code", "words"), CHANGES, ids=[what for what, *_ in CHANGES])
def test_what_can_not_be_continued_is_refused_until_restart(tmp_path, what, change, code, words):
    sample, out = write_sample(tmp_path / "sample", "8M"), tmp_path / "out"
    stopped(sample, out, "--target", "tp=4")
    change(sample, tmp_path / "out.partial")
    command = ("reshard", sample, out, "--target", "tp=4", "--progress", "off")
    assert_refused(run_mpi(3, *command), code, *words, out=out)
    assert_done(run_mpi(3, *command, "--restart"))
    assert_done(run_mpi(2, "compare", sample, out, "--progress", "off"))


def test_another_target_is_refused_until_restart(tmp_path, sample):
    out = tmp_path / "out"
    stopped(sample, out, "--target", "tp=4")
    other = ("reshard", sample, out, "--target", "tp=2", "--progress", "off")
    assert_refused(run_mpi(2, *other), 2, "another target", "--restart", out=out)
    assert_done(run_mpi(2, *other, "--restart"))


def test_bytes_that_changed_between_two_runs_are_found_though_they_were_moved_by_the_first(tmp_path):
    """A shard that says it wasn't changed, but was: a digest that wasn't complete is computed from its beginning."""
    sample, out = write_sample(tmp_path / "sample", "8M"), tmp_path / "out"
    stopped(sample, out, "--target", "tp=4")
    for shard in sorted(sample.glob("rank-*")):
        times = shard.stat().st_atime_ns, shard.stat().st_mtime_ns
        with open(shard, "r+b") as file:
            for position in range(1 << 17, shard.stat().st_size, 1 << 17):  # in each array that is large
                file.seek(position)
                byte = file.read(1)
                file.seek(position)
                file.write(bytes([byte[0] ^ 1]))
        os.utime(shard, ns=times)
    command = ("reshard", sample, out, "--target", "tp=4", "--progress", "off")
    assert_refused(run_mpi(3, *command), 4, "digest", "--restart", out=out)
    assert_refused(run_mpi(3, *command), 2, "can't be continued", "--restart", out=out)


# The lock


HOLDS = """
import sys, time
from pathlib import Path
from reshard_mpi.run.lock import SharedLock
with SharedLock(Path(sys.argv[1])):
    print("holds", flush=True)
    time.sleep(float(sys.argv[2]))
"""


@contextlib.contextmanager
def lingering(partial: Path, seconds: float):
    """A rank of a job that was stopped is still there."""
    python, _ = require_mpi("mpich")
    with subprocess.Popen([python, "-c", HOLDS, partial, str(seconds)], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout.readline() == "holds\n"
        try:
            yield
        finally:
            process.kill()


def test_as_long_as_any_rank_of_the_last_run_lives_nobody_else_begins(tmp_path, sample):
    out = tmp_path / "out"
    command = ("reshard", sample, out, "--target", "tp=4", *SMALL, "--progress", "off")
    stopped(sample, out, "--target", "tp=4")
    with lingering(tmp_path / "out.partial", 60):
        assert_refused(run_mpi(2, *command), 2, "a job is writing it (host ", out=out)
        assert_refused(run_mpi(2, *command, "--restart"), 2, "a job is writing it (host ", out=out)
    continued(2, tmp_path / "report", *command)


def test_the_same_slurm_job_waits_for_the_ranks_of_its_last_run(tmp_path, sample):
    out, job = tmp_path / "out", {"SLURM_JOB_ID": "77"}
    arguments = ("reshard", sample, out, "--target", "tp=4", *SMALL, *NOTING)
    assert_refused(run_python_mpi(3, "-c", STOPPED_ON_THE_WAY, *arguments, env=job), 75, "signal", out=out)
    command = ("reshard", sample, out, "--target", "tp=4", "--progress", "off")
    with lingering(tmp_path / "out.partial", 3):
        assert_done(run_mpi(2, *command, env=job))
