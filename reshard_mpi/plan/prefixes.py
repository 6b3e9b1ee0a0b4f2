"""Hashes that need no pass of their own: target arrays that begin as a source array does. Pure.

SHA-256 is sequential, but its state can be copied. A target array whose first bytes are those of a source array goes on from the
state that the reader of the source has there; one that is a source array from end to end has its digest already.

    source   |-- tp 0 --|-- tp 1 --|            |------ tp 0 ------|------ tp 1 ------|
    target   |==========.----------|            |=====|------------|=====|------------|       = is hashed once
"""

from typing import NamedTuple

import numpy as np

from reshard_mpi.boxes import Ints, equal_rows
from reshard_mpi.plan.plan import SHA256, Rows


class Prefixes(NamedTuple):
    """Of each target array the source array, with a digest, that it begins as, or -1; and how many bytes they have in common."""

    source: Ints
    nbytes: Ints


def find_prefixes(source: Rows, target: Rows) -> Prefixes:
    """The longest common beginnings, where they are at least half of the target array."""
    fills, filled = (_filling(rows) for rows in (source, target))
    arrays, of = source.arrays, source.array[fills]
    fills = fills[(arrays.has_digest[of] == SHA256) & (arrays.converted_nbytes[of] == 0)]
    starts = np.concatenate([source.stored.boxes.start[fills], target.stored.boxes.start[filled]])
    _, number = equal_rows(np.concatenate([source.tensor[fills], target.tensor[filled]]), *starts.T)
    source_of = np.full(len(number), -1)
    source_of[number[: len(fills)]] = fills
    met = source_of[number[len(fills) :]]
    i, j = met[met >= 0], filled[met >= 0]
    nbytes = _common(_shapes(source, i), _shapes(target, j))
    long = 2 * nbytes >= target.arrays.nbytes[target.array[j]]
    found = Prefixes(np.full(len(target.arrays.file), -1), np.zeros(len(target.arrays.file), np.int64))
    found.source[target.array[j[long]]] = source.array[i[long]]
    found.nbytes[target.array[j[long]]] = nbytes[long]
    return found


def _filling(rows: Rows) -> Ints:
    """The rows that are all of their arrays: no padding, nobody else."""
    return np.flatnonzero(rows.stored.boxes.volume == rows.arrays.nbytes[rows.array])


def _shapes(rows: Rows, index: Ints) -> Ints:
    return rows.stored.boxes.stop[index] - rows.stored.boxes.start[index]


def _common(one: Ints, other: Ints) -> Ints:
    """How many of their first bytes boxes with the same start have in common, stored row by row; shapes (n, naxes).

    They part at the end of the first row of the last axis in which they differ.
    """
    naxes = one.shape[1]
    differs = one != other
    last = np.where(differs.any(axis=1), naxes - 1 - np.argmax(differs[:, ::-1], axis=1), 0)
    within = np.arange(naxes) >= last[:, np.newaxis]
    return np.prod(np.where(within, np.minimum(one, other), 1), axis=1)
