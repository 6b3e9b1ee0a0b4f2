"""A rank that sees files late, as on another host of a network file system; or never, while another one sees them."""

import json

import pytest

from tests.jobs.outcome import AT, assert_done, assert_refused, run_alone, write_sample
from tests.mpi.together import contents
from tests.mpirun import run_python_mpi

# `blind(rank, part, seconds, flags)`: from its first attempt on, and for so long, the rank can't open a file with `part` in its
# path and these flags, nor see it.
BLIND = (
    AT
    + """
import errno
from mpi4py import MPI
from reshard_mpi.storage import known
SEEN, OPEN, IS_THERE = [], os.open, os.path.lexists
def blind(rank, part, seconds, flags=0):
    def is_hidden(path):
        if MPI.COMM_WORLD.rank != rank or part not in str(path):
            return False
        SEEN.append(time.monotonic())
        return SEEN[-1] < SEEN[0] + seconds
    def opened(path, given, *arguments, **options):
        if given & os.O_ACCMODE == flags & os.O_ACCMODE and not given & os.O_CREAT and is_hidden(path):
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), str(path))
        return OPEN(path, given, *arguments, **options)
    os.open = opened
    os.path.lexists = lambda path: not is_hidden(path) and IS_THERE(path)
"""
)
FOR_EVER = 1000
DONE = '\ntry:\n    main()\nfinally:\n    assert MPI.COMM_WORLD.rank != 1 or len(SEEN) > 1, "never blind"'


@pytest.fixture(scope="module")
def sample(tmp_path_factory):
    return write_sample(tmp_path_factory.mktemp("sample") / "sample", "4M")


@pytest.fixture(scope="module")
def answer(sample):
    assert_done(run_alone("reshard", sample, sample.parent / "answer", "--target", "tp=4"))
    return contents(sample.parent / "answer")


def run(program: str, *arguments: object):
    return run_python_mpi(4, "-c", BLIND + program, "reshard", *arguments, "--target", "tp=4", timeout=40)


LATE = [
    ("the lock of OUT.partial", '"out.partial/lock", 1, os.O_RDWR', []),
    ("a file to write", '"out.partial/rank-00001", 1, os.O_RDWR', []),
    ("a file to read back", '"out.partial/rank-", 1, os.O_RDONLY', ["--verify", "full"]),
    ("a shard that another rank has looked into", '"sample/rank-00001", 1, os.O_RDONLY', []),
]


@pytest.mark.parametrize(("what", "blind", "options"), LATE, ids=[what for what, *_ in LATE])
def test_a_file_that_a_rank_sees_late_is_waited_for(sample, answer, tmp_path, what, blind, options):
    assert_done(run(f"blind(1, {blind})" + DONE, sample, tmp_path / "out", *options))
    assert contents(tmp_path / "out") == answer


NEVER = [
    ("OUT.partial", '"out.partial/", {}, os.O_RDWR', "out.partial/lock"),
    ("a file to write", '"out.partial/rank-00001", {}, os.O_RDWR', "out.partial/rank-00001.safetensors"),
    ("a shard", '"sample/rank-00001", {}, os.O_RDONLY', "sample/rank-00001.safetensors"),
]


@pytest.mark.parametrize(("what", "blind", "path"), NEVER, ids=[what for what, *_ in NEVER])
def test_a_file_that_a_rank_never_sees_is_told_with_who_sees_it(sample, tmp_path, what, blind, path):
    done = run(f"known.PATIENCE_S = 0.5\nblind(1, {blind.format(FOR_EVER)})\nmain()", sample, tmp_path / "out")
    words = [path, "rank 1 on host ", "does not see it, which rank 0 on host "]
    assert_refused(done, 5, *words, out=tmp_path / "out")


def test_one_rank_for_which_out_is_on_nfs_is_enough_for_one_writer_a_file(sample, answer, tmp_path):
    """With tp=2 of pp=2 to tp=4 nothing is sent if whoever reads may write."""
    sent = {}
    for rank in (1, 4):  # there is no rank 4
        nfs = f"import reshard_mpi.run.job as job\njob.is_on_nfs = lambda path: MPI.COMM_WORLD.rank == {rank}\nmain()"
        report = tmp_path / f"report-{rank}"
        assert_done(run(nfs, sample, tmp_path / f"out-{rank}", "--report", report))
        assert contents(tmp_path / f"out-{rank}") == answer
        sent[rank] = json.loads(report.read_text())["phases"]["exchange"]["nbytes"]
    assert sent[4] == 0 < sent[1]
