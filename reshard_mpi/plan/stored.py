"""Boxes in bytes: where each box of a tensor lies in a file, whatever its dtype, rank or padding.

From here on a tensor is an array of bytes. Axes that nobody cuts are merged with the axis before, so that the last axis is the
longest run that is contiguous everywhere, and element types, including those narrower than a byte, are gone:

    bfloat16 [8, 4096, 14336], cut on axes 0 and 2   ->   bytes [8 * 4096, 28672]
    float32 [], whole                                ->   bytes [4]

A slab is a box with some leading indices fixed, a range of the next axis, and all of the later ones: a contiguous byte range of
the whole tensor and (without padding on later axes) of every stored box too.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

import numpy as np

from reshard_mpi.boxes import Boxes, Ints, meet
from reshard_mpi.errors import InputError


class Place(NamedTuple):
    """A box within a tensor and within its stored array, in elements per axis."""

    offset: tuple[int, ...]
    extent: tuple[int, ...]
    before: tuple[int, ...]
    local_shape: tuple[int, ...]


@dataclass(frozen=True)
class ByteForm:
    """A tensor and its places in bytes. `lead` is where, in its stored array, each box begins; nboxes rows in the order given."""

    shape: tuple[int, ...]
    boxes: Boxes
    stride: Ints
    lead: Ints


@dataclass(frozen=True)
class StoredBoxes:
    """Boxes in bytes, and where each lies: int64 arrays of nboxes rows.

    `stride`: bytes between neighbours along each axis; `offset`: of the box's first byte in its file.
    """

    boxes: Boxes
    stride: Ints
    offset: Ints

    def spans(self, rows: Ints, parts: Boxes) -> tuple[Ints, Ints]:
        """The contiguous byte span (first byte, byte after the last) of the file that encloses each part of box rows[i]."""
        stride = self.stride[rows]
        first = self.offset[rows] + ((parts.start - self.boxes.start[rows]) * stride).sum(axis=1)
        return first, first + ((parts.stop - parts.start - 1) * stride).sum(axis=1) + 1

    @property
    def naxes(self) -> int:
        return self.boxes.start.shape[1]

    @property
    def leading_axes(self) -> Ints:
        """Of each box, the first axis along which it can be divided."""
        return np.argmax(self.boxes.stop - self.boxes.start > 1, axis=1)

    def cut(self, rows: Ints, parts: Boxes) -> "StoredBoxes":
        """The parts of box rows[i], as stored boxes of their own."""
        stride = self.stride[rows]
        return StoredBoxes(
            parts, stride, self.offset[rows] + ((parts.start - self.boxes.start[rows]) * stride).sum(axis=1)
        )

    def parts(self, rows: Ints, slabs: Boxes) -> Boxes:
        """Row by row the part of box rows[i] within slabs[i]."""
        return meet(self.boxes.take(rows), slabs)


def byte_form(shape: tuple[int, ...], nbits: int, places: tuple[Place, ...], where: str = "tensor") -> ByteForm:
    """The tensor in bytes; InputError at `where` when a cut of a type narrower than a byte isn't on a byte boundary.

    No place may be without elements.

    >>> form = byte_form((4, 6), 16, (Place((0, 0), (2, 6), (0, 0), (2, 6)), Place((2, 0), (2, 6), (0, 0), (2, 6))))
    >>> form.shape, form.boxes.start.tolist(), form.boxes.stop.tolist()
    ((48,), [[0], [24]], [[24], [48]])
    """
    return _byte_form(shape, nbits, places, where if nbits % 8 else "")


@lru_cache(maxsize=64)  # the layers of a model repeat each other, whatever they are called
def _byte_form(shape: tuple[int, ...], nbits: int, places: tuple[Place, ...], where: str) -> ByteForm:
    offset, extent, before, local = (
        np.array(part, np.int64).reshape(len(places), len(shape)) for part in zip(*places, strict=True)
    )
    return byte_form_of_arrays(shape, nbits, offset, extent, before, local, where)


def byte_form_of_arrays(
    shape: tuple[int, ...],
    nbits: int,
    offset: Ints,
    extent: Ints,
    before: Ints,
    local_shape: Ints,
    where: str = "tensor",
) -> ByteForm:
    """As `byte_form`, with places as arrays of shape (nplaces, naxes)."""
    columns = [
        _Column(size, offset[:, axis], offset[:, axis] + extent[:, axis], before[:, axis], local_shape[:, axis])
        for axis, size in enumerate(shape)
    ] or [_Column.whole(1, len(offset))]
    merged = [columns[-1]]
    for column in reversed(columns[:-1]):
        inner = merged[-1]
        if inner.is_whole:
            merged[-1] = column.scaled(inner.size)
        elif not (column.size == 1 and column.is_whole):
            merged.append(column)
    merged[0] = merged[0].in_bytes(nbits, where)
    merged.reverse()
    local = np.stack([column.local for column in merged], axis=1)
    stride = np.ones_like(local)
    stride[:, :-1] = np.cumprod(local[:, :0:-1], axis=1)[:, ::-1]
    skipped = np.stack([column.before for column in merged], axis=1)
    start, stop = (np.stack([getattr(column, side) for column in merged], axis=1) for side in ("start", "stop"))
    return ByteForm(tuple(column.size for column in merged), Boxes(start, stop), stride, (skipped * stride).sum(axis=1))


@dataclass(frozen=True)
class _Column:
    """One axis of the tensor and of every place; arrays of shape (nplaces,)."""

    size: int
    start: Ints
    stop: Ints
    before: Ints
    local: Ints

    @classmethod
    def whole(cls, size: int, nplaces: int) -> "_Column":
        zero = np.zeros(nplaces, np.int64)
        return cls(size, zero, zero + size, zero, zero + size)

    @property
    def is_whole(self) -> bool:
        """Does every stored array hold all of this axis, and nothing else?"""
        return bool(np.all(self.start == 0) and np.all(self.stop == self.size) and np.all(self.local == self.size))

    def scaled(self, factor: int) -> "_Column":
        return _Column(
            self.size * factor, self.start * factor, self.stop * factor, self.before * factor, self.local * factor
        )

    def in_bytes(self, nbits: int, where: str) -> "_Column":
        if nbits % 8 == 0:
            return self.scaled(nbits // 8)
        numbers = np.concatenate([self.start, self.stop, self.before, self.local, [self.size]])
        if np.any(numbers * nbits % 8):
            raise InputError(
                where,
                f"a part begins or ends within a byte: its elements have {nbits} bits; cut it at multiples of "
                f"{8 // math.gcd(8, nbits)} elements",
            )
        return _Column(
            self.size * nbits // 8,
            *(numbers * nbits // 8 for numbers in (self.start, self.stop, self.before, self.local)),
        )


def stacked(naxes: int, tensors: Sequence[Ints], fill: int) -> Ints:
    """The rows of arrays (n, k), one a tensor, as one array (n, naxes): with leading columns of `fill` where k is less.

    >>> stacked(2, [np.array([[7], [8]]), np.array([[3, 4]])], 1).tolist()
    [[1, 7], [1, 8], [3, 4]]
    """
    widths = np.repeat([numbers.shape[1] for numbers in tensors], [len(numbers) for numbers in tensors])
    found = np.full((len(widths), naxes), fill, np.int64)
    for width in np.unique(widths).tolist():
        found[widths == width, naxes - width :] = np.concatenate([n for n in tensors if n.shape[1] == width])
    return found


def range_slabs(shape: tuple[int, ...], first: int, last: int) -> Iterator[tuple[tuple[int, ...], tuple[int, ...]]]:
    """The slabs (start, stop) that make up the bytes [first, last) of a tensor of bytes, in order.

    >>> list(range_slabs((3, 4), 2, 9))
    [((0, 2), (1, 4)), ((1, 0), (2, 4)), ((2, 0), (3, 1))]
    """
    if first >= last:
        return
    if len(shape) == 1:
        yield (first,), (last,)
        return
    row_nbytes = math.prod(shape[1:])
    row, within = divmod(first, row_nbytes)
    end_row, end_within = divmod(last, row_nbytes)
    if within or row == end_row:
        stop = end_within if row == end_row else row_nbytes
        yield from (((row, *start), (row + 1, *end)) for start, end in range_slabs(shape[1:], within, stop))
        row += 1
    if row < end_row:
        yield (row, *(0,) * (len(shape) - 1)), (end_row, *shape[1:])
    if row <= end_row and end_within:
        yield from (((end_row, *start), (end_row + 1, *end)) for start, end in range_slabs(shape[1:], 0, end_within))
