"""The exchange of one round, with rounds made by hand: each tile lands where it belongs, and nowhere else."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import pytest
from mpi4py import MPI

from reshard_mpi.mpi.exchange import Exchanger
from reshard_mpi.plan.rounds import CastParts, Copies, RoundWork, Spans, Tiles
from tests.mpi.together import faults_of_all, unequal

BUFFER_NBYTES = 1 << 14
UNTOUCHED = 255


class Tile(NamedTuple):
    """A box of bytes on its way: where it lies in the buffers of its sender and its receiver."""

    sender: int
    receiver: int
    shape: tuple[int, ...]
    from_position: int
    from_stride: tuple[int, ...]
    to_position: int
    to_stride: tuple[int, ...]


def strides(shape: Sequence[int], gap: int) -> tuple[int, ...]:
    """Row-major, with `gap` bytes more in a row."""
    found = [1]
    for extent in reversed(shape[1:]):
        found.insert(0, found[0] * extent + (gap if len(found) == 1 else 0))
    return tuple(found)


def placed(routes: Sequence[tuple[int, int, tuple[int, ...]]], *, unit: int) -> list[Tile]:
    """Tiles one after the other in both buffers, with other gaps there than here; all numbers are multiples of `unit`."""
    tiles, read, written = [], {}, {}
    for sender, receiver, shape in routes:
        from_stride, to_stride = strides(shape, 3 * unit), strides(shape, 5 * unit)
        from_position, to_position = read.get(sender, unit), written.get(receiver, 2 * unit)
        tiles.append(Tile(sender, receiver, shape, from_position, from_stride, to_position, to_stride))
        read[sender] = from_position + shape[0] * from_stride[0] + unit
        written[receiver] = to_position + shape[0] * to_stride[0] + unit
    return tiles


def every_pair(size: int, shape: tuple[int, ...]) -> list[tuple[int, int, tuple[int, ...]]]:
    return [(sender, receiver, shape) for sender in range(size) for receiver in range(size)]


ROUTES = [
    # why, unit of all positions and strides, routes for so many ranks
    ("nothing at all", 1, lambda size: []),
    ("to oneself alone", 1, lambda size: [(rank, rank, (3, 5)) for rank in range(size)]),
    ("one byte", 1, lambda size: every_pair(size, (1, 1))),
    ("odd rows", 1, lambda size: every_pair(size, (3, 5))),
    ("three axes", 1, lambda size: every_pair(size, (2, 3, 7))),
    ("units of two bytes", 2, lambda size: every_pair(size, (3, 6))),
    ("units of eight bytes", 8, lambda size: every_pair(size, (4, 16))),
    ("one axis of one element", 8, lambda size: every_pair(size, (1, 8, 1))),
    ("several for one pair", 1, lambda size: every_pair(size, (2, 3)) + every_pair(size, (1, 4)) * 2),
    ("each to the next", 1, lambda size: [(rank, (rank + 1) % size, (2 + rank, 3)) for rank in range(size)]),
    ("a rank that sends nothing", 1, lambda size: [r for r in every_pair(size, (2, 3)) if r[0] != size - 1]),
    ("a rank that gets nothing", 1, lambda size: [r for r in every_pair(size, (2, 3)) if r[1] != 0]),
    ("one rank has it all", 1, lambda size: [(0, rank, (5, 7 + rank)) for rank in range(size)]),
]


class Watched:
    """Stands for a communicator, and notes what enters MPI."""

    def __init__(self, comm: MPI.Intracomm):
        self._comm = comm
        self.counts: list[tuple[list[int], list[int]]] = []

    def Ialltoallv(self, send: list[Any], receive: list[Any]) -> MPI.Request:
        self.counts.append((list(send[1][0]), list(receive[1][0])))
        return self._comm.Ialltoallv(send, receive)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._comm, name)


def here(tiles: Sequence[Tile], naxes: int) -> Tiles:
    return Tiles(
        np.array([tile.from_position for tile in tiles], np.int64),
        np.array([tile.from_stride for tile in tiles], np.int64).reshape(-1, naxes),
        np.array([tile.shape for tile in tiles], np.int64).reshape(-1, naxes),
    )


def there(tiles: Sequence[Tile], naxes: int) -> Tiles:
    return Tiles(
        np.array([tile.to_position for tile in tiles], np.int64),
        np.array([tile.to_stride for tile in tiles], np.int64).reshape(-1, naxes),
        np.array([tile.shape for tile in tiles], np.int64).reshape(-1, naxes),
    )


def work_of(tiles: Sequence[Tile], naxes: int, rank: int, nranks: int) -> RoundWork:
    """The part of `rank`; messages hold tiles by rank, then in the order of `tiles`."""
    own = [tile for tile in tiles if tile.sender == rank == tile.receiver]
    sends = sorted((t for t in tiles if t.sender == rank != t.receiver), key=lambda t: t.receiver)
    receives = sorted((t for t in tiles if t.receiver == rank != t.sender), key=lambda t: t.sender)
    none = Spans(*(np.empty(0, np.int64) for _ in range(5)), 0)
    return RoundWork(
        crosses=any(tile.sender != tile.receiver for tile in tiles),
        read=none,
        local_from=here(own, naxes),
        local_to=there(own, naxes),
        send=here(sends, naxes),
        send_nbytes=nbytes_by_rank([t.receiver for t in sends], sends, nranks),
        receive=there(receives, naxes),
        receive_nbytes=nbytes_by_rank([t.sender for t in receives], receives, nranks),
        write=none,
        straight=none,
        copy=Copies(*(np.empty(0, np.int64) for _ in range(5))),
        cast=CastParts(here([], naxes), np.empty(0, np.int64)),
    )


def nbytes_by_rank(ranks: Sequence[int], tiles: Sequence[Tile], nranks: int) -> np.ndarray:
    found = np.zeros(nranks, np.int64)
    for rank, tile in zip(ranks, tiles, strict=True):
        found[rank] += np.prod(tile.shape)
    return found


def read_buffer(rank: int, number: int) -> np.ndarray:
    """Bytes that tell ranks, rounds and places apart; none is UNTOUCHED."""
    return np.random.default_rng([rank, number]).integers(0, UNTOUCHED, BUFFER_NBYTES, dtype=np.uint8)


def view(buffer: np.ndarray, position: int, stride: tuple[int, ...], shape: tuple[int, ...]) -> np.ndarray:
    return np.lib.stride_tricks.as_strided(buffer[position:], shape, stride)


def expected_buffer(tiles: Sequence[Tile], rank: int, number: int) -> np.ndarray:
    expected = np.full(BUFFER_NBYTES, UNTOUCHED, np.uint8)
    for tile in tiles:
        if tile.receiver == rank:
            sent = view(read_buffer(tile.sender, number), tile.from_position, tile.from_stride, tile.shape)
            view(expected, tile.to_position, tile.to_stride, tile.shape)[...] = sent
    return expected


@pytest.mark.parametrize(("why", "unit", "routes_for"), ROUTES, ids=[why for why, _, _ in ROUTES])
def test_tiles_land_where_they_belong_and_none_to_oneself_enters_mpi(comm, why, unit, routes_for):
    routes = routes_for(comm.size)
    tiles = placed(routes, unit=unit)
    naxes = len(routes[0][2]) if routes else 2
    work = work_of(tiles, naxes, comm.rank, comm.size)
    watched = Watched(comm)
    exchanger = Exchanger(watched, BUFFER_NBYTES)
    faults = []
    for number in range(2):  # the second round finds the buffers as the first one left them
        read, written = read_buffer(comm.rank, number), np.full(BUFFER_NBYTES, UNTOUCHED, np.uint8)
        exchanger.exchange(work, read, written)
        expected = expected_buffer(tiles, comm.rank, number)
        wrong = np.flatnonzero(written != expected)
        faults += [f"round {number}: {len(wrong)} bytes are wrong, the first at {wrong[0]}"] if len(wrong) else []
        faults += unequal("the source", read.tolist(), read_buffer(comm.rank, number).tolist())
    for sent, received in watched.counts:
        faults += unequal("bytes to oneself in MPI", (sent[comm.rank], received[comm.rank]), (0, 0))
    away = sum(int(np.prod(t.shape)) for t in tiles if t.sender == comm.rank != t.receiver)
    faults += unequal("bytes sent", exchanger.sent_nbytes, 2 * away)
    assert not faults_of_all(comm, faults)
