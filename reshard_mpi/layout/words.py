"""The words of transformers' `tp_plan`: which axis of a tensor each of them splits.

A weight is stored as [out, in] (of stacked experts [expert, out, in]), so `colwise` is the last axis but one and `rowwise` the
last; a bias [out] is split by the one and replicated by the other. An embedding is stored as [vocabulary, hidden] and looked up
by row: there `rowwise` is axis 0, as in torch. What a word says of inputs and outputs (`_rep`, `_gather_output`, ...) is no
matter here.
"""

import itertools
from typing import Literal

from reshard_mpi.errors import names

# Hooks on a module, which say nothing of how its parameters are cut.
HOOKS = frozenset(
    "all_reduce ep_dispatch_experts ep_router gather isolated local local_params moe_identity_expert moe_tp_experts".split()
)
REPLICATED = frozenset("mla_kv_a_proj replicate replicated replicated_with_grad_allreduce sequence_parallel".split())
FIXED = {"embedding_rowwise": 0, "embedding_colwise": 1, "grouped_gemm": 0}
_PREFIXES = ("", "local_", "packed_", "local_packed_")
_SUFFIXES = ("", "_rep", "_gather_output", "_split_input", "_allreduce", "_all_reduce", "_reduce_scatter")
_COLWISE, _ROWWISE = (
    frozenset(prefix + base + suffix for prefix, suffix in itertools.product(_PREFIXES, _SUFFIXES))
    for base in ("colwise", "rowwise")
)
_EMBEDDING = ("embed", "wte", "wpe")
_NO_EMBEDDING = ("out", "proj", "norm")  # GPT-NeoX's embed_out is a Linear


def is_word(word: str) -> bool:
    return word in HOOKS or word in REPLICATED or word in FIXED or word in _COLWISE or word in _ROWWISE


def known_words() -> str:
    common = ["colwise", "rowwise", "packed_colwise", "packed_rowwise", *sorted(FIXED), "replicate"]
    return names(common, most=len(common))


def is_packed(word: str) -> bool:
    """Does the word say that two tensors are fused along the axis?"""
    return "packed_" in word


def tensor_axis(word: str, fqn: str, naxes: int) -> int | Literal["replicate"]:
    """The tensor axis that the word splits.

    >>> tensor_axis("colwise_rep", "lm_head.weight", 2), tensor_axis("rowwise", "o_proj.bias", 1)
    (0, 'replicate')
    >>> tensor_axis("rowwise", "model.embed_tokens.weight", 2), tensor_axis("packed_colwise", "mlp.experts.gate_up_proj", 3)
    (0, 1)
    """
    if word in REPLICATED or naxes == 0:
        return "replicate"
    if word in FIXED:
        return FIXED[word]
    is_colwise = word in _COLWISE
    if naxes == 2 and is_embedding(fqn):
        return 1 if is_colwise else 0
    if is_colwise:
        return max(naxes - 2, 0)
    return naxes - 1 if naxes > 1 else "replicate"


def is_embedding(fqn: str) -> bool:
    """
    >>> is_embedding("model.embed_tokens.weight"), is_embedding("embed_out.weight"), is_embedding("embed.norm.weight")
    (True, False, False)
    """
    module = fqn.split(".")[-2:][0]
    return any(word in module for word in _EMBEDDING) and not any(word in module for word in _NO_EMBEDDING)
