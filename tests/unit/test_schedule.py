"""Slabs dealt to rounds: every slab once, in order within its sequence, nobody beyond the budget, all readers busy."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from reshard_mpi.plan.schedule import Loads, deal_rounds


def loads(*per_slab: dict[int, int]) -> Loads:
    """Of each slab {rank: bytes}."""
    rows = [(slab, rank, n) for slab, costs in enumerate(per_slab) for rank, n in sorted(costs.items())]
    return Loads(*np.array(rows, np.int64).reshape(-1, 3).T)


def free(count: int) -> np.ndarray:
    return np.arange(count)


@pytest.mark.parametrize(
    "why, read, sequence, budget, rounds, most",
    [
        ("all fit", [{0: 3}, {0: 3}], [0, 1], 6, [[0, 1]], 6),
        ("one a round", [{0: 3}, {0: 3}], [0, 1], 5, [[0], [1]], 3),
        ("two readers side by side", [{0: 3}, {1: 3}, {0: 3}, {1: 3}], [0, 1, 2, 3], 3, [[0, 1], [2, 3]], 3),
        ("in order, whoever reads", [{0: 3}, {1: 3}], [0, 0], 3, [[0, 1]], 3),
        ("a slab beyond the budget has a round of its own", [{0: 1}, {0: 9}, {0: 1}], [0, 1, 2], 5, [[0], [1], [2]], 9),
        (
            "of a slab that two read, it is whoever reads most that is busy",
            [{0: 1, 1: 4}, {1: 4}],
            [0, 1],
            5,
            [[0], [1]],
            4,
        ),
        ("nothing", [], [], 5, [], 0),
    ],
)
def test_rounds_are_those_of_the_table(why, read, sequence, budget, rounds, most):
    read = loads(*read)
    found, buffer_nbytes = deal_rounds([read, read, read], np.array(sequence, np.int64), 2, budget)
    assert ([sorted(members) for members in found], buffer_nbytes) == (rounds, most)


@pytest.mark.parametrize("kind", [0, 1, 2], ids=["read", "written", "sent"])
def test_each_kind_of_load_fills_a_round(kind):
    kinds = [loads(*[{0: 4 if k == kind else 1}] * 6) for k in range(3)]
    rounds, most = deal_rounds(kinds, free(6), 1, 8)
    assert (len(rounds), most) == (3, 8)


def test_one_full_reader_does_not_keep_the_others_waiting():
    """Rank 0 reads four slabs, ranks 1 and 2 one each: all are served in the first round."""
    read = loads({0: 5}, {0: 5}, {0: 5}, {0: 5}, {1: 5}, {2: 5})
    rounds, _ = deal_rounds([read], free(6), 3, 5)
    assert [sorted(members) for members in rounds] == [[0, 4, 5], [1], [2], [3]]


@st.composite
def jobs(draw):
    nranks, nslabs = draw(st.integers(1, 4)), draw(st.integers(0, 15))
    costs = st.dictionaries(st.integers(0, nranks - 1), st.integers(1, 9), min_size=1, max_size=nranks)
    kinds = [loads(*(draw(costs) for _ in range(nslabs))) for _ in range(3)]
    steps = draw(st.lists(st.integers(0, 1), min_size=nslabs, max_size=nslabs))
    return kinds, np.cumsum(steps, dtype=np.int64) - (steps[0] if steps else 0), nranks, draw(st.integers(1, 30))


@settings(max_examples=60)
@given(jobs())
def test_every_slab_is_in_one_round_in_the_order_of_its_sequence_and_within_the_budget(job):
    kinds, sequence, nranks, budget = job
    rounds, most = deal_rounds(kinds, sequence, nranks, budget)
    assert sorted(slab for members in rounds for slab in members) == list(range(len(sequence)))
    round_of = {slab: number for number, members in enumerate(rounds) for slab in members}
    for slab in range(1, len(sequence)):
        assert sequence[slab] != sequence[slab - 1] or round_of[slab - 1] <= round_of[slab]
    heaviest = 0
    for members in rounds:
        assert members
        busy = [np.bincount(load.rank, load.nbytes * np.isin(load.slab, members), nranks) for load in kinds]
        heaviest = max(heaviest, *(int(load.max()) for load in busy))
        assert len(members) == 1 or all(load.max() <= budget for load in busy)
    assert most == heaviest
