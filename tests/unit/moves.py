"""Random jobs as bytes: sources, what must become of them, and every round of a plan carried out in one process.

Files are bytearrays, messages are slices, and nothing is asked of MPI: `exchange` is imported for the copying of tiles alone.
"""

import hashlib
import math
import random
from bisect import bisect
from collections import defaultdict
from dataclasses import dataclass, field, replace

import numpy as np

from reshard_mpi.mpi.exchange import copy_tiles, packed
from reshard_mpi.plan.earlier import Earlier
from reshard_mpi.plan.plan import ArrayTable, Plan
from reshard_mpi.plan.planner import PlannedTensor, Resources, make_plan
from reshard_mpi.plan.rounds import RoundWork, Spans, expand_round
from reshard_mpi.plan.stored import Place, byte_form
from reshard_mpi.storage.digests import digest_row
from tests.reference import dtypes
from tests.reference.describe import SUB_BYTE_UNIT
from tests.reference.dice import Dice
from tests.unit.tilings import Shape, Tile, pad, rows, stored_bytes, tile, whole_cells

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
    needed: list[np.ndarray]  # how often each byte must be touched, per shard
    table: ArrayTable
    row_of: dict[tuple[int, int], int]  # (tensor, position in its list) -> array


def describe_tensors(
    dice: Dice, least: int = 0, most: int = 5, percent_padded: int = 30, by_rows: bool = False
) -> tuple[list[Tensor], int, int]:
    """Tensors with elements, and the numbers of source and of target shards; `by_rows`: sources are cut along axis 0 alone."""
    nsources, ntargets = dice.integer(1, 5), dice.integer(1, 5)
    tensors = []
    for _ in range(dice.integer(least, most)):
        dtype = dice.pick(["uint8", "bfloat16", "float32", "complex64", "float4_e2m1fn", "float6_e2m3fn"])
        unit = SUB_BYTE_UNIT.get(dtype, 1)
        shape = [dice.integer(1, 9) for _ in range(dice.pick([0, 1, 2, 2, 3, 4]))]
        if dice.chance(25) and not by_rows:
            shape = [1, *shape]
        if unit > 1:
            shape = [*shape[:-1], unit * dice.integer(1, 4)]
        shape = tuple(shape)
        padded = percent_padded if dice.chance(40) else 0
        pieces = rows(dice, shape, unit) if by_rows else tile(dice, shape, dice.pick([0, 60, 80]), unit)
        source = [(dice.integer(0, nsources - 1), pad(dice, piece, padded, unit)) for piece in pieces]
        target = []
        for piece in tile(dice, shape, dice.pick([0, 60, 80]), unit):
            target += [(shard, piece) for shard in dice.some(range(ntargets), 40) or [0]]
        tensors.append(Tensor(dtype, shape, source, target))
    return tensors, nsources, ntargets


@dataclass
class Job:
    """What is to be moved with which resources, and what must come of it."""

    tensors: list[Tensor]
    source: Stored
    target: Stored
    expected: list[bytes]
    resources: Resources

    def plan(self, earlier: Earlier | None = None) -> Plan:
        planned = []
        for index, tensor in enumerate(self.tensors):
            places = [Place(t.offset, t.extent, t.before, t.local_shape) for _, t in [*tensor.source, *tensor.target]]
            form = byte_form(tensor.shape, dtypes.bits(tensor.dtype), tuple(places))
            rows_of_sides = [
                np.array([side.row_of[index, position] for position in range(len(listed))], np.int64)
                for side, listed in ((self.source, tensor.source), (self.target, tensor.target))
            ]
            planned.append(PlannedTensor(form, *rows_of_sides))
        nshards = len(self.source.shards), len(self.target.shards)
        of_target = replace(self.target.table, has_digest=np.zeros_like(self.target.table.has_digest))
        return make_plan(planned, self.source.table, of_target, nshards, self.resources, earlier)

    def given(self, round_nbytes: int, **others: object) -> "Job":
        """The same job with other resources."""
        return replace(self, resources=replace(self.resources, round_nbytes=round_nbytes, **others))


def describe_job(dice: Dice, resources: Resources, tensors: list[Tensor], nsources: int, ntargets: int) -> Job:
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
    source, target = sides
    expected = [bytes(shard) for shard in target.shards]
    target.shards = [bytearray(bytes([GARBAGE]) * len(shard)) for shard in target.shards]
    return Job(tensors, source, target, expected, resources)


def _store(dice, noise, tensors, cells, listed, nshards) -> Stored:
    shards = [bytearray(bytes([GARBAGE]) * 8 * dice.integer(1, 3)) for _ in range(nshards)]
    needed: list[list[np.ndarray]] = [[np.zeros(len(shard), np.int64)] for shard in shards]
    places, row_of = [], {}
    for row, (shard, index, position, piece) in enumerate(sorted(dice.shuffled(listed), key=lambda item: item[0])):
        tensor = tensors[index]
        raw = stored_bytes(noise, tensor.dtype, cells[index], piece)
        places.append((shard, len(shards[shard]), len(raw)))
        row_of[index, position] = row
        shards[shard] += raw
        needed[shard].append(_box_mask(tensor.dtype, piece))
    table = table_of(places)
    rows = [digest_row("sha256:" + hashlib.sha256(shards[f][b : b + n]).hexdigest()) for f, b, n in places]
    table = replace(table, digest=np.array(rows, np.int64).reshape(-1, 4), has_digest=np.ones(len(rows), np.int64))
    return Stored(shards, [np.concatenate(parts) for parts in needed], table, row_of)


def table_of(places: list[tuple[int, int, int]]) -> ArrayTable:
    """Arrays at (file, begin, nbytes), without digests."""
    file, begin, nbytes = np.array(places, np.int64).reshape(len(places), 3).T.copy()
    return ArrayTable.of(file, begin, nbytes)


def _box_mask(dtype: str, piece: Tile) -> np.ndarray:
    """1 for every byte of a stored array that belongs to the box."""
    nbytes = dtypes.nelems(piece.local_shape) * dtypes.bits(dtype) // 8
    cells = dtypes.to_cells(bytes(nbytes), dtype, piece.local_shape).copy()
    cells[tuple(slice(b, b + e) for b, e in zip(piece.before, piece.extent, strict=True))] = 1
    return np.array(np.frombuffer(dtypes.to_bytes(cells, dtype), np.uint8) != 0, np.int64)


Touched = list[tuple[int, int, int]]  # (rank, first byte, byte after the last) in the order of the rounds


@dataclass
class Seen:
    """What a simulated run did, to be held against what it should have done."""

    read: list[np.ndarray]  # how often each byte was read, per shard
    written: list[np.ndarray]
    read_of: dict[int, Touched] = field(default_factory=lambda: defaultdict(list))  # per source array
    written_of: dict[int, Touched] = field(default_factory=lambda: defaultdict(list))
    sent_nbytes: int = 0
    copied_nbytes: int = 0


def carry_out(job: Job, plan: Plan, nrounds: int | None = None) -> Seen:
    """Every round of every rank, or the first ones; the target shards of the job are filled."""
    seen = Seen(
        [np.zeros(len(shard), np.int64) for shard in job.source.shards],
        [np.zeros(len(shard), np.int64) for shard in job.target.shards],
    )
    for number in range(plan.nrounds if nrounds is None else nrounds):
        work = [expand_round(plan, number, rank) for rank in range(plan.nranks)]
        _one_round(job, plan, work, seen)
    return seen


def _one_round(job: Job, plan: Plan, work: list[RoundWork], seen: Seen) -> None:
    size = plan.buffer_nbytes
    read_buffers, send_buffers, write_buffers = [], [], []
    for rank, mine in enumerate(work):
        assert mine.send_nbytes[rank] == 0 and mine.receive_nbytes[rank] == 0, "a message to oneself"
        assert mine.send_nbytes.sum() == mine.send.nbytes.sum()
        assert mine.receive_nbytes.sum() == mine.receive.nbytes.sum()
        amounts = {
            "reads": mine.read.buffer_nbytes,
            "writes": mine.write.buffer_nbytes,
            "sends": int(mine.send_nbytes.sum()),
            "receives": int(mine.receive_nbytes.sum()),
        }
        assert max(amounts.values()) <= size, f"rank {rank} {amounts} bytes in a round of {size}"
        seen.sent_nbytes += amounts["sends"]
        read_buffer, write_buffer, send_buffer = (np.full(size, GARBAGE, np.uint8) for _ in range(3))
        _read(job, rank, mine.read, read_buffer, seen)
        copy_tiles(read_buffer, mine.local_from, write_buffer, mine.local_to)
        copy_tiles(read_buffer, mine.send, send_buffer, packed(mine.send))
        read_buffers.append(read_buffer)
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
        _write(job, rank, mine, read_buffers[rank], write_buffers[rank], seen)


def _runs_of(spans: Spans, table: ArrayTable) -> list[tuple[int, int, int, int]]:
    """(file, offset, bytes, position) of each run: in file order, apart from each other, and around every span."""
    runs = spans.runs
    found = list(
        zip(runs.file.tolist(), runs.offset.tolist(), runs.nbytes.tolist(), runs.position.tolist(), strict=True)
    )
    assert found == sorted(found)
    assert all(a[0] < b[0] or a[1] + a[2] <= b[1] for a, b in zip(found, found[1:], strict=False))
    assert all(0 <= position and position + nbytes <= spans.buffer_nbytes for _, _, nbytes, position in found)
    columns = table.file[spans.array], spans.offset, spans.nbytes, spans.position
    for file, offset, nbytes, position in zip(*(column.tolist() for column in columns), strict=True):
        run_file, at, run_nbytes, start = found[bisect(found, (file, offset, math.inf)) - 1]
        assert (run_file, position - start) == (file, offset - at) and at <= offset, "a span that is in no run"
        assert offset + nbytes <= at + run_nbytes, "a span that is longer than its run"
    return found


def _touched(rank: int, spans: Spans, by_array: dict[int, Touched]) -> None:
    for array, offset, nbytes in zip(spans.array.tolist(), spans.offset.tolist(), spans.nbytes.tolist(), strict=True):
        by_array[array].append((rank, offset, offset + nbytes))


def _read(job: Job, rank: int, spans: Spans, buffer: np.ndarray, seen: Seen) -> None:
    taken = np.zeros(len(buffer), np.int64)
    for file, offset, nbytes, position in _runs_of(spans, job.source.table):
        seen.read[file][offset : offset + nbytes] += 1
        taken[position : position + nbytes] += 1
        buffer[position : position + nbytes] = np.frombuffer(job.source.shards[file], np.uint8)[offset:][:nbytes]
    assert taken.max(initial=0) <= 1, "two runs share a place in the buffer"
    _touched(rank, spans, seen.read_of)


def _write(job: Job, rank: int, work: RoundWork, read_buffer: np.ndarray, write_buffer: np.ndarray, seen: Seen) -> None:
    touched = []
    for spans, buffer in ((work.write, write_buffer), (work.straight, read_buffer)):
        for file, offset, nbytes, position in _runs_of(spans, job.target.table):
            seen.written[file][offset : offset + nbytes] += 1
            job.target.shards[file][offset : offset + nbytes] = buffer[position : position + nbytes].tobytes()
        touched += zip(spans.array.tolist(), spans.offset.tolist(), spans.nbytes.tolist(), strict=True)
    for array, offset, nbytes in sorted(touched):
        seen.written_of[array].append((rank, offset, offset + nbytes))
    copies = work.copy
    columns = copies.source_file, copies.source_offset, copies.file, copies.offset, copies.nbytes
    for source_file, source_offset, file, offset, nbytes in zip(*(column.tolist() for column in columns), strict=True):
        seen.read[source_file][source_offset : source_offset + nbytes] += 1
        seen.written[file][offset : offset + nbytes] += 1
        job.target.shards[file][offset : offset + nbytes] = job.source.shards[source_file][source_offset:][:nbytes]
        seen.copied_nbytes += nbytes
