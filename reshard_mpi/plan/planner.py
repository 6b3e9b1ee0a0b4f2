"""Make the plan: divide the boxes between ranks, cut tensors into slabs, deal the slabs to rounds. Pure.

Slabs that must pass a rank front to back, because a SHA-256 is computed of them on the way, stay in order. In a round every
reader is given about equally much, from different tensors.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from reshard_mpi.boxes import Boxes, Ints, join
from reshard_mpi.errors import PlanningError
from reshard_mpi.plan.plan import BUFFERS, ArrayTable, Plan, Side
from reshard_mpi.plan.schedule import Loads, deal_rounds
from reshard_mpi.plan.shares import Shares, deal_by_bytes, deal_to_least, equal_shares, shares_of_readers, whole_shares
from reshard_mpi.plan.slabs import SPARE_NBYTES, SlabTensor, cut_slabs
from reshard_mpi.plan.stored import ByteForm, StoredBoxes, padded_to

LEAST_ROUND_NBYTES = 1 << 14
MOST_ROUND_NBYTES = 1 << 28  # counts and displacements of a round stay far below 2**31


@dataclass(frozen=True)
class PlannedTensor:
    """One tensor with elements: in bytes, its source boxes and then its target boxes; and the arrays that hold them."""

    form: ByteForm
    source_arrays: Ints
    target_arrays: Ints


@dataclass(frozen=True)
class Resources:
    """What there is to work with. `writers` is owner (one rank a target file) or shared; `hashing`: digests are wanted."""

    nranks: int
    round_nbytes: int
    writers: str
    hashing: bool


def round_nbytes_of(memory_nbytes: int) -> int:
    """Bytes that a rank may read, send, receive or write in a round; PlanningError when `memory_nbytes` is too little."""
    least = BUFFERS * LEAST_ROUND_NBYTES
    if memory_nbytes < least:
        raise PlanningError(
            "--memory", f"{memory_nbytes} bytes are too few for the buffers of a rank; give at least {least // 1024}K"
        )
    return min(memory_nbytes // BUFFERS, MOST_ROUND_NBYTES)


def make_plan(
    tensors: Sequence[PlannedTensor],
    source_arrays: ArrayTable,
    target_arrays: ArrayTable,
    nshards: tuple[int, int],
    resources: Resources,
) -> Plan:
    """The plan that brings every target box its bytes. `nshards`: how many files source and target have."""
    naxes = max((len(tensor.form.shape) for tensor in tensors), default=1)
    source = _read_side(_boxes_of(tensors, naxes, source_arrays, target=False), nshards[0], resources)
    target = _written_side(_boxes_of(tensors, naxes, target_arrays, target=True), source, nshards[1], resources)
    holders = _most_holders(target)
    slabs = cut_slabs(_slab_tensors(tensors, naxes, source, target, holders, resources), naxes)
    read = _loads(slabs.boxes, slabs.tensor, source)
    sent = Loads(read.slab, read.rank, read.nbytes * holders[slabs.tensor[read.slab]])
    loads = [read, _loads(slabs.boxes, slabs.tensor, target), sent]
    rounds, buffer_nbytes = deal_rounds(loads, slabs.sequence, resources.nranks, resources.round_nbytes)
    order = np.array([slab for members in rounds for slab in sorted(members)], np.int64)
    round_first = np.cumsum([0, *map(len, rounds)])
    return Plan(
        resources.nranks, buffer_nbytes, source, target, slabs.boxes.take(order), slabs.tensor[order], round_first
    )


@dataclass(frozen=True)
class _Rows:
    """The boxes of one side, before they are divided between ranks."""

    stored: StoredBoxes
    array: Ints
    tensor: Ints
    ntensors: int
    arrays: ArrayTable


def _boxes_of(tensors: Sequence[PlannedTensor], naxes: int, arrays: ArrayTable, target: bool) -> _Rows:
    start, stop, stride, lead, array = [], [], [], [], []
    for tensor in tensors:
        nsources = len(tensor.source_arrays)
        rows = slice(nsources, None) if target else slice(0, nsources)
        form = tensor.form
        start.append(padded_to(naxes, form.boxes.start[rows], 0))
        stop.append(padded_to(naxes, form.boxes.stop[rows], 1))
        stride.append(_with_leading_strides(naxes, form.boxes.take(rows), form.stride[rows]))
        lead.append(form.lead[rows])
        array.append(tensor.target_arrays if target else tensor.source_arrays)

    def stacked(columns: list[Ints], shape: tuple[int, ...]) -> Ints:
        return np.concatenate(columns) if columns else np.empty(shape, np.int64)

    boxes = Boxes(stacked(start, (0, naxes)), stacked(stop, (0, naxes)))
    held_by = stacked(array, (0,))
    stored = StoredBoxes(boxes, stacked(stride, (0, naxes)), stacked(lead, (0,)) + arrays.begin[held_by])
    return _Rows(stored, held_by, np.repeat(np.arange(len(array)), [len(held) for held in array]), len(tensors), arrays)


def _with_leading_strides(naxes: int, boxes: Boxes, stride: Ints) -> Ints:
    """On the axes that are put in front, of size 1, a step is as long as the span of the whole box."""
    span = ((boxes.stop - boxes.start - 1) * stride).sum(axis=1, keepdims=True) + 1
    return np.concatenate([np.repeat(span, naxes - stride.shape[1], axis=1), stride], axis=1)


def _read_side(rows: _Rows, nshards: int, resources: Resources) -> Side:
    """Who reads what: a rank its own shard, else equal bytes; an array that is hashed is read by one rank."""
    arrays = rows.arrays
    if nshards == resources.nranks:
        reader = arrays.file
    else:
        reader = deal_by_bytes(arrays.nbytes, resources.nranks)
    shares = whole_shares(rows.stored, reader[rows.array])
    if not resources.hashing and nshards != resources.nranks:
        in_file_order = np.lexsort((rows.stored.offset, arrays.file[rows.array]))
        shares = equal_shares(rows.stored, in_file_order, resources.nranks)
    return _side(rows, shares, replace(arrays, hasher=reader))


def _written_side(rows: _Rows, source: Side, nshards: int, resources: Resources) -> Side:
    """Who writes what: one rank a file, or whoever has read it."""
    arrays, nranks = rows.arrays, resources.nranks
    if resources.writers == "owner":
        file_nbytes = np.bincount(arrays.file, weights=arrays.nbytes, minlength=nshards).astype(np.int64)
        owner = np.arange(nshards) if nshards == nranks else deal_by_bytes(file_nbytes, nranks)
        shares = whole_shares(rows.stored, owner[arrays.file][rows.array])
    else:
        shares = shares_of_readers(rows.stored, rows.tensor, source.stored, source.tensor, source.rank)
    side = _side(rows, shares, arrays)
    return replace(side, arrays=replace(arrays, hasher=_hashers(side, nranks)))


def _hashers(side: Side, nranks: int) -> Ints:
    """Who computes the digest of each array: its writer; where there are several, whoever has least to read back."""
    least, most = np.full(len(side.arrays.file), nranks), np.full(len(side.arrays.file), -1)
    np.minimum.at(least, side.array, side.rank)
    np.maximum.at(most, side.array, side.rank)
    several = np.flatnonzero(least < most)
    hasher = np.where(most < 0, 0, most)
    hasher[several] = deal_to_least(side.arrays.nbytes[several], nranks)
    return hasher


def _side(rows: _Rows, shares: Shares, arrays: ArrayTable) -> Side:
    tensor = rows.tensor[shares.row]
    return Side(
        rows.stored.cut(shares.row, shares.boxes),
        rows.array[shares.row],
        shares.rank,
        np.searchsorted(tensor, np.arange(rows.ntensors + 1)),
        _twins(shares.boxes, tensor, shares.rank),
        arrays,
    )


def _twins(boxes: Boxes, tensor: Ints, rank: Ints) -> Ints:
    columns = np.column_stack([tensor, rank, boxes.start, boxes.stop])
    _, first, numbered = np.unique(columns, axis=0, return_index=True, return_inverse=True)
    return first[numbered.ravel()].astype(np.int64)


def _most_holders(target: Side) -> Ints:
    """Of each tensor, the most ranks that any byte of it is sent to."""
    boxes = np.column_stack([target.tensor, target.stored.boxes.start, target.stored.boxes.stop])[target.is_own]
    distinct, count = np.unique(boxes, axis=0, return_counts=True)
    most = np.ones(len(target.first) - 1, np.int64)
    np.maximum.at(most, distinct[:, 0], count)
    return most


def _slab_tensors(
    tensors: Sequence[PlannedTensor], naxes: int, source: Side, target: Side, holders: Ints, resources: Resources
) -> list[SlabTensor]:
    """What the cut of each tensor depends on."""
    in_order = target.is_alone[target.array]
    found = []
    for index, tensor in enumerate(tensors):
        read, written = (slice(int(side.first[index]), int(side.first[index + 1])) for side in (source, target))
        sources = source.stored.boxes.take(read)
        nboxes = read.stop - read.start + written.stop - written.start
        limit = resources.round_nbytes // int(holders[index])
        ordered = None
        if resources.hashing:
            hashed = np.flatnonzero(in_order[written]) + written.start
            ordered = Boxes(
                *(np.concatenate([a, b]) for a, b in zip(sources, target.stored.boxes.take(hashed), strict=True))
            )
        found.append(
            SlabTensor(
                (1,) * (naxes - len(tensor.form.shape)) + tensor.form.shape,
                sources,
                source.stored.stride[read],
                ordered,
                max(limit - SPARE_NBYTES * nboxes, limit // 2, 1),
            )
        )
    return found


def _loads(slabs: Boxes, slab_tensor: Ints, side: Side) -> Loads:
    """What each rank reads or writes for each slab, in bytes of spans."""
    own = np.flatnonzero(side.is_own)
    slab, index = join(slabs, side.stored.boxes.take(own), slab_tensor, side.tensor[own])
    row = own[index]
    first, last = side.stored.spans(row, side.stored.parts(row, slabs.take(slab)))
    rank, nranks = side.rank[row], int(side.rank.max(initial=0)) + 1
    pairs, numbered = np.unique(slab * nranks + rank, return_inverse=True)
    nbytes = np.zeros(len(pairs), np.int64)
    np.add.at(nbytes, numbered, last - first + SPARE_NBYTES)
    return Loads(*np.divmod(pairs, nranks), nbytes)
