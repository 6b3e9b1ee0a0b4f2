"""Random tilings of tensors, padded as a shard may store them, and the bytes that follow: whole arrays, no product code."""

import random
from dataclasses import dataclass, replace

import numpy as np

from tests.reference import dtypes
from tests.reference.dice import Dice
from tests.reference.fragments import slices

Shape = tuple[int, ...]


@dataclass(frozen=True)
class Tile:
    """A box of a tensor and the array that stores it, padding around it; all in elements."""

    offset: Shape
    extent: Shape
    before: Shape
    local_shape: Shape

    @property
    def is_padded(self) -> bool:
        return self.local_shape != self.extent


def tile(dice: Dice, shape: Shape, percent: int, unit: int = 1) -> list[Tile]:
    """Boxes that tile `shape`: cut in two, `percent` of the time once more; the last axis at multiples of `unit`."""
    return [
        Tile(offset, extent, (0,) * len(shape), extent)
        for offset, extent in _cut(dice, (0,) * len(shape), shape, percent, unit)
    ]


def rows(dice: Dice, shape: Shape, unit: int = 1) -> list[Tile]:
    """Boxes that tile `shape`, cut along axis 0 alone; where that is the last axis too, at multiples of `unit`."""
    if not shape:
        return tile(dice, shape, 0)
    step = unit if len(shape) == 1 else 1
    edges = [0, *(edge for edge in range(step, shape[0], step) if dice.chance(50)), shape[0]]
    return [
        Tile((a, *(0,) * (len(shape) - 1)), (b - a, *shape[1:]), (0,) * len(shape), (b - a, *shape[1:]))
        for a, b in zip(edges, edges[1:], strict=False)
    ]


def _cut(dice: Dice, offset: Shape, extent: Shape, percent: int, unit: int) -> list[tuple[Shape, Shape]]:
    units = [unit if axis == len(extent) - 1 else 1 for axis in range(len(extent))]
    axes = [axis for axis, size in enumerate(extent) if size >= 2 * units[axis]]
    if not axes or not dice.chance(percent):
        return [(offset, extent)]
    axis = dice.pick(axes)
    size = units[axis] * dice.integer(1, extent[axis] // units[axis] - 1)
    low, high, begin = list(extent), list(extent), list(offset)
    low[axis], high[axis], begin[axis] = size, extent[axis] - size, offset[axis] + size
    return _cut(dice, offset, tuple(low), percent, unit) + _cut(dice, tuple(begin), tuple(high), percent, unit)


def pad(dice: Dice, piece: Tile, percent: int, unit: int = 1) -> Tile:
    """The same box with elements stored around it; on the last axis in multiples of `unit`."""
    if not dice.chance(percent):
        return piece
    units = [unit if axis == len(piece.extent) - 1 else 1 for axis in range(len(piece.extent))]
    before = tuple(n * dice.pick([0, 0, 1, 2]) for n in units)
    after = tuple(n * dice.pick([0, 1, 3]) for n in units)
    local = tuple(b + e + a for b, e, a in zip(before, piece.extent, after, strict=True))
    return replace(piece, before=before, local_shape=local)


def whole_cells(noise: random.Random, dtype: str, shape: Shape) -> np.ndarray:
    return dtypes.to_cells(noise.randbytes(dtypes.nelems(shape) * dtypes.bits(dtype) // 8), dtype, shape)


def stored_bytes(noise: random.Random, dtype: str, cells: np.ndarray, piece: Tile) -> bytes:
    """The array that stores a tile of the whole tensor `cells`: garbage wherever it has padding."""
    stored = whole_cells(noise, dtype, piece.local_shape).copy()
    stored[slices(piece.before, piece.extent)] = cells[slices(piece.offset, piece.extent)]
    return dtypes.to_bytes(stored, dtype)
