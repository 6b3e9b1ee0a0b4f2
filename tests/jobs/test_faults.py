"""Whatever goes wrong, wherever, on whichever rank: one line, one exit code, no hang; nothing is lost; the same command goes on.

FAULTS is also the table of docs/reliability.md.
"""

import errno
import functools
import hashlib
import json
import os
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import pytest

from tests.jobs import faults
from tests.jobs.outcome import CASES, assert_done, assert_refused, error_lines, run_alone, write_sample
from tests.jobs.test_resume import assert_equal_folders
from tests.mpirun import CHECKOUT, run_mpi, run_python_mpi, tail

NRANKS, LAST = 3, -1
WITHIN_S = 20.0
JOB = ("--target", "tp=4", "--memory", "120K", "--journal-every", 0, "--verify", "full", "--progress", "off")
OWNER, SHARED, UNSEEN = ("--writers", "owner"), ("--writers", "shared"), ("--verify", "none")
STALLING = (*OWNER, "--stall-timeout", 2)
MPICH, BOTH = ("mpich",), ("mpich", "openmpi")
GOES_ON, UNTIL_RESTART, IS_DONE, IS_THERE, IS_REPLACED = (
    "the same command goes on",
    "refused until `--restart`",
    "OUT is whole",
    "OUT is whole, and says so when asked again",
    "OUT is whole, and replaced when asked again",
)


class Point(NamedTuple):
    """A place in a job: while what is done, by which function, when it is called for which time."""

    phase: str
    at: str
    number: int = 1


MANIFEST = Point("the manifest is read", "reshard_mpi.storage.source:open_source")
HEADERS = Point("headers are read", "reshard_mpi.storage.source:read_headers")
PLANNING = Point("rank 0 plans", "reshard_mpi.run.lead:Lead.prepare")
REPLICAS = Point("replicas are hashed", "reshard_mpi.run.job:_check_equalities")
LOCKING = Point("the lock is shared", "reshard_mpi.run.job:SharedLock")
CREATING = Point("files are created", "reshard_mpi.run.job:_create_files")
BUFFERS = Point("buffers are allocated", "reshard_mpi.run.transfer:Reader.__init__")
READ = "reshard_mpi.run.transfer:Reader.read"
READ_FIRST, READ_MIDDLE = Point("the first round is read", READ), Point("a round is read", READ, 5)
READ_LAST = Point("the last round is read", READ, LAST)
COPYING = Point("the kernel copies", "reshard_mpi.run.transfer:Writer.copy")
PACKING = Point("a round is packed", "reshard_mpi.mpi.exchange:Exchanger.exchange", 4)
UNPACKING = Point("a round is unpacked", "reshard_mpi.mpi.exchange:await_all", 3)
WRITE = "reshard_mpi.run.transfer:Writer.write"
WRITE_FIRST, WRITE_MIDDLE = Point("the first round is written", WRITE), Point("a round is written", WRITE, 5)
WRITE_LAST = Point("the last round is written", WRITE, LAST)
SYNC_FIRST = Point("the first round is synced", "reshard_mpi.run.transfer:Writer.sync")
SYNC_LAST = Point("all is synced", "reshard_mpi.run.transfer:Writer.sync", LAST)
NOTING = Point("the journal is written", "reshard_mpi.run.lead:Lead.note", 3)
DIGESTS = Point("shared arrays are read back", "reshard_mpi.run.transfer:Writer.digests")
VERIFYING = Point("OUT is read back (`full`)", "reshard_mpi.run.job:_verify_target")
CLAIMING = Point("`OUT.partial` is claimed", "reshard_mpi.run.lead:Lead.begin")
CASE = Point("`case.json` is written", "reshard_mpi.run.lead:Lead.commit")
RENAMING = Point("OUT gets its name", "reshard_mpi.run.commit:PartialFolder._rename")
SETTLING = Point("that name is synced", "reshard_mpi.run.commit:PartialFolder._settle")
REMOVING = Point("the replaced OUT is removed", "reshard_mpi.run.commit:_remove")


@dataclass(frozen=True)
class Row:
    """`what` goes wrong at a point, on which rank (None: on each); the exit code, words of the line, and what is left."""

    what: str
    point: Point
    rank: int | None
    do: str
    code: int | None  # None: whatever the launcher makes of a rank that is killed
    words: tuple[str, ...] = ()
    call: str = ""
    file: str = ""
    left: str = GOES_ON
    options: tuple[object, ...] = OWNER
    mpis: tuple[str, ...] = MPICH
    overwrite: bool = True  # there is an OUT already

    @property
    def name(self) -> str:
        return f"{self.what}, while {self.point.phase}, rank {self.rank}".replace("`", "")


def failing_read(point: Point, rank: int, file: str = "/source/", **options: object) -> Row:
    words = ("can't read", "Input/output error", "rank-0000")
    return Row("a read fails", point, rank, "EIO", 5, words, "os:preadv", file, **options)


def failing_write(what: str, do: str, point: Point, rank: int, call: str, words: tuple[str, ...], **options) -> Row:
    return Row(what, point, rank, do, 5, (*words, os.strerror(getattr(errno, do))), call, "out.partial/", **options)


def flipped_bit(point: Point, rank: int, file: str = "/source/", **options: object) -> Row:
    return Row(
        "a bit flips",
        point,
        rank,
        "flipped",
        4,
        ("has digest", "--restart"),
        "os:preadv",
        file,
        UNTIL_RESTART,
        **options,
    )


def no_memory(point: Point, rank: int, call: str = "", **options: object) -> Row:
    return Row("no memory is left", point, rank, "no memory", 6, ("memory",), call, **options)


def killed(point: Point, rank: int, call: str = "", **options: object) -> Row:
    return Row("the rank is killed", point, rank, "SIGKILL", None, (), call, **options)


def stopped(point: Point, rank: int, **options: object) -> Row:
    return Row("SIGUSR1", point, rank, "SIGUSR1", 75, ("stopped by a signal", "goes on"), **options)


def stalled(point: Point, rank: int | None, call: str, file: str, word: str, **options: object) -> Row:
    words = (f" to {word} it", "rank", "on host", "--stall-timeout", "rank-0000")
    return Row("the file system stalls", point, rank, "stall", 5, words, call, file, options=STALLING, **options)


FULL = ("can't write", "rank-0000", "No space left")
FAULTS = [
    Row("a file may not be read", MANIFEST, 0, "EACCES", 5, ("case.json", "denied"), "os:open", "case.json"),
    Row("a file may not be read", HEADERS, 1, "EACCES", 5, ("rank-0000", "denied"), "os:open", "/source/rank-"),
    Row("a file vanishes", HEADERS, 1, "ENOENT", 5, ("rank-0000", "No such file"), "os:open", "/source/rank-"),
    Row("a file vanishes", READ_FIRST, 1, "gone", 5, ("rank-0000", "No such file"), "os:open", "/source/rank-"),
    Row("a file is seen late", READ_FIRST, 2, "ENOENT", 0, (), "os:open", "/source/rank-", left=IS_DONE),
    Row("a read fails", HEADERS, 1, "EIO", 5, ("can't read", "rank-0000"), "os:pread", "/source/rank-"),
    failing_read(REPLICAS, 2),
    failing_read(READ_FIRST, 0, mpis=BOTH),
    failing_read(READ_MIDDLE, 1),
    failing_read(READ_LAST, 2),
    failing_read(DIGESTS, 1, "out.partial/", options=SHARED),
    failing_read(VERIFYING, 1, "out.partial/"),
    Row("a shard is cut", READ_MIDDLE, 1, "end of file", 5, ("rank-0000", "ends at byte"), "os:preadv", "/source/"),
    flipped_bit(READ_FIRST, 1, mpis=BOTH),
    flipped_bit(READ_LAST, 2),
    flipped_bit(VERIFYING, 2, "out.partial/"),
    failing_write("the disk is full", "ENOSPC", CREATING, 2, "os:posix_fallocate", ("rank-0000",), mpis=BOTH),
    failing_write("the disk is full", "ENOSPC", WRITE_FIRST, 1, "os:pwrite", ("can't write", "rank-0000")),
    Row("the disk is full", COPYING, 1, "ENOSPC", 5, FULL, "os:copy_file_range", options=UNSEEN),
    failing_write("the disk is full", "ENOSPC", NOTING, 0, "os:write", ("can't write", "journal")),
    failing_write("the disk is full", "ENOSPC", CASE, 0, "os:posix_fallocate", ("case.json",)),
    failing_write("the quota is used up", "EDQUOT", CREATING, 1, "os:posix_fallocate", ("rank-0000",)),
    failing_write("the quota is used up", "EDQUOT", WRITE_MIDDLE, 2, "os:pwrite", ("can't write", "rank-0000")),
    failing_write("a write fails", "EIO", WRITE_LAST, 0, "os:pwrite", ("can't write", "rank-0000")),
    failing_write("a sync fails", "EIO", SYNC_FIRST, 2, "os:fsync", ("can't sync", "rank-0000"), mpis=BOTH),
    failing_write("a sync fails", "EIO", SYNC_LAST, 1, "os:fsync", ("can't sync", "rank-0000")),
    failing_write("a sync fails", "EIO", NOTING, 0, "os:fsync", ("can't write", "journal")),
    failing_write("a sync fails", "EIO", CASE, 0, "os:fsync", ("can't sync", "case.json")),
    Row(
        "a sync fails",
        SETTLING,
        0,
        "EIO",
        5,
        ("can't sync", "is whole, but"),
        "os:fsync",
        left=IS_THERE,
        overwrite=False,
    ),
    Row(
        "a folder may not be written", CLAIMING, 0, "EROFS", 5, ("out.partial", "Read-only"), "os:mkdir", "out.partial"
    ),
    Row("a folder may not be written", LOCKING, 2, "EACCES", 5, ("lock", "denied"), "os:open", "out.partial/lock"),
    failing_write("a folder may not be written", "EACCES", CREATING, 2, "os:open", ("rank-0000",)),
    Row("a folder may not be written", RENAMING, 0, "EACCES", 5, ("out: can't put",), "os:rename", overwrite=False),
    Row("a folder may not be written", REMOVING, 0, "EACCES", 0, (), "os:unlink", left=IS_DONE),
    no_memory(MANIFEST, 0, "reshard_mpi.storage.source:parse_case"),
    no_memory(HEADERS, 1),
    no_memory(PLANNING, 0),
    no_memory(BUFFERS, 2),
    no_memory(READ_MIDDLE, 1, mpis=BOTH),
    no_memory(PACKING, 2, mpis=BOTH),
    no_memory(UNPACKING, 1, "reshard_mpi.mpi.exchange:copy_tiles"),
    no_memory(WRITE_LAST, 2),
    no_memory(DIGESTS, 0),
    killed(PLANNING, 0),
    killed(READ_FIRST, 2),
    killed(WRITE_MIDDLE, 0, mpis=BOTH),
    Row("the rank is killed", NOTING, 0, "killed half-way", None, (), "os:write", "journal"),
    killed(WRITE_LAST, 1),
    killed(VERIFYING, 2),
    killed(CASE, 0),
    killed(RENAMING, 0),
    killed(REMOVING, 0, left=IS_REPLACED),
    stopped(MANIFEST, 0),
    stopped(PLANNING, 0),
    stopped(CREATING, 2),
    stopped(READ_FIRST, 1),
    stopped(WRITE_MIDDLE, 2, mpis=BOTH),
    stopped(SYNC_LAST, 0),
    stopped(VERIFYING, 1),
    Row("SIGUSR1", CASE, 0, "SIGUSR1", 0, left=IS_DONE),
    Row("the rank is slow", READ_FIRST, 1, "slow", 0, (), "os:preadv", left=IS_DONE),
    stalled(HEADERS, 1, "os:open", "/source/rank-", "open"),
    stalled(READ_MIDDLE, 2, "os:preadv", "/source/", "read", mpis=BOTH),
    stalled(WRITE_MIDDLE, 1, "os:pwrite", "out.partial/", "write"),
    stalled(SYNC_FIRST, 0, "os:fsync", "out.partial/", "sync"),
    stalled(READ_FIRST, None, "os:preadv", "/source/", "read", mpis=BOTH),
]


@pytest.fixture(scope="module")
def source(tmp_path_factory) -> Path:
    return write_sample(tmp_path_factory.mktemp("faults") / "source", "300K", dp=2)


@pytest.fixture(scope="module")
def whole(source, tmp_path_factory):
    """OUT as it must be, and the number of rounds that it takes, by options."""

    @functools.cache
    def made(options: tuple[object, ...]) -> tuple[Path, int]:
        folder = tmp_path_factory.mktemp("whole")
        arguments = (*JOB, *options, "--report", folder / "report")
        assert_done(run_mpi(NRANKS, "reshard", source, folder / "out", *arguments))
        return folder / "out", json.loads((folder / "report").read_text())["nrounds"]

    return made


def state(folder: Path) -> dict[str, tuple[int, str]]:
    """When each file was written, and what it holds."""
    return {
        path.name: (path.stat().st_mtime_ns, hashlib.sha256(path.read_bytes()).hexdigest()) for path in folder.iterdir()
    }


@pytest.mark.parametrize(
    ("row", "mpi"),
    [
        pytest.param(row, mpi, id=f"{row.name}, {mpi}", marks=[pytest.mark.thorough] if number % 3 else [])
        for number, (row, mpi) in enumerate((row, mpi) for row in FAULTS for mpi in row.mpis)
    ],
)
def test_whatever_goes_wrong(tmp_path, source, whole, row, mpi):
    expected, nrounds = whole(row.options)
    out, note = tmp_path / "out", tmp_path / "note"
    if row.overwrite:
        shutil.copytree(CASES / "tp3-uneven-to-tp2", out)
    source_was, out_was = state(source), state(out) if row.overwrite else None
    command = ("reshard", source, out, *JOB, *row.options, *(["--overwrite"] if row.overwrite else []))
    number = nrounds if row.point.number == LAST else row.point.number
    fault = {"rank": row.rank, "do": row.do, "at": row.point.at, "number": number, "call": row.call, "file": row.file}
    program = (faults.__file__, json.dumps(fault | {"note": str(note)}))
    done = run_python_mpi(NRANKS, *program, *command, mpi=mpi, timeout=WITHIN_S)

    assert note.exists(), f"the fault was never met\n{tail(done.stderr)}"
    assert state(source) == source_was
    if row.code == 0:
        assert_done(done)
    elif row.code is None:
        assert done.returncode != 0
        assert "Traceback" not in done.stderr and not error_lines(done.stderr), done.stderr
    else:
        assert_refused(done, row.code, *row.words)
    if row.left in (GOES_ON, UNTIL_RESTART):
        assert (state(out) if out.exists() else None) == out_was
        if row.left == UNTIL_RESTART:
            assert_refused(run_alone(*command), 2, "--restart")
            command = (*command, "--restart")
    if row.left == IS_THERE:
        assert_refused(run_alone(*command), 2, "exists")
    elif row.left != IS_DONE:
        assert_done(run_alone(*command))
    if row.left != IS_DONE:
        assert sorted(path.name for path in tmp_path.iterdir()) == ["note", "out"]
    assert_equal_folders(expected, out)


READING = Point("a tensor is read", "reshard_mpi.check.whole:WholeTensor.read")
OTHERS = [
    # command, what goes wrong
    ("verify", failing_read(READING, 1)),
    ("verify", no_memory(READING, 2)),
    ("verify", stopped(READING, 0)),
    ("verify", stalled(READING, 2, "os:preadv", "/source/", "read")),
    ("compare", failing_read(READING, 2)),
    ("compare", no_memory(READING, 0)),
    ("compare", stopped(READING, 1)),
    ("compare", stalled(READING, 1, "os:preadv", "/source/", "read")),
]


@pytest.mark.parametrize(("command", "row"), OTHERS, ids=[f"{command}, {row.name}" for command, row in OTHERS])
def test_the_commands_that_check_end_as_reshard_does(tmp_path, source, command, row):
    note = tmp_path / "note"
    fault = {"rank": row.rank, "do": row.do, "at": row.point.at, "call": row.call, "file": row.file, "note": str(note)}
    folders = [source] * (2 if command == "compare" else 1)
    program = (faults.__file__, json.dumps(fault), command, *folders, "--progress", "off", "--stall-timeout", 2)
    done = run_python_mpi(NRANKS, *program, timeout=WITHIN_S)
    assert note.exists()
    assert_refused(done, row.code, *(word for word in row.words if word != "goes on"))


def table() -> str:
    """FAULTS as it stands in docs/reliability.md."""
    lines = [
        "| what goes wrong | while | on rank | with | exit | the line says | afterwards |",
        "|---|---|---|---|---|---|---|",
    ]
    for row in FAULTS:
        rank = "each" if row.rank is None else row.rank
        mpis = ", ".join({"mpich": "MPICH", "openmpi": "Open MPI"}[mpi] for mpi in row.mpis)
        code = "the launcher's" if row.code is None else row.code
        words = " … ".join(row.words).strip() or "–"
        lines.append(f"| {row.what} | {row.point.phase} | {rank} | {mpis} | {code} | {words} | {row.left} |")
    return "\n".join(lines) + "\n"


def test_the_table_of_docs_reliability_is_this_one():
    text = (CHECKOUT / "docs" / "reliability.md").read_text()
    assert table() in text, f"the table should be:\n{table()}"
