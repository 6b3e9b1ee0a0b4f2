"""Who reads and who writes what: everybody about equally much, every byte by one rank, and by one that has it at hand."""

from dataclasses import dataclass

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from reshard_mpi.boxes import Boxes
from reshard_mpi.plan import shares as shares_module
from reshard_mpi.plan.shares import (
    Shares,
    choose_members,
    deal_among,
    deal_by_bytes,
    deal_to_least,
    equal_shares,
    shares_of_readers,
    whole_shares,
)
from reshard_mpi.plan.stored import Place, StoredBoxes, byte_form, stacked
from tests.reference.dice import Dice
from tests.unit.tilings import Shape, Tile, pad, rows, tile


def ints(*values: int) -> np.ndarray:
    return np.array(values, np.int64)


# Dealt by bytes


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


@pytest.mark.parametrize(
    "why, nbytes, nranks, ranks",
    [
        ("the largest first, each to whoever has least", [1, 5, 4], 2, [1, 0, 1]),
        ("equal items, in turn", [3, 3, 3, 3], 3, [0, 1, 2, 0]),
        ("fewer items than ranks", [1, 2], 4, [1, 0]),
        ("no items", [], 3, []),
        ("one rank", [1, 0, 2], 1, [0, 0, 0]),
    ],
)
def test_items_are_dealt_to_whoever_has_least(why, nbytes, nranks, ranks):
    assert deal_to_least(ints(*nbytes), nranks).tolist() == ranks


@given(st.lists(st.integers(0, 1000), max_size=30), st.integers(1, 9))
def test_items_that_all_may_have_are_dealt_to_whoever_has_least(nbytes, nranks):
    dealt = deal_among(ints(*nbytes), [range(nranks)] * len(nbytes), nranks)
    assert dealt.tolist() == deal_to_least(ints(*nbytes), nranks).tolist()


@given(st.lists(st.integers(0, 1000), min_size=1, max_size=30), st.integers(1, 9))
def test_no_rank_has_more_than_the_least_busy_and_one_item(nbytes, nranks):
    ranks = deal_to_least(ints(*nbytes), nranks)
    load = np.bincount(ranks, ints(*nbytes), nranks)
    assert load.max() <= load.min() + max(nbytes)


# Of replicas


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
    assert members_chosen(nbytes, candidates, 3) == chosen


def test_replicas_are_read_equally_from_all_shards_that_hold_them():
    nbytes, candidates = [10] * 40, [[0, 1, 2, 3]] * 40
    chosen = members_chosen(nbytes, candidates, 4)
    assert np.bincount([candidates[i][k] for i, k in enumerate(chosen)]).tolist() == [10] * 4


def members_chosen(nbytes: list[int], candidates: list[list[int]], nshards: int) -> list[int]:
    """For each box the position of its candidate."""
    first = np.cumsum([0, *map(len, candidates)])
    shards = ints(*(shard for of_box in candidates for shard in of_box))
    return (choose_members(ints(*nbytes), first, shards, nshards) - first[:-1]).tolist()


# Boxes, divided


@dataclass
class Sides:
    """Tensors cut twice: boxes in bytes, row by row, with the tensor of each; all tensors have the same number of axes."""

    shapes: list[Shape]
    source: StoredBoxes
    source_tensor: np.ndarray
    target: StoredBoxes
    target_tensor: np.ndarray

    def masks(self, boxes: Boxes, tensors: np.ndarray) -> list[np.ndarray]:
        """For each box the bytes of its tensor that it holds."""
        found = []
        for start, stop, tensor in zip(boxes.start.tolist(), boxes.stop.tolist(), tensors.tolist(), strict=True):
            mask = np.zeros(self.shapes[tensor], bool)
            mask[tuple(slice(a, b) for a, b in zip(start, stop, strict=True))] = True
            found.append(mask)
        return found


def cut_twice(tensors: list[tuple[Shape, list[Tile], list[Tile]]], begins=None) -> Sides:
    """Tensors of bytes with their source and target tiles; each tile in an array of its own, one after the other."""
    forms = [
        byte_form(shape, 8, tuple(Place(t.offset, t.extent, t.before, t.local_shape) for t in [*sources, *targets]))
        for shape, sources, targets in tensors
    ]
    naxes = max(len(form.shape) for form in forms)
    shapes = [(1,) * (naxes - len(form.shape)) + form.shape for form in forms]
    columns = []
    for is_target in (False, True):
        start, stop, stride, lead, tensor = [], [], [], [], []
        for number, (form, (_, sources, targets)) in enumerate(zip(forms, tensors, strict=True)):
            mine = slice(len(sources), None) if is_target else slice(0, len(sources))
            boxes = form.boxes.take(mine)
            span = ((boxes.stop - boxes.start - 1) * form.stride[mine]).sum(axis=1, keepdims=True) + 1
            start.append(stacked(naxes, [boxes.start], 0))
            stop.append(stacked(naxes, [boxes.stop], 1))
            stride.append(np.hstack([np.repeat(span, naxes - boxes.start.shape[1], axis=1), form.stride[mine]]))
            lead.append(form.lead[mine])
            tensor += [number] * len(targets if is_target else sources)
        offset = np.concatenate(lead)
        tiles = [t for _, sources, targets in tensors for t in (targets if is_target else sources)]
        nbytes = ints(*(int(np.prod(t.local_shape)) for t in tiles))
        offset = offset + (np.cumsum(nbytes) - nbytes if begins is None or not is_target else ints(*begins))
        stored = StoredBoxes(Boxes(np.concatenate(start), np.concatenate(stop)), np.concatenate(stride), offset)
        columns += [stored, ints(*tensor)]
    return Sides(shapes, *columns)


def random_sides(dice: Dice, by_rows: bool = False, padded: int = 30) -> Sides:
    tensors = []
    for _ in range(dice.integer(1, 3)):
        shape = tuple(dice.integer(1, 9) for _ in range(dice.integer(1, 3)))
        sources = rows(dice, shape) if by_rows else tile(dice, shape, dice.pick([0, 60, 80]))
        targets = tile(dice, shape, dice.pick([0, 60, 80]))
        targets += dice.some(targets, 30)  # replicas
        tensors.append((shape, [pad(dice, piece, padded) for piece in sources], targets))
    return cut_twice(tensors)


def random_readers(dice: Dice, sides: Sides) -> np.ndarray:
    nranks = dice.integer(1, 4)
    return ints(*(dice.integer(0, nranks - 1) for _ in sides.source_tensor))


def hold_together(sides: Sides, stored: StoredBoxes, tensor: np.ndarray, shares: Shares) -> None:
    """Every byte of every box is in exactly one of its shares, and shares come box by box, front to back."""
    counts = [np.zeros(sides.shapes[t], np.int64) for t in tensor.tolist()]
    for row, mask in zip(shares.row.tolist(), sides.masks(shares.boxes, tensor[shares.row]), strict=True):
        counts[row] += mask
    for count, mask in zip(counts, sides.masks(stored.boxes, tensor), strict=True):
        assert np.array_equal(count, mask)
    places = list(zip(shares.row.tolist(), shares.boxes.start.tolist(), strict=True))
    assert places == sorted(places)


dices = st.integers(0, 1 << 32).map(Dice)


@settings(max_examples=20)
@given(dices)
def test_whole_shares_are_the_boxes(dice):
    sides = random_sides(dice)
    reader = random_readers(dice, sides)
    shares = whole_shares(sides.source, reader)
    hold_together(sides, sides.source, sides.source_tensor, shares)
    assert np.array_equal(shares.rank, reader) and len(shares.row) == len(reader)


def hold_equal(sides: Sides, order: np.ndarray, shares: Shares, nranks: int) -> None:
    """In `order` ranks rise, and each rank ends within one row of where equal bytes would end."""
    place = np.argsort(order)[shares.row]
    in_order = np.lexsort((*shares.boxes.start.T[::-1], place))
    rank, nbytes = shares.rank[in_order], shares.boxes.volume[in_order]
    assert np.all(np.diff(rank) >= 0) and np.all((rank >= 0) & (rank < nranks))
    boxes, axis = sides.source.boxes, sides.source.leading_axes
    row_nbytes = boxes.volume // (boxes.stop - boxes.start)[np.arange(len(axis)), axis]
    for r in range(nranks - 1):
        lacking = nbytes.sum() * (r + 1) // nranks - nbytes[rank <= r].sum()
        assert 0 <= lacking < row_nbytes.max()


@settings(max_examples=60)
@given(dices)
def test_equal_shares_are_runs_of_equal_bytes_within_one_row(dice):
    sides = random_sides(dice)
    order = ints(*dice.shuffled(range(len(sides.source_tensor))))
    nranks = dice.integer(1, 9)
    shares = equal_shares(sides.source, order, nranks)
    hold_together(sides, sides.source, sides.source_tensor, shares)
    hold_equal(sides, order, shares, nranks)


def whole(shape: Shape) -> Tile:
    return Tile((0,) * len(shape), shape, (0,) * len(shape), shape)


def parts(shape: Shape, nparts: int, axis: int) -> list[Tile]:
    """Cut along one axis."""
    found = []
    for part in range(nparts):
        offset, extent = [0] * len(shape), list(shape)
        offset[axis] = shape[axis] * part // nparts
        extent[axis] = shape[axis] * (part + 1) // nparts - offset[axis]
        found.append(Tile(tuple(offset), tuple(extent), (0,) * len(shape), tuple(extent)))
    return found


@pytest.mark.parametrize(
    "why, shape, nranks, edges",
    [
        ("rows that divide", (8, 3), 4, [2, 4, 6, 8]),
        ("rows that don't", (7, 3), 2, [3, 7]),
        ("fewer rows than ranks: some have nothing", (2, 3), 4, [1, 2]),
        ("one row of bytes", (10,), 3, [3, 6, 10]),
        ("a first axis of one", (1, 6, 2), 3, [2, 4, 6]),
    ],
)
def test_one_large_box_is_divided_by_its_rows(why, shape, nranks, edges):
    sides = cut_twice([(shape, [whole(shape)], parts(shape, 2, -1))])
    shares = equal_shares(sides.source, ints(0), nranks)
    axis = int(sides.source.leading_axes[0])
    assert shares.boxes.stop[:, axis].tolist() == edges


def test_nothing_is_divided_into_no_shares():
    nothing = StoredBoxes(Boxes(*(np.empty((0, 2), np.int64) for _ in range(2))), np.empty((0, 2), np.int64), ints())
    for shares in (whole_shares(nothing, ints()), equal_shares(nothing, ints(), 3)):
        assert (len(shares.row), len(shares.rank), shares.boxes.start.shape) == (0, 0, (0, 2))


def test_of_no_boxes_readers_have_no_shares():
    nothing = StoredBoxes(Boxes(*(np.empty((0, 2), np.int64) for _ in range(2))), np.empty((0, 2), np.int64), ints())
    shares = shares_of_readers(nothing, ints(), nothing, ints(), ints())
    assert (len(shares.row), len(shares.rank), shares.boxes.start.shape) == (0, 0, (0, 2))


# Whoever reads writes


@pytest.fixture
def divided_finely(monkeypatch):
    """Boxes of some bytes are divided as those of megabytes are, and nothing is aligned."""
    monkeypatch.setattr(shares_module, "LEAST_SHARE_NBYTES", 1)


def shares_by(sides: Sides, reader: np.ndarray) -> Shares:
    return shares_of_readers(sides.target, sides.target_tensor, sides.source, sides.source_tensor, reader)


def ranks_in(sides: Sides, reader: np.ndarray, boxes: Boxes, tensors: np.ndarray) -> list[set[int]]:
    """For each box the ranks that read a part of it."""
    sources = sides.masks(sides.source.boxes, sides.source_tensor)
    return [
        {int(reader[i]) for i in np.flatnonzero(sides.source_tensor == tensor) if np.any(mask & sources[i])}
        for mask, tensor in zip(sides.masks(boxes, tensors), tensors.tolist(), strict=True)
    ]


@pytest.mark.parametrize("least", [1, 20, 1 << 18])
def test_shares_of_readers_are_the_boxes_each_by_a_rank_that_reads_of_the_box(least, monkeypatch):
    monkeypatch.setattr(shares_module, "LEAST_SHARE_NBYTES", least)

    @settings(max_examples=40)
    @given(dices)
    def holds(dice):
        sides = random_sides(dice)
        reader = random_readers(dice, sides)
        shares = shares_by(sides, reader)
        hold_together(sides, sides.target, sides.target_tensor, shares)
        of_boxes = ranks_in(sides, reader, sides.target.boxes, sides.target_tensor)
        assert all(rank in of_boxes[row] for row, rank in zip(shares.row.tolist(), shares.rank.tolist(), strict=True))

    holds()


@pytest.mark.parametrize("by_rows", [True, False], ids=["rows", "columns"])
def test_a_share_is_of_a_rank_that_reads_a_part_of_its_rows_wherever_sources_are_cut_in_bands(by_rows, divided_finely):
    @settings(max_examples=40)
    @given(dices)
    def holds(dice):
        shape = (dice.integer(1, 12), dice.integer(1, 12))
        bands = rows(dice, shape)
        if not by_rows:  # each band of rows is cut into columns
            bands = [
                Tile(
                    (band.offset[0], column.offset[1]),
                    (band.extent[0], column.extent[1]),
                    (0, 0),
                    (band.extent[0], column.extent[1]),
                )
                for band in bands
                for column in parts(shape, min(dice.integer(1, 4), shape[1]), 1)
            ]
        sides = cut_twice([(shape, bands, tile(dice, shape, 70))])
        reader = random_readers(dice, sides)
        shares = shares_by(sides, reader)
        here = ranks_in(sides, reader, shares.boxes, sides.target_tensor[shares.row])
        assert all(rank in ranks for rank, ranks in zip(shares.rank.tolist(), here, strict=True))
        if by_rows:
            assert all(len(ranks) == 1 for ranks in here)

    holds()


@settings(max_examples=60)
@given(dices)
def test_equal_boxes_are_divided_alike(dice):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(shares_module, "LEAST_SHARE_NBYTES", dice.pick([1, 20, 1 << 18]))
        sides = random_sides(dice)
        shares = shares_by(sides, random_readers(dice, sides))
    divided: dict[tuple, set] = {}
    for row, tensor in enumerate(sides.target_tensor.tolist()):
        mine = np.flatnonzero(shares.row == row)
        box = tensor, *sides.target.boxes.start[row].tolist(), *sides.target.boxes.stop[row].tolist()
        parts = zip(*(column[mine].tolist() for column in (*shares.boxes, shares.rank)), strict=True)
        divided.setdefault(box, set()).add(repr(list(parts)))
    assert all(len(ways) == 1 for ways in divided.values())


def test_equal_boxes_are_divided_alike_wherever_they_lie_in_their_files():
    shape = (4096, 1000)
    sides = cut_twice([(shape, parts(shape, 4, 1), [whole(shape)] * 2)], begins=[8, 16])
    shares = shares_by(sides, ints(0, 1, 2, 3))
    assert shares.boxes.start[:4].tolist() == shares.boxes.start[4:].tolist()


@pytest.mark.parametrize(
    "why, nbytes, rank_of, edges",
    [
        ("half and half", [6, 6], [0, 1], [(0, 4), (1, 8)]),
        ("in proportion", [2, 6, 4], [0, 1, 2], [(0, 1), (1, 5), (2, 8)]),
        ("two parts of one rank count together", [3, 6, 3], [0, 1, 0], [(0, 4), (1, 8)]),
        ("one rank has it all", [6, 6], [1, 1], [(1, 8)]),
        ("a rank with less than a row has none", [1, 11], [0, 1], [(1, 8)]),
    ],
)
def test_rows_that_several_ranks_read_parts_of_are_divided_in_proportion(why, nbytes, rank_of, edges, divided_finely):
    """Eight rows of twelve bytes: sources are columns, the target is whole."""
    ends = np.cumsum(nbytes).tolist()
    sources = [Tile((0, end - n), (8, n), (0, 0), (8, n)) for end, n in zip(ends, nbytes, strict=True)]
    sides = cut_twice([((8, 12), sources, [whole((8, 12))])])
    shares = shares_by(sides, ints(*rank_of))
    assert list(zip(shares.rank.tolist(), shares.boxes.stop[:, 0].tolist(), strict=True)) == edges


def test_rows_of_few_bytes_are_not_divided_but_given_to_whoever_reads_most(monkeypatch):
    shape = (8, 12)
    sources = [Tile((0, 0), (8, 5), (0, 0), (8, 5)), Tile((0, 5), (8, 7), (0, 0), (8, 7))]
    sides = cut_twice([(shape, sources, [whole(shape)])])
    for least, ranks in ((8 * 12, [0, 1]), (8 * 12 + 1, [1])):
        monkeypatch.setattr(shares_module, "LEAST_SHARE_NBYTES", least)
        assert shares_by(sides, ints(0, 1)).rank.tolist() == ranks


def test_many_small_boxes_that_all_ranks_read_alike_are_dealt_to_all_of_them():
    """Hundred tensors of two columns each, cut into one: by what they are, not all to the same rank."""
    tensors = [((n + 2, 2), parts((n + 2, 2), 2, 1), [whole((n + 2, 2))]) for n in range(100)]
    sides = cut_twice(tensors)
    shares = shares_by(sides, np.tile([0, 1], 100))
    assert len(shares.row) == 100
    assert 30 < np.count_nonzero(shares.rank) < 70
