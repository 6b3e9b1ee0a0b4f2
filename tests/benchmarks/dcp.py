"""A peer: PyTorch's distributed checkpoint (DCP), which reshards while it loads; then it saves what it loaded.

    mpirun -n N python -m tests.benchmarks.dcp reshard SOURCE DCP OUT TARGET RENDEZVOUS
    mpirun -n 4 python -m tests.benchmarks.dcp write SOURCE DCP RENDEZVOUS
    python -m tests.benchmarks.dcp check SOURCE OUT TARGET

`write` saves the source with DCP, `reshard` is what is timed, `check` compares its output with the source. There are as
many ranks as target shards, which is the only way: a rank holds its shard of the target. (For `single`, a group of one.)
A tensor that several ranks hold is a DTensor, split or replicated on a mesh of these ranks; one that a single rank
holds is a plain tensor. DCP's defaults are kept; one of them is to sync its files, as ours does.

Prints the seconds inside the process, without imports, process group and meshes.
"""

import json
import math
import sys
import time
import warnings
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as checkpoint
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard

from tests.benchmarks.gloo import process_group
from tests.benchmarks.layouts import Layout, boxes_of, case_layout, slices, split_axes, target_layout
from tests.benchmarks.shards import map_shard

Meshes = dict[tuple[tuple[int, ...], tuple[int, ...]], DeviceMesh]
State = dict[str, torch.Tensor]


def mesh_key(layout: Layout, fqn: str) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """(ranks that hold it, shape of their mesh)."""
    boxes = boxes_of(layout, fqn)
    return tuple(boxes), tuple(split_axes(list(boxes.values())).values()) or (len(boxes),)


def meshes_of(layout: Layout) -> Meshes:
    """Collective: a mesh for each set of ranks that share a tensor, made in the same order on all ranks."""
    keys = sorted({mesh_key(layout, fqn) for fqn in layout.shapes})
    return {
        (ranks, shape): DeviceMesh("cpu", torch.tensor(ranks).reshape(shape)) for ranks, shape in keys if len(ranks) > 1
    }


def state_of(layout: Layout, meshes: Meshes, rank: int) -> State:
    """The tensors of this rank, not filled."""
    return {fqn: _tensor(layout, meshes, fqn, rank) for fqn in layout.ranks[rank]}


def _tensor(layout: Layout, meshes: Meshes, fqn: str, rank: int) -> torch.Tensor:
    local = torch.empty(layout.ranks[rank][fqn].extent, dtype=torch.bfloat16)
    mesh = meshes.get(mesh_key(layout, fqn))
    if mesh is None:
        return local
    placements = [Shard(axis) for axis in split_axes(list(boxes_of(layout, fqn).values()))] or [Replicate()]
    shape = layout.shapes[fqn]
    stride = tuple(math.prod(shape[axis + 1 :]) for axis in range(len(shape)))
    return DTensor.from_local(local, mesh, placements, run_check=False, shape=torch.Size(shape), stride=stride)


def write(source: str, saved: str, rendezvous: str) -> None:
    layout = case_layout(Path(source))
    with process_group(rendezvous) as rank:
        state = state_of(layout, meshes_of(layout), rank)
        for fqn, array in map_shard(Path(source) / f"rank-{rank:05d}.safetensors").items():
            tensor = state[fqn]
            local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
            local.view(torch.uint16).numpy()[...] = array
        checkpoint.save(state, checkpoint_id=saved)


def reshard(source: str, saved: str, out: str, target: str, rendezvous: str) -> None:
    layout = target_layout(case_layout(Path(source)), target)
    with process_group(rendezvous) as rank:
        meshes = meshes_of(layout)
        dist.barrier()
        started = time.perf_counter()
        state = state_of(layout, meshes, rank)
        checkpoint.load(state, checkpoint_id=saved)
        checkpoint.save(state, checkpoint_id=out)
        dist.barrier()
        if rank == 0:
            print(json.dumps({"seconds": time.perf_counter() - started}))


def check(source: str, out: str, target: str) -> None:
    """Print what is wrong with the output."""
    layout = case_layout(Path(source))
    faults = list(_wrong_boxes(out, target_layout(layout, target)))
    shards = [map_shard(path) for path in sorted(Path(source).glob("rank-*.safetensors"))]
    for fqn, shape in layout.shapes.items():
        tensor = torch.zeros(shape, dtype=torch.bfloat16)
        checkpoint.load({fqn: tensor}, checkpoint_id=out, no_dist=True)
        whole = tensor.view(torch.uint16).numpy()
        if not all(np.array_equal(whole[slices(box)], shards[r][fqn]) for r, box in boxes_of(layout, fqn).items()):
            faults.append(f"{fqn}: other values")
    print("\n".join(faults))


def _wrong_boxes(out: str, target: Layout) -> list[str]:
    """Tensors that were not saved in the boxes of the target."""
    saved = checkpoint.FileSystemReader(out).read_metadata().state_dict_metadata
    wrong = []
    for fqn in target.shapes:
        expected = {tuple(box) for box in boxes_of(target, fqn).values()}
        if {(tuple(chunk.offsets), tuple(chunk.sizes)) for chunk in saved[fqn].chunks} != expected:
            wrong.append(f"{fqn}: other boxes")
    return wrong


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    {"write": write, "reshard": reshard, "check": check}[sys.argv[1]](*sys.argv[2:])
