"""Boxes: how axes are cut, which boxes meet, what they leave uncovered; held against dense arrays."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from reshard_mpi import boxes as boxes_module
from reshard_mpi.boxes import Boxes, array_split_part, chunk, equal_rows, find_hole, find_overlaps, join
from tests.needed import needed

SIDE = 5  # of the dense arrays


def as_boxes(intervals, naxes: int) -> Boxes:
    """[(start, stop) per axis] per box."""
    pairs = np.array(intervals, np.int64).reshape(len(intervals), naxes, 2)
    return Boxes(pairs[:, :, 0], pairs[:, :, 1])


def cells_of(boxes: Boxes, index: int) -> tuple[slice, ...]:
    return tuple(
        slice(start, stop) for start, stop in zip(boxes.start[index].tolist(), boxes.stop[index].tolist(), strict=True)
    )


def marked(shape: tuple[int, ...], boxes: Boxes, index: int) -> np.ndarray:
    """A dense array in which one box is marked."""
    dense = np.zeros(shape, bool)
    dense[cells_of(boxes, index)] = True
    return dense


@st.composite
def grouped_boxes(draw, naxes: int):
    """Up to 7 boxes with elements, and the group of each."""
    interval = st.tuples(st.integers(0, SIDE - 1), st.integers(1, SIDE)).map(lambda p: (p[0], min(p[0] + p[1], SIDE)))
    intervals = draw(st.lists(st.lists(interval, min_size=naxes, max_size=naxes), max_size=7))
    group = draw(st.lists(st.integers(0, 2), min_size=len(intervals), max_size=len(intervals)))
    return as_boxes(intervals, naxes), np.array(group, np.int64)


# Cuts


@pytest.mark.parametrize(
    "why, nelems, nparts, parts",
    [
        ("it divides", 6, 3, [(0, 2), (2, 4), (4, 6)]),
        ("the last part is shorter", 5, 2, [(0, 3), (3, 5)]),
        ("the last part is empty", 5, 4, [(0, 2), (2, 4), (4, 5), (5, 5)]),
        ("two parts are empty", 9, 8, [(0, 2), (2, 4), (4, 6), (6, 8), (8, 9), (9, 9), (9, 9), (9, 9)]),
        ("fewer elements than parts", 2, 4, [(0, 1), (1, 2), (2, 2), (2, 2)]),
        ("no elements", 0, 3, [(0, 0), (0, 0), (0, 0)]),
        ("one part", 7, 1, [(0, 7)]),
        ("one element", 1, 2, [(0, 1), (1, 1)]),
    ],
)
def test_chunks_are_those_of_the_table(why, nelems, nparts, parts):
    assert [chunk(nelems, nparts, part) for part in range(nparts)] == parts


@given(st.integers(0, 200), st.integers(1, 40))
def test_chunks_follow_each_other_and_only_the_last_ones_are_shorter(nelems, nparts):
    parts = [tuple(map(int, chunk(nelems, nparts, part))) for part in range(nparts)]
    sizes = [stop - start for start, stop in parts]
    longest = (nelems + nparts - 1) // nparts
    assert [start for start, _ in parts] == [min(i * longest, nelems) for i in range(nparts)]
    assert sum(sizes) == nelems
    assert sizes == sorted(sizes, reverse=True)
    assert all(size in (0, longest, nelems % longest) for size in sizes if longest)


@given(st.lists(st.integers(0, 200), max_size=9), st.integers(1, 40))
def test_chunks_of_many_axes_at_once_are_those_of_each(nelems, nparts):
    part = np.arange(len(nelems)) * 7 % nparts
    start, stop = chunk(np.array(nelems, np.int64), nparts, part)
    assert start.dtype == stop.dtype == np.int64
    each = [chunk(n, nparts, p) for n, p in zip(nelems, part.tolist(), strict=True)]
    assert list(zip(start.tolist(), stop.tolist(), strict=True)) == each


def test_chunks_are_those_of_torch():
    torch = needed("torch")
    for nelems in range(30):
        for nparts in range(1, 12):
            sizes = [len(part) for part in torch.arange(nelems).chunk(nparts)]
            sizes += [0] * (nparts - len(sizes))  # torch leaves empty parts out
            assert [b - a for a, b in (chunk(nelems, nparts, part) for part in range(nparts))] == sizes


def test_array_split_parts_are_those_of_numpy():
    for nitems in range(1, 33):
        for nparts in range(1, 12):
            parts = np.array_split(np.arange(nitems), nparts)
            expected = [part for part, items in enumerate(parts) for _ in items]
            assert [array_split_part(nitems, nparts, item) for item in range(nitems)] == expected


# Which boxes meet


@pytest.mark.parametrize("naxes", range(5))
@pytest.mark.parametrize("at_once", [2, 1 << 22], ids=["two at a time", "all at once"])
def test_join_finds_every_pair_that_shares_an_element_and_no_other(naxes, at_once, monkeypatch):
    monkeypatch.setattr(boxes_module, "CANDIDATES_AT_ONCE", at_once)

    @settings(max_examples=25)
    @given(grouped_boxes(naxes), grouped_boxes(naxes))
    def holds(a, b):
        (a_boxes, a_group), (b_boxes, b_group) = a, b
        shape = (SIDE,) * naxes
        expected = {
            (i, j)
            for i in range(len(a_group))
            for j in range(len(b_group))
            if a_group[i] == b_group[j] and np.any(marked(shape, a_boxes, i) & marked(shape, b_boxes, j))
        }
        i, j = join(a_boxes, b_boxes, a_group, b_group)
        pairs = list(zip(i.tolist(), j.tolist(), strict=True))
        assert len(pairs) == len(set(pairs))
        assert set(pairs) == expected
        again = join(a_boxes, b_boxes, a_group, b_group)
        assert np.array_equal(again[0], i) and np.array_equal(again[1], j)

    holds()


@pytest.mark.parametrize("least", [0, 1 << 20, 1 << 40], ids=["small", "beyond bincount", "beyond int64"])
def test_join_needs_no_memory_for_groups_that_are_not_there(least):
    rows = as_boxes([[(0, 2), (0, 1 << 40)], [(2, 4), (0, 1 << 40)]], 2)
    columns = as_boxes([[(0, 4), (0, 9)], [(0, 4), (9, 1 << 40)], [(0, 4), (0, 9)]], 2)
    i, j = join(rows, columns, np.array([0, 1]) + least, np.array([0, 1, 1]) + least)
    assert sorted(zip(i.tolist(), j.tolist(), strict=True)) == [(0, 0), (1, 1), (1, 2)]


@pytest.mark.parametrize("axis", [0, 1, 2], ids=["rows", "columns", "a later axis"])
def test_join_looks_at_hardly_more_pairs_than_meet_whichever_axis_is_cut(axis, monkeypatch):
    nboxes, shape = 1024, [64, 4096, 4096]
    shape[axis] = 4096

    def cut(nparts: int) -> Boxes:
        start = np.zeros((nparts, 3), np.int64)
        stop = np.tile(np.array(shape, np.int64), (nparts, 1))
        start[:, axis] = np.arange(nparts) * shape[axis] // nparts
        stop[:, axis] = np.append(start[1:, axis], shape[axis])
        return Boxes(start, stop)

    looked_at = []
    share = boxes_module._share
    monkeypatch.setattr(boxes_module, "_share", lambda a, b, i, j: looked_at.append(len(i)) or share(a, b, i, j))
    here, there = cut(nboxes), cut(nboxes - 1)
    i, _ = join(here, there, np.zeros(nboxes, np.int64), np.zeros(nboxes - 1, np.int64))
    assert nboxes <= len(i) < 2 * nboxes
    assert len(i) <= sum(looked_at) <= 2 * len(i)


def test_groups_choose_their_axis_each_for_itself(monkeypatch):
    """One tensor is cut by rows, the other by columns: no one axis would do for both."""
    nparts = 100
    rows = [[(k, k + 1), (0, nparts)] for k in range(nparts)]
    columns = [[(0, nparts), (k, k + 1)] for k in range(nparts)]
    both, group = as_boxes(rows + columns, 2), np.repeat([0, 1], nparts)
    looked_at = []
    share = boxes_module._share
    monkeypatch.setattr(boxes_module, "_share", lambda a, b, i, j: looked_at.append(len(i)) or share(a, b, i, j))
    i, j = join(both, both, group, group)
    assert np.array_equal(np.sort(i), np.arange(2 * nparts)) and np.array_equal(i, j)
    assert sum(looked_at) == 2 * nparts


@pytest.mark.parametrize("naxes", range(5))
def test_of_each_group_the_first_pair_of_different_boxes_that_share_an_element_is_found(naxes):
    @settings(max_examples=25)
    @given(grouped_boxes(naxes))
    def holds(grouped):
        boxes, group = grouped
        shape = (SIDE,) * naxes
        pairs = [
            (i, j)
            for i in range(len(group))
            for j in range(i + 1, len(group))
            if group[i] == group[j] and np.any(marked(shape, boxes, i) & marked(shape, boxes, j))
        ]
        first = {int(group[i]): (i, j) for i, j in reversed(pairs)}
        assert find_overlaps(boxes, group) == [first[g] for g in sorted(first)]

    holds()


# Holes


def cut_up(draw, start, stop) -> list:
    """Boxes that tile a box, cut in two as often as drawn."""
    axes = [axis for axis, (a, b) in enumerate(zip(start, stop, strict=True)) if b - a > 1]
    if not axes or not draw(st.booleans()):
        return [(start, stop)]
    axis = draw(st.sampled_from(axes))
    middle = draw(st.integers(start[axis] + 1, stop[axis] - 1))
    low, high = list(stop), list(start)
    low[axis], high[axis] = middle, middle
    return cut_up(draw, start, tuple(low)) + cut_up(draw, tuple(high), stop)


@st.composite
def tiles_with_some_left_out(draw):
    shape = tuple(draw(st.lists(st.integers(1, SIDE), max_size=4)))
    tiles = cut_up(draw, (0,) * len(shape), shape)
    kept = [tile for tile in tiles if draw(st.integers(0, 5))]
    order = draw(st.permutations(kept))
    start, stop = (np.array([t[side] for t in order], np.int64).reshape(len(order), len(shape)) for side in (0, 1))
    return shape, Boxes(start, stop)


@settings(max_examples=150)
@given(tiles_with_some_left_out())
def test_a_hole_is_found_exactly_where_no_box_is(shaped):
    shape, boxes = shaped
    dense = np.zeros(shape, bool)
    for index in range(len(boxes.start)):
        dense |= marked(shape, boxes, index)
    hole = find_hole(shape, boxes)
    if dense.all():
        assert hole is None
        return
    start, stop = hole
    assert all(0 <= a < b <= size for a, b, size in zip(start, stop, shape, strict=True))
    assert not dense[tuple(slice(a, b) for a, b in zip(start, stop, strict=True))].any()


@pytest.mark.parametrize(
    "why, shape, intervals, hole",
    [
        ("a 0-d tensor has one point, and nobody holds it", (), [], ((), ())),
        ("a 0-d tensor, held", (), [[]], None),
        ("a tensor without elements lacks nothing", (0, 4), [], None),
        ("nor does one without elements on a later axis", (4, 0), [], None),
        ("no boxes at all", (2, 3), [], ((0, 0), (2, 3))),
        ("the first rows", (4,), [[(1, 4)]], ((0,), (1,))),
        ("the last column of the last rows", (4, 4), [[(0, 2), (0, 4)], [(2, 4), (0, 3)]], ((2, 3), (4, 4))),
        ("the middle", (3,), [[(0, 1)], [(2, 3)]], ((1,), (2,))),
        (
            "sizes whose product is far beyond any array",
            (1 << 30, 1 << 30),
            [[(0, 1 << 29), (0, 1 << 30)]],
            ((1 << 29, 0), (1 << 30, 1 << 30)),
        ),
    ],
)
def test_holes_are_those_of_the_table(why, shape, intervals, hole):
    assert find_hole(shape, as_boxes(intervals, len(shape))) == hole


# Small things


@settings(max_examples=50)
@given(st.integers(1, 4).flatmap(lambda n: st.lists(st.tuples(*[st.integers(-2, 2)] * n), max_size=30)), st.booleans())
def test_equal_rows_are_those_of_numpy(rows, far_apart):
    if not rows:
        assert [found.tolist() for found in equal_rows(np.empty(0, np.int64))] == [[], []]
        return
    columns = np.array(rows, np.int64) * ((1 << 61) if far_apart else 1)
    _, first, number = np.unique(columns, axis=0, return_index=True, return_inverse=True)
    found = equal_rows(*columns.T)
    assert [part.tolist() for part in found] == [first.tolist(), number.reshape(-1).tolist()]


def test_volume_and_nonempty_count_elements_also_of_boxes_without_axes():
    no_axes = Boxes(np.zeros((2, 0), np.int64), np.zeros((2, 0), np.int64))
    assert no_axes.volume.tolist() == [1, 1]
    assert no_axes.nonempty.tolist() == [True, True]
    boxes = as_boxes([[(0, 2), (1, 4)], [(3, 3), (0, 9)]], 2)
    assert boxes.volume.tolist() == [6, 0]
    assert boxes.nonempty.tolist() == [True, False]
    assert boxes.take(np.array([1])).start.tolist() == [[3, 0]]
