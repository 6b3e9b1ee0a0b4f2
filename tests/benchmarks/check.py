"""Are the bytes right that a contender wrote as safetensors? Prints what is wrong, a line each.

    python -m tests.benchmarks.check SOURCE OUT TARGET

Every file must hold the tensors of its rank in the boxes of the target, and every element of them must be that of the
source: each source shard is held against each part of the output that overlaps it.
"""

import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from tests.benchmarks.layouts import Box, Layout, boxes_of, case_layout, target_layout
from tests.benchmarks.shards import Array, map_shard


def faults(source: Path, out: Path, target: str) -> Iterator[str]:
    layout = case_layout(source)
    wanted = target_layout(layout, target)
    if (out / "case.json").exists() and case_layout(out) != wanted:
        yield "case.json: not the boxes of the target"
    source_shards = [map_shard(path) for path in sorted(source.glob("*.safetensors"))]
    out_shards = [map_shard(path) for path in sorted(out.glob("*.safetensors"))]
    if len(out_shards) != len(wanted.ranks):
        yield f"{len(out_shards)} files, expected {len(wanted.ranks)}"
        return
    for rank, (boxes, shard) in enumerate(zip(wanted.ranks, out_shards, strict=True)):
        if set(shard) != set(boxes):
            yield f"file {rank}: {len(shard)} tensors, expected {len(boxes)}"
        for fqn in set(shard) & set(boxes):
            if not _holds(shard[fqn], boxes[fqn], fqn, layout, source_shards):
                yield f"file {rank}: {fqn}: other shape or values"


def _holds(found: Array, box: Box, fqn: str, layout: Layout, source_shards: list[dict[str, Array]]) -> bool:
    """Is the array `found`, at `box`, the tensor of the source?"""
    return found.shape == box.extent and all(
        np.array_equal(found[_within(box, part)], source_shards[rank][fqn][_within(part, box)])
        for rank, part in boxes_of(layout, fqn).items()
    )


def _within(box: Box, other: Box) -> tuple[slice, ...]:
    """The part of `box` that `other` overlaps, counted from the start of `box`."""
    return tuple(
        slice(max(o, first) - first, max(min(o + e, first + size) - first, max(o, first) - first))
        for first, size, o, e in zip(*box, *other, strict=True)
    )


def main(source: str, out: str, target: str) -> None:
    for fault in faults(Path(source), Path(out), target):
        print(fault)


if __name__ == "__main__":
    main(*sys.argv[1:])
