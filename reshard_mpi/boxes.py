"""Half-open integer boxes: how an axis is split, which boxes meet, whether boxes tile a shape.

Pure numpy, no files, no MPI. Many boxes are two int64 arrays of shape (nboxes, naxes). What meets what is found per axis in
sorted arrays; of all axes the one with the fewest candidates is taken, for each group of boxes by itself. That stays near the
number of real meetings whichever axis is cut, and unlike a dense grid of cut points it needs memory for candidates only, so that
irregular (or hostile) boxes can't blow it up.
"""

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

Ints = NDArray[np.int64]
Index = NDArray[np.int64] | NDArray[np.bool_] | slice
CANDIDATES_AT_ONCE = 1 << 20


class Boxes(NamedTuple):
    """Boxes as arrays: `start` and `stop`, int64, shape (nboxes, naxes), start <= stop."""

    start: Ints
    stop: Ints

    def take(self, index: Index) -> "Boxes":
        return Boxes(self.start[index], self.stop[index])

    @property
    def nonempty(self) -> NDArray[np.bool_]:
        return np.all(self.start < self.stop, axis=1)

    @property
    def volume(self) -> Ints:
        return np.prod(self.stop - self.start, axis=1, dtype=np.int64)


def chunk(nelems: Ints | int, nparts: int, part: Ints | int) -> tuple[Ints, Ints]:
    """Part `part` of `nelems` elements cut into `nparts` as `torch.chunk` cuts, as half-open intervals; arrays or numbers.

    >>> [tuple(map(int, chunk(5, 4, i))) for i in range(4)]
    [(0, 2), (2, 4), (4, 5), (5, 5)]
    """
    step = -(-nelems // nparts)
    return np.minimum(part * step, nelems), np.minimum((part + 1) * step, nelems)


def array_split_part(nitems: int, nparts: int, item: int) -> int:
    """The part that holds `item` when `range(nitems)` is cut as `numpy.array_split` cuts.

    >>> [array_split_part(5, 3, i) for i in range(5)]
    [0, 0, 1, 1, 2]
    """
    size, nlarger = divmod(nitems, nparts)
    larger = nlarger * (size + 1)
    return item // (size + 1) if item < larger else nlarger + (item - larger) // size


def meet(a: Boxes, b: Boxes) -> Boxes:
    """Row by row the common box of `a` and `b`; empty rows have start >= stop on some axis."""
    return Boxes(np.maximum(a.start, b.start), np.minimum(a.stop, b.stop))


def join(a: Boxes, b: Boxes, a_group: Ints, b_group: Ints) -> tuple[Ints, Ints]:
    """Index pairs (i, j) of every `a[i]` and `b[j]` of the same group that share an element.

    Groups are non-negative numbers, one a box: boxes of different tensors, say, which never meet. Boxes must not be empty.
    The order of the pairs is a function of the input.

    >>> rows = Boxes(np.array([[0, 0], [2, 0]]), np.array([[2, 4], [4, 4]]))
    >>> one = Boxes(np.array([[1, 1]]), np.array([[3, 2]]))
    >>> [index.tolist() for index in join(rows, one, np.zeros(2, int), np.zeros(1, int))]
    [[0, 1], [0, 0]]
    """
    found = list(_pairs(a, b, a_group, b_group, np.zeros(len(a_group), bool)))
    i, j = (np.concatenate([pair[side] for pair in found]) if found else np.empty(0, np.int64) for side in (0, 1))
    return i, j


def _pairs(a: Boxes, b: Boxes, a_group: Ints, b_group: Ints, is_done: NDArray[np.bool_]) -> Iterator[tuple[Ints, Ints]]:
    """The pairs of `join`, some at a time; those of a[i] no more once is_done[i]. Boxes of a group come in their order."""
    if not len(a_group) or not len(b_group):
        return
    naxes = a.start.shape[1]
    axes = [_axis_candidates(a, b, a_group, b_group, axis) for axis in range(naxes)]
    if not axes:  # boxes without axes are single points
        axes = [_axis_candidates(Boxes(*_unit(a_group)), Boxes(*_unit(b_group)), a_group, b_group, 0)]
    best = _cheapest_axis([upper - lower for _, lower, upper in axes], a_group)
    for axis, (order, lower, upper) in enumerate(axes):
        yield from _filtered(a, b, order, lower, upper, np.flatnonzero(best == axis), is_done)


def _unit(group: Ints) -> tuple[Ints, Ints]:
    return np.zeros((len(group), 1), np.int64), np.ones((len(group), 1), np.int64)


def _axis_candidates(a: Boxes, b: Boxes, a_group: Ints, b_group: Ints, axis: int) -> tuple[Ints, Ints, Ints]:
    """On one axis: an order of `b` in which the candidates of a[i] are the range lower[i]:upper[i]."""
    a_start, a_stop, b_start, b_stop = _in_groups(
        [a.start[:, axis], a.stop[:, axis], b.start[:, axis], b.stop[:, axis]], [a_group, a_group, b_group, b_group]
    )
    order = np.lexsort((b_stop, b_start))
    reached = np.maximum.accumulate(b_stop[order])
    lower = np.searchsorted(reached, a_start, side="right")
    upper = np.maximum(np.searchsorted(b_start[order], a_stop, side="left"), lower)
    return order, lower, upper


def _in_groups(columns: list[Ints], groups: list[Ints]) -> list[Ints]:
    """Numbers that are ordered as (group, coordinate)."""
    low, high = min(int(column.min()) for column in columns), max(int(column.max()) for column in columns)
    last_group = max(int(group.max()) for group in groups)
    if (last_group + 1) * (high - low + 1) < 1 << 63:
        return [group * (high - low + 1) + (column - low) for column, group in zip(columns, groups, strict=True)]
    # Too large for one int64, unless what counts is the order of the coordinates.
    cuts, numbered = np.unique(np.concatenate(columns), return_inverse=True)
    numbers = np.split(numbered, np.cumsum([len(column) for column in columns])[:-1])
    return [group * len(cuts) + number for number, group in zip(numbers, groups, strict=True)]


def _cheapest_axis(counts: list[Ints], group: Ints) -> Ints:
    """For every box of `a` the axis on which its whole group has the fewest candidates."""
    if len(counts) == 1:
        return np.zeros(len(group), np.int64)
    if group.max() > 4 * len(group):  # most numbers are of no group here
        _, group = np.unique(group, return_inverse=True)
    totals = np.stack([np.bincount(group, weights=count) for count in counts])
    return np.argmin(totals, axis=0)[group]


def _filtered(
    a: Boxes, b: Boxes, order: Ints, lower: Ints, upper: Ints, rows: Ints, is_done: NDArray[np.bool_]
) -> Iterator[tuple[Ints, Ints]]:
    counts = (upper - lower)[rows]
    ends = np.cumsum(counts)
    first = 0
    while first < len(rows):
        base = ends[first] - counts[first]
        last = max(first + 1, int(np.searchsorted(ends, base + CANDIDATES_AT_ONCE, side="right")))
        is_left = ~is_done[rows[first:last]]
        part, ncandidates = rows[first:last][is_left], counts[first:last][is_left]
        i = np.repeat(part, ncandidates)
        j = order[
            np.arange(len(i))
            - np.repeat(np.cumsum(ncandidates) - ncandidates, ncandidates)
            + np.repeat(lower[part], ncandidates)
        ]
        both = _share(a, b, i, j)
        yield i[both], j[both]
        first = last


def _share(a: Boxes, b: Boxes, i: Ints, j: Ints) -> NDArray[np.bool_]:
    """Of the pairs a[i] and b[j] those that share an element; an axis at a time, as the candidates are many."""
    found = np.ones(len(i), bool)
    for axis in range(a.start.shape[1]):
        found &= (a.start[i, axis] < b.stop[j, axis]) & (b.start[j, axis] < a.stop[i, axis])
    return found


def equal_rows(*columns: Ints) -> tuple[Ints, Ints]:
    """Of each distinct row of the columns the first that has it; and for each row the number of its distinct row.

    Distinct rows are numbered in their order. (numpy.unique(axis=0) compares rows as bytes: several times slower.)

    >>> first, number = equal_rows(np.array([3, 1, 3]), np.array([0, 0, 0]))
    >>> first.tolist(), number.tolist()
    ([1, 0], [1, 0, 1])
    """
    columns = tuple(column for column in columns if np.any(column != column[:1])) or columns[:1]
    order = np.lexsort(columns[::-1])
    differs = np.zeros(max(len(order) - 1, 0), bool)
    for column in columns:
        ordered = column[order]
        differs |= ordered[1:] != ordered[:-1]
    begins = np.append(True, differs)[: len(order)]
    number = np.empty(len(order), np.int64)
    number[order] = np.cumsum(begins) - 1
    return order[begins], number


def find_overlaps(boxes: Boxes, group: Ints) -> list[tuple[int, int]]:
    """Of each group in which different boxes share an element, the first two that do. Boxes must not be empty."""
    overlaps: list[tuple[int, int]] = []
    _, number = np.unique(group, return_inverse=True)
    is_done = np.zeros(len(group), bool)
    for i, j in _pairs(boxes, boxes, group, group, is_done):  # all of them may be as many as boxes squared
        pairs = np.flatnonzero(i < j)
        pairs = pairs[np.lexsort((j[pairs], i[pairs], number[i[pairs]]))]
        groups, first = np.unique(number[i[pairs]], return_index=True)
        overlaps += zip(i[pairs[first]].tolist(), j[pairs[first]].tolist(), strict=True)
        is_done |= np.isin(number, groups) if len(groups) else False
    return sorted(overlaps, key=lambda pair: (group[pair[0]], pair))


def find_hole(shape: tuple[int, ...], boxes: Boxes) -> tuple[tuple[int, ...], tuple[int, ...]] | None:
    """A box (start, stop) of `shape` that no box covers, or None. The boxes must lie within `shape` and not overlap.

    >>> find_hole((4, 4), Boxes(np.array([[0, 0], [2, 0]]), np.array([[2, 4], [4, 3]])))
    ((2, 3), (4, 4))
    """
    if not shape:
        return None if len(boxes.start) else ((), ())
    cuts, numbered = np.unique(
        np.concatenate([boxes.start[:, 0], boxes.stop[:, 0], [0, shape[0]]]), return_inverse=True
    )
    nboxes = len(boxes.start)
    rest = np.prod(boxes.stop[:, 1:] - boxes.start[:, 1:], axis=1, dtype=np.int64)
    change = np.zeros(len(cuts), np.int64)
    np.add.at(change, numbered[:nboxes], rest)
    np.add.at(change, numbered[nboxes : 2 * nboxes], -rest)
    whole = int(np.prod(shape[1:], dtype=np.int64))
    lacking = np.flatnonzero(np.cumsum(change)[:-1] < whole)
    if not len(lacking) or not whole:
        return None
    start, stop = int(cuts[lacking[0]]), int(cuts[lacking[0] + 1])
    here = (boxes.start[:, 0] <= start) & (boxes.stop[:, 0] >= stop)
    inner = find_hole(shape[1:], Boxes(boxes.start[here, 1:], boxes.stop[here, 1:]))
    assert inner is not None
    return (start, *inner[0]), (stop, *inner[1])
