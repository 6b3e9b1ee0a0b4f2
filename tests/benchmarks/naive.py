"""A peer: what one writes without looking for a tool. One process, everything in memory, nothing checked.

    python -m tests.benchmarks.naive SOURCE OUT TARGET

Loads every shard with safetensors, puts each tensor together in numpy, cuts it for the target, and saves. Writes no
`case.json`. Prints the seconds from the first read to the last write.
"""

import json
import sys
import time
from pathlib import Path

import ml_dtypes  # noqa: F401  (safetensors finds bfloat16 in it)
import numpy as np
from safetensors.numpy import load_file, save_file

from tests.benchmarks.layouts import case_layout, slices, target_layout


def reshard(source: Path, out: Path, target: str) -> None:
    layout = case_layout(source)
    whole: dict[str, np.ndarray] = {}
    for rank, boxes in enumerate(layout.ranks):
        for fqn, part in load_file(source / f"rank-{rank:05d}.safetensors").items():
            if fqn not in whole:
                whole[fqn] = np.empty(layout.shapes[fqn], part.dtype)
            whole[fqn][slices(boxes[fqn])] = part
    out.mkdir()
    for rank, boxes in enumerate(target_layout(layout, target).ranks):
        # safetensors saves an array that is not contiguous wrong, without an error.
        arrays = {fqn: np.ascontiguousarray(whole[fqn][slices(box)]) for fqn, box in boxes.items()}
        save_file(arrays, out / f"rank-{rank:05d}.safetensors", {"format": "pt"})


def main(source: str, out: str, target: str) -> None:
    started = time.perf_counter()
    reshard(Path(source), Path(out), target)
    print(json.dumps({"seconds": time.perf_counter() - started}))


if __name__ == "__main__":
    main(*sys.argv[1:])
