"""Checkpoints written with real torch, and what torch itself loads of them.

    mpirun -n N python -m tests.formats.torch_writer train|nested|flat|hf|sharded KIND OUT RENDEZVOUS

KIND: fsdp (fully_shard), tp (column- and row-wise), fsdp_tp (both). `train` saves {"model": ..., "step": 7}, `nested`
{"model": ...}, `flat` the state dict itself, `hf` too, with HuggingFaceStorageWriter(save_distributed=True); `sharded` has a
ShardedTensor, whatever KIND. Beside OUT, OUT.truth.safetensors holds every tensor whole, as torch loads it from there, under the
name that it should get.
"""

import os
import sys
import warnings
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as checkpoint
from safetensors.torch import save_file
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from tests.benchmarks.gloo import process_group


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down, self.norm = nn.Linear(12, 20), nn.Linear(20, 12, bias=False), nn.LayerNorm(12)
        self.register_buffer("scale", torch.tensor(3.5))
        self.register_buffer("steps", torch.arange(7))


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, 12)
        self.layers = nn.ModuleList(Block() for _ in range(2))


def model_of(kind: str, size: int) -> nn.Module:
    torch.manual_seed(0)
    model = Model().to(torch.bfloat16)
    with torch.no_grad():
        model.layers[0].norm.weight.uniform_()
    tp = {"tp": size, "fsdp_tp": 2}.get(kind, 1)
    mesh = init_device_mesh("cpu", (size // tp, tp), mesh_dim_names=("fsdp", "tp"))
    if tp > 1:
        for block in model.layers:
            parallelize_module(block, mesh["tp"], {"up": ColwiseParallel(), "down": RowwiseParallel()})
    if size // tp > 1:
        for block in model.layers:
            fully_shard(block, mesh=mesh["fsdp"])
        fully_shard(model, mesh=mesh["fsdp"])
    return model


def sharded_state(rank: int, size: int) -> dict[str, object]:
    """Rows of a matrix on each rank, one more on the last, as the FSDP of before DTensor saved them; and a plain tensor."""
    from torch.distributed._shard import sharded_tensor

    rows = 3 + (rank == size - 1)
    part = torch.arange(rows * 5, dtype=torch.float32).reshape(rows, 5) + 15 * rank
    where = sharded_tensor.ShardMetadata([3 * rank, 0], [rows, 5], f"rank:{rank}/cpu")
    whole = sharded_tensor.init_from_local_shards([sharded_tensor.Shard(part, where)], 3 * size + 1, 5)
    return {"w": whole, "b": torch.arange(4)}


def write_sharded(out: str, rank: int) -> None:
    size = dist.get_world_size()
    checkpoint.save(sharded_state(rank, size), checkpoint_id=out)
    found = {"w": torch.zeros(3 * size + 1, 5), "b": torch.zeros(4, dtype=torch.int64)}
    checkpoint.load(found, checkpoint_id=out)
    if rank == 0:
        assert torch.equal(found["w"].flatten(), torch.arange(15.0 * size + 5))
        save_file(found, f"{Path(out)}.truth.safetensors")


def main(what: str, kind: str, out: str, rendezvous: str) -> None:
    with process_group(rendezvous) as rank:
        if what == "sharded":
            return write_sharded(out, rank)
        state = model_of(kind, dist.get_world_size()).state_dict()
        if what == "hf":
            state = {fqn: tensor for fqn, tensor in state.items() if tensor.is_floating_point()}
            writer = checkpoint.HuggingFaceStorageWriter(out, save_distributed=True)
            checkpoint.save(state, storage_writer=writer)
        else:
            saved = {"train": {"model": state, "step": 7}, "nested": {"model": state}, "flat": state}[what]
            checkpoint.save(saved, checkpoint_id=out)
            for tensor in state.values():
                tensor.zero_()
            checkpoint.load(saved, checkpoint_id=out)
        whole = {
            fqn: (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).contiguous()
            for fqn, tensor in state.items()
        }
        if rank == 0:
            prefix = "model." if what == "train" else ""
            save_file({prefix + fqn: tensor for fqn, tensor in whole.items()}, f"{Path(out)}.truth.safetensors")


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    main(*sys.argv[1:])
    os._exit(0)  # all is written; threads of torch have been seen to abort an interpreter that ends by itself
