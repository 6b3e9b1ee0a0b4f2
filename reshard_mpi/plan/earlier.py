"""What an earlier run of the same job has done, and what of it a plan need not do again. Pure.

Slabs depend on ranks and memory, but each of them is a range of the bytes of its tensor, in row-major order. So what is done is
known as such ranges, whoever did it, and in whatever rounds.
"""

from dataclasses import replace
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from reshard_mpi.boxes import Ints
from reshard_mpi.plan.plan import NOBODY, SHA256, ArrayTable
from reshard_mpi.plan.prefixes import Prefixes


class Ranges(NamedTuple):
    """Bytes `begin[i]` to `end[i]` of tensor `tensor[i]`, in row-major order."""

    tensor: Ints
    begin: Ints
    end: Ints


class Earlier(NamedTuple):
    """What is durable: `written` of the tensors, in every array of the target that holds it.

    `verified`: of each source array, whether it was held against its digest. `digest` (narrays, 4) of the target's arrays, where
    `has_digest` says so.
    """

    written: Ranges
    verified: NDArray[np.bool_]
    digest: Ints
    has_digest: NDArray[np.bool_]


def joined(ranges: Ranges) -> Ranges:
    """The same bytes in as few ranges as can be, in order."""
    order = np.lexsort((ranges.begin, ranges.tensor))
    tensor, begin, end = (column[order] for column in ranges)
    if not len(tensor):
        return ranges
    # Tensors one after the other, so that no range of one reaches one of the next.
    place = tensor * (1 + int(end.max()))
    reached = np.maximum.accumulate(place + end)
    starts = np.append(True, (place + begin)[1:] > reached[:-1]) | np.append(True, tensor[1:] != tensor[:-1])
    ends = np.append(starts[1:], True)
    return Ranges(tensor[starts], begin[starts], (reached - place)[ends])


def is_within(parts: Ranges, whole: Ranges) -> NDArray[np.bool_]:
    """Of each part, whether one of the joined ranges `whole` holds all of it."""
    if not len(whole.tensor):
        return np.zeros(len(parts.tensor), bool)
    last = 1 + max(int(whole.end.max()), int(parts.end.max(initial=0)))
    at = np.searchsorted(whole.tensor * last + whole.begin, parts.tensor * last + parts.begin, side="right") - 1
    return (at >= 0) & (whole.tensor[at] == parts.tensor) & (parts.end <= whole.end[at])


def without_verified(
    prefixes: Prefixes, source: ArrayTable, target: ArrayTable, verified: NDArray[np.bool_]
) -> Prefixes:
    """The common beginnings of which a hash can go on: what is verified is not hashed again. A whole array keeps its digest."""
    is_whole = (prefixes.nbytes == target.nbytes) & (prefixes.nbytes == source.nbytes[prefixes.source])
    gone = (prefixes.source >= 0) & verified[prefixes.source] & ~is_whole
    return Prefixes(np.where(gone, -1, prefixes.source), np.where(gone, 0, prefixes.nbytes))


def with_digests(target: ArrayTable, earlier: Earlier) -> ArrayTable:
    """The target's arrays, of which those that were hashed earlier need it no more."""
    known = earlier.has_digest
    return replace(
        target,
        digest=np.where(known[:, np.newaxis], earlier.digest, target.digest),
        has_digest=np.where(known, SHA256, target.has_digest),
        hasher=np.where(known, NOBODY, target.hasher),
        begins_as=np.where(known, -1, target.begins_as),
        begins_nbytes=np.where(known, 0, target.begins_nbytes),
    )
