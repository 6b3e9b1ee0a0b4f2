"""How one tensor axis is cut where `torch.chunk` alone would be wrong: whole heads, shared heads, fused tensors. Pure.

qkv of 4 query heads and 2 key-value heads, tp = 2:    |q0 q1|q2 q3|k0|k1|v0|v1|
                                 what rank 0 holds:    |q0 q1|     |k0|  |v0|  |   stored as  |q0 q1|k0|v0|
"""

import itertools
from collections.abc import Sequence
from typing import NamedTuple

from reshard_mpi.boxes import chunk

Box = tuple[tuple[int, ...], tuple[int, ...]]  # (offset, extent) in elements
Intervals = tuple[
    tuple[int, int], ...
]  # half-open, in elements of the whole axis, in the order in which they are stored


class Misfit(Exception):
    """The axis can't be cut so; the message says why, and no tensor."""


class Member(NamedTuple):
    """A part of a fused axis that is cut by itself. `repeats`: where there are fewer units than ranks, neighbours share one."""

    size: int
    unit: int = 1
    repeats: bool = False

    def part(self, nparts: int, index: int) -> tuple[int, int]:
        """The half-open interval of part `index`, as `torch.chunk` cuts; Misfit when it would cut a unit.

        >>> Member(256, 128).part(2, 1), Member(256, 128, repeats=True).part(4, 1)
        ((128, 256), (0, 128))
        """
        nunits, rest = divmod(self.size, self.unit)
        if rest:
            raise Misfit(f"{self.size} elements are no whole number of units of {self.unit}")
        if self.repeats and 0 < nunits < nparts:
            if nparts % nunits:
                raise Misfit(f"{nparts} ranks can't share {nunits} units of {self.unit} equally")
            first = index * nunits // nparts * self.unit
            return first, first + self.unit
        start, stop = chunk(self.size, nparts, index)
        if start % self.unit or stop % self.unit:
            cut = stop if stop % self.unit else start
            raise Misfit(f"part {index} of {nparts} would be cut at element {cut}, within a unit of {self.unit}")
        return int(start), int(stop)


class Cut(NamedTuple):
    """The members of a fused axis, in their order; a plain axis has one."""

    members: tuple[Member, ...]

    @property
    def size(self) -> int:
        return sum(member.size for member in self.members)

    def parts(self, nparts: int, index: int) -> Intervals:
        """What part `index` holds of each member.

        >>> Cut((Member(4), Member(2))).parts(2, 1)
        ((2, 4), (5, 6))
        """
        found, first = [], 0
        for member in self.members:
            start, stop = member.part(nparts, index)
            found.append((first + start, first + stop))
            first += member.size
        return tuple(found)


def cut_axis(intervals: Intervals, nparts: int, index: int, cut: Cut | None) -> Intervals:
    """Part `index` of what is stored; neighbours are joined, and of nothing at all one empty interval is left.

    >>> cut_axis(((0, 4), (8, 12)), 2, 1, None), cut_axis(((0, 8),), 1, 0, Cut((Member(4), Member(4))))
    (((8, 12),), ((0, 8),))
    """
    size = sum(stop - start for start, stop in intervals)
    if cut is not None and cut.size != size:
        raise Misfit(f"there are {size} elements to cut, the layout says {cut.size}")
    start, stop = chunk(size, nparts, index)
    local = ((int(start), int(stop)),) if cut is None else cut.parts(nparts, index)
    return _joined([piece for part in local for piece in _within(intervals, part)])


def _within(intervals: Intervals, part: tuple[int, int]) -> list[tuple[int, int]]:
    """A part, in elements of what is stored, as intervals of the whole axis."""
    found, position = [], 0
    for start, stop in intervals:
        low, high = max(part[0], position), min(part[1], position + stop - start)
        if low < high or (low == high and part[0] == part[1]):
            found.append((start + low - position, start + high - position))
        position += stop - start
    return found


def _joined(intervals: Sequence[tuple[int, int]]) -> Intervals:
    held = [interval for interval in intervals if interval[0] < interval[1]]
    if not held:
        return (intervals[0] if intervals else (0, 0),)
    found = [held[0]]
    for start, stop in held[1:]:
        if start == found[-1][1]:
            found[-1] = (found[-1][0], stop)
        else:
            found.append((start, stop))
    return tuple(found)


def stored_boxes(
    columns: Sequence[Intervals], shape: Sequence[int]
) -> tuple[tuple[int, ...], tuple[tuple[Box, tuple[int, ...]], ...]]:
    """The array that holds some intervals of each axis: its shape, and its boxes, each with the elements before it per axis.

    What lies beyond the tensor's `shape` is padding: stored, but in no box.

    >>> stored_boxes([((2, 4), (5, 6)), ((0, 9),)], (6, 9))
    ((3, 9), ((((2, 0), (2, 9)), (0, 0)), (((5, 0), (1, 9)), (2, 0))))
    >>> stored_boxes([((4, 8),)], (6,)), stored_boxes([((8, 12),)], (6,))
    (((4,), ((((4,), (2,)), (0,)),)), ((4,), ((((6,), (0,)), (0,)),)))
    """
    held = [_joined([(min(a, size), min(b, size)) for a, b in of]) for of, size in zip(columns, shape, strict=True)]
    boxes = []
    for pieces in itertools.product(*held):
        box = tuple(start for start, _ in pieces), tuple(stop - start for start, stop in pieces)
        before = tuple(
            sum(stop - start for start, stop in column[: column.index(piece)])
            for column, piece in zip(held, pieces, strict=True)
        )
        boxes.append((box, before))
    return tuple(sum(stop - start for start, stop in column) for column in columns), tuple(boxes)
