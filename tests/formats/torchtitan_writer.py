"""A small Llama as torchtitan has it, saved by real DCP from FSDP2 and tensor parallelism, and what it makes of some tokens.

    mpirun -n 4 python -m tests.formats.torchtitan_writer OUT RENDEZVOUS

Names and rotary embeddings are torchtitan's (models/llama3): a head's neighbours 2i and 2i + 1 are one complex number, which is
turned. Beside OUT lies OUT.logits.pt.
"""

import os
import sys
import warnings
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as checkpoint
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from tests.benchmarks.gloo import process_group

HEADS, KV_HEADS, HEAD_DIM, HIDDEN, INNER, LAYERS, VOCABULARY = 4, 2, 8, 32, 48, 2, 60
TOKENS = torch.tensor([[3, 1, 4, 1, 5, 9, 2, 6, 59, 0]])


def turned(x: torch.Tensor) -> torch.Tensor:
    """Rotary embeddings of (batch, position, head, HEAD_DIM)."""
    frequencies = 1.0 / (10000.0 ** (torch.arange(0, HEAD_DIM, 2) / HEAD_DIM))
    angles = torch.outer(torch.arange(x.shape[1]), frequencies)
    pairs = torch.view_as_complex(x.reshape(*x.shape[:-1], -1, 2))
    return torch.view_as_real(pairs * torch.polar(torch.ones_like(angles), angles)[None, :, None]).flatten(3)


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.wq, self.wo = nn.Linear(HIDDEN, HEADS * HEAD_DIM), nn.Linear(HEADS * HEAD_DIM, HIDDEN)
        self.wk, self.wv = (nn.Linear(HIDDEN, KV_HEADS * HEAD_DIM) for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = (w(x).unflatten(-1, (-1, HEAD_DIM)) for w in (self.wq, self.wk, self.wv))
        q, k, v = (t.transpose(1, 2) for t in (turned(q), turned(k), v))
        found = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        return self.wo(found.transpose(1, 2).flatten(2))


class FeedForward(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.w1, self.w2, self.w3 = (
            nn.Linear(*sizes, bias=False) for sizes in ((HIDDEN, INNER), (INNER, HIDDEN), (HIDDEN, INNER))
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.w2(F.silu(self.w1(x)) * self.w3(x))


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attention, self.feed_forward = Attention(), FeedForward()
        self.attention_norm, self.ffn_norm = (nn.RMSNorm(HIDDEN, eps=1e-6) for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.attention(self.attention_norm(x))
        return x + self.feed_forward(self.ffn_norm(x))


class Llama(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.tok_embeddings = nn.Embedding(VOCABULARY, HIDDEN)
        self.layers = nn.ModuleDict({str(layer): Block() for layer in range(LAYERS)})
        self.norm, self.output = nn.RMSNorm(HIDDEN, eps=1e-6), nn.Linear(HIDDEN, VOCABULARY, bias=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.tok_embeddings(tokens)
        for block in self.layers.values():
            x = block(x)
        return self.output(self.norm(x))


def shard(model: Llama) -> None:
    """tp = 2, and FSDP over the rest, which cuts within key-value heads."""
    mesh = init_device_mesh("cpu", (dist.get_world_size() // 2, 2), mesh_dim_names=("fsdp", "tp"))
    columns = ("attention.wq", "attention.wk", "attention.wv", "feed_forward.w1", "feed_forward.w3")
    plan = {name: ColwiseParallel() for name in columns}
    plan |= {name: RowwiseParallel() for name in ("attention.wo", "feed_forward.w2")}
    for block in model.layers.values():
        parallelize_module(block, mesh["tp"], plan)
        fully_shard(block, mesh=mesh["fsdp"])
    fully_shard(model, mesh=mesh["fsdp"])


def main(out: str, rendezvous: str) -> None:
    with process_group(rendezvous) as rank:
        torch.manual_seed(0)
        model = Llama().eval()
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.uniform_(-0.5, 0.5)
            if rank == 0:
                torch.save(model(TOKENS), f"{Path(out)}.logits.pt")
        shard(model)
        checkpoint.save({**model.state_dict(), "train_state": {"step": 7}}, checkpoint_id=out)


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    main(*sys.argv[1:])
    os._exit(0)  # all is written; threads of torch have been seen to abort an interpreter that ends by itself
