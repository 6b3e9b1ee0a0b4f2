"""A job that goes on: what is done isn't done again, whatever the ranks and the rounds were, and all the rest is."""

import hashlib

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from reshard_mpi.plan.earlier import Earlier, Ranges, is_within, joined
from reshard_mpi.plan.plan import NOBODY, Plan
from tests.reference.dice import Dice, HypothesisDice
from tests.unit.moves import Job, carry_out
from tests.unit.test_plan import FINENESS, divide_finely, planned, random_job


def ranges(*rows: tuple[int, int, int]) -> Ranges:
    return Ranges(*np.array(rows, np.int64).reshape(-1, 3).T)


def rows(found: Ranges) -> list[tuple[int, ...]]:
    return list(zip(*(column.tolist() for column in found), strict=True))


@pytest.mark.parametrize(
    "given_, expected",
    [
        ([], []),
        ([(0, 3, 5)], [(0, 3, 5)]),
        ([(0, 3, 5), (0, 0, 3)], [(0, 0, 5)]),
        ([(0, 0, 3), (0, 4, 5)], [(0, 0, 3), (0, 4, 5)]),
        ([(0, 0, 9), (0, 2, 3), (0, 8, 11)], [(0, 0, 11)]),
        ([(1, 0, 4), (0, 0, 4), (1, 4, 5)], [(0, 0, 4), (1, 0, 5)]),
    ],
)
def test_ranges_that_touch_or_overlap_become_one(given_, expected):
    assert rows(joined(ranges(*given_))) == expected


@pytest.mark.parametrize(
    "part, within",
    [
        ((0, 0, 5), True),
        ((0, 2, 3), True),
        ((0, 4, 6), False),
        ((0, 5, 7), False),
        ((0, 7, 9), True),
        ((0, 6, 9), False),
        ((1, 0, 1), False),
        ((2, 0, 5), False),
        ((2, 1, 5), True),
    ],
)
def test_a_part_is_done_only_where_all_of_it_is(part, within):
    whole = ranges((0, 0, 5), (0, 7, 9), (2, 1, 5))
    assert is_within(ranges(part), whole).tolist() == [within]
    assert is_within(ranges(part), ranges()).tolist() == [False]


def slabs_of(plan: Plan, nrounds: int) -> Ranges:
    """What the first rounds have written."""
    some = slice(0, int(plan.round_first[nrounds]))
    begin = plan.slab_begin[some]
    return Ranges(plan.slab_tensor[some], begin, begin + plan.slabs.take(some).volume)


def recorded(dice: Dice, job: Job, written: Ranges) -> Earlier:
    """Some source arrays were verified, and some of the target's arrays hashed."""
    verified = np.array([dice.chance(40) for _ in job.source.table.file], bool)
    has_digest = np.array([dice.chance(40) for _ in job.target.table.file], bool)
    places = zip(job.target.table.file, job.target.table.begin, job.target.table.nbytes, strict=True)
    digests = [hashlib.sha256(job.expected[file][begin : begin + nbytes]).digest() for file, begin, nbytes in places]
    digest = np.frombuffer(b"".join(digests), np.int64).reshape(-1, 4)
    return Earlier(written, verified, np.where(has_digest[:, np.newaxis], digest, 0), has_digest)


@pytest.mark.parametrize("writers, hashing", [("owner", True), ("shared", True), ("shared", False)])
@settings(max_examples=15, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.data())
def test_another_plan_goes_on_where_one_was_stopped(writers, hashing, monkeypatch, data):
    dice = HypothesisDice(data.draw)
    divide_finely(monkeypatch, dice.pick(FINENESS))
    job, plan = planned(random_job(dice, writers, hashing))
    nrounds = dice.integer(0, plan.nrounds)
    carry_out(job, plan, nrounds)
    earlier, was_done = recorded(dice, job, slabs_of(plan, nrounds)), nrounds == plan.nrounds

    again = job.given(dice.pick([64, 200, 1 << 14]), nranks=dice.integer(1, 6), writers=dice.pick(["owner", "shared"]))
    again, _ = planned(again)
    plan = again.plan(earlier)
    seen = carry_out(again, plan)

    for shard, expected in zip(again.target.shards, job.expected, strict=True):
        assert bytes(shard[: len(expected)]) == expected
    assert max((count.max(initial=0) for count in seen.written), default=0) <= 1
    if was_done:
        assert not plan.nrounds
    if hashing:
        hold_hashes(job, plan, earlier)


def hold_hashes(job: Job, plan: Plan, earlier: Earlier) -> None:
    """What is verified is not hashed, nor does any hash go on from it; what is known is not hashed, and known aright."""
    source, target = plan.source.arrays, plan.target.arrays
    assert np.array_equal(source.has_digest > 0, ~earlier.verified)
    assert not earlier.verified[target.begins_as[target.begins_as >= 0]].any()
    assert np.array_equal(target.has_digest > 0, target.hasher == NOBODY)
    assert (target.has_digest > 0)[earlier.has_digest].all()
    for array in np.flatnonzero(target.has_digest):
        begin, nbytes = target.begin[array], target.nbytes[array]
        expected = job.expected[target.file[array]][begin : begin + nbytes]
        assert target.digest[array].tobytes() == hashlib.sha256(expected).digest()
