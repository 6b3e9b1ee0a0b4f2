"""Tensors cut into slabs: pieces that are contiguous wherever they are stored, and small enough for a round. Pure.

tensor   |--slab 0--|--slab 1--|--slab 2--|--...
source   |----- rank 0 ------------|--- rank 1 ----         large boxes get slabs of their own
"""

from functools import lru_cache
from itertools import pairwise
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from reshard_mpi.boxes import Boxes, Ints, equal_rows

SPARE_NBYTES = 16  # a span may be moved by this much in its buffer to keep the alignment it has in its file


class Slabs(NamedTuple):
    """Slabs of all tensors, tensor by tensor and in order.

    Slabs of one `sequence` must be moved in order. `sequence` and `tensor` rise.
    """

    boxes: Boxes
    tensor: Ints
    sequence: Ints


class Held(NamedTuple):
    """Boxes, in bytes, and the ranks that hold them; row i is of tensor `tensor[i]`, and these rise.

    `stride`: bytes of the file per step along each axis.
    """

    boxes: Boxes
    stride: Ints
    rank: Ints
    tensor: Ints


class Ordered(NamedTuple):
    """Boxes that must pass front to back, and the tensor of each."""

    boxes: Boxes
    tensor: Ints


class SlabTensors(NamedTuple):
    """What the cuts of tensors depend on: `shape` (ntensors, naxes) in bytes, numbers of shape (ntensors,).

    Each tensor is read and written. `ordered` are the boxes that must pass front to back; None: slabs are free. `copies`: the
    most ranks that a byte is sent to. `limit_nbytes` is what a slab may cost any rank.
    """

    shape: Ints
    read: Held
    written: Held
    ordered: Ordered | None
    copies: Ints
    limit_nbytes: Ints


class _Cuts(NamedTuple):
    """All indices before `axis[t]` being fixed, tensor t is cut into `nranges[t]` ranges of rows [low, high) of that axis."""

    axis: Ints
    nranges: Ints
    low: Ints
    high: Ints


def cut_slabs(tensors: SlabTensors) -> Slabs:
    """The slabs of every tensor."""
    naxes = tensors.shape.shape[1]
    cuts = _cuts(tensors)
    is_fixed = np.arange(naxes) < cuts.axis[:, np.newaxis]
    nprefixes = np.prod(np.where(is_fixed, tensors.shape, 1), axis=1)
    nslabs = nprefixes * cuts.nranges
    tensor = np.repeat(np.arange(len(nslabs)), nslabs)
    within = np.arange(len(tensor)) - np.repeat(np.cumsum(nslabs) - nslabs, nslabs)
    prefix, cut = np.divmod(within, cuts.nranges[tensor])
    start, stop = np.zeros((len(tensor), naxes), np.int64), tensors.shape[tensor]
    for axis in reversed(range(naxes)):
        fixed = np.flatnonzero(is_fixed[tensor, axis])
        prefix[fixed], start[fixed, axis] = np.divmod(prefix[fixed], stop[fixed, axis])
        stop[fixed, axis] = start[fixed, axis] + 1
    every, axis_of = np.arange(len(tensor)), cuts.axis[tensor]
    cut += (np.cumsum(cuts.nranges) - cuts.nranges)[tensor]
    start[every, axis_of], stop[every, axis_of] = cuts.low[cut], cuts.high[cut]
    begins = within == 0
    if tensors.ordered is None:
        begins[:] = True
    else:
        leading = np.minimum(cuts.axis, np.argmax(tensors.shape > 1, axis=1))
        edges = np.flatnonzero(~np.any(start * (np.arange(naxes) > leading[tensor, np.newaxis]), axis=1))
        begins[edges] |= _cuts_no_box(tensors, leading, tensor[edges], start[edges, leading[tensor[edges]]])
    return Slabs(Boxes(start, stop), tensor, np.cumsum(begins) - 1)


def slab_begins(shape: Ints, slabs: Slabs) -> Ints:
    """Where in its tensor, of `shape[tensor]` bytes, each slab begins, in row-major order. From there on it is contiguous."""
    later = np.cumprod(shape[:, ::-1], axis=1)[:, ::-1] // np.maximum(shape, 1)
    return (slabs.boxes.start * later[slabs.tensor]).sum(axis=1)


def _cuts(tensors: SlabTensors) -> _Cuts:
    """A tensor that fits is not cut; others along the first axis whose rows fit, else along the last one."""
    shape, limit = tensors.shape, tensors.limit_nbytes
    sent_limit = limit // tensors.copies
    loose = np.zeros(len(shape), bool)
    loose[tensors.read.tensor[~_is_tight(tensors.read)]] = True
    fits = (np.prod(shape, axis=1) <= sent_limit) & ~loose
    axis, most_rows = np.zeros(len(shape), np.int64), shape[:, 0].copy()
    left = np.flatnonzero(~fits)
    for candidate in range(shape.shape[1]):
        read, written = (_busiest_rows(held, candidate, left, shape) for held in (tensors.read, tensors.written))
        axis[left], most_rows[left] = candidate, np.minimum(sent_limit[left] // read, limit[left] // written)
        left = left[most_rows[left] == 0]
    return _cut_rows(tensors, axis, np.maximum(most_rows, 1))


def _is_tight(held: Held) -> NDArray[np.bool_]:
    """Are there no bytes of padding between the rows of the first axis?"""
    rows = np.prod(held.boxes.stop[:, 1:] - held.boxes.start[:, 1:], axis=1)
    return held.stride[:, 0] == rows


def _busiest_rows(held: Held, axis: int, tensors: Ints, shape: Ints) -> Ints:
    """Of each of the `tensors` the most bytes that one row of the axis costs a rank.

    That is of all its boxes that share the row, padding included. Boxes that differ in an index before the axis are counted
    together too, but of one row they can't be more than all of it.
    """
    index = np.flatnonzero(np.isin(held.tensor, tensors))
    boxes, tensor, stride = held.boxes.take(index), held.tensor[index], held.stride[index, axis]
    most, padding = np.zeros(len(shape), np.int64), np.ones(len(shape), np.int64)
    _, holder = equal_rows(tensor, held.rank[index])
    alone = np.bincount(holder)[holder] == 1
    np.maximum.at(most, tensor[alone], stride[alone])
    several = np.flatnonzero(~alone)
    edge = np.concatenate([boxes.start[several, axis], boxes.stop[several, axis]])
    # By row; where a box ends and the next begins, the end comes first. After the last row of a rank nothing is left.
    order = np.lexsort((np.repeat([1, 0], len(several)), edge, np.tile(holder[several], 2)))
    running = np.cumsum(np.concatenate([stride[several], -stride[several]])[order])
    np.maximum.at(most, np.tile(tensor[several], 2)[order], running)
    np.maximum.at(padding, tensor, -(-stride // np.prod((boxes.stop - boxes.start)[:, axis + 1 :], axis=1)))
    row_nbytes = np.prod(shape[:, axis + 1 :], axis=1)
    return np.where(most // padding > row_nbytes, row_nbytes * padding, most)[tensors]


def _cut_rows(tensors: SlabTensors, axis: Ints, most_rows: Ints) -> _Cuts:
    """Every tensor into ranges of at most so many rows of the axis."""
    nrows = tensors.shape[np.arange(len(axis)), axis]
    read = np.flatnonzero((most_rows < nrows)[tensors.read.tensor])
    tensor = tensors.read.tensor[read]
    starts = tensors.read.boxes.start[read, axis[tensor]]
    first, _ = equal_rows(tensor, starts)
    begins = np.searchsorted(tensor[first], np.arange(len(axis) + 1)).tolist()
    source_starts = starts[first].tolist()
    edges = [
        _row_cuts(rows, most, tuple(source_starts[a:b]))
        for rows, most, (a, b) in zip(nrows.tolist(), most_rows.tolist(), pairwise(begins), strict=True)
    ]
    nranges = np.array([len(cuts) - 1 for cuts in edges], np.int64)
    low, high = (np.concatenate([cuts[part] for cuts in edges] or [nrows]) for part in (slice(-1), slice(1, None)))
    return _Cuts(axis, nranges, low, high)


def _cuts_no_box(tensors: SlabTensors, axis: Ints, tensor: Ints, row: Ints) -> NDArray[np.bool_]:
    """Is no box that must pass in order on both sides of this row of the tensor's axis?

    Where that is so, as many boxes have ended as have begun: the rows from there on can be moved by themselves.
    """
    assert tensors.ordered is not None
    nrows = tensors.shape[np.arange(len(axis)), axis]
    place = np.cumsum(nrows + 1) - nrows - 1  # rows of all tensors, one after the other, ends included
    boxes, of = tensors.ordered
    column = np.arange(len(of)), axis[of]
    begun = np.searchsorted(np.sort(place[of] + boxes.start[column]), place[tensor] + row, side="left")
    ended = np.searchsorted(np.sort(place[of] + boxes.stop[column]), place[tensor] + row, side="right")
    return begun == ended


@lru_cache(maxsize=64)  # the layers of a model repeat each other
def _row_cuts(nrows: int, most_rows: int, source_starts: tuple[int, ...]) -> Ints:
    """Where to cut the rows into slabs of at most `most_rows`: where source boxes begin, large ones in equal parts.

    >>> _row_cuts(20, 6, (0, 2, 4, 20)).tolist()
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
    return np.array(cuts if cuts[-1] == nrows else [*cuts, nrows], np.int64)
