"""The presets against transformers: every tensor of a model has a rule, and it is that of the model's own `tp_plan`."""

import re

import pytest

from reshard_mpi.layout.file import load_layout
from reshard_mpi.layout.rules import Tensor
from reshard_mpi.layout.words import HOOKS, is_embedding, is_packed, tensor_axis
from tests.needed import needed

torch = needed("torch")
transformers = needed("transformers")

SIZES = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": 40}
MODELS = [
    ("llama", "LlamaConfig", {"num_key_value_heads": 2}),
    ("qwen2", "Qwen2Config", {"num_key_value_heads": 2}),
    (
        "qwen3_moe",
        "Qwen3MoeConfig",
        {"num_key_value_heads": 2, "num_experts": 4, "moe_intermediate_size": 16, "head_dim": 8},
    ),
    ("mixtral", "MixtralConfig", {"num_key_value_heads": 2, "num_local_experts": 4}),
    ("gpt-neox", "GPTNeoXConfig", {}),
]


@pytest.mark.parametrize("preset, config, sizes", MODELS, ids=[row[0] for row in MODELS])
def test_a_preset_is_the_tp_plan_of_its_model(preset, config, sizes):
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(getattr(transformers, config)(**SIZES, **sizes))
    tensors = [Tensor(fqn, fqn, tuple(tensor.shape)) for fqn, tensor in model.state_dict().items()]
    found = load_layout(preset, {"head_dim": 8}).resolve(tensors, ["tp"])
    assert not found.faults, list(map(str, found.faults))
    plan = {key: word for key, word in model.tp_plan.items() if word not in HOOKS}
    for tensor in tensors:
        generic = re.sub(r"\.\d+\.", ".*.", tensor.fqn)
        word = plan.get(generic) or plan.get(generic.rpartition(".")[0])
        rule = found.layout[tensor.fqn]["tp"]
        if word is None:
            assert rule == (0 if is_embedding(tensor.fqn) else "replicate"), tensor.fqn
        else:
            assert rule == tensor_axis(word, tensor.fqn, len(tensor.shape)), (tensor.fqn, word)
            cut = found.cuts.get(tensor.fqn, {}).get("tp")
            assert (cut is not None and len(cut.members) == 2) == is_packed(word), tensor.fqn
