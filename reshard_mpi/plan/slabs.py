"""Tensors cut into slabs: pieces that are contiguous wherever they are stored, and small enough for a round. Pure.

tensor   |--slab 0--|--slab 1--|--slab 2--|--...
source   |----- rank 0 ------------|--- rank 1 ----         large boxes get slabs of their own
"""

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from reshard_mpi.boxes import Boxes, Ints

SPARE_NBYTES = 16  # a span may be moved by this much in its buffer to keep the alignment it has in its file


class Slabs(NamedTuple):
    """Slabs of all tensors, tensor by tensor and in order.

    Slabs of one `sequence` must be moved in order. `sequence` and `tensor` rise.
    """

    boxes: Boxes
    tensor: Ints
    sequence: Ints


class Held(NamedTuple):
    """Boxes of one tensor and the ranks that hold them; `stride`: bytes of the file per step along each axis."""

    boxes: Boxes
    stride: Ints
    rank: Ints


class SlabTensor(NamedTuple):
    """What the cut of one tensor depends on. Boxes are in bytes.

    `ordered` are the boxes that must pass front to back; None: slabs are free. `copies`: the most ranks that a byte is sent
    to. `limit_nbytes` is what a slab may cost any rank.
    """

    shape: tuple[int, ...]
    read: Held
    written: Held
    ordered: Boxes | None
    copies: int
    limit_nbytes: int


def cut_slabs(tensors: Sequence[SlabTensor], naxes: int) -> Slabs:
    """The slabs of every tensor."""
    start: list[Ints] = []
    stop: list[Ints] = []
    sequence: list[Ints] = []
    count = []
    nsequences = 0
    for tensor in tensors:
        axis, cuts = _cuts(tensor)
        prefixes = np.indices(tensor.shape[:axis], np.int64).reshape(axis, -1).T if axis else np.zeros((1, 0), np.int64)
        nslabs = len(prefixes) * (len(cuts) - 1)
        low = np.zeros((nslabs, naxes), np.int64)
        low[:, :axis] = np.repeat(prefixes, len(cuts) - 1, axis=0)
        high = low + 1
        high[:, axis + 1 :] = tensor.shape[axis + 1 :]
        low[:, axis], high[:, axis] = np.tile(cuts[:-1], len(prefixes)), np.tile(cuts[1:], len(prefixes))
        start.append(low)
        stop.append(high)
        if nslabs == 1:
            numbered = np.zeros(1, np.int64)
        elif tensor.ordered is None:
            numbered = np.arange(nslabs)
        elif len(prefixes) > 1:
            numbered = np.zeros(nslabs, np.int64)
        else:
            # A slab that ends one band and begins the next ties the two together.
            bands = np.intersect1d(_bands(tensor.ordered, axis), cuts[:-1])
            numbered = np.searchsorted(bands, cuts[:-1], side="right") - 1
        sequence.append(numbered + nsequences)
        nsequences += int(numbered[-1]) + 1
        count.append(nslabs)
    return Slabs(
        Boxes(*(np.concatenate(side) if side else np.empty((0, naxes), np.int64) for side in (start, stop))),
        np.repeat(np.arange(len(count)), count),
        np.concatenate(sequence) if sequence else np.empty(0, np.int64),
    )


def _cuts(tensor: SlabTensor) -> tuple[int, Ints]:
    """The axis along which the tensor is cut, all indices before it being fixed, and where."""
    nbytes = math.prod(tensor.shape)
    if nbytes * tensor.copies <= tensor.limit_nbytes and _is_tight(tensor.read.boxes, tensor.read.stride, 0):
        return 0, np.array([0, tensor.shape[0]], np.int64)
    for axis in range(len(tensor.shape)):
        row_nbytes = max(_busiest_row(tensor.read, axis) * tensor.copies, _busiest_row(tensor.written, axis))
        if row_nbytes <= tensor.limit_nbytes:
            break
    source_starts = np.unique(tensor.read.boxes.start[:, axis]).tolist()
    return axis, np.array(
        _row_cuts(tensor.shape[axis], max(tensor.limit_nbytes // row_nbytes, 1), source_starts), np.int64
    )


def _is_tight(boxes: Boxes, stride: Ints, axis: int) -> bool:
    """Are there no bytes of padding between the rows?"""
    rows = np.prod(boxes.stop[:, axis + 1 :] - boxes.start[:, axis + 1 :], axis=1)
    return bool(np.all(stride[:, axis] == rows))


def _busiest_row(held: Held, axis: int) -> int:
    """The most bytes that one row of the axis costs a rank: of all its boxes that share the row, padding included."""
    nboxes = len(held.rank)
    edge = np.concatenate([held.boxes.start[:, axis], held.boxes.stop[:, axis]])
    change = np.concatenate([held.stride[:, axis], -held.stride[:, axis]])
    # Within a rank by row; where a box ends and the next begins, the end comes first.
    order = np.lexsort((np.repeat([1, 0], nboxes), edge, np.tile(held.rank, 2)))
    return int(np.cumsum(change[order]).max())


def _bands(boxes: Boxes, axis: int) -> list[int]:
    """The rows at which no box is cut in two: each band of rows between them can be moved by itself.

    >>> _bands(Boxes(np.array([[0], [3], [2]]), np.array([[2], [5], [4]])), 0)
    [0, 2]
    """
    order = np.argsort(boxes.start[:, axis], kind="stable")
    begins, ends = boxes.start[order, axis], np.maximum.accumulate(boxes.stop[order, axis])
    return [0, *begins[1:][begins[1:] >= ends[:-1]].tolist()]


def _row_cuts(nrows: int, most_rows: int, source_starts: Sequence[int]) -> list[int]:
    """Where to cut the rows into slabs of at most `most_rows`: where source boxes begin, large ones in equal parts.

    >>> _row_cuts(20, 6, [0, 2, 4, 20])
    [0, 4, 9, 14, 20]
    """
    cuts, reached = [0], 0
    for stop in [*source_starts, nrows]:
        if stop - cuts[-1] > most_rows:
            if reached > cuts[-1]:
                cuts.append(reached)
            first = cuts[-1]
            nslabs = -(-(stop - first) // most_rows)
            cuts += [first + (stop - first) * k // nslabs for k in range(1, nslabs + 1)] if nslabs > 1 else []
        reached = stop
    return cuts if cuts[-1] == nrows else [*cuts, nrows]
