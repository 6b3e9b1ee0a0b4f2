"""Tensors as tilings: which ranks hold which box, put so that it can be drawn on a plane. Pure: draws nothing itself."""

import math
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice, pairwise, product
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

Numbers = tuple[int, ...]


class Tile(NamedTuple):
    """A box of a tensor, in elements, and the ranks that hold it, ascending."""

    start: Numbers
    stop: Numbers
    ranks: Numbers


@dataclass(frozen=True)
class Tiling:
    """The boxes of a tensor that have elements, each once, in the order of where they start."""

    shape: Numbers
    tiles: tuple[Tile, ...]

    def cuts(self, axis: int) -> list[int]:
        """Where a tile begins or ends along an axis; the ends of the tensor are among them."""
        return sorted(
            {0, self.shape[axis]} | {edge for tile in self.tiles for edge in (tile.start[axis], tile.stop[axis])}
        )


def tiling_of(shape: Iterable[int], boxes: Iterable[tuple[int, Iterable[int], Iterable[int]]]) -> Tiling:
    """The tiling that (rank, offset, extent) make; boxes that are equal are one tile of several ranks.

    >>> tiling_of([4], [(0, [0], [3]), (2, [3], [1]), (1, [0], [3])]).tiles
    (Tile(start=(0,), stop=(3,), ranks=(0, 1)), Tile(start=(3,), stop=(4,), ranks=(2,)))
    """
    held: defaultdict[tuple[Numbers, Numbers], set[int]] = defaultdict(set)
    for rank, offset, extent in boxes:
        start, size = tuple(offset), tuple(extent)
        if 0 not in size:
            held[start, tuple(a + n for a, n in zip(start, size, strict=True))].add(rank)
    return Tiling(tuple(shape), tuple(Tile(*box, tuple(sorted(ranks))) for box, ranks in sorted(held.items())))


class Kind(NamedTuple):
    """Tensors that are cut alike: the largest, which stands for all, and how many others there are."""

    tensor: str
    nothers: int


def kinds_of(
    tilings: Mapping[str, Sequence[Tiling]], nbytes: Mapping[str, int], most: int
) -> tuple[list[Kind], list[str]]:
    """Up to `most` kinds of tensors, largest first, and the tensors of all other kinds.

    Tensors are of one kind if they have as many axes, each cut into as many parts, held by as many ranks, on every side. Of each
    number of axes the kind with the most bytes comes first, so that small tensors are seen too; ties are broken by name.
    """
    members: defaultdict[object, list[str]] = defaultdict(list)
    for tensor, sides in sorted(tilings.items()):
        members[tuple(map(_form, sides))].append(tensor)
    kinds = sorted(members.values(), key=lambda kind: -sum(nbytes[tensor] for tensor in kind))
    naxes = [len(tilings[kind[0]][0].shape) for kind in kinds]
    order = sorted(range(len(kinds)), key=lambda index: naxes[index] in naxes[:index])  # stable: else by bytes
    chosen = [kinds[index] for index in sorted(order[:most])]
    left = [tensor for index in order[most:] for tensor in kinds[index]]
    return [Kind(max(kind, key=lambda tensor: nbytes[tensor]), len(kind) - 1) for kind in chosen], left


def _form(tiling: Tiling) -> object:
    cuts = tuple(len(tiling.cuts(axis)) for axis in range(len(tiling.shape)))
    return cuts, len(tiling.tiles), frozenset(len(tile.ranks) for tile in tiling.tiles)


class Plane(NamedTuple):
    """The tensor axes that run down and across a picture; None: there is none, and a tile is 1 high or wide."""

    down: int | None
    across: int | None


def plane_of(tilings: Sequence[Tiling]) -> Plane:
    """The two axes with the most cuts (of equal ones the last), of tilings of one tensor."""
    naxes = len(tilings[0].shape)
    order = sorted(range(naxes), key=lambda axis: (sum(len(tiling.cuts(axis)) for tiling in tilings), axis))
    axes = sorted(order[-2:])
    return Plane(*[None] * (2 - len(axes)), *axes)


class Slice(NamedTuple):
    """Where the axes outside of the plane have one set of tiles: axis -> (start, stop), and those tiles."""

    where: dict[int, tuple[int, int]]
    tiles: tuple[Tile, ...]


def slices_of(tiling: Tiling, plane: Plane, most: int) -> tuple[list[Slice], int]:
    """The first `most` slices along the axes outside of the plane, and how many there are in all."""
    axes = [axis for axis in range(len(tiling.shape)) if axis not in plane]
    parts = [list(pairwise(tiling.cuts(axis))) for axis in axes]
    slices = [
        Slice(dict(zip(axes, part, strict=True)), tuple(t for t in tiling.tiles if _reaches(t, axes, part)))
        for part in islice(product(*parts), most)
    ]
    return slices, math.prod(map(len, parts))


def _reaches(tile: Tile, axes: Sequence[int], part: Sequence[tuple[int, int]]) -> bool:
    """Between two neighbouring cuts, a tile lies all the way or not at all."""
    return all(tile.start[axis] <= a and b <= tile.stop[axis] for axis, (a, b) in zip(axes, part, strict=True))


def bands_of(width: float, height: float, count: int) -> list[NDArray[np.float64]]:
    """Polygons of equal area that fill a rectangle which begins at (0, 0): bands that slant, so as not to look like tiles.

    >>> [band.tolist() for band in bands_of(1, 1, 2)]
    [[[0.0, 0.0], [1.0, 0.0], [0.0, 1.0]], [[1.0, 0.0], [1.0, 1.0], [0.0, 1.0]]]
    """
    sums = [_sum_below(width, height, share / count) for share in range(1, count)]
    return [_band(width, height, a, b) for a, b in pairwise([0.0, *sums, width + height])]


def _sum_below(width: float, height: float, share: float) -> float:
    """The number s such that x + y < s in this share of the rectangle."""
    less, more = sorted((width, height))
    if share > 0.5:
        return width + height - _sum_below(width, height, 1 - share)
    area = share * width * height
    return math.sqrt(2 * area) if area < less * less / 2 else area / less + less / 2


def _band(width: float, height: float, a: float, b: float) -> NDArray[np.float64]:
    """Where a <= x + y <= b: from the ends of the line x + y = a to those of x + y = b, by the corners between them."""
    edge = [(min(s, width), max(s - width, 0.0)) for s in _from_to(a, width, b)]
    back = [(max(s - height, 0.0), min(s, height)) for s in reversed(_from_to(a, height, b))]
    return np.array([*edge, *(corner for corner in back if corner not in edge)])


def _from_to(first: float, corner: float, last: float) -> list[float]:
    return [first, corner, last] if first < corner < last else [first, last]


def ranks_text(ranks: Sequence[int]) -> str:
    """Ranks on little room.

    >>> ranks_text([3]), ranks_text([0, 2]), ranks_text(range(8)), ranks_text(range(1, 64, 4)), ranks_text([0, 1, 4, 9])
    ('3', '0,2', '0-7', '1,5..61', '4 ranks')
    """
    steps = {b - a for a, b in pairwise(ranks)}
    if len(ranks) < 3:
        return ",".join(map(str, ranks))
    if steps == {1}:
        return f"{ranks[0]}-{ranks[-1]}"
    return f"{ranks[0]},{ranks[1]}..{ranks[-1]}" if len(steps) == 1 else f"{len(ranks)} ranks"
