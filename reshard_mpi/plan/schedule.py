"""Which slabs are moved in which round, so that every rank is about equally busy and none beyond its buffers. Pure."""

import heapq
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from reshard_mpi.boxes import Ints


class Loads(NamedTuple):
    """What slabs cost ranks: `nbytes[i]` for rank `rank[i]` in slab `slab[i]`; sorted by slab."""

    slab: Ints
    rank: Ints
    nbytes: Ints


def deal_rounds(loads: Sequence[Loads], sequence: Ints, nranks: int, round_nbytes: int) -> tuple[list[list[int]], int]:
    """The slabs of each round, and the most bytes that any rank has of any kind of load in any round.

    `loads[0]` is what is read. Slabs of one sequence stay in order; the least busy reader is served first, and begun
    sequences before new ones. A round exceeds `round_nbytes` only when a single slab does.
    """
    nslabs = len(sequence)
    per_kind = [_by_slab(nslabs, load) for load in loads]
    main_reader = [int(ranks[np.argmax(nbytes)]) for ranks, nbytes in per_kind[0]]
    ends = np.flatnonzero(np.append(sequence[1:] != sequence[:-1], True)).tolist() if nslabs else []
    waiting: dict[int, list[tuple[int, int]]] = {}  # reader -> heap of (next slab, last slab of its sequence)
    for first, last in zip([0, *(slab + 1 for slab in ends)], ends, strict=False):
        heapq.heappush(waiting.setdefault(main_reader[first], []), (first, last))
    rounds, most = [], 0
    while waiting:
        busy = [np.zeros(nranks, np.int64) for _ in per_kind]
        members: list[int] = []
        open_readers = [(0, reader) for reader in sorted(waiting)]
        while open_readers:
            _, reader = heapq.heappop(open_readers)
            slab, last = waiting[reader][0]
            parts = [kind[slab] for kind in per_kind]
            if members and not _fits(busy, parts, round_nbytes):
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


def _fits(busy: Sequence[Ints], parts: Sequence[tuple[Ints, Ints]], round_nbytes: int) -> bool:
    return all((load[ranks] + nbytes <= round_nbytes).all() for load, (ranks, nbytes) in zip(busy, parts, strict=True))


def _by_slab(nslabs: int, load: Loads) -> list[tuple[Ints, Ints]]:
    first = np.searchsorted(load.slab, np.arange(nslabs + 1)).tolist()
    return [(load.rank[a:b], load.nbytes[a:b]) for a, b in zip(first, first[1:], strict=False)]
