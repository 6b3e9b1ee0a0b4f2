"""The redistribution plan: which rank reads what, in which round, and where every byte of it goes.

A plan is a value: int64 arrays, built without data, files or MPI, equal on every rank. It holds the stored boxes of both
sides, who reads and who writes them, and the slabs of every round; what one rank does in one round is expanded when it is due.

    tensor   |--slab 0--|--slab 1--|--slab 2--|--...      a slab is contiguous in every stored box
    rounds    0          0          1                     no rank reads or writes more than round_nbytes in a round

Slabs of one tensor are read in order, so that a source fragment passes its reader, and a target fragment its writer, front to
back: its SHA-256 is computed on the way. In a round every reader is given about equally much, from different tensors.
"""

import heapq
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields

import numpy as np

from reshard_mpi.boxes import Boxes, Ints, join, meet
from reshard_mpi.errors import PlanningError
from reshard_mpi.stored import ByteForm, StoredBoxes, padded_to

# Two buffers each to read and to write (one in use, one being filled or emptied), one each to send and to receive.
BUFFERS = 6
LEAST_ROUND_NBYTES = 1 << 14
MOST_ROUND_NBYTES = 1 << 28  # counts and displacements of a round stay far below 2**31
SPARE_NBYTES = 16  # a span may be moved by this much in its buffer to keep the alignment it has in its file


@dataclass(frozen=True)
class ArrayTable:
    """Stored arrays of one side, in the order (file, begin): int64, one row an array.

    `rank` reads or writes it; `digest` is a SHA-256 as four numbers, meaningful where `has_digest`.
    """

    file: Ints
    begin: Ints
    nbytes: Ints
    rank: Ints
    digest: Ints
    has_digest: Ints


@dataclass(frozen=True)
class Side:
    """The stored boxes of one side, tensor by tensor: box rows `first[t]:first[t + 1]` belong to tensor t, `array` holds them.

    `twin` is the first row with the same box of the same tensor on the same MPI rank: its bytes serve for all of them.
    """

    stored: StoredBoxes
    array: Ints
    first: Ints
    twin: Ints
    arrays: ArrayTable

    @property
    def rank(self) -> Ints:
        """The MPI rank that reads or writes each box."""
        return self.arrays.rank[self.array]

    @property
    def tensor(self) -> Ints:
        return np.repeat(np.arange(len(self.first) - 1), np.diff(self.first))


@dataclass(frozen=True)
class Plan:
    """Everything a rank needs to know. Slabs `round_first[k]:round_first[k + 1]` make round k.

    No rank reads, sends, receives or writes more than `buffer_nbytes` in a round.
    """

    nranks: int
    buffer_nbytes: int
    source: Side
    target: Side
    slabs: Boxes
    slab_tensor: Ints
    round_first: Ints

    @property
    def nrounds(self) -> int:
        return len(self.round_first) - 1

    @property
    def memory_nbytes(self) -> int:
        """Bytes of all buffers of a rank."""
        return BUFFERS * self.buffer_nbytes

    def round_slabs(self, number: int) -> slice:
        return slice(int(self.round_first[number]), int(self.round_first[number + 1]))


@dataclass(frozen=True)
class PlannedTensor:
    """One tensor with elements: in bytes, its source boxes and then its target boxes; and the arrays that hold them."""

    form: ByteForm
    source_arrays: tuple[int, ...]
    target_arrays: tuple[int, ...]


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
    nranks: int,
    round_nbytes: int,
) -> Plan:
    """The plan that moves every target box's bytes, `round_nbytes` a rank and round."""
    naxes = max((len(tensor.form.shape) for tensor in tensors), default=1)
    source = _side(tensors, naxes, source_arrays, target=False)
    target = _side(tensors, naxes, target_arrays, target=True)
    holders = _most_holders(target)
    slabs, slab_tensor, sequence = _cut_slabs(tensors, source, target, naxes, round_nbytes, holders)
    slab, reader, nbytes = _loads(slabs, slab_tensor, source)
    sent = (slab, reader, nbytes * holders[slab_tensor[slab]])
    loads = [(slab, reader, nbytes), _loads(slabs, slab_tensor, target), sent]
    rounds, buffer_nbytes = _deal_rounds(loads, sequence, nranks, round_nbytes)
    order = np.array([slab for members in rounds for slab in sorted(members)], np.int64)
    round_first = np.cumsum([0, *map(len, rounds)])
    return Plan(nranks, buffer_nbytes, source, target, slabs.take(order), slab_tensor[order], round_first)


def _side(tensors: Sequence[PlannedTensor], naxes: int, arrays: ArrayTable, target: bool) -> Side:
    start, stop, stride, offset, count = [], [], [], [], []
    array: list[int] = []
    for tensor in tensors:
        nsources = len(tensor.source_arrays)
        rows = slice(nsources, None) if target else slice(0, nsources)
        form, named = tensor.form, tensor.target_arrays if target else tensor.source_arrays
        start.append(padded_to(naxes, form.boxes.start[rows], 0))
        stop.append(padded_to(naxes, form.boxes.stop[rows], 1))
        stride.append(_with_leading_strides(naxes, form.boxes.take(rows), form.stride[rows]))
        offset.append(form.lead[rows] + arrays.begin[list(named)])
        array += named
        count.append(len(named))

    def stacked(columns: list[Ints]) -> Ints:
        return np.concatenate(columns) if columns else np.empty((0, naxes), np.int64)

    boxes = Boxes(stacked(start), stacked(stop))
    stored = StoredBoxes(boxes, stacked(stride), np.concatenate(offset) if offset else np.empty(0, np.int64))
    held_by = np.array(array, np.int64)
    return Side(
        stored,
        held_by,
        np.cumsum([0, *count]),
        _twins(boxes, np.repeat(np.arange(len(count)), count), arrays.rank[held_by]),
        arrays,
    )


def _with_leading_strides(naxes: int, boxes: Boxes, stride: Ints) -> Ints:
    """On the axes that are put in front, of size 1, a step is as long as the span of the whole box."""
    span = ((boxes.stop - boxes.start - 1) * stride).sum(axis=1, keepdims=True) + 1
    return np.concatenate([np.repeat(span, naxes - stride.shape[1], axis=1), stride], axis=1)


def _twins(boxes: Boxes, tensor: Ints, rank: Ints) -> Ints:
    columns = np.column_stack([tensor, rank, boxes.start, boxes.stop])
    _, first, numbered = np.unique(columns, axis=0, return_index=True, return_inverse=True)
    return first[numbered].astype(np.int64)


def _most_holders(target: Side) -> Ints:
    """Of each tensor, the most ranks that any byte of it is sent to."""
    own = target.twin == np.arange(len(target.twin))
    boxes = np.column_stack([target.tensor, target.stored.boxes.start, target.stored.boxes.stop])[own]
    distinct, count = np.unique(boxes, axis=0, return_counts=True)
    most = np.ones(len(target.first) - 1, np.int64)
    np.maximum.at(most, distinct[:, 0], count)
    return most


def _cut_slabs(
    tensors: Sequence[PlannedTensor], source: Side, target: Side, naxes: int, round_nbytes: int, holders: Ints
) -> tuple[Boxes, Ints, Ints]:
    """Slabs of all tensors, tensor by tensor and in order; the tensor and the sequence of each.

    A sequence is a run of slabs to be kept in order: rows that some source or target box holds together.
    """
    start, stop, tensor_of, sequence_of = [], [], [], []
    nsequences = 0
    for index, tensor in enumerate(tensors):
        shape = (1,) * (naxes - len(tensor.form.shape)) + tensor.form.shape
        boxes = [side.stored.boxes.take(slice(side.first[index], side.first[index + 1])) for side in (source, target)]
        both = Boxes(np.concatenate([boxes[0].start, boxes[1].start]), np.concatenate([boxes[0].stop, boxes[1].stop]))
        usable = max(
            round_nbytes // int(holders[index]) - SPARE_NBYTES * len(both.start),
            round_nbytes // (2 * int(holders[index])),
            1,
        )
        axis, row_nbytes = _slab_axis(
            shape, boxes[0], source.stored.stride[source.first[index] : source.first[index + 1]], usable
        )
        bands = _bands(both, axis) if math.prod(shape[:axis]) == 1 else [0]
        cuts = _row_cuts(shape[axis], max(usable // row_nbytes, 1), np.unique(boxes[0].start[:, axis]).tolist())
        for prefix in np.ndindex(*shape[:axis]):
            band = 0
            for first, last in zip(cuts, cuts[1:], strict=False):
                while band + 1 < len(bands) and bands[band + 1] <= first:
                    band += 1
                start.append((*prefix, first, *(0,) * (naxes - axis - 1)))
                stop.append((*(i + 1 for i in prefix), last, *shape[axis + 1 :]))
                tensor_of.append(index)
                sequence_of.append(nsequences + band)
        nsequences += len(bands)
    slabs = Boxes(*(np.array(side, np.int64).reshape(-1, naxes) for side in (start, stop)))
    return slabs, np.array(tensor_of, np.int64), np.array(sequence_of, np.int64)


def _slab_axis(shape: tuple[int, ...], sources: Boxes, stride: Ints, round_nbytes: int) -> tuple[int, int]:
    """The first axis of which one row fits into a round, and the most bytes that reading a row can cost a rank."""
    for axis in range(len(shape)):
        row_nbytes = math.prod(shape[axis + 1 :])
        tight = np.prod(sources.stop[:, axis + 1 :] - sources.start[:, axis + 1 :], axis=1)
        if np.any(stride[:, axis] != tight):  # stored padding is read too: of all boxes that share a row, at the worst
            row_nbytes = max(row_nbytes, _busiest_row(sources, stride, axis))
        if row_nbytes <= round_nbytes:
            break
    return axis, row_nbytes


def _busiest_row(boxes: Boxes, stride: Ints, axis: int) -> int:
    cuts, numbered = np.unique(np.concatenate([boxes.start[:, axis], boxes.stop[:, axis]]), return_inverse=True)
    change = np.zeros(len(cuts), np.int64)
    np.add.at(change, numbered[: len(stride)], stride[:, axis])
    np.add.at(change, numbered[len(stride) :], -stride[:, axis])
    return int(np.cumsum(change).max())


def _bands(boxes: Boxes, axis: int) -> list[int]:
    """The rows at which no box is cut in two: each band of rows between them can be moved by itself."""
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


def _loads(slabs: Boxes, slab_tensor: Ints, side: Side) -> tuple[Ints, Ints, Ints]:
    """(slab, rank, bytes) triples in the order of the slabs: what a rank reads or writes for a slab."""
    own = np.flatnonzero(side.twin == np.arange(len(side.twin)))
    slab, index = join(slabs, side.stored.boxes.take(own), slab_tensor, side.tensor[own])
    row = own[index]
    first, last = side.stored.spans(row, side.stored.parts(row, slabs.take(slab)))
    rank, nranks = side.rank[row], int(side.rank.max(initial=0)) + 1
    pairs, numbered = np.unique(slab * nranks + rank, return_inverse=True)
    nbytes = np.zeros(len(pairs), np.int64)
    np.add.at(nbytes, numbered, last - first + SPARE_NBYTES)
    return *np.divmod(pairs, nranks), nbytes


def _deal_rounds(
    loads: Sequence[tuple[Ints, Ints, Ints]], sequence: Ints, nranks: int, round_nbytes: int
) -> tuple[list[list[int]], int]:
    """The slabs of each round, and the most bytes of any rank in any.

    Slabs of one sequence stay in order; the least busy reader is served first.
    """
    nslabs = len(sequence)
    per_side = [_by_slab(nslabs, *load) for load in loads]
    main_reader = [int(ranks[np.argmax(nbytes)]) for ranks, nbytes in per_side[0]]
    last_of = np.flatnonzero(np.append(sequence[1:] != sequence[:-1], True)).tolist() if nslabs else []
    waiting: dict[int, list[tuple[int, int]]] = {}  # reader -> heap of (next slab, last slab of its sequence)
    for first, last in zip([0, *(slab + 1 for slab in last_of)], last_of, strict=False):
        heapq.heappush(waiting.setdefault(main_reader[first], []), (first, last))
    rounds, most = [], 0
    while waiting:
        busy = [np.zeros(nranks, np.int64) for _ in per_side]
        members: list[int] = []
        open_readers = [(0, reader) for reader in sorted(waiting)]
        while open_readers:
            _, reader = heapq.heappop(open_readers)
            slab, last = waiting[reader][0]
            parts = [side[slab] for side in per_side]
            if members and any(
                np.any(load[ranks] + nbytes > round_nbytes) for load, (ranks, nbytes) in zip(busy, parts, strict=True)
            ):
                continue  # nothing more of this reader in this round
            for load, (ranks, nbytes) in zip(busy, parts, strict=True):
                load[ranks] += nbytes
            members.append(slab)
            heapq.heappop(waiting[reader])
            if slab < last:
                following = main_reader[slab + 1]
                if following not in waiting or (not waiting[following] and following != reader):
                    heapq.heappush(open_readers, (int(busy[0][following]), following))
                heapq.heappush(waiting.setdefault(following, []), (slab + 1, last))
            if waiting[reader]:
                heapq.heappush(open_readers, (int(busy[0][reader]), reader))
        waiting = {reader: heap for reader, heap in waiting.items() if heap}
        rounds.append(members)
        most = max(most, *(int(load.max()) for load in busy))
    return rounds, most


def _by_slab(nslabs: int, slab: Ints, rank: Ints, nbytes: Ints) -> list[tuple[Ints, Ints]]:
    first = np.searchsorted(slab, np.arange(nslabs + 1)).tolist()
    return [(rank[a:b], nbytes[a:b]) for a, b in zip(first, first[1:], strict=False)]


def traffic(plan: Plan) -> Ints:
    """Bytes that rank i brings to rank j, shape (nranks, nranks); the diagonal never enters MPI."""
    own = np.flatnonzero(plan.target.twin == np.arange(len(plan.target.twin)))
    boxes = plan.target.stored.boxes.take(own)
    i, j = join(plan.source.stored.boxes, boxes, plan.source.tensor, plan.target.tensor[own])
    nbytes = meet(plan.source.stored.boxes.take(i), boxes.take(j)).volume
    found = np.zeros((plan.nranks, plan.nranks), np.int64)
    np.add.at(found, (plan.source.rank[i], plan.target.rank[own][j]), nbytes)
    return found


def plan_arrays(value: object) -> Iterator[Ints | int]:
    """The numbers that a plan (or a part of one) is made of, in the order of its fields."""
    if isinstance(value, int | np.ndarray):
        yield value
    else:
        parts = value if isinstance(value, tuple) else [getattr(value, field.name) for field in fields(value)]  # type: ignore[arg-type]
        for part in parts:
            yield from plan_arrays(part)


def plan_from_arrays(values: Sequence[Ints | int]) -> Plan:
    """The plan whose `plan_arrays` are `values`."""
    rest = iter(values)

    def side() -> Side:
        stored = StoredBoxes(Boxes(next(rest), next(rest)), next(rest), next(rest))  # type: ignore[arg-type]
        return Side(stored, next(rest), next(rest), next(rest), ArrayTable(*(next(rest) for _ in fields(ArrayTable))))  # type: ignore[arg-type]

    return Plan(next(rest), next(rest), side(), side(), Boxes(next(rest), next(rest)), next(rest), next(rest))  # type: ignore[arg-type]
