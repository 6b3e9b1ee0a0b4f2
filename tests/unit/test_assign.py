"""Who reads and who writes what: everybody about equally much, and nobody else's shard without need."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from reshard_mpi.plan.shares import assign_readers, assign_writers, choose_members, deal_by_bytes


def ints(*values: int) -> np.ndarray:
    return np.array(values, np.int64)


@pytest.mark.parametrize(
    "why, nbytes, nranks, ranks",
    [
        ("equal items", [1, 1, 1, 1], 2, [0, 0, 1, 1]),
        ("a large one last", [5, 5, 10, 20], 2, [0, 0, 0, 1]),
        ("one item", [7], 3, [1]),
        ("no items", [], 3, []),
        ("items without bytes are dealt by number", [0, 0, 0, 0], 2, [0, 0, 1, 1]),
        ("more ranks than items", [1, 1], 4, [1, 3]),
        ("one rank", [3, 0, 9], 1, [0, 0, 0]),
        ("bytes times ranks beyond int64", [1 << 61, 1 << 61], 100_000, [25_000, 75_000]),
    ],
)
def test_items_are_dealt_in_runs_of_equal_bytes(why, nbytes, nranks, ranks):
    assert deal_by_bytes(ints(*nbytes), nranks).tolist() == ranks


@given(st.lists(st.integers(0, 1000), max_size=30), st.integers(1, 9))
def test_runs_are_in_order_and_no_rank_gets_more_than_its_share_and_one_item(nbytes, nranks):
    ranks = deal_by_bytes(ints(*nbytes), nranks)
    assert ranks.tolist() == sorted(ranks.tolist())
    assert all(0 <= rank < nranks for rank in ranks)
    for rank in range(nranks):
        mine = [n for n, r in zip(nbytes, ranks, strict=True) if r == rank]
        assert sum(mine) <= sum(nbytes) / nranks + max(mine, default=0)


FILE, NBYTES = ints(0, 0, 1, 3), ints(10, 10, 10, 10)


@pytest.mark.parametrize(
    "why, nshards, nranks, readers",
    [
        ("as many: rank r reads shard r, even one that holds nothing", 4, 4, [0, 0, 1, 3]),
        ("fewer ranks: runs of equal bytes", 4, 2, [0, 0, 1, 1]),
        ("one rank", 4, 1, [0, 0, 0, 0]),
        ("more ranks: a shard is shared", 4, 8, [1, 3, 5, 7]),
    ],
)
def test_a_rank_reads_its_own_shard_where_there_are_as_many(why, nshards, nranks, readers):
    assert assign_readers(FILE, NBYTES, nshards, nranks).tolist() == readers


@pytest.mark.parametrize(
    "why, nshards, nranks, writers",
    [
        ("as many: rank r writes shard r", 4, 4, [0, 0, 1, 3]),
        ("fewer ranks: each shard has one writer", 4, 2, [0, 0, 1, 1]),
        ("fewer ranks, that don't divide", 4, 3, [0, 0, 1, 2]),
        ("more ranks: several write one shard", 4, 8, [1, 3, 5, 7]),
    ],
)
def test_a_shard_has_one_writer_unless_ranks_would_be_idle(why, nshards, nranks, writers):
    assert assign_writers(FILE, NBYTES, nshards, nranks).tolist() == writers


@given(st.lists(st.tuples(st.integers(0, 7), st.integers(0, 100)), max_size=30).map(sorted), st.integers(1, 7))
def test_with_fewer_ranks_than_shards_no_shard_has_two_writers(arrays, nranks):
    file, nbytes = (ints(*column) for column in (zip(*arrays, strict=True) if arrays else ((), ())))
    writers = assign_writers(file, nbytes, 8, nranks)
    assert len({(f, w) for f, w in zip(file.tolist(), writers.tolist(), strict=True)}) == len(set(file.tolist()))


@pytest.mark.parametrize(
    "why, nbytes, candidates, chosen",
    [
        ("no choice", [4, 4], [[0], [1]], [0, 0]),
        ("the one that has to read less", [4, 4, 4], [[0], [0, 1], [0, 1]], [0, 1, 0]),
        ("a tie goes to the first member", [4], [[2, 1, 0]], [0]),
        ("the largest choose first", [1, 9, 8], [[0, 1], [0, 1], [0, 1]], [1, 0, 1]),
        ("no boxes", [], [], []),
    ],
)
def test_of_each_replica_group_the_member_whose_shard_is_read_least_is_chosen(why, nbytes, candidates, chosen):
    assert choose_members(nbytes, candidates, 3) == chosen


def test_replicas_are_read_equally_from_all_shards_that_hold_them():
    nbytes, candidates = [10] * 40, [[0, 1, 2, 3]] * 40
    chosen = choose_members(nbytes, candidates, 4)
    assert np.bincount([candidates[i][k] for i, k in enumerate(chosen)]).tolist() == [10] * 4
