"""Make the plan: divide the boxes between ranks, cut tensors into slabs, deal the slabs to rounds. Pure.

Slabs that must pass a rank front to back, because a SHA-256 is computed of them on the way, stay in order. In a round every
reader is given about equally much, from different tensors.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from reshard_mpi.boxes import Boxes, Ints, equal_rows, join, meet
from reshard_mpi.errors import PlanningError
from reshard_mpi.plan.earlier import Earlier, Ranges, is_within, joined, with_digests, without_verified
from reshard_mpi.plan.plan import BUFFERS, NOBODY, ArrayTable, Plan, Rows, Side, buffers
from reshard_mpi.plan.prefixes import Prefixes, find_prefixes
from reshard_mpi.plan.schedule import Loads, deal_rounds
from reshard_mpi.plan.shares import (
    Shares,
    deal_by_bytes,
    deal_in_order,
    deal_to_least,
    deal_to_readers,
    equal_shares,
    shares_of_readers,
    whole_shares,
)
from reshard_mpi.plan.slabs import SPARE_NBYTES, Held, Ordered, Slabs, SlabTensors, cut_slabs, slab_begins
from reshard_mpi.plan.stored import ByteForm, StoredBoxes, stacked

LEAST_ROUND_NBYTES = 1 << 13
UNCOUNTED_NBYTES = 1 << 16
MOST_ROUND_NBYTES = 1 << 24  # more is no faster: the first touch of a buffer costs more than a round


@dataclass(frozen=True)
class PlannedTensor:
    """One tensor with elements: in bytes, its source boxes and then its target boxes; and the arrays that hold them."""

    form: ByteForm
    source_arrays: Ints
    target_arrays: Ints


@dataclass(frozen=True)
class Resources:
    """What there is to work with. `hashing`: digests are wanted.

    `writers`: owner (one rank a target file), nodes (likewise, dealt in order), or shared. `readers`: of each source file, the
    ranks that see it; empty where all ranks see all files.
    """

    nranks: int
    round_nbytes: int
    writers: str
    hashing: bool
    readers: tuple[tuple[int, ...], ...] = ()


def round_nbytes_of(memory_nbytes: int, held_nbytes: int = 0, casting: bool = False) -> int:
    """Bytes that a rank may read, send, receive or write in a round; PlanningError when `memory_nbytes` is too little.

    `held_nbytes` are needed beside the buffers; a little is lost in what Python needs anyway. `casting`: is anything to be
    converted?
    """
    held_nbytes = max(held_nbytes - UNCOUNTED_NBYTES, 0)
    least = BUFFERS * LEAST_ROUND_NBYTES + held_nbytes
    if memory_nbytes < least:
        raise PlanningError(
            "--memory",
            f"{memory_nbytes} bytes are too few for the buffers of a rank; give at least {-(-least // 1024)}K",
        )
    return min((memory_nbytes - held_nbytes) // buffers(casting), MOST_ROUND_NBYTES)


def make_plan(
    tensors: Sequence[PlannedTensor],
    source_arrays: ArrayTable,
    target_arrays: ArrayTable,
    nshards: tuple[int, int],
    resources: Resources,
    earlier: Earlier | None = None,
) -> Plan:
    """The plan that brings every target box its bytes. `nshards`: how many files source and target have.

    What was done `earlier` isn't done again.
    """
    naxes = max((len(tensor.form.shape) for tensor in tensors), default=1)
    source_rows, target_rows = (
        _boxes_of(tensors, naxes, arrays, target) for arrays, target in ((source_arrays, False), (target_arrays, True))
    )
    source = _read_side(source_rows, nshards[0], resources)
    target = _written_side(target_rows, source, nshards[1], resources)
    if resources.hashing:
        prefixes = find_prefixes(source_rows, target_rows)
        if earlier is not None:
            prefixes = without_verified(prefixes, source.arrays, target.arrays, earlier.verified)
        target = _with_hashers(target, source, prefixes, resources.nranks)
    if earlier is not None:
        left = np.where(earlier.verified, 0, source.arrays.has_digest)
        source = replace(source, arrays=replace(source.arrays, has_digest=left))
        target = replace(target, arrays=with_digests(target.arrays, earlier))
    slabs, loads = _slabs_that_fit(tensors, naxes, source, target, resources)
    begin = slab_begins(_shapes(tensors, naxes), slabs)
    if earlier is not None:
        ranges = Ranges(slabs.tensor, begin, begin + slabs.boxes.volume)
        left = np.flatnonzero(~is_within(ranges, joined(earlier.written)))
        slabs, loads, begin = _taken(slabs, left), [_loads_of(load, left) for load in loads], begin[left]
    rounds, buffer_nbytes = deal_rounds(loads, slabs.sequence, resources.nranks, resources.round_nbytes)
    order = np.array([slab for members in rounds for slab in sorted(members)], np.int64)
    crosses = _crosses(source, target, resources.nranks)
    return Plan(
        resources.nranks,
        buffer_nbytes,
        int(resources.hashing),
        source,
        target,
        slabs.boxes.take(order),
        slabs.tensor[order],
        begin[order],
        round_first=np.cumsum([0, *map(len, rounds)]),
        round_crosses=np.array([crosses[slabs.tensor[members]].any() for members in rounds], np.int64),
    )


def _boxes_of(tensors: Sequence[PlannedTensor], naxes: int, arrays: ArrayTable, target: bool) -> Rows:
    start, stop, stride, lead, array = [], [], [], [], []
    for tensor in tensors:
        nsources, form = len(tensor.source_arrays), tensor.form
        rows = slice(nsources, None) if target else slice(0, nsources)
        start.append(form.boxes.start[rows])
        stop.append(form.boxes.stop[rows])
        stride.append(form.stride[rows])
        lead.append(form.lead[rows])
        array.append(tensor.target_arrays if target else tensor.source_arrays)
    boxes = Boxes(stacked(naxes, start, 0), stacked(naxes, stop, 1))
    none = [np.empty(0, np.int64)]
    held_by = np.concatenate(array or none)
    stored = StoredBoxes(
        boxes,
        _with_leading_strides(boxes, stacked(naxes, stride, 0)),
        np.concatenate(lead or none) + arrays.begin[held_by],
    )
    return Rows(stored, held_by, np.repeat(np.arange(len(array)), [len(held) for held in array]), len(tensors), arrays)


def _with_leading_strides(boxes: Boxes, stride: Ints) -> Ints:
    """On the axes that were put in front, of size 1 and with stride 0, a step is as long as the span of the whole box."""
    span = ((boxes.stop - boxes.start - 1) * stride).sum(axis=1, keepdims=True) + 1
    return np.where(stride == 0, span, stride)


def _read_side(rows: Rows, nshards: int, resources: Resources) -> Side:
    """Who reads what: a rank its own shard, else equal bytes; an array that is hashed is read by one rank."""
    arrays, readers = rows.arrays, resources.readers
    if nshards == resources.nranks and all(rank in ranks for rank, ranks in enumerate(readers)):
        reader = arrays.file
    elif readers:
        reader = deal_to_readers(arrays.nbytes, arrays.file, readers)
    else:
        reader = deal_by_bytes(arrays.nbytes, resources.nranks)
    shares = whole_shares(rows.stored, reader[rows.array])
    if not resources.hashing and nshards != resources.nranks and not readers:
        in_file_order = np.lexsort((rows.stored.offset, arrays.file[rows.array]))
        shares = equal_shares(rows.stored, in_file_order, resources.nranks)
    return _side(rows, shares, replace(arrays, hasher=reader))


def _written_side(rows: Rows, source: Side, nshards: int, resources: Resources) -> Side:
    """Who writes what: one rank a file, or whoever has read it."""
    if resources.writers == "shared":
        shares = shares_of_readers(rows.stored, rows.tensor, source.stored, source.tensor, source.rank)
        return _side(rows, shares, rows.arrays)
    owner = _owners(rows.arrays, nshards, resources)
    return _side(rows, whole_shares(rows.stored, owner[rows.array]), replace(rows.arrays, hasher=owner))


def _owners(arrays: ArrayTable, nshards: int, resources: Resources) -> Ints:
    """Of each array the rank that writes its file."""
    if nshards == resources.nranks or resources.writers == "nodes":
        return deal_in_order(nshards, resources.nranks)[arrays.file]
    nbytes = np.bincount(arrays.file, weights=arrays.nbytes, minlength=nshards).astype(np.int64)
    return deal_by_bytes(nbytes, resources.nranks)[arrays.file]


def _with_hashers(target: Side, source: Side, prefixes: Prefixes, nranks: int) -> Side:
    """Who computes the digest of each target array: its writer; where there are several, the reader of its beginning.

    Where nothing is known of the beginning, it is whoever has least to hash; where nothing is written, the owner of the file.
    """
    arrays = target.arrays
    least, most = np.full(len(arrays.file), nranks), np.full(len(arrays.file), -1)
    np.minimum.at(least, target.array, target.rank)
    np.maximum.at(most, target.array, target.rank)
    has_prefix, several = prefixes.source >= 0, least < most
    is_whole = has_prefix & (prefixes.nbytes == arrays.nbytes)
    is_known = is_whole & (source.arrays.nbytes[prefixes.source] == arrays.nbytes)
    reader = source.arrays.hasher[prefixes.source]
    hasher = np.where(has_prefix & several | is_whole, reader, np.where(most < 0, arrays.hasher, most))
    begins = has_prefix & (hasher == reader) & ~is_known
    begins_nbytes = np.where(begins, prefixes.nbytes, 0)
    left_nbytes = np.where(is_known, 0, arrays.nbytes - begins_nbytes)
    dealt = several & ~has_prefix
    busy = np.bincount(source.arrays.hasher, source.arrays.nbytes * source.arrays.has_digest, nranks)
    busy += np.bincount(hasher[~dealt], left_nbytes[~dealt], nranks)
    hasher[dealt] = deal_to_least(left_nbytes[dealt], nranks, busy.astype(np.int64))
    hasher[is_known] = NOBODY
    known = replace(
        arrays,
        digest=np.where(is_known[:, np.newaxis], source.arrays.digest[prefixes.source], arrays.digest),
        has_digest=is_known.astype(np.int64),
        hasher=hasher,
        begins_as=np.where(begins, prefixes.source, -1),
        begins_nbytes=begins_nbytes,
    )
    return replace(target, arrays=known)


def _side(rows: Rows, shares: Shares, arrays: ArrayTable) -> Side:
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
    first, number = equal_rows(tensor, rank, *boxes.start.T, *boxes.stop.T)
    return first[number]


def _crosses(source: Side, target: Side, nranks: int) -> np.ndarray:
    """Of each tensor, whether any rank writes what another has read. Compares what lies on the same rank alone."""
    ntensors = len(source.first) - 1
    own = np.flatnonzero(target.is_own)
    boxes, tensor, rank = target.stored.boxes.take(own), target.tensor[own], target.rank[own]
    i, j = join(source.stored.boxes, boxes, source.tensor * nranks + source.rank, tensor * nranks + rank)
    stays, lands = np.zeros(ntensors, np.int64), np.zeros(ntensors, np.int64)
    np.add.at(stays, tensor[j], meet(source.stored.boxes.take(i), boxes.take(j)).volume)
    np.add.at(lands, tensor, boxes.volume)
    return stays < lands


def _most_holders(target: Side) -> Ints:
    """Of each tensor, the most ranks that any byte of it is sent to."""
    own = np.flatnonzero(target.is_own)
    boxes, tensor = target.stored.boxes.take(own), target.tensor[own]
    first, number = equal_rows(tensor, *boxes.start.T, *boxes.stop.T)
    most = np.ones(len(target.first) - 1, np.int64)
    np.maximum.at(most, tensor[first], np.bincount(number, minlength=len(first)))
    return most


def _slabs_that_fit(
    tensors: Sequence[PlannedTensor], naxes: int, source: Side, target: Side, resources: Resources
) -> tuple[Slabs, list[Loads]]:
    """Slabs none of which costs a rank more than a round may, and what they cost: read, written, sent."""
    holders = _most_holders(target)
    limits = np.full(len(tensors), resources.round_nbytes)
    while True:
        slabs = cut_slabs(_slab_tensors(tensors, naxes, source, target, holders, limits, resources))
        read = _loads(slabs.boxes, slabs.tensor, source)
        sent = Loads(read.slab, read.rank, read.nbytes * holders[slabs.tensor[read.slab]])
        loads = [read, _loads(slabs.boxes, slabs.tensor, target), sent]
        beyond = [load.slab[load.nbytes > resources.round_nbytes] for load in loads]
        too_large = np.unique(slabs.tensor[np.concatenate(beyond)])
        if not len(too_large):
            return slabs, loads
        if limits[too_large].min() <= 1:
            least = BUFFERS * max(int(load.nbytes.max()) for load in loads)
            raise PlanningError(
                "--memory", f"a tensor is stored in too many small pieces; give at least {-(-least // 1024)}K"
            )
        # Many small pieces, or padding between them: each costs more than its bytes.
        limits[too_large] //= 2


def _slab_tensors(
    tensors: Sequence[PlannedTensor],
    naxes: int,
    source: Side,
    target: Side,
    holders: Ints,
    limits: Ints,
    resources: Resources,
) -> SlabTensors:
    """What the cuts of the tensors depend on."""
    own, in_order = np.flatnonzero(target.is_own), np.flatnonzero(target.is_alone[target.array])
    read = Held(source.stored.boxes, source.stored.stride, source.rank, source.tensor)
    written, tensor = target.stored.boxes, target.tensor
    ordered = None
    if resources.hashing:
        boxes = Boxes(*map(np.concatenate, zip(read.boxes, written.take(in_order), strict=True)))
        ordered = Ordered(boxes, np.concatenate([read.tensor, tensor[in_order]]))
    return SlabTensors(
        _shapes(tensors, naxes),
        read,
        Held(written.take(own), target.stored.stride[own], target.rank[own], tensor[own]),
        ordered,
        holders,
        np.maximum(limits - SPARE_NBYTES, 1),
    )


def _shapes(tensors: Sequence[PlannedTensor], naxes: int) -> Ints:
    """Of each tensor, in bytes, with as many axes as any has."""
    shapes = [(1,) * (naxes - len(planned.form.shape)) + planned.form.shape for planned in tensors]
    return np.array(shapes, np.int64).reshape(len(tensors), naxes)


def _taken(slabs: Slabs, index: Ints) -> Slabs:
    return Slabs(slabs.boxes.take(index), slabs.tensor[index], slabs.sequence[index])


def _loads_of(loads: Loads, slabs: Ints) -> Loads:
    """The loads of these slabs, which are numbered anew; `slabs` rise."""
    number = np.searchsorted(slabs, loads.slab)
    taken = np.flatnonzero(slabs[np.minimum(number, len(slabs) - 1)] == loads.slab) if len(slabs) else number[:0]
    return Loads(number[taken], loads.rank[taken], loads.nbytes[taken])


def _loads(slabs: Boxes, slab_tensor: Ints, side: Side) -> Loads:
    """What each rank reads or writes for each slab, in bytes of spans."""
    own = np.flatnonzero(side.is_own)
    slab, index = join(slabs, side.stored.boxes.take(own), slab_tensor, side.tensor[own])
    row = own[index]
    first, last = side.stored.spans(row, side.stored.parts(row, slabs.take(slab)))
    rank, file = side.rank[row], side.arrays.file[side.array[row]]
    order = np.lexsort((first, file, rank, slab))
    slab, rank, file, first, last = slab[order], rank[order], file[order], first[order], last[order]
    # What follows on in the file needs no alignment of its own.
    touches = (first[1:] == last[:-1]) & (file[1:] == file[:-1]) & (rank[1:] == rank[:-1]) & (slab[1:] == slab[:-1])
    nbytes = last - first + np.where(np.append(False, touches), 0, SPARE_NBYTES)
    begins = np.flatnonzero(np.append(True, (slab[1:] != slab[:-1]) | (rank[1:] != rank[:-1]))[: len(slab)])
    return Loads(slab[begins], rank[begins], np.add.reduceat(nbytes, begins) if len(begins) else nbytes)
