"""Tensors cut into slabs: all of a tensor, in order, each small enough for the busiest rank, at the places that serve best."""

import math
from typing import NamedTuple

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from reshard_mpi.boxes import Boxes
from reshard_mpi.plan import slabs as slabs_module
from reshard_mpi.plan.slabs import Held, Ordered, Slabs, SlabTensors, cut_slabs
from tests.reference.dice import Dice
from tests.unit.tilings import Shape, Tile, pad, tile


def held(tiles: list[Tile], ranks: list[int]) -> Held:
    """Tiles of bytes, as they are stored: a step along an axis passes the padding too."""
    start, stop, local = (
        np.array(column, np.int64)
        for column in zip(*((t.offset, np.add(t.offset, t.extent), t.local_shape) for t in tiles), strict=True)
    )
    stride = np.ones_like(local)
    stride[:, :-1] = np.cumprod(local[:, :0:-1], axis=1)[:, ::-1]
    return Held(Boxes(start, stop), stride, np.array(ranks, np.int64), np.zeros(len(tiles), np.int64))


def whole(shape: Shape) -> Tile:
    return Tile((0,) * len(shape), shape, (0,) * len(shape), shape)


class Tensor(NamedTuple):
    """One tensor of bytes to be cut; by default it is read and written by rank 0, whole."""

    shape: Shape
    limit: int
    read: Held | None = None
    written: Held | None = None
    ordered: Boxes | None = None
    copies: int = 1


def slabs_of(*tensors: Tensor) -> Slabs:
    everything = [held([whole(tensor.shape)], [0]) for tensor in tensors]
    read, written = (
        of_all([getattr(tensor, side) or whole for tensor, whole in zip(tensors, everything, strict=True)])
        for side in ("read", "written")
    )
    ordered = None
    if any(tensor.ordered is not None for tensor in tensors):
        boxes = [tensor.ordered for tensor in tensors]
        number = np.repeat(np.arange(len(boxes)), [len(of_one.start) for of_one in boxes])
        ordered = Ordered(Boxes(*map(np.concatenate, zip(*boxes, strict=True))), number)
    shape, limit, copies = (
        np.array([getattr(tensor, name) for tensor in tensors], np.int64) for name in ("shape", "limit", "copies")
    )
    return cut_slabs(SlabTensors(shape, read, written, ordered, copies, limit))


def of_all(sides: list[Held]) -> Held:
    boxes = Boxes(*map(np.concatenate, zip(*(side.boxes for side in sides), strict=True)))
    stride, rank = (np.concatenate([getattr(side, name) for side in sides]) for name in ("stride", "rank"))
    return Held(boxes, stride, rank, np.repeat(np.arange(len(sides)), [len(side.rank) for side in sides]))


def intervals(slabs: Slabs, axis: int) -> list[tuple[int, int]]:
    return list(zip(slabs.boxes.start[:, axis].tolist(), slabs.boxes.stop[:, axis].tolist(), strict=True))


@pytest.mark.parametrize(
    "why, shape, limit, boxes",
    [
        ("it fits", (4, 6), 24, [((0, 0), (4, 6))]),
        ("rows", (4, 6), 12, [((0, 0), (2, 6)), ((2, 0), (4, 6))]),
        (
            "rows in equal parts, not full ones and a rest",
            (7, 3),
            9,
            [((0, 0), (2, 3)), ((2, 0), (4, 3)), ((4, 0), (7, 3))],
        ),
        (
            "within rows that are too large",
            (2, 6),
            4,
            [((0, 0), (1, 3)), ((0, 3), (1, 6)), ((1, 0), (2, 3)), ((1, 3), (2, 6))],
        ),
        ("a first axis of one", (1, 4, 6), 12, [((0, 0, 0), (1, 2, 6)), ((0, 2, 0), (1, 4, 6))]),
        ("one byte at a time", (1, 3), 1, [((0, n), (1, n + 1)) for n in range(3)]),
    ],
)
def test_a_tensor_is_cut_along_the_first_axis_whose_rows_fit(why, shape, limit, boxes):
    slabs = slabs_of(Tensor(shape, limit))
    found = [(tuple(a), tuple(b)) for a, b in zip(*(side.tolist() for side in slabs.boxes), strict=True)]
    assert found == boxes


def test_a_byte_that_is_sent_to_several_ranks_counts_so_often():
    assert len(slabs_of(Tensor((4, 6), 24, copies=1)).tensor) == 1
    assert len(slabs_of(Tensor((4, 6), 24, copies=2)).tensor) == 2
    assert len(slabs_of(Tensor((4, 6), 24, copies=4)).tensor) == 4


def test_cuts_are_made_where_source_boxes_begin_and_large_boxes_are_cut_equally():
    tiles = [
        Tile((first, 0), (last - first, 2), (0, 0), (last - first, 2)) for first, last in ((0, 2), (2, 4), (4, 20))
    ]
    slabs = slabs_of(Tensor((20, 2), 12, held(tiles, [0, 0, 0])))
    assert intervals(slabs, 0) == [(0, 4), (4, 9), (9, 14), (14, 20)]


def test_a_row_costs_what_the_busiest_rank_has_of_it():
    """Two columns of six bytes: of two ranks each has a half of every row, of one rank all of it."""
    tiles = [Tile((0, 0), (4, 6), (0, 0), (4, 6)), Tile((0, 6), (4, 6), (0, 0), (4, 6))]
    counts = [
        len(slabs_of(Tensor((4, 12), 24, held(tiles, ranks), held(tiles, [0, 1]))).tensor) for ranks in ([0, 1], [0, 0])
    ]
    assert counts == [1, 2]


def test_padding_between_rows_costs_what_bytes_cost():
    padded = held([Tile((0, 0), (4, 6), (0, 0), (4, 24))], [0])
    assert intervals(slabs_of(Tensor((4, 6), 24, padded)), 0) == [(n, n + 1) for n in range(4)]


def test_without_an_order_every_slab_is_free():
    slabs = slabs_of(Tensor((4, 2), 2), Tensor((3, 2), 2))
    assert slabs.sequence.tolist() == list(range(7))
    assert slabs.tensor.tolist() == [0] * 4 + [1] * 3


def test_slabs_of_a_box_that_must_pass_in_order_are_one_sequence_and_bands_between_boxes_are_free():
    """Rows 0 to 4 and 4 to 8 are boxes of their own; then one of rows 8 to 12 and one of 10 to 14 that meet."""
    ordered = Boxes(np.array([[0, 0], [4, 0], [8, 0], [10, 1]]), np.array([[4, 2], [8, 2], [12, 1], [14, 2]]))
    slabs = slabs_of(Tensor((14, 2), 4, ordered=ordered))
    assert intervals(slabs, 0) == [(2 * n, 2 * n + 2) for n in range(7)]
    assert slabs.sequence.tolist() == [0, 0, 1, 1, 2, 2, 2]


def test_slabs_within_rows_are_one_sequence():
    ordered = Boxes(np.array([[0, 0]]), np.array([[3, 8]]))
    assert slabs_of(Tensor((3, 8), 4, ordered=ordered)).sequence.tolist() == [0] * 6


def test_slabs_within_rows_are_a_sequence_for_each_box_of_the_first_axis():
    """Four planes that are cut, of which boxes hold one, two and one: each box can be moved by itself."""
    ordered = Boxes(np.array([[0, 0, 0], [1, 0, 0], [3, 0, 0]]), np.array([[1, 2, 4], [3, 2, 4], [4, 2, 4]]))
    slabs = slabs_of(Tensor((4, 2, 4), 4, ordered=ordered))
    assert slabs.sequence.tolist() == [0, 0, 1, 1, 1, 1, 2, 2]


def test_a_first_axis_of_one_does_not_tie_boxes_together():
    ordered = Boxes(np.array([[0, 0, 0], [0, 1, 0]]), np.array([[1, 1, 4], [1, 2, 4]]))
    assert slabs_of(Tensor((1, 2, 4), 2, ordered=ordered)).sequence.tolist() == [0, 0, 1, 1]


def test_a_row_within_planes_is_of_one_plane():
    """A rank that has four planes has no more of a row than the row."""
    tiles = [Tile((n, 0, 0), (1, 4, 6), (0, 0, 0), (1, 4, 6)) for n in range(4)]
    planes = held(tiles, [0, 0, 0, 0])
    slabs = slabs_of(Tensor((4, 4, 6), 12, planes, planes))
    assert len(slabs.tensor) == 8 and set(intervals(slabs, 1)) == {(0, 2), (2, 4)}


def test_a_row_within_padded_planes_costs_its_padding_too():
    tiles = [Tile((n, 0, 0), (1, 4, 6), (0, 0, 0), (1, 4, 12)) for n in range(4)]
    planes = held(tiles, [0, 0, 0, 0])
    assert len(slabs_of(Tensor((4, 4, 6), 12, planes, planes)).tensor) == 16


def test_no_tensors_are_no_slabs():
    none, nothing = np.empty(0, np.int64), Boxes(*(np.empty((0, 3), np.int64) for _ in range(2)))
    nobody = Held(nothing, nothing.start, none, none)
    slabs = cut_slabs(SlabTensors(nothing.start, nobody, nobody, Ordered(nothing, none), none, none))
    assert (slabs.boxes.start.shape, len(slabs.tensor), len(slabs.sequence)) == ((0, 3), 0, 0)


def test_where_to_cut_equal_tensors_is_computed_once():
    slabs_module._row_cuts.cache_clear()
    slabs = slabs_of(*[Tensor((20, 2), 12)] * 100)
    assert len(slabs.tensor) == 400
    assert slabs_module._row_cuts.cache_info().misses == 1


@pytest.mark.parametrize("nranks, nslabs", [(1, 20), (2, 10), (10, 2)])
def test_of_a_thousand_boxes_those_of_one_rank_count_together(nranks, nslabs):
    """Columns of one byte, dealt in turn: a row costs a rank a byte for each of its columns."""
    tiles = [Tile((0, n), (20, 1), (0, 0), (20, 1)) for n in range(1000)]
    columns = held(tiles, [n % nranks for n in range(1000)])
    assert len(slabs_of(Tensor((20, 1000), 1000, columns, columns)).tensor) == nslabs


@settings(max_examples=100)
@given(st.integers(0, 1 << 32))
def test_slabs_are_all_of_each_tensor_in_order_and_contiguous_in_it(seed):
    dice, tensors = Dice(seed), []
    naxes, is_ordered = dice.integer(1, 3), dice.pick([False, True])
    for _ in range(dice.integer(1, 3)):
        shape = tuple(dice.integer(1, 6) for _ in range(naxes))
        sides = []
        for percent in (50, 0):
            tiles = [pad(dice, piece, percent) for piece in tile(dice, shape, 70)]
            sides.append(held(tiles, [dice.integer(0, 2) for _ in tiles]))
        ordered = sides[0].boxes if is_ordered else None
        tensors.append(Tensor(shape, dice.integer(1, math.prod(shape)), *sides, ordered, dice.integer(1, 3)))
    slabs = slabs_of(*tensors)
    assert slabs.tensor.tolist() == sorted(slabs.tensor.tolist())
    assert slabs.sequence.tolist() == sorted(slabs.sequence.tolist())
    for index, tensor in enumerate(tensors):
        flat = np.arange(math.prod(tensor.shape)).reshape(tensor.shape)
        mine = np.flatnonzero(slabs.tensor == index)
        passed = [flat[tuple(map(slice, slabs.boxes.start[k], slabs.boxes.stop[k]))].reshape(-1) for k in mine.tolist()]
        assert np.array_equal(np.concatenate(passed), flat.reshape(-1))
        if tensor.ordered is not None:
            hold_boxes_in_one_sequence(tensor.ordered, slabs, mine)


def hold_boxes_in_one_sequence(ordered: Boxes, slabs: Slabs, mine: np.ndarray) -> None:
    """All slabs of a box are of one sequence; left out are bands that begin within a slab (see the test below)."""
    for start, stop in zip(*ordered, strict=True):
        uncut = [r for r in range(start[0] + 1) if not np.any((ordered.start[:, 0] < r) & (r < ordered.stop[:, 0]))]
        if uncut[-1] not in slabs.boxes.start[mine, 0]:
            continue
        meets = np.all((slabs.boxes.start[mine] < stop) & (slabs.boxes.stop[mine] > start), axis=1)
        assert len(set(slabs.sequence[mine][meets].tolist())) == 1


def test_slabs_of_a_box_are_one_sequence_also_where_its_band_begins_within_a_slab():
    """Row 0; then a column of five rows beside boxes of one and of four rows. Slabs are rows 0 to 2 and 2 to 6."""
    boxes = Boxes(np.array([[0, 0], [1, 0], [1, 1], [2, 1]]), np.array([[1, 9], [6, 1], [2, 9], [6, 9]]))
    read = Held(boxes, np.array([[9, 1], [1, 1], [8, 1], [8, 1]]), np.array([0, 1, 1, 1]), np.zeros(4, np.int64))
    slabs = slabs_of(Tensor((6, 9), 36, read, ordered=boxes))
    assert intervals(slabs, 0) == [(0, 2), (2, 6)]
    assert slabs.sequence.tolist() == [0, 0]
