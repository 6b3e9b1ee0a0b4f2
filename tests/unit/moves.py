"""Random jobs as bytes: sources, what must become of them, and every round of a plan carried out in one process.

Files are bytearrays, messages are slices, and nothing is asked of MPI: `exchange` is imported for the copying of tiles alone.
"""

import random
from collections import defaultdict
from dataclasses import dataclass, field

import numpy as np

from reshard_mpi.plan.shares import assign_readers, assign_writers
from reshard_mpi.mpi.exchange import copy_tiles, packed
from reshard_mpi.plan.plan import ArrayTable, Plan, PlannedTensor, make_plan
from reshard_mpi.plan.rounds import RoundWork, Spans, expand_round
from reshard_mpi.plan.stored import Place, byte_form
from tests.reference import dtypes
from tests.reference.describe import SUB_BYTE_UNIT
from tests.reference.dice import Dice
from tests.unit.tilings import Shape, Tile, pad, stored_bytes, tile, whole_cells

GARBAGE = 0xA5


@dataclass
class Tensor:
    """A tensor as bytes: `source` and `target` list (shard, tile); a target tile may stand in several shards."""

    dtype: str
    shape: Shape
    source: list[tuple[int, Tile]]
    target: list[tuple[int, Tile]]


@dataclass
class Stored:
    """The shards of one side, and its arrays in the order (shard, begin)."""

    shards: list[bytearray]
    needed: list[np.ndarray] = field(default_factory=list)  # how often each byte must be touched, per shard
    table: ArrayTable | None = None
    row_of: dict[tuple[int, int], int] = field(default_factory=dict)  # (tensor, position in its list) -> array


def describe_tensors(dice: Dice, most: int = 5, percent_padded: int = 30) -> tuple[list[Tensor], int, int]:
    """Tensors with elements, and the numbers of source and of target shards."""
    nsources, ntargets = dice.integer(1, 5), dice.integer(1, 5)
    tensors = []
    for _ in range(dice.integer(0, most)):
        dtype = dice.pick(["uint8", "bfloat16", "float32", "complex64", "float4_e2m1fn", "float6_e2m3fn"])
        unit = SUB_BYTE_UNIT.get(dtype, 1)
        shape = [dice.integer(1, 9) for _ in range(dice.pick([0, 1, 2, 2, 3, 4]))]
        if dice.chance(25):
            shape = [1, *shape]
        if unit > 1:
            shape = [*shape[:-1], unit * dice.integer(1, 4)]
        shape = tuple(shape)
        padded = percent_padded if dice.chance(40) else 0
        source = [
            (dice.integer(0, nsources - 1), pad(dice, piece, padded, unit))
            for piece in tile(dice, shape, dice.pick([0, 60, 80]), unit)
        ]
        target = []
        for piece in tile(dice, shape, dice.pick([0, 60, 80]), unit):
            target += [(shard, piece) for shard in dice.some(range(ntargets), 40) or [0]]
        tensors.append(Tensor(dtype, shape, source, target))
    return tensors, nsources, ntargets


@dataclass
class Job:
    """What is to be moved, and what must come of it."""

    tensors: list[Tensor]
    source: Stored
    target: Stored
    expected: list[bytes]
    nranks: int
    round_nbytes: int

    def plan(self) -> Plan:
        planned = []
        for index, tensor in enumerate(self.tensors):
            places = [Place(t.offset, t.extent, t.before, t.local_shape) for _, t in [*tensor.source, *tensor.target]]
            form = byte_form(tensor.shape, dtypes.bits(tensor.dtype), tuple(places))
            rows = [
                tuple(side.row_of[index, position] for position in range(len(listed)))
                for side, listed in ((self.source, tensor.source), (self.target, tensor.target))
            ]
            planned.append(PlannedTensor(form, *rows))
        return make_plan(planned, self.source.table, self.target.table, self.nranks, self.round_nbytes)


def describe_job(
    dice: Dice, nranks: int, round_nbytes: int, tensors: list[Tensor], nsources: int, ntargets: int
) -> Job:
    """Shards with these tensors: arrays in an order of the dice, here and there a gap as a header would leave one."""
    noise = random.Random(dice.integer(0, 1 << 30))
    cells = [whole_cells(noise, tensor.dtype, tensor.shape) for tensor in tensors]
    sides = []
    for nshards, side in ((nsources, "source"), (ntargets, "target")):
        listed = [
            (shard, index, position, piece)
            for index, tensor in enumerate(tensors)
            for position, (shard, piece) in enumerate(getattr(tensor, side))
        ]
        sides.append(_store(dice, noise, tensors, cells, listed, nshards))
    (source, _), (target, expected) = sides
    target.shards = [bytearray(bytes([GARBAGE]) * len(shard)) for shard in target.shards]
    for stored, nshards, assign in ((source, nsources, assign_readers), (target, ntargets, assign_writers)):
        file, begin, nbytes = stored.table
        none = np.zeros(len(file), np.int64)
        stored.table = ArrayTable(
            file, begin, nbytes, assign(file, nbytes, nshards, nranks), np.zeros((len(file), 4), np.int64), none
        )
    return Job(tensors, source, target, expected, nranks, round_nbytes)


def _store(dice, noise, tensors, cells, listed, nshards) -> tuple[Stored, list[bytes]]:
    stored = Stored([bytearray(bytes([GARBAGE]) * 8 * dice.integer(1, 3)) for _ in range(nshards)])
    needed: list[list[np.ndarray]] = [[np.zeros(len(shard), np.int64)] for shard in stored.shards]
    rows = []
    for row, (shard, index, position, piece) in enumerate(sorted(dice.shuffled(listed), key=lambda item: item[0])):
        tensor = tensors[index]
        raw = stored_bytes(noise, tensor.dtype, cells[index], piece)
        rows.append((shard, len(stored.shards[shard]), len(raw)))
        stored.row_of[index, position] = row
        stored.shards[shard] += raw
        needed[shard].append(_box_mask(tensor.dtype, piece))
    stored.needed = [np.concatenate(parts) for parts in needed]
    columns = np.array(rows, np.int64).reshape(len(rows), 3)
    stored.table = tuple(columns[:, k].copy() for k in range(3))
    return stored, [bytes(shard) for shard in stored.shards]


def _box_mask(dtype: str, piece: Tile) -> np.ndarray:
    """1 for every byte of a stored array that belongs to the box."""
    nbytes = dtypes.nelems(piece.local_shape) * dtypes.bits(dtype) // 8
    cells = dtypes.to_cells(bytes(nbytes), dtype, piece.local_shape).copy()
    cells[tuple(slice(b, b + e) for b, e in zip(piece.before, piece.extent, strict=True))] = 1
    return np.array(np.frombuffer(dtypes.to_bytes(cells, dtype), np.uint8) != 0, np.int64)


@dataclass
class Seen:
    """What a simulated run did, to be held against what it should have done."""

    read: list[np.ndarray]
    written: list[np.ndarray]
    rounds: int = 0
    most_nbytes: int = 0
    sent_nbytes: int = 0


def carry_out(job: Job, plan: Plan) -> Seen:
    """Every round of every rank; the target shards of the job are filled."""
    seen = Seen(
        [np.zeros(len(shard), np.int64) for shard in job.source.shards],
        [np.zeros(len(shard), np.int64) for shard in job.target.shards],
    )
    for number in range(plan.nrounds):
        work = [expand_round(plan, number, rank) for rank in range(plan.nranks)]
        _one_round(job, plan, work, seen)
    seen.rounds = plan.nrounds
    return seen


def _one_round(job: Job, plan: Plan, work: list[RoundWork], seen: Seen) -> None:
    size = plan.buffer_nbytes
    send_buffers, write_buffers = [], []
    for rank, mine in enumerate(work):
        assert mine.send_nbytes[rank] == 0 and mine.receive_nbytes[rank] == 0, "a message to oneself"
        assert (
            mine.send_nbytes.sum() == mine.send.nbytes.sum() and mine.receive_nbytes.sum() == mine.receive.nbytes.sum()
        )
        amounts = (
            mine.read.buffer_nbytes,
            mine.write.buffer_nbytes,
            int(mine.send_nbytes.sum()),
            int(mine.receive_nbytes.sum()),
            int(mine.read.nbytes.sum()),
        )
        assert max(amounts) <= size, f"rank {rank} moves {amounts} bytes in a round of {size}"
        seen.most_nbytes = max(seen.most_nbytes, *amounts)
        seen.sent_nbytes += int(mine.send_nbytes.sum())
        read_buffer, write_buffer, send_buffer = (np.full(size, GARBAGE, np.uint8) for _ in range(3))
        _read(job, mine.read, read_buffer, seen)
        copy_tiles(read_buffer, mine.local_from, write_buffer, mine.local_to)
        copy_tiles(read_buffer, mine.send, send_buffer, packed(mine.send))
        send_buffers.append(send_buffer)
        write_buffers.append(write_buffer)
    messages = defaultdict(bytes)
    for rank, mine in enumerate(work):
        ends = np.cumsum(mine.send_nbytes)
        for to, end in enumerate(ends.tolist()):
            messages[rank, to] = send_buffers[rank][end - int(mine.send_nbytes[to]) : end].tobytes()
    for rank, mine in enumerate(work):
        arrived = [messages[source, rank] for source in range(plan.nranks)]
        assert [len(message) for message in arrived] == mine.receive_nbytes.tolist(), "sizes of messages disagree"
        receive_buffer = np.full(size, GARBAGE, np.uint8)
        joined = np.frombuffer(b"".join(arrived), np.uint8)
        receive_buffer[: len(joined)] = joined
        copy_tiles(receive_buffer, packed(mine.receive), write_buffers[rank], mine.receive)
        _write(job, mine.write, write_buffers[rank], seen)


def _each(spans: Spans):
    columns = (spans.array, spans.file, spans.offset, spans.nbytes, spans.position)
    return zip(*(column.tolist() for column in columns), strict=True)


def _read(job: Job, spans: Spans, buffer: np.ndarray, seen: Seen) -> None:
    taken = np.zeros(len(buffer), np.int64)
    for array, file, offset, nbytes, position in _each(spans):
        assert file == job.source.table.file[array]
        assert position + nbytes <= spans.buffer_nbytes
        seen.read[file][offset : offset + nbytes] += 1
        taken[position : position + nbytes] += 1
        buffer[position : position + nbytes] = np.frombuffer(job.source.shards[file], np.uint8)[offset:][:nbytes]
    assert taken.max(initial=0) <= 1, "two spans share a place in the buffer"


def _write(job: Job, spans: Spans, buffer: np.ndarray, seen: Seen) -> None:
    for array, file, offset, nbytes, position in _each(spans):
        assert file == job.target.table.file[array]
        assert position + nbytes <= spans.buffer_nbytes
        seen.written[file][offset : offset + nbytes] += 1
        job.target.shards[file][offset : offset + nbytes] = buffer[position : position + nbytes].tobytes()
