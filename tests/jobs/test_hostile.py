"""Input that isn't what it seems, and machines that have too little: one line, the right exit code, on all ranks, soon."""

import json
import os
import struct
import time
from pathlib import Path

import pytest

from tests.jobs.outcome import AT, CASES, FIXTURES, assert_done, assert_refused, copy_of, run_alone, write_sample
from tests.mpirun import run_mpi, run_python_mpi

UNEVEN = CASES / "tp3-uneven-to-tp2"
SHARD, MANIFEST = "rank-00001.safetensors", "case.json"
WITHIN_S = 20


def a_fifo(path: Path) -> None:
    os.mkfifo(path)


def a_folder(path: Path) -> None:
    path.mkdir()


def a_device(path: Path) -> None:
    path.symlink_to("/dev/zero")


def a_link_out(path: Path) -> None:
    path.symlink_to(UNEVEN / path.name)


def a_loop(path: Path) -> None:
    path.symlink_to(path)


def a_huge_file(path: Path) -> None:
    """It takes no space, and nothing of it must be read."""
    path.touch()
    os.truncate(path, 1 << 42)


def a_header_as_long_as_a_huge_file(path: Path) -> None:
    a_huge_file(path)
    with open(path, "r+b") as file:
        file.write(struct.pack("<Q", (1 << 42) - 8))


THINGS = [a_fifo, a_folder, a_device, a_link_out, a_loop, a_huge_file, a_header_as_long_as_a_huge_file]
PLACES = [
    (UNEVEN, SHARD),
    (UNEVEN, MANIFEST),
    (FIXTURES / "formats" / "dcp", ".metadata"),
    (FIXTURES / "formats" / "dcp", "__0_0.distcp"),
]


NO_FILES = [
    (source, name, thing)
    for source, name in PLACES
    for thing in (THINGS if name == SHARD else [a_fifo, a_device, a_huge_file])
]


@pytest.mark.parametrize(
    ("source", "name", "thing"), NO_FILES, ids=[f"{name} {thing.__name__}" for _, name, thing in NO_FILES]
)
def test_what_is_no_file_of_the_folder_is_refused(tmp_path, source, name, thing):
    copy = copy_of(source, tmp_path / "source")
    (copy / name).unlink()
    thing(copy / name)
    if thing is a_link_out and not (UNEVEN / name).exists():
        (copy / name).unlink()
        (copy / name).symlink_to(source / name)
    started = time.monotonic()
    done = run_mpi(2, "reshard", copy, tmp_path / "out", "--target", "single")
    assert time.monotonic() - started < WITHIN_S
    assert done.returncode in (3, 5), done.stderr
    if (copy / name).exists() or thing is not a_loop:  # a manifest that leads nowhere isn't there
        assert_refused(done, done.returncode, name, out=tmp_path / "out")
    else:
        assert_refused(done, done.returncode, out=tmp_path / "out")


@pytest.mark.parametrize("name", ["model.safetensors.index.json", "layout.toml", "oracles.safetensors"])
@pytest.mark.parametrize("thing", [a_fifo, a_device], ids=["FIFO", "device"])
def test_an_index_a_layout_or_an_oracle_file_that_is_none_is_refused(tmp_path, name, thing):
    copy = copy_of(UNEVEN, tmp_path / "source")
    options = ["--verify", "full"]
    if name == "model.safetensors.index.json":
        (copy / MANIFEST).unlink()
    elif name == "layout.toml":
        options = ["--layout", copy / name]
    (copy / name).unlink(missing_ok=True)
    thing(copy / name)
    done = run_mpi(2, "reshard", copy, tmp_path / "out", *options)
    assert done.returncode in (3, 5), done.stderr
    assert_refused(done, done.returncode, name, out=tmp_path / "out")


@pytest.mark.parametrize("name", ["journal.jsonl", "journal.jsonl.new", "lock", "rank-00000.safetensors"])
@pytest.mark.parametrize(
    ("thing", "restart"),
    [("FIFO", []), ("folder", []), ("link", ["--restart"])],
    ids=["FIFO", "folder", "link, restart"],
)
def test_an_out_partial_whose_journal_or_lock_is_no_file_is_somebody_else_s(tmp_path, name, thing, restart):
    partial, precious = tmp_path / "out.partial", tmp_path / "precious"
    partial.mkdir()
    precious.write_text("not ours")
    if name.startswith("rank"):  # what an earlier run has left is kept
        (partial / "journal.jsonl").touch()
    {"FIFO": a_fifo, "folder": a_folder, "link": lambda path: path.symlink_to(precious)}[thing](partial / name)
    done = run_mpi(2, "reshard", UNEVEN, tmp_path / "out", *restart, timeout=WITHIN_S)
    assert_refused(done, 2, f"out.partial/{name}", out=tmp_path / "out")
    assert precious.read_text() == "not ours"


@pytest.mark.parametrize(
    "content", [b"[" * 100_000, b"\xff", b"[]", b'{"job": {}, "state": []}', b"9" * 10_000, b" " * (1 << 25)]
)
def test_a_journal_that_can_t_be_understood_is_a_matter_of_restart(tmp_path, content):
    (tmp_path / "out.partial").mkdir()
    (tmp_path / "out.partial" / "journal.jsonl").write_bytes(content)
    assert_refused(run_alone("reshard", UNEVEN, tmp_path / "out"), 2, "--restart", out=tmp_path / "out")


# ---- files that change while they are read


@pytest.mark.parametrize("command", ["reshard", "verify", "compare"])
@pytest.mark.parametrize("size", [100, 10_000])
def test_a_shard_that_gets_another_length_after_it_was_looked_into(tmp_path, command, size):
    """Cut short it can't be read; where another length isn't refused, what is appended is none of its arrays."""
    source = copy_of(UNEVEN, tmp_path / "source")
    cut = f"os.truncate({str(source / SHARD)!r}, {size})"
    at = "reshard_mpi.check.audit:digests_of" if command == "verify" else "reshard_mpi.check.compare:deal"
    at = "reshard_mpi.run.job:move_rounds" if command == "reshard" else at
    code = AT + f"at({at!r}, 0, lambda: {cut})\nmain()\n"
    rest = {"reshard": [tmp_path / "out", "--target", "single"], "verify": [], "compare": [UNEVEN]}[command]
    if command == "verify":
        code = code.replace("reshard_mpi.check.audit:digests_of", "reshard_mpi.check.verify:digests_of")
    done = run_python_mpi(3, "-c", code, command, source, *rest)
    if command != "compare":
        assert_refused(done, 5, SHARD, "isn't the file that it was before", out=tmp_path / "out")
    elif size == 100:
        assert_refused(done, 5, SHARD, "changed while it was read")
    else:
        assert_done(done)


# ---- very many


def test_a_hundred_thousand_arrays_that_no_fragment_names_take_a_moment(tmp_path):
    """A header of 5 MB; the library allows 100."""
    source = copy_of(UNEVEN, tmp_path / "source")
    header = b"{" + b",".join(b'"%d":{"dtype":"U8","shape":[0],"data_offsets":[0,0]}' % n for n in range(10**5)) + b"}"
    (source / SHARD).write_bytes(struct.pack("<Q", len(header)) + header)
    started = time.monotonic()
    assert_refused(run_mpi(2, "reshard", source, tmp_path / "out", "--target", "single"), 3, SHARD, "holds no array")
    assert time.monotonic() - started < WITHIN_S


def test_boxes_that_all_overlap_each_other_take_no_memory(tmp_path):
    """Each with each would be 200 million pairs."""
    source = copy_of(UNEVEN, tmp_path / "source")
    manifest = json.loads((source / MANIFEST).read_text())
    one = max(manifest["fragments"], key=lambda f: f["element_extent"])
    manifest["fragments"] = [one | {"fragment_id": str(n), "payload_key": str(n)} for n in range(20_000)]
    manifest |= {"expected_manifest_digest": None, "oracles": [], "oracle_file": None}
    (source / MANIFEST).write_text(json.dumps(manifest))
    limited = ("bash", "-c", 'ulimit -v 1500000; exec "$@"', "bash")
    assert_refused(run_mpi(2, "reshard", source, tmp_path / "out", prefix=limited), 3, "overlaps")


# ---- too little memory

NO_MEMORY = """
import resource
def starve():
    mapped = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (mapped + (4 << 20), resource.RLIM_INFINITY))
def fail():
    raise MemoryError
"""
STARVED = [
    # command, before what, on which rank, how
    ("reshard", "reshard_mpi.run.move:Reader", 1, "starve"),
    ("reshard", "reshard_mpi.run.move:Exchanger", 0, "starve"),
    ("reshard", "reshard_mpi.mpi.load:_read", 0, "fail"),
    ("reshard", "reshard_mpi.storage.source:check_case", 0, "fail"),
    ("reshard", "reshard_mpi.run.lead:prepare", 0, "fail"),
    ("reshard", "reshard_mpi.storage.files:Files.read", 2, "fail"),
    ("reshard", "reshard_mpi.run.lead:case_text", 0, "fail"),
    ("verify", "reshard_mpi.storage.files:Files.read", 2, "fail"),
    ("compare", "reshard_mpi.storage.files:Files.read", 1, "fail"),
    ("compare", "reshard_mpi.check.compare:_verdict", 0, "fail"),
]


@pytest.mark.parametrize(
    ("command", "place", "rank", "how"), STARVED, ids=[f"{r[0]} {r[1].split(':')[1]}" for r in STARVED]
)
def test_a_rank_without_memory_ends_all_with_one_line(tmp_path, command, place, rank, how):
    source = write_sample(tmp_path / "source", "48M" if how == "starve" else "1M")
    rest = {"reshard": [tmp_path / "out", "--target", "tp=3"], "verify": [], "compare": [source]}[command]
    code = f"{AT}{NO_MEMORY}at({place!r}, {rank}, {how})\nmain()\n"
    done = run_python_mpi(3, "-c", code, command, source, *rest, "--progress", "off")
    assert_refused(done, 6, "memory", out=tmp_path / "out")
