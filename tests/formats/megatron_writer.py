"""A small Llama of real Megatron-Core on CPUs, saved twice as `torch_dist`, and what it makes of some tokens.

    mpirun -n 4 python -m tests.formats.megatron_writer OUT RENDEZVOUS

OUT/stacked: tp = 2, with the layers stacked, and OUT/logits.pt. OUT/numbered: what Megatron-Core loads from there at tp = 2 and
pp = 2 and saves with every layer under its number, gate and up apart (`singleton_local_shards`).
"""

import contextlib
import multiprocessing
import os
import sys
import warnings
from multiprocessing import resource_tracker
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F

from tests.benchmarks.gloo import process_group

HEADS, KV_HEADS, HIDDEN, INNER, LAYERS, VOCABULARY, PADDED = 4, 2, 32, 48, 2, 60, 64
TOKENS = torch.tensor([[3, 1, 4, 1, 5, 9, 2, 6, 59, 0]])


def without_cuda() -> None:
    """Megatron-Core asks for CUDA where it needs none."""
    torch.cuda.synchronize = lambda *_, **__: None
    torch.cuda.current_device = lambda: torch.device("cpu")
    torch.Tensor.cuda = lambda self, *_, **__: self
    from megatron.core.tensor_parallel.random import CudaRNGStatesTracker

    CudaRNGStatesTracker.fork = lambda *_, **__: contextlib.nullcontext()


def model_of(tp: int, pp: int) -> torch.nn.Module:
    from megatron.core import parallel_state
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.transformer import TransformerConfig

    parallel_state.initialize_model_parallel(tp, pp)
    config = TransformerConfig(
        num_layers=LAYERS,
        hidden_size=HIDDEN,
        ffn_hidden_size=INNER,
        num_attention_heads=HEADS,
        num_query_groups=KV_HEADS,
        tensor_model_parallel_size=tp,
        pipeline_model_parallel_size=pp,
        pipeline_dtype=torch.float32,
        use_cpu_initialization=True,
        gated_linear_unit=True,
        activation_func=F.silu,
        add_bias_linear=False,
        add_qkv_bias=True,
        normalization="RMSNorm",
        layernorm_epsilon=1e-6,
        init_method_std=0.3,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        masked_softmax_fusion=False,
        bias_dropout_fusion=False,
        bias_activation_fusion=False,
        apply_rope_fusion=False,
        gradient_accumulation_fusion=False,
    )
    return GPTModel(
        config,
        get_gpt_layer_local_spec(normalization="RMSNorm"),
        vocab_size=PADDED,
        max_sequence_length=64,
        position_embedding_type="rope",
        share_embeddings_and_output_weights=False,
        pre_process=parallel_state.is_pipeline_first_stage(),
        post_process=parallel_state.is_pipeline_last_stage(),
    ).eval()


def logits_of(model: torch.nn.Module) -> torch.Tensor:
    """Of the tokens, without those of the padding; every rank has computed a part of the vocabulary."""
    length = TOKENS.shape[1]
    part = model(TOKENS, torch.arange(length)[None], torch.ones(1, 1, length, length).triu(1).bool())
    parts = [torch.empty_like(part) for _ in range(dist.get_world_size())]
    dist.all_gather(parts, part.contiguous())
    return torch.cat(parts[:2], dim=-1)[..., :VOCABULARY]


def save(model: torch.nn.Module, out: Path, by_number: bool) -> None:
    from megatron.core import dist_checkpointing

    if dist.get_rank() == 0:
        out.mkdir(parents=True)
    dist.barrier()
    dist_checkpointing.save(model.sharded_state_dict(metadata={"singleton_local_shards": by_number}), out)
    dist.barrier()


def main(out: Path, rendezvous: str) -> None:
    without_cuda()
    with process_group(rendezvous) as rank, torch.no_grad():
        from megatron.core import dist_checkpointing, parallel_state

        torch.manual_seed(0)
        model = model_of(tp=2, pp=1)
        for name, parameter in model.named_parameters():
            if "norm" in name or "bias" in name:  # else ones and zeros
                parameter.uniform_(-0.5, 0.5, generator=torch.Generator().manual_seed(len(name)))
        logits = logits_of(model)
        save(model, out / "stacked", by_number=False)
        if rank == 0:
            torch.save(logits, out / "logits.pt")
        parallel_state.destroy_model_parallel()
        model = model_of(tp=2, pp=2)
        loaded = dist_checkpointing.load(model.sharded_state_dict(), out / "stacked")
        model.load_state_dict(loaded, strict=False)
        save(model, out / "numbered", by_number=True)


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    try:
        main(Path(sys.argv[1]), sys.argv[2])
    finally:  # its helpers would outlive this process, and mpirun waits for them
        for helper in multiprocessing.active_children():
            helper.kill()
        resource_tracker._resource_tracker._stop()
    os._exit(0)  # all is written; threads of torch have been seen to abort an interpreter that ends by itself
