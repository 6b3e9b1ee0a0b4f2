"""Tensors that trainers hold in a way of their own, fused or with other heads: a new name alone makes them something else.

They are known by their names, those that they have or ever had; what was done to them says whether they still are what they were.
"""

import re
from collections.abc import Iterator, Mapping
from typing import NamedTuple

from reshard_mpi.checkpoint.wanted import History
from reshard_mpi.errors import InputError, names, plural


class Family(NamedTuple):
    """Tensors whose fqn has the pattern in it; `operation` makes of them what Hugging Face's models have, `preset` has it all."""

    pattern: re.Pattern[str]
    what: str
    operation: str
    preset: str


FAMILIES = (
    Family(
        re.compile(
            r"(?:^|\.)(?:decoder|encoder)\.layers\.(?:.*\.)?(?:linear_qkv|linear_fc1)\.(?:weight|bias)\d*(?:\.|$)"
        ),
        "fused, as Megatron-Core holds q, k and v, or gate and up",
        "split",
        "megatron-llama",
    ),
    Family(
        re.compile(r"(?:^|\.)layers\.\d+\.attention\.(?:qkv_linear\.)?(?:wq|wk)\.(?:weight|bias)(?:\.|$)"),
        "heads with the pairs of rotary embeddings interleaved, as torchtitan's Llama and the original one have them",
        "permute",
        "torchtitan-llama",
    ),
    Family(
        re.compile(r"(?:^|\.)layers\.\d+\.attention\.qkv_linear\.wqkv\.(?:weight|bias)(?:\.|$)"),
        "fused, as torchtitan holds q, k and v",
        "split",
        "torchtitan-llama, once the checkpoint was saved without fusing them",
    ),
)


def unfit(fqns: Mapping[str, str], history: History) -> Iterator[InputError]:
    """One fault for each family of which tensors (id -> fqn) would only be renamed."""
    for family in FAMILIES:
        found = [
            fqn
            for tensor, fqn in sorted(fqns.items())
            if any(family.pattern.search(name) for name in (fqn, *(step.fqn for step in history.get(tensor, ()))))
            and not any(step.kind == family.operation for step in history.get(tensor, ()))
        ]
        if found:
            yield InputError(
                "--format hf",
                f"{plural(len(found), 'tensor')} would be no tensors of Hugging Face's: {names(found)}: {family.what}; take "
                f"--layout {family.preset}, or one with an operation {family.operation}; leave them out with --exclude; "
                "or say --layout none to have them as they are",
            )
