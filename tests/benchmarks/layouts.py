"""Which box of which tensor each rank holds, in a source and in a target. Needs the standard library alone.

The rules of a target are written again here, for the few targets of the benchmarks: peers that took them from the
package could not show that it is wrong.
"""

import json
import math
import re
from pathlib import Path
from typing import NamedTuple

RANKS = 4  # of every source, and of every target but `single`


class Box(NamedTuple):
    """A half-open region of a tensor, in elements."""

    offset: tuple[int, ...]
    extent: tuple[int, ...]


class Layout(NamedTuple):
    """shapes: fqn -> global shape. ranks: of each rank, fqn -> the box that it holds."""

    shapes: dict[str, tuple[int, ...]]
    ranks: list[dict[str, Box]]


def case_layout(folder: Path) -> Layout:
    """The layout that the `case.json` of a folder tells of."""
    case = json.loads((folder / "case.json").read_bytes())
    shapes: dict[str, tuple[int, ...]] = {}
    ranks: list[dict[str, Box]] = [{} for _ in range(case["world_size"])]
    for fragment in case["fragments"]:
        fqn = fragment["fqn"]
        shapes[fqn] = tuple(fragment["global_shape"])
        box = Box(tuple(fragment["element_offset"]), tuple(fragment["element_extent"]))
        ranks[dict(fragment["topology_coordinates"])["rank"]][fqn] = box
    return Layout(shapes, ranks)


def target_layout(source: Layout, target: str) -> Layout:
    """The layout of `single`, `tp=4`, `fsdp=4` or `pp=4`.

    >>> rows = Layout({"w": (6, 2)}, [{"w": Box((0, 0), (3, 2))}, {"w": Box((3, 0), (3, 2))}])
    >>> target_layout(rows, "single").ranks
    [{'w': Box(offset=(0, 0), extent=(6, 2))}]
    >>> [boxes["w"].extent for boxes in target_layout(rows, "tp=4").ranks]
    [(2, 2), (2, 2), (2, 2), (0, 2)]
    """
    whole = {fqn: Box((0,) * len(shape), shape) for fqn, shape in source.shapes.items()}
    if target == "single":
        return Layout(source.shapes, [whole])
    if target == "pp=4":
        stages = {fqn: _stage(fqn, source) for fqn in whole}
        return Layout(
            source.shapes, [{fqn: whole[fqn] for fqn, at in stages.items() if at == rank} for rank in range(RANKS)]
        )
    axes = {fqn: 0 if target == "fsdp=4" else _split_axis(fqn, source) for fqn in whole}
    return Layout(
        source.shapes,
        [{fqn: _part(shape, axes[fqn], rank) for fqn, shape in source.shapes.items()} for rank in range(RANKS)],
    )


def slices(box: Box) -> tuple[slice, ...]:
    """The box as an index into an array of the whole tensor."""
    return tuple(slice(first, first + size) for first, size in zip(*box, strict=True))


def split_axes(boxes: list[Box]) -> dict[int, int]:
    """tensor axis -> number of parts, of the axes that these boxes of a tensor cut."""
    offsets = [{box.offset[axis] for box in boxes} for axis in range(len(boxes[0].offset))]
    return {axis: len(begins) for axis, begins in enumerate(offsets) if len(begins) > 1}


def boxes_of(layout: Layout, fqn: str) -> dict[int, Box]:
    """rank -> the box of `fqn` that it holds."""
    return {rank: boxes[fqn] for rank, boxes in enumerate(layout.ranks) if fqn in boxes}


def _split_axis(fqn: str, source: Layout) -> int | None:
    return next(iter(split_axes(list(boxes_of(source, fqn).values()))), None)


def _part(shape: tuple[int, ...], axis: int | None, rank: int) -> Box:
    """Part `rank` of RANKS, as `torch.chunk` cuts."""
    offset, extent = [0] * len(shape), list(shape)
    if axis is not None:
        size = math.ceil(shape[axis] / RANKS)
        offset[axis] = min(rank * size, shape[axis])
        extent[axis] = min(size, shape[axis] - offset[axis])
    return Box(tuple(offset), tuple(extent))


def _stage(fqn: str, source: Layout) -> int:
    """Layers as evenly as `numpy.array_split`; what has no number stays first or last."""
    layer = _layer(fqn)
    if layer is None:
        return 0 if "embed" in fqn else RANKS - 1
    nlayers = 1 + max(number for number in map(_layer, source.shapes) if number is not None)
    small, longer = divmod(nlayers, RANKS)
    return layer // (small + 1) if layer < longer * (small + 1) else longer + (layer - longer * (small + 1)) // small


def _layer(fqn: str) -> int | None:
    found = re.search(r"\.layers\.(\d+)\.", fqn)
    return int(found[1]) if found else None
