"""Which MPI rank reads and which writes each stored array; pure, and the same on whatever rank it is computed.

A rank reads its own shard when there are as many shards as ranks. Otherwise arrays, in the order of the files, are dealt in
runs of equal bytes: every rank opens few files and no rank gets more than its share and one array.
"""

from collections.abc import Sequence

import numpy as np

from reshard_mpi.boxes import Ints


def deal_by_bytes(nbytes: Ints, nranks: int) -> Ints:
    """Rank of each item when items, in order, are dealt in `nranks` runs of about equal bytes.

    >>> deal_by_bytes(np.array([5, 5, 10, 20]), 2).tolist()
    [0, 0, 0, 1]
    """
    total = int(nbytes.sum())
    if not total:
        return np.arange(len(nbytes), dtype=np.int64) * nranks // max(len(nbytes), 1)
    # Python's integers: bytes times ranks may pass 2**63.
    middles = ((np.cumsum(nbytes) * 2 - nbytes).astype(object) * nranks) // (2 * total)
    return np.minimum(middles.astype(np.int64), nranks - 1)


def assign_readers(file: Ints, nbytes: Ints, nshards: int, nranks: int) -> Ints:
    """Reader of each source array; arrays come in the order (file, offset)."""
    return file.copy() if nshards == nranks else deal_by_bytes(nbytes, nranks)


def assign_writers(file: Ints, nbytes: Ints, nshards: int, nranks: int) -> Ints:
    """Writer of each target array: one rank a shard while that leaves no rank idle, else several ranks share a shard."""
    if nshards == nranks:
        return file.copy()
    if nshards < nranks:
        return deal_by_bytes(nbytes, nranks)
    shard_nbytes = np.bincount(file, weights=None, minlength=nshards) * 0
    np.add.at(shard_nbytes, file, nbytes)
    return deal_by_bytes(shard_nbytes, nranks)[file]


def choose_members(nbytes: Sequence[int], candidates: Sequence[Sequence[int]], nshards: int) -> list[int]:
    """For each box the position, in `candidates`, of the shard to read it from, so that all shards are read about equally.

    `candidates[i]` are the shards that hold box i; where there is a choice, the largest boxes choose first.

    >>> choose_members([4, 4, 4], [[0], [0, 1], [0, 1]], 2)
    [0, 1, 0]
    """
    load = [0] * nshards
    chosen = [0] * len(nbytes)
    for i in sorted(range(len(nbytes)), key=lambda i: (len(candidates[i]) > 1, -nbytes[i], i)):
        chosen[i] = min(range(len(candidates[i])), key=lambda k: (load[candidates[i][k]], k))
        load[candidates[i][chosen[i]]] += nbytes[i]
    return chosen
