"""SHA-256 on the way: what comes in order is taken, what doesn't is read again."""

import hashlib

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from reshard_mpi.storage import digests
from reshard_mpi.storage.digests import RunningDigest, digest_name, digest_row

DATA = bytes(range(100))
SHA256 = hashlib.sha256(DATA).digest()


class Source:
    """An array that counts what is read of it."""

    def __init__(self, data: bytes):
        self.data, self.read_nbytes = data, 0

    def read(self, offset: int, into: memoryview) -> None:
        assert offset + len(into) <= len(self.data)
        into[:] = self.data[offset : offset + len(into)]
        self.read_nbytes += len(into)


def fed(spans: list[tuple[int, int]], data: bytes = DATA) -> RunningDigest:
    running = RunningDigest(len(data))
    for first, last in spans:
        running.feed(first, memoryview(data)[first:last])
    return running


@pytest.mark.parametrize(
    "why, spans, lacking",
    [
        ("in one piece", [(0, 100)], 0),
        ("in order", [(0, 1), (1, 50), (50, 100)], 0),
        ("nothing yet", [], 100),
        ("an empty span changes nothing", [(0, 0), (0, 50), (50, 50), (50, 100)], 0),
        ("the end first: it comes again", [(50, 100), (0, 50)], 50),
        ("the first half twice", [(0, 50), (0, 50), (50, 100)], 0),
        ("overlapping", [(0, 60), (40, 100)], 0),
        ("one within what was taken", [(0, 60), (10, 20), (60, 100)], 0),
        ("a gap: what follows it is lost", [(0, 40), (60, 100)], 60),
        ("a gap that is filled later", [(0, 40), (60, 80), (40, 60), (80, 100)], 40),
        ("backwards", [(n, n + 10) for n in range(90, -1, -10)], 90),
    ],
)
def test_what_is_lacking_is_read_again_and_the_digest_is_that_of_the_whole(why, spans, lacking):
    running, source = fed(spans), Source(DATA)
    assert running.is_complete == (lacking == 0)
    assert running.catch_up(100, source.read) == lacking == source.read_nbytes
    assert running.is_complete
    assert running.digest() == SHA256


@pytest.mark.parametrize("spans", [[(0, 100)], [(0, 30), (30, 31), (31, 100)], [(n, n + 1) for n in range(100)]])
def test_what_begins_alike_goes_on_from_where_the_other_was(spans):
    other = DATA[:30] + bytes(50)
    running = RunningDigest(100)
    forks = [running.fork(30, 80), running.fork(30, 30), running.fork(100, 101), running.fork(99, 100)]
    assert forks[0].feed(30, memoryview(other[30:])) == 0, "taken before the other had come so far"
    assert sum(running.feed(first, memoryview(DATA)[first:last]) for first, last in spans) == 100
    assert (running.digest(), forks[1].digest()) == (SHA256, hashlib.sha256(DATA[:30]).digest())
    assert forks[0].feed(20, memoryview(other[20:])) == 50
    assert forks[0].digest() == hashlib.sha256(other).digest()
    assert forks[2].catch_up(101, Source(DATA + b"!").read) == 1
    assert forks[2].digest() == hashlib.sha256(DATA + b"!").digest()
    assert forks[3].catch_up(100, Source(DATA).read) == 1
    assert forks[3].digest() == SHA256


@settings(max_examples=100)
@given(st.lists(st.tuples(st.integers(0, 100), st.integers(0, 100)).map(sorted), max_size=8), st.integers(1, 7))
def test_any_spans_in_any_order_come_to_the_same_digest(spans, at_once):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(digests, "COPY_NBYTES", at_once)
        running, source = fed(spans), Source(DATA)
        for middle in (30, 70, 100):
            running.catch_up(middle, source.read)
        assert (running.digest(), running.is_complete) == (SHA256, True)
        assert source.read_nbytes <= 100


def test_catching_up_stops_where_it_is_told_to():
    running, source = fed([(0, 10)]), Source(DATA)
    assert running.catch_up(25, source.read) == 15
    assert running.catch_up(20, source.read) == 0
    running.feed(25, memoryview(DATA)[25:])
    assert running.digest() == SHA256
    assert source.read_nbytes == 15


def test_an_array_without_bytes_is_complete_at_once():
    running = RunningDigest(0)
    assert running.is_complete
    assert running.digest() == hashlib.sha256(b"").digest()


def test_a_digest_that_is_not_complete_is_a_bug_of_ours():
    with pytest.raises(AssertionError):
        fed([(0, 99)]).digest()


def test_names_and_rows_of_four_numbers_are_the_same_digest():
    name = digest_name(SHA256)
    row = digest_row(name)
    assert (row.dtype, row.shape) == (np.int64, (4,))
    assert digest_name(row) == digest_name(row.tobytes()) == name == "sha256:" + SHA256.hex()
    assert digest_row(None).tolist() == [0, 0, 0, 0]
