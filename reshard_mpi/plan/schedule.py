"""Which slabs are moved in which round, so that every rank is about equally busy and none beyond its buffers. Pure."""

import heapq
from collections.abc import Sequence
from itertools import pairwise
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
    costs = _by_slab(loads, len(sequence), nranks)
    main_reader = _main_readers(loads[0]).tolist()
    ends = np.flatnonzero(np.append(sequence[1:] != sequence[:-1], True)).tolist() if len(sequence) else []
    waiting: dict[int, list[tuple[int, int]]] = {}  # reader -> heap of (next slab, last slab of its sequence)
    for first, last in zip([0, *(slab + 1 for slab in ends)], ends, strict=False):
        heapq.heappush(waiting.setdefault(main_reader[first], []), (first, last))
    rounds, most = [], 0
    while waiting:
        busy = np.zeros(len(loads) * nranks, np.int64)
        members: list[int] = []
        open_readers = [(0, reader) for reader in sorted(waiting)]
        while open_readers:
            _, reader = heapq.heappop(open_readers)
            slab, last = waiting[reader][0]
            place, nbytes = costs[slab]
            with_it = busy[place] + nbytes
            if members and with_it.max() > round_nbytes:
                continue  # nothing more of this reader in this round
            busy[place] = with_it
            members.append(slab)
            heapq.heappop(waiting[reader])
            if slab < last:
                following = main_reader[slab + 1]
                if following not in waiting or (not waiting[following] and following != reader):
                    heapq.heappush(open_readers, (int(busy[following]), following))
                heapq.heappush(waiting.setdefault(following, []), (slab + 1, last))
            if waiting[reader]:
                heapq.heappush(open_readers, (int(busy[reader]), reader))
        waiting = {reader: heap for reader, heap in waiting.items() if heap}
        rounds.append(members)
        most = max(most, int(busy.max()))
    return rounds, most


def _by_slab(loads: Sequence[Loads], nslabs: int, nranks: int) -> list[tuple[Ints, Ints]]:
    """What each slab costs: bytes, and where they count in an array of all ranks' loads of the first kind, the second, ..."""
    slab = np.concatenate([load.slab for load in loads])
    order = np.argsort(slab, kind="stable")
    place = np.concatenate([kind * nranks + load.rank for kind, load in enumerate(loads)])[order]
    nbytes = np.concatenate([load.nbytes for load in loads])[order]
    first = np.searchsorted(slab[order], np.arange(nslabs + 1)).tolist()
    return [(place[a:b], nbytes[a:b]) for a, b in pairwise(first)]


def _main_readers(read: Loads) -> Ints:
    """Of each slab the rank that reads most of it, of equals the first."""
    order = np.lexsort((-read.nbytes, read.slab))
    slab = read.slab[order]
    return read.rank[order][np.append(True, slab[1:] != slab[:-1])[: len(slab)]]
