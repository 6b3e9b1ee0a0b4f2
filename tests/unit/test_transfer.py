"""Between real files and buffers: what is read, written and hashed, in order and out of order."""

import hashlib
import os
from dataclasses import replace

import numpy as np
import pytest

from reshard_mpi.boxes import Boxes
from reshard_mpi.errors import IntegrityError, StorageError
from reshard_mpi.mpi.exchange import copy_tiles
from reshard_mpi.plan.plan import ArrayTable, Side
from reshard_mpi.plan.planner import Resources
from reshard_mpi.plan.rounds import Copies, Runs, Spans, expand_round
from reshard_mpi.plan.stored import StoredBoxes
from reshard_mpi.run.transfer import Reader, Writer
from reshard_mpi.storage.digests import RunningDigest, digest_row
from reshard_mpi.storage.files import Files
from tests.reference.dice import Dice
from tests.unit.moves import Tensor, describe_job, table_of
from tests.unit.tilings import Tile

NAMES = ("rank-00000.safetensors", "rank-00001.safetensors")
A, B, C = b"a" * 10 + b"A" * 14, b"b" * 16, b"c" * 40
FILES = {NAMES[0]: b"header00" + A + B, NAMES[1]: b"header11" + C}
# (file, begin, nbytes) of A, B and C
PLACES = [(0, 8, 24), (0, 32, 16), (1, 8, 40)]


def sha256(data: bytes) -> str:
    return "sha256:" + hashlib.sha256(data).hexdigest()


def table(*digests: str | None) -> ArrayTable:
    rows = np.stack([digest_row(digest) for digest in digests])
    known = np.array([digest is not None for digest in digests], np.int64)
    return replace(table_of(PLACES), digest=rows, has_digest=known)


def spans(*parts: tuple[int, int, int]) -> Spans:
    """(array, first byte, byte after the last) within arrays, in file order; what touches or overlaps is one run."""
    runs: list[list[int]] = []  # file, offset, nbytes, position
    found, end = [], 0
    for index, first, last in parts:
        file, begin, _ = PLACES[index]
        if runs and runs[-1][0] == file and begin + first <= runs[-1][1] + runs[-1][2]:
            runs[-1][2] = max(runs[-1][2], begin + last - runs[-1][1])
        else:
            runs.append([file, begin + first, last - first, -(-end // 8) * 8])
        end = runs[-1][3] + runs[-1][2]
        found.append((index, begin + first, last - first, runs[-1][3] + begin + first - runs[-1][1]))
    array, offset, nbytes, position = np.array(found, np.int64).reshape(-1, 4).T
    return Spans(array, offset, nbytes, position, Runs(*np.array(runs, np.int64).reshape(-1, 4).T), end)


@pytest.fixture
def folder(tmp_path):
    for name, content in FILES.items():
        (tmp_path / name).write_bytes(content)
    return tmp_path


def reader_of(folder, *digests, hashing=True) -> Reader:
    return Reader(Files(folder), NAMES, ("a", "b", "c"), table(*digests), 128, hashing)


GOOD = (sha256(A), sha256(B), sha256(C))


# Reading


def test_spans_of_a_round_are_read_to_their_places(folder):
    reader = reader_of(folder, *GOOD)
    wanted = spans((0, 4, 12), (1, 0, 16), (2, 8, 16))
    buffer = reader.read(0, wanted)
    assert buffer[:8].tobytes() == A[4:12]
    assert buffer[8:24].tobytes() == B
    assert buffer[24:32].tobytes() == C[8:16]
    assert reader.work.nbytes == 32


def test_spans_that_follow_each_other_are_read_with_one_call(folder, monkeypatch):
    calls = []
    plain = os.preadv
    monkeypatch.setattr(
        os, "preadv", lambda fd, views, offset: calls.append((len(views[0]), offset)) or plain(fd, views, offset)
    )
    buffer = reader_of(folder, *GOOD, hashing=False).read(0, spans((0, 0, 24), (1, 0, 16), (2, 0, 8)))
    assert calls == [(40, 8), (8, 8)]
    assert buffer[:48].tobytes() == A + B + C[:8]


def test_spans_that_overlap_are_read_once_and_each_is_hashed(folder):
    """Two boxes side by side in one stored array: each is padding to the other."""
    reader = reader_of(folder, *GOOD)
    buffer = reader.read(0, spans((0, 0, 20), (0, 4, 24), (1, 0, 16)))
    reader.finish()
    assert buffer[:40].tobytes() == A + B
    assert (reader.work.nbytes, reader.work.again_nbytes) == (40, 0)


def test_three_rounds_have_three_buffers_and_the_fourth_takes_the_first_again(folder):
    """While one is read, one is in use and one is written from."""
    reader = reader_of(folder, *GOOD, hashing=False)
    buffers = [reader.read(number, spans((number, 0, 8))) for number in range(3)]
    assert [buffer[:8].tobytes() for buffer in buffers] == [A[:8], B[:8], C[:8]]
    assert np.shares_memory(reader.read(3, spans((0, 8, 16))), buffers[0])


def test_a_round_without_spans_reads_nothing(folder):
    reader = reader_of(folder, *GOOD)
    reader.read(0, spans())
    reader.finish()
    assert (reader.work.nbytes, reader.work.hashed_nbytes) == (0, 0)


def test_arrays_that_hold_their_digests_pass_and_are_hashed_on_the_way(folder):
    reader = reader_of(folder, *GOOD)
    reader.read(0, spans((0, 0, 12), (2, 0, 20)))
    reader.read(1, spans((0, 12, 24), (1, 0, 16), (2, 20, 40)))
    reader.finish()
    assert (reader.work.nbytes, reader.work.hashed_nbytes, reader.work.again_nbytes) == (80, 80, 0)


@pytest.mark.parametrize("damaged, key", [(0, "a"), (1, "b"), (2, "c")])
def test_a_digest_that_does_not_hold_is_told_when_the_last_byte_was_read(damaged, key, folder):
    digests = [*GOOD]
    digests[damaged] = sha256(b"?")
    reader = reader_of(folder, *digests)
    reader.read(0, spans((0, 0, 12), (1, 0, 8), (2, 0, 20)))
    with pytest.raises(IntegrityError) as refused:
        reader.read(1, spans((0, 12, 24), (1, 8, 16), (2, 20, 40)))
    text = str(refused.value)
    assert NAMES[PLACES[damaged][0]] in text
    assert f"array {key!r} has digest {GOOD[damaged]}" in text and sha256(b"?") in text


def test_nothing_is_hashed_when_it_is_not_asked_for(folder):
    reader = reader_of(folder, *[sha256(b"?")] * 3, hashing=False)
    reader.read(0, spans((0, 0, 24), (1, 0, 16)))
    reader.finish()
    assert reader.work.hashed_nbytes == 0


def test_an_array_without_digest_is_not_hashed(folder):
    reader = reader_of(folder, None, sha256(B), None)
    reader.read(0, spans((0, 0, 24), (1, 0, 16), (2, 0, 40)))
    reader.finish()
    assert reader.work.hashed_nbytes == 16


@pytest.mark.parametrize(
    "why, rounds, again",
    [
        ("padding before and after the box", [[(0, 4, 20)]], 8),
        ("padding within", [[(0, 0, 8)], [(0, 16, 24)]], 8),
        ("the second half first", [[(0, 12, 24)], [(0, 0, 12)]], 12),
        ("only the first bytes are needed", [[(0, 0, 1)]], 23),
    ],
)
def test_what_a_digest_needs_and_no_round_reads_in_order_is_read_for_it(why, rounds, again, folder):
    for digest, fails in ((sha256(A), False), (sha256(b"?"), True)):
        reader = reader_of(folder, digest, None, None)
        try:
            for number, parts in enumerate(rounds):
                reader.read(number, spans(*parts))
            reader.finish()
            assert not fails
            assert (reader.work.again_nbytes, reader.work.hashed_nbytes) == (again, len(A))
        except IntegrityError:
            assert fails


def test_an_array_that_no_round_reads_is_not_opened(folder):
    (folder / NAMES[1]).unlink()
    reader = reader_of(folder, *GOOD)
    reader.read(0, spans((0, 0, 24)))
    reader.finish()


@pytest.mark.parametrize("why, content", [("cut short", FILES[NAMES[1]][:30]), ("emptied", b"")])
def test_a_file_that_shrank_is_a_storage_error(why, content, folder):
    (folder / NAMES[1]).write_bytes(content)
    with pytest.raises(StorageError, match=NAMES[1]):
        reader_of(folder, *GOOD).read(0, spans((2, 0, 40)))


# Writing


ALONE = [(0, 0), (1, 0), (2, 0)]  # (array, rank) of every box: rank 0 writes it all


def side_of(boxes: list[tuple[int, int]], hasher: list[int]) -> Side:
    """Of the target what a writer looks at: who writes a box of which array, and who hashes which."""
    array, rank = np.array(boxes, np.int64).T
    nothing = np.zeros((len(array), 1), np.int64)
    stored = StoredBoxes(Boxes(nothing, nothing + 1), nothing + 1, nothing[:, 0])
    arrays = replace(table_of(PLACES), hasher=np.array(hasher, np.int64))
    return Side(stored, array, rank, np.array([0, len(array)]), np.arange(len(array)), arrays)


def no_digest(array: int) -> RunningDigest:
    raise AssertionError("no array begins as a source array")


def writer_of(folder, hashing=True, boxes=ALONE, hasher=(0, 0, 0), rank=0) -> Writer:
    for name, content in FILES.items():
        (folder / name).write_bytes(content[:8] + b"." * (len(content) - 8))
    return Writer(Files(folder, os.O_RDWR), NAMES, side_of(boxes, list(hasher)), rank, 128, hashing, no_digest)


def finished(writer: Writer) -> dict[int, bytes]:
    writer.sync()
    return writer.digests()


CONTENT = {0: A, 1: B, 2: C}


def write(writer: Writer, number: int, parts) -> None:
    wanted = spans(*parts)
    buffer = writer.buffer(number)
    for (array, first, last), position in zip(parts, wanted.position.tolist(), strict=True):
        buffer[position : position + last - first] = np.frombuffer(CONTENT[array][first:last], np.uint8)
    writer.write((wanted, buffer))


@pytest.mark.parametrize(
    "why, rounds, again",
    [
        ("all at once", [[(0, 0, 24), (1, 0, 16), (2, 0, 40)]], 0),
        ("in order", [[(0, 0, 12), (2, 0, 8)], [(0, 12, 24), (2, 8, 40)], [(1, 0, 16)]], 0),
        ("the second half first", [[(0, 12, 24)], [(0, 0, 12), (1, 0, 16), (2, 0, 40)]], 12),
        ("backwards", [[(2, 20, 40)], [(2, 0, 20), (1, 0, 16)], [(0, 0, 24)]], 20),
    ],
)
def test_what_is_written_has_its_digest_whatever_the_order(why, rounds, again, folder):
    writer = writer_of(folder)
    for number, parts in enumerate(rounds):
        write(writer, number, parts)
    digests = finished(writer)
    assert {array: "sha256:" + digest.hex() for array, digest in digests.items()} == dict(enumerate(GOOD))
    assert {name: (folder / name).read_bytes() for name in NAMES} == FILES
    assert (writer.work.nbytes, writer.work.again_nbytes) == (80, again)


def test_without_hashing_there_are_no_digests_but_the_same_bytes(folder):
    writer = writer_of(folder, hashing=False)
    write(writer, 0, [(0, 0, 24), (1, 0, 16), (2, 0, 40)])
    assert finished(writer) == {}
    assert {name: (folder / name).read_bytes() for name in NAMES} == FILES


SHARED = [(0, 0), (1, 0), (2, 0), (0, 1), (1, 1)]  # rank 1 writes the ends of A and B


@pytest.mark.parametrize(
    "why, hasher, hashed, again",
    [
        (
            "by rank 0: C on the way, A and B are read back",
            [0, 0, 0],
            [(0, GOOD[0]), (1, GOOD[1]), (2, GOOD[2])],
            24 + 16,
        ),
        ("A by rank 1", [1, 0, 0], [(1, GOOD[1]), (2, GOOD[2])], 16),
        ("all by rank 1, also what it doesn't write", [1, 1, 1], [], 0),
    ],
)
def test_arrays_that_several_ranks_write_are_read_back_by_the_one_that_hashes_them(why, hasher, hashed, again, folder):
    mine, other = writer_of(folder, True, SHARED, hasher, 0), writer_of(folder, True, SHARED, hasher, 1)
    write(mine, 0, [(0, 0, 12), (1, 0, 8), (2, 0, 40)])
    write(other, 0, [(0, 12, 24), (1, 8, 16)])
    mine.sync(), other.sync()
    digests = mine.digests()
    assert [(array, "sha256:" + digest.hex()) for array, digest in digests.items()] == hashed
    assert mine.work.again_nbytes == again
    together = digests | other.digests()
    assert {array: "sha256:" + digest.hex() for array, digest in together.items()} == dict(enumerate(GOOD))
    assert {name: (folder / name).read_bytes() for name in NAMES} == FILES


def test_an_array_without_bytes_or_that_nobody_writes_has_a_digest_too(folder):
    """Its hasher has nothing to wait for."""
    writer = writer_of(folder, boxes=[(0, 0)])
    write(writer, 0, [(0, 0, 24)])
    digests = finished(writer)
    assert sorted(digests) == [0, 1, 2]
    assert "sha256:" + digests[0].hex() == GOOD[0]
    assert "sha256:" + digests[1].hex() == sha256(b"." * 16)


def test_pieces_of_several_buffers_are_hashed_in_the_order_of_the_file(folder):
    writer = writer_of(folder)
    buffers = [np.frombuffer(content, np.uint8) for content in (A, A[12:] + B)]
    first, second = spans((0, 0, 12)), spans((0, 12, 24), (1, 0, 16))
    writer.write((second, buffers[1]), (first, buffers[0]))
    digests = finished(writer)
    assert ["sha256:" + digests[array].hex() for array in (0, 1)] == list(GOOD[:2])
    assert (writer.work.nbytes, writer.work.again_nbytes) == (40, 40)  # C was never written: read back


def test_copies_go_from_file_to_file_and_are_synced(folder, tmp_path):
    writer = writer_of(folder, hashing=False)
    (tmp_path / "x").write_bytes(b"-" * 5 + A + C)
    with Files(tmp_path) as source:
        of = [np.array(column) for column in ([0, 0], [5, 29], [0, 1], [8, 8], [24, 40])]
        writer.copy(source, ["x"], Copies(*of))
    writer.sync()
    assert (folder / NAMES[0]).read_bytes()[8:32] == A
    assert (folder / NAMES[1]).read_bytes()[8:48] == C
    assert writer.work.copied_nbytes == 64


def test_every_file_that_was_written_is_synced_and_no_other(folder, monkeypatch):
    synced = []
    plain = os.fsync
    monkeypatch.setattr(os, "fsync", lambda fd: synced.append(os.readlink(f"/proc/self/fd/{fd}")) or plain(fd))
    writer = writer_of(folder)
    write(writer, 0, [(2, 0, 40)])
    finished(writer)
    assert synced == [str(folder / NAMES[1])]


def test_a_writer_of_nothing_has_no_digests(folder):
    writer = writer_of(folder, rank=1)
    write(writer, 0, [])
    assert finished(writer) == {}
    assert (writer.work.nbytes, writer.work.hashed_nbytes) == (0, 0)


# Both, on a whole plan


@pytest.mark.parametrize("writers", ["owner", "shared"])
def test_a_job_of_one_rank_moves_hashes_and_reads_each_byte_once(writers, tmp_path):
    """Rows to columns, in twenty rounds: neither side has to read anything again."""

    def parts(axis: int) -> list[tuple[int, Tile]]:
        extent = (20, 15) if axis else (10, 30)
        return [(n, Tile((0, 15 * n) if axis else (10 * n, 0), extent, (0, 0), extent)) for n in (0, 1)]

    resources = Resources(1, 150, writers, hashing=True)
    job = describe_job(Dice(3), resources, [Tensor("float32", (20, 30), parts(0), parts(1))], 2, 2)
    plan = job.plan()
    assert plan.nrounds > 10
    names = ("0", "1")
    for side in ("source", "target"):
        (tmp_path / side).mkdir()
        for name, shard in zip(names, getattr(job, side).shards, strict=True):
            (tmp_path / side / name).write_bytes(shard)
    with Files(tmp_path / "source") as source, Files(tmp_path / "target", os.O_RDWR) as target:
        reader = Reader(source, names, ("a", "b"), plan.source.arrays, plan.buffer_nbytes, True)
        writer = Writer(target, names, plan.target, 0, plan.buffer_nbytes, True, reader.digest_of)
        for number in range(plan.nrounds):
            work = expand_round(plan, number, 0)
            read_buffer, write_buffer = reader.read(number, work.read), writer.buffer(number)
            copy_tiles(read_buffer, work.local_from, write_buffer, work.local_to)
            writer.write((work.write, write_buffer), (work.straight, read_buffer))
        reader.finish()
        digests = finished(writer)
    for name, expected in zip(names, job.expected, strict=True):
        written = (tmp_path / "target" / name).read_bytes()
        assert written[-1200:] == expected[-1200:]
        assert digests[int(name)] == hashlib.sha256(expected[-1200:]).digest()
    assert (reader.work.nbytes, reader.work.again_nbytes) == (2400, 0)
    assert (writer.work.nbytes, writer.work.again_nbytes) == (2400, 0)
