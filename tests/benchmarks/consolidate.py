"""A peer: PyTorch's consolidation of the safetensors shards that its HuggingFaceStorageWriter saves.

    python -m tests.benchmarks.consolidate one SOURCE OUT TARGET NTHREADS
    mpirun -n N python -m tests.benchmarks.consolidate every SOURCE OUT TARGET RENDEZVOUS

`one` is `consolidate_safetensors_files`, in one process: threads share the output files out among them. `every` is
`consolidate_safetensors_files_on_every_rank`: ranks do. Either writes whole tensors into one or several files, so the
targets are `single` and `pp=4` (a file a stage). A file is the work of one thread or rank, and it hashes nothing.

Of replicated tensors every copy is read, where PyTorch's own writer would have saved one: some KiB here.
Prints the seconds inside the process, without imports and the set-up of the process group.
"""

import json
import sys
import time
from pathlib import Path

import torch.distributed as dist
from safetensors import torch as _  # noqa: F401  (imported late by the consolidation: start-up, not work)
from torch.distributed.checkpoint._consolidate_hf_safetensors import (
    consolidate_safetensors_files,
    consolidate_safetensors_files_on_every_rank,
)

from tests.benchmarks.gloo import process_group
from tests.benchmarks.layouts import case_layout, target_layout


def file_numbers(source: str, target: str) -> dict[str, int]:
    """fqn -> number of its file, from 1."""
    ranks = target_layout(case_layout(Path(source)), target).ranks
    return {fqn: 1 + rank for rank, boxes in enumerate(ranks) for fqn in boxes}


def one(source: str, out: str, target: str, nthreads: str) -> None:
    started = time.perf_counter()
    Path(out).mkdir()
    consolidate_safetensors_files(source, out, file_numbers(source, target), int(nthreads))
    print(json.dumps({"seconds": time.perf_counter() - started}))


def every(source: str, out: str, target: str, rendezvous: str) -> None:
    with process_group(rendezvous) as rank:
        started = time.perf_counter()
        Path(out).mkdir(exist_ok=True)
        dist.barrier()
        consolidate_safetensors_files_on_every_rank(source, out, file_numbers(source, target))
        if rank == 0:
            print(json.dumps({"seconds": time.perf_counter() - started}))


if __name__ == "__main__":
    {"one": one, "every": every}[sys.argv[1]](*sys.argv[2:])
