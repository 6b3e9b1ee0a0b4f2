"""Tensors as tilings: what is one tile, which tensors are of one kind, and what comes onto a plane."""

from itertools import product

import numpy as np
import pytest

from reshard_mpi.boxes import chunk
from reshard_mpi.show.tilings import (
    Kind,
    Plane,
    Slice,
    Tile,
    Tiling,
    bands_of,
    kinds_of,
    plane_of,
    slices_of,
    tiling_of,
)


def cut(shape, parts, replicas: int = 1) -> Tiling:
    """Every axis cut into so many parts, as ranks in rank order hold them; each part on `replicas` neighbouring ranks."""
    boxes, rank = [], 0
    for where in product(*map(range, parts)):
        edges = [tuple(map(int, chunk(n, k, i))) for n, k, i in zip(shape, parts, where, strict=True)]
        for _ in range(replicas):
            boxes.append((rank, [a for a, _ in edges], [b - a for a, b in edges]))
            rank += 1
    return tiling_of(shape, boxes)


@pytest.mark.parametrize(
    "why, shape, boxes, tiles",
    [
        ("a scalar", (), [(0, (), ())], [Tile((), (), (0,))]),
        ("a scalar on two ranks", (), [(1, (), ()), (0, (), ())], [Tile((), (), (0, 1))]),
        ("no elements", (0, 3), [(0, (0, 0), (0, 3))], []),
        ("an empty part", (2,), [(0, (0,), (2,)), (1, (2,), (0,))], [Tile((0,), (2,), (0,))]),
        ("two parts of one rank", (4,), [(5, (2,), (2,)), (5, (0,), (2,))], [Tile((0,), (2,), (5,)), Tile((2,), (4,), (5,))]),
        ("said twice", (1,), [(3, (0,), (1,)), (3, (0,), (1,))], [Tile((0,), (1,), (3,))]),
    ],
)  # fmt: skip
def test_equal_boxes_are_one_tile_and_boxes_without_elements_none(why, shape, boxes, tiles):
    assert tiling_of(shape, boxes) == Tiling(shape, tuple(tiles))


# Kinds


def test_tensors_that_are_cut_alike_are_one_kind_and_the_largest_stands_for_it():
    whole, halves = cut((8, 8), (1, 1)), cut((8, 8), (2, 1))
    tilings = {
        "a": (whole, halves),
        "b": (cut((6, 4), (1, 1)), cut((6, 4), (2, 1))),
        "other way": (halves, whole),
        "other axis": (whole, cut((8, 8), (1, 2))),
        "replicas": (whole, cut((8, 8), (2, 1), replicas=2)),
    }
    nbytes = {"a": 10, "b": 20, "other way": 40, "other axis": 7, "replicas": 5}
    kinds, left = kinds_of(tilings, nbytes, 9)
    assert kinds == [Kind("other way", 0), Kind("b", 1), Kind("other axis", 0), Kind("replicas", 0)]
    assert left == []
    assert kinds_of(dict(reversed(tilings.items())), nbytes, 9) == (kinds, left)


def test_kinds_that_are_too_many_are_left_out_but_each_number_of_axes_is_seen():
    tilings = {f"w{n}": (cut((64, 2), (n, 1)),) for n in range(1, 9)} | {"b": (cut((4,), (2,)),), "s": (cut((), ()),)}
    nbytes = {name: 1000 - int(name[1:]) if name[0] == "w" else 4 for name in tilings}
    kinds, left = kinds_of(tilings, nbytes, 4)
    assert [kind.tensor for kind in kinds] == ["w1", "w2", "b", "s"]
    assert left == [f"w{n}" for n in range(3, 9)]


def test_hundreds_of_layers_are_few_kinds():
    ways = {"q": cut((32, 32), (4, 1)), "o": cut((32, 32), (1, 4))}
    tilings = {f"layers.{n}.{name}": (tiling,) for n in range(200) for name, tiling in ways.items()}
    kinds, left = kinds_of(tilings, dict.fromkeys(tilings, 2048), 6)
    assert kinds == [Kind("layers.0.o", 199), Kind("layers.0.q", 199)] and not left


# The plane


@pytest.mark.parametrize(
    "why, tilings, plane",
    [
        ("no axes", [cut((), ())], Plane(None, None)),
        ("one runs across", [cut((7,), (3,))], Plane(None, 0)),
        ("two", [cut((7, 5), (1, 3))], Plane(0, 1)),
        ("uncut: the last two", [cut((2, 3, 4), (1, 1, 1))], Plane(1, 2)),
        ("what is cut is seen", [cut((8, 3, 4), (4, 1, 1))], Plane(0, 2)),
        ("cut before or after", [cut((8, 8, 4), (4, 1, 1)), cut((8, 8, 4), (1, 4, 1))], Plane(0, 1)),
        ("all are cut: the two that are most", [cut((8, 8, 8, 8), (4, 2, 3, 2))], Plane(0, 2)),
    ],
)
def test_the_axes_with_the_most_cuts_are_drawn(why, tilings, plane):
    assert plane_of(tilings) == plane


def test_slices_lie_between_the_cuts_of_the_other_axes():
    tiling = cut((4, 6, 6), (2, 3, 3))
    slices, nslices = slices_of(tiling, Plane(1, 2), 9)
    assert nslices == 2
    assert slices == [Slice({0: (0, 2)}, tiling.tiles[:9]), Slice({0: (2, 4)}, tiling.tiles[9:])]
    assert slices_of(tiling, Plane(1, 2), 1) == (slices[:1], 2)


def test_a_tile_of_several_slices_is_in_each_of_them():
    boxes = [(0, (0, 0, 0), (4, 1, 2)), (1, (0, 1, 0), (1, 1, 2)), (2, (1, 1, 0), (3, 1, 2))]
    slices, _ = slices_of(tiling_of((4, 2, 2), boxes), Plane(1, 2), 9)
    assert [[tile.ranks for tile in part.tiles] for part in slices] == [[(0,), (1,)], [(0,), (2,)]]


def test_a_tensor_without_other_axes_is_one_slice():
    tiling = cut((4, 6), (2, 3))
    assert slices_of(tiling, Plane(0, 1), 9) == ([Slice({}, tiling.tiles)], 1)


# Bands


def area(polygon: np.ndarray) -> float:
    x, y = polygon.T
    return float(abs(x @ np.roll(y, -1) - y @ np.roll(x, -1)) / 2)


@pytest.mark.parametrize("width, height", [(1, 1), (9, 0.1), (0.1, 9), (2, 3)])
@pytest.mark.parametrize("count", [1, 2, 3, 16])
def test_bands_are_equal_parts_of_a_rectangle(width, height, count):
    bands = bands_of(width, height, count)
    assert len(bands) == count
    assert [area(band) for band in bands] == pytest.approx([width * height / count] * count)
    corners = np.concatenate(bands)
    assert corners.min(axis=0) == pytest.approx([0, 0]) and corners.max(axis=0) == pytest.approx([width, height])
