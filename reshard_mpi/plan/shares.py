"""Which MPI rank reads and which writes what: stored boxes are divided into shares, each of one rank. Pure.

A rank reads its own shard when there are as many shards as ranks; otherwise arrays, in the order of the files, are dealt in
runs of equal bytes. Who has read a part writes it, if it may: then it need not be sent. Rows to which several ranks
contribute are divided between these ranks in proportion:

    source, cut by columns   | rank 0 | rank 1 |        target, whole   | rank 0 writes |   half of each row stays at home
                             |        |        |                        | rank 1 writes |
"""

import heapq
from collections.abc import Collection, Sequence
from typing import NamedTuple

import numpy as np

from reshard_mpi.boxes import Boxes, Ints, equal_rows, join, meet
from reshard_mpi.plan.stored import StoredBoxes

LEAST_SHARE_NBYTES = 1 << 18  # rows that are less are not divided


class Shares(NamedTuple):
    """Parts of stored boxes: part `boxes[i]` of box `row[i]` belongs to `rank[i]`. Sorted by row, then place."""

    row: Ints
    boxes: Boxes
    rank: Ints


def deal_by_bytes(nbytes: Ints, nranks: int) -> Ints:
    """Rank of each item when items, in order, are dealt in `nranks` runs of about equal bytes.

    >>> deal_by_bytes(np.array([5, 5, 10, 20]), 2).tolist()
    [0, 0, 0, 1]
    """
    total = int(nbytes.sum())
    if not total:
        return deal_in_order(len(nbytes), nranks)
    middles = np.cumsum(nbytes) - nbytes / 2
    return np.minimum((middles / total * nranks).astype(np.int64), nranks - 1)


def deal_in_order(nitems: int, nranks: int) -> Ints:
    """Rank of each item when items, in order, are dealt to ranks in order.

    >>> deal_in_order(4, 2).tolist(), deal_in_order(2, 4).tolist()
    ([0, 0, 1, 1], [0, 2])
    """
    return np.arange(nitems, dtype=np.int64) * nranks // max(nitems, 1)


def deal_to_readers(nbytes: Ints, file: Ints, readers: Sequence[tuple[int, ...]]) -> Ints:
    """Rank of each item when the items of files that the same ranks see are dealt, in order, in runs of about equal bytes.

    Item i lies in `file[i]`, which the ranks `readers[file[i]]` see.

    >>> deal_to_readers(np.array([5, 5, 10, 7]), np.array([0, 0, 0, 1]), [(2, 3), (0, 1)]).tolist()
    [2, 2, 3, 1]
    """
    rank_of = np.zeros(len(nbytes), np.int64)
    groups = {ranks: number for number, ranks in enumerate(dict.fromkeys(readers))}
    group_of = np.array([groups[ranks] for ranks in readers], np.int64)[file]
    for ranks, number in groups.items():
        items = np.flatnonzero(group_of == number)
        rank_of[items] = np.array(ranks, np.int64)[deal_by_bytes(nbytes[items], len(ranks))]
    return rank_of


def deal_to_least(nbytes: Ints, nranks: int, busy: Ints | None = None) -> Ints:
    """Rank of each item when the largest is dealt first, always to the rank with the fewest bytes.

    `busy`: what the ranks have already.

    >>> deal_to_least(np.array([1, 5, 4]), 2).tolist()
    [1, 0, 1]
    """
    load = [(int(have), rank) for rank, have in enumerate(np.zeros(nranks, np.int64) if busy is None else busy)]
    heapq.heapify(load)
    rank_of = np.zeros(len(nbytes), np.int64)
    for item in np.argsort(-nbytes, kind="stable").tolist():
        have, rank = load[0]
        rank_of[item] = rank
        heapq.heapreplace(load, (have + int(nbytes[item]), rank))
    return rank_of


def deal_among(nbytes: Ints, ranks_of: Sequence[Collection[int]], nranks: int) -> Ints:
    """Rank of each item when the largest is dealt first, to whoever of the ranks that may have it has the fewest bytes.

    >>> deal_among(np.array([1, 5, 4]), [(0, 1), (1,), (0, 1)], 2).tolist()
    [0, 1, 0]
    """
    load, rank_of = [0] * nranks, np.zeros(len(nbytes), np.int64)
    for item in np.argsort(-nbytes, kind="stable").tolist():
        rank_of[item] = rank = min(ranks_of[item], key=lambda rank: (load[rank], rank))
        load[rank] += int(nbytes[item])
    return rank_of


def choose_members(nbytes: Ints, first: Ints, shard: Ints, nshards: int) -> Ints:
    """For each box the candidate to be read, so that all shards are read about equally.

    Candidates `first[i]:first[i + 1]` hold box i, candidate c in `shard[c]`; where there is a choice, the largest boxes choose
    first.

    >>> choose_members(np.array([4, 4, 4]), np.array([0, 1, 3, 5]), np.array([0, 0, 1, 0, 1]), 2).tolist()
    [0, 2, 3]
    """
    chosen, alone = first[:-1].copy(), np.diff(first) == 1
    load = np.zeros(nshards, np.int64)
    np.add.at(load, shard[chosen[alone]], nbytes[alone])
    choosing = np.flatnonzero(~alone)
    for box in choosing[np.argsort(-nbytes[choosing], kind="stable")].tolist():
        candidates = shard[first[box] : first[box + 1]]
        position = int(np.argmin(load[candidates]))
        load[candidates[position]] += nbytes[box]
        chosen[box] += position
    return chosen


def whole_shares(stored: StoredBoxes, rank: Ints) -> Shares:
    """Every box in one piece."""
    return Shares(np.arange(len(rank)), stored.boxes, rank)


def equal_shares(stored: StoredBoxes, order: Ints, nranks: int) -> Shares:
    """Boxes, taken in `order`, dealt in runs of equal bytes; those at the ends of a run are cut between two rows."""
    nbytes = stored.boxes.volume[order]
    ends = np.cumsum(nbytes)
    total = int(ends[-1]) if len(ends) else 0
    limits = [total * (k + 1) // nranks for k in range(nranks)]
    first_rank = np.searchsorted(limits, ends - nbytes, side="right")
    last_rank = np.minimum(np.searchsorted(limits, ends - 1, side="right"), nranks - 1)
    whole = first_rank == last_rank
    row, start, stop, rank = [], [], [], []
    leading_axes = stored.leading_axes
    for index in np.flatnonzero(~whole).tolist():
        box, low, high = order[index], int(first_rank[index]), int(last_rank[index])
        axis = int(leading_axes[box])
        edge = int(stored.boxes.start[box, axis])
        nrows = int(stored.boxes.stop[box, axis]) - edge
        begin = int(ends[index] - nbytes[index])
        for r in range(low, high + 1):
            cut = nrows if r == high else (limits[r] - begin) * nrows // int(nbytes[index])
            upto = int(stored.boxes.start[box, axis]) + cut
            if upto > edge:
                start.append(np.where(np.arange(stored.naxes) == axis, edge, stored.boxes.start[box]))
                stop.append(np.where(np.arange(stored.naxes) == axis, upto, stored.boxes.stop[box]))
                row.append(int(box))
                rank.append(r)
            edge = max(edge, upto)
    uncut = order[whole]
    boxes = Boxes(*(np.array(side, np.int64).reshape(-1, stored.naxes) for side in (start, stop)))
    shares = Shares(
        np.concatenate([uncut, np.array(row, np.int64)]),
        Boxes(*map(np.concatenate, zip(stored.boxes.take(uncut), boxes, strict=True))),
        np.concatenate([first_rank[whole], np.array(rank, np.int64)]),
    )
    return _sorted(shares)


def shares_of_readers(
    stored: StoredBoxes, tensor: Ints, source: StoredBoxes, source_tensor: Ints, reader: Ints
) -> Shares:
    """Target boxes, divided between the ranks that read what they are made of.

    `source` boxes are read by `reader`. Equal target boxes are divided equally.
    """
    j, i = join(stored.boxes, source.boxes, tensor, source_tensor)
    tiles = meet(stored.boxes.take(j), source.boxes.take(i))
    axis = stored.leading_axes[j]
    every = np.arange(len(j))
    low, high = tiles.start[every, axis], tiles.stop[every, axis]
    low, high = _joined_where_they_overlap(j, low, high, stored)
    band, entry_rank, entry_nbytes = _entries(j, low, high, reader[i], tiles.volume)
    cut_low, cut_high = _divided(band, entry_nbytes, stored)
    box = band[:, 0]
    kept = cut_low < cut_high
    return _merged(stored, box[kept], cut_low[kept], cut_high[kept], entry_rank[kept])


def _joined_where_they_overlap(box: Ints, low: Ints, high: Ints, stored: StoredBoxes) -> tuple[Ints, Ints]:
    """Bands of rows are the intervals of the tiles; where those of one box overlap without being equal, the whole box is one."""
    order = np.lexsort((high, low, box))
    b, lo, hi = box[order], low[order], high[order]
    same = b[1:] == b[:-1]
    odd = same & (lo[1:] < hi[:-1]) & ((lo[1:] != lo[:-1]) | (hi[1:] != hi[:-1]))
    irregular = np.unique(b[1:][odd])
    whole = np.isin(box, irregular)
    axis = stored.leading_axes[box]
    return np.where(whole, stored.boxes.start[box, axis], low), np.where(whole, stored.boxes.stop[box, axis], high)


def _entries(box: Ints, low: Ints, high: Ints, rank: Ints, nbytes: Ints) -> tuple[Ints, Ints, Ints]:
    """(box, low, high) of each band, the ranks that contribute to it, and how much; one row a band and rank, sorted."""
    first, number = equal_rows(box, low, high, rank)
    total = np.zeros(len(first), np.int64)
    np.add.at(total, number, nbytes)
    return np.column_stack([box, low, high])[first], rank[first], total


def _divided(band: Ints, nbytes: Ints, stored: StoredBoxes) -> tuple[Ints, Ints]:
    """The rows [low, high) of each entry of its band, in proportion to what it contributes; small bands go to one entry."""
    first = np.append(True, np.any(band[1:] != band[:-1], axis=1)) if len(band) else np.empty(0, bool)
    number = np.cumsum(first) - 1
    begins = np.flatnonzero(first)
    upto = np.cumsum(nbytes)
    before = (upto - nbytes)[begins][number]  # of the band, in all entries
    whole = np.add.reduceat(nbytes, begins)[number] if len(band) else nbytes
    nrows = band[:, 2] - band[:, 1]
    low = band[:, 1] + ((upto - nbytes - before) / whole * nrows).astype(np.int64)
    high = np.where(np.append(first[1:], True), band[:, 2], np.append(low[1:], 0))
    small = whole < LEAST_SHARE_NBYTES
    chosen = _one_of_each(band, number, begins, nbytes, stored)
    return np.where(small, band[:, 1], low), np.where(small, np.where(chosen, band[:, 2], band[:, 1]), high)


def _one_of_each(band: Ints, number: Ints, begins: Ints, nbytes: Ints, stored: StoredBoxes) -> np.ndarray:
    """Marks one entry of each band: of those that contribute most, another one for each box."""
    if not len(band):
        return np.empty(0, bool)
    most = nbytes == np.maximum.reduceat(nbytes, begins)[number]
    counted = np.cumsum(most)
    position = counted - 1 - (counted - most)[begins][number]
    nbest = np.add.reduceat(most.astype(np.int64), begins)[number]
    # Equal boxes, on several target ranks, must choose alike: by what they are, not by where they stand.
    box = band[:, 0]
    mark = (stored.boxes.start[box] * 31 + stored.boxes.stop[box]).sum(axis=1)
    return most & (position == mark % nbest)


def _merged(stored: StoredBoxes, box: Ints, low: Ints, high: Ints, rank: Ints) -> Shares:
    """Neighbours of one rank become one share."""
    order = np.lexsort((low, box))
    box, low, high, rank = box[order], low[order], high[order], rank[order]
    joined = (box[1:] == box[:-1]) & (rank[1:] == rank[:-1]) & (low[1:] == high[:-1])
    begins = np.flatnonzero(np.append(True, ~joined)[: len(box)])
    ends = np.flatnonzero(np.append(~joined, True)[: len(box)])
    box, low, high, rank = box[begins], low[begins], high[ends], rank[begins]
    start, stop = stored.boxes.start[box].copy(), stored.boxes.stop[box].copy()
    axis, every = stored.leading_axes[box], np.arange(len(box))
    start[every, axis], stop[every, axis] = low, high
    return Shares(box, Boxes(start, stop), rank)


def _sorted(shares: Shares) -> Shares:
    order = np.lexsort((*shares.boxes.start.T[::-1], shares.row))
    return Shares(shares.row[order], shares.boxes.take(order), shares.rank[order])
