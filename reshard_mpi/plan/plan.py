"""The redistribution plan: which rank reads what, in which round, and where every byte of it goes.

A plan is a value: int64 arrays, built without data, files or MPI, equal on every rank. It holds the stored boxes of both
sides, who reads and who writes them, and the slabs of every round; what one rank does in one round is expanded when it is due.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields

import numpy as np

from reshard_mpi.boxes import Boxes, Ints, join, meet
from reshard_mpi.plan.stored import StoredBoxes

# To read: one being filled, one in use, one being written from. To write: one being filled, one being written. One each to send
# and to receive.
READ_BUFFERS, WRITE_BUFFERS = 3, 2
BUFFERS = READ_BUFFERS + WRITE_BUFFERS + 2
CAST_BUFFERS = 1  # at most, to convert what is read
SHA256 = 1  # as `has_digest` says it
NOBODY = -1  # where a rank would stand


def buffers(casting: bool) -> int:
    """How many buffers a rank has; `casting`: is any array converted?"""
    return BUFFERS + CAST_BUFFERS * casting


@dataclass(frozen=True)
class ArrayTable:
    """Stored arrays of one side, in the order (file, begin): int64, one row an array.

    `digest` is a digest as four numbers; `has_digest` is 0 where there is none, else the number of its algorithm. `hasher` is
    the rank that computes it: on the way where it reads or writes all of the array itself, else by reading it back. Nobody
    computes that of a target array which is known beforehand. `begins_as` is the source array, read by the hasher, whose first
    `begins_nbytes` bytes are also the first of this one, or -1: its hash goes on from there. `converted_nbytes`: of the bytes
    that the file holds in place of these, in another dtype or order, and of which the digest is; 0 where it holds these.
    """

    file: Ints
    begin: Ints
    nbytes: Ints
    digest: Ints
    has_digest: Ints
    hasher: Ints
    begins_as: Ints
    begins_nbytes: Ints
    converted_nbytes: Ints

    @classmethod
    def of(
        cls,
        file: Ints,
        begin: Ints,
        nbytes: Ints,
        digest: Ints | None = None,
        has_digest: Ints | None = None,
        converted_nbytes: Ints | None = None,
    ) -> "ArrayTable":
        """Arrays that nobody has been chosen to hash yet; without `digest`, none is known."""
        none = np.zeros(len(file), np.int64)
        if digest is None or has_digest is None:
            digest, has_digest = np.zeros((len(file), 4), np.int64), none
        converted_nbytes = none if converted_nbytes is None else converted_nbytes
        return cls(file, begin, nbytes, digest, has_digest, none, none - 1, none, converted_nbytes)


@dataclass(frozen=True)
class Rows:
    """The boxes of one side, before they are divided between ranks."""

    stored: StoredBoxes
    array: Ints
    tensor: Ints
    ntensors: int
    arrays: ArrayTable


@dataclass(frozen=True)
class Side:
    """The boxes of one side, tensor by tensor: rows `first[t]:first[t + 1]` belong to tensor t.

    Row i lies in `array[i]` and is read or written by MPI rank `rank[i]`. `twin` is the first row with the same box of the
    same tensor on the same rank: its bytes serve for all of them.
    """

    stored: StoredBoxes
    array: Ints
    rank: Ints
    first: Ints
    twin: Ints
    arrays: ArrayTable

    @property
    def tensor(self) -> Ints:
        return np.repeat(np.arange(len(self.first) - 1), np.diff(self.first))

    @property
    def is_alone(self) -> np.ndarray:
        """Of each array, whether its hasher reads or writes all of it itself."""
        nothers = np.zeros(len(self.arrays.file), np.int64)
        np.add.at(nothers, self.array, self.rank != self.arrays.hasher[self.array])
        return nothers == 0

    @property
    def is_own(self) -> np.ndarray:
        """Rows that are their own twin: each byte that a rank holds, once."""
        return self.twin == np.arange(len(self.twin))


@dataclass(frozen=True)
class Plan:
    """Everything a rank needs to know. Slabs `round_first[k]:round_first[k + 1]` make round k.

    Slab i is the bytes from `slab_begin[i]` on of tensor `slab_tensor[i]`, in row-major order, as many as its volume.
    `round_crosses[k]`: does any rank send anything to another in round k? `hashing`: is every byte to be seen? No rank reads,
    sends, receives or writes more than `buffer_nbytes` in a round.
    """

    nranks: int
    buffer_nbytes: int
    hashing: int
    source: Side
    target: Side
    slabs: Boxes
    slab_tensor: Ints
    slab_begin: Ints
    round_first: Ints
    round_crosses: Ints

    @property
    def nrounds(self) -> int:
        return len(self.round_first) - 1

    @property
    def memory_nbytes(self) -> int:
        """Bytes of all buffers of a rank."""
        return buffers(bool(self.source.arrays.converted_nbytes.any())) * self.buffer_nbytes

    def round_slabs(self, number: int) -> slice:
        return slice(int(self.round_first[number]), int(self.round_first[number + 1]))


@dataclass(frozen=True)
class Traffic:
    """A matrix of bytes, (number of givers, number of takers) its shape, of which most is 0: `nbytes[i]` go from `giver[i]` to
    `taker[i]`. Sorted, each pair once.
    """

    shape: tuple[int, int]
    giver: Ints
    taker: Ints
    nbytes: Ints

    @property
    def sent(self) -> Ints:
        """Of what a giver gives, all but what it keeps."""
        away = self.giver != self.taker
        found = np.zeros(self.shape[0], np.int64)
        np.add.at(found, self.giver[away], self.nbytes[away])
        return found

    def matrix(self, shares: tuple[int, int] = (1, 1)) -> Ints:
        """With so many neighbouring givers as one, and so many takers."""
        nrows, ncolumns = (-(-count // share) for count, share in zip(self.shape, shares, strict=True))
        found = np.zeros((nrows, ncolumns), np.int64)
        np.add.at(found, (self.giver // shares[0], self.taker // shares[1]), self.nbytes)
        return found


def traffic(plan: Plan) -> Traffic:
    """Bytes that rank i brings to rank j; the diagonal never enters MPI."""
    own = np.flatnonzero(plan.target.is_own)
    return _nbytes_between(plan, own, plan.source.rank, plan.target.rank, (plan.nranks, plan.nranks))


def shard_traffic(plan: Plan, nshards: tuple[int, int]) -> Traffic:
    """Bytes of source shard i in target shard j, of so many shards, whichever ranks move them."""
    source, target = (side.arrays.file[side.array] for side in (plan.source, plan.target))
    return _nbytes_between(plan, np.arange(len(target)), source, target, nshards)


def _nbytes_between(plan: Plan, rows: Ints, giver: Ints, taker: Ints, shape: tuple[int, int]) -> Traffic:
    """Bytes that source and target rows have in common, of these target rows, summed by who gives and who takes them."""
    boxes = plan.target.stored.boxes.take(rows)
    i, j = join(plan.source.stored.boxes, boxes, plan.source.tensor, plan.target.tensor[rows])
    nbytes = meet(plan.source.stored.boxes.take(i), boxes.take(j)).volume
    pairs, pair = np.unique(giver[i] * shape[1] + taker[rows][j], return_inverse=True)
    total = np.zeros(len(pairs), np.int64)
    np.add.at(total, pair, nbytes)
    return Traffic(shape, *np.divmod(pairs, shape[1]), total)


def received(plan: Plan) -> Ints:
    """Bytes that each rank gets from others. Compares what lies on the same rank alone, so that it can be asked of any plan."""
    own = np.flatnonzero(plan.target.is_own)
    boxes, tensor, rank = plan.target.stored.boxes.take(own), plan.target.tensor[own], plan.target.rank[own]
    here = plan.source.tensor * plan.nranks + plan.source.rank
    i, j = join(plan.source.stored.boxes, boxes, here, tensor * plan.nranks + rank)
    found = np.zeros(plan.nranks, np.int64)
    np.add.at(found, rank, boxes.volume)
    np.subtract.at(found, rank[j], meet(plan.source.stored.boxes.take(i), boxes.take(j)).volume)
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

    def boxes() -> Boxes:
        return Boxes(next(rest), next(rest))  # type: ignore[arg-type]

    def side() -> Side:
        stored = StoredBoxes(boxes(), next(rest), next(rest))  # type: ignore[arg-type]
        array, rank, first, twin = (next(rest) for _ in range(4))
        return Side(stored, array, rank, first, twin, ArrayTable(*(next(rest) for _ in fields(ArrayTable))))  # type: ignore[arg-type]

    head, sides = (next(rest) for _ in range(3)), (side() for _ in range(2))
    return Plan(*head, *sides, boxes(), *(next(rest) for _ in range(4)))  # type: ignore[arg-type, call-arg]
