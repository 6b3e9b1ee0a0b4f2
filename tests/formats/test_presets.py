"""The presets against transformers: every tensor of a model has a rule, and it is that of the model's own `tp_plan`."""

import re

import pytest

from reshard_mpi.layout.file import load_layout
from reshard_mpi.layout.rules import Tensor
from reshard_mpi.layout.words import HOOKS, is_embedding, is_packed, tensor_axis
from tests.jobs.outcome import assert_done
from tests.mpirun import run_mpi
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
        {
            "num_key_value_heads": 2,
            "num_experts": 4,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 16,
            "head_dim": 8,
        },
    ),
    ("mixtral", "MixtralConfig", {"num_key_value_heads": 2, "num_local_experts": 4}),
    ("gpt-neox", "GPTNeoXConfig", {}),
]


# What tp_plan said of experts until transformers 5.24; since then they are left to expert parallelism there.
EXPERTS = {
    "model.layers.*.mlp.experts.gate_up_proj": "packed_colwise",
    "model.layers.*.mlp.experts.down_proj": "rowwise",
}


@pytest.mark.parametrize("preset, config, sizes", MODELS, ids=[row[0] for row in MODELS])
def test_a_preset_is_the_tp_plan_of_its_model(preset, config, sizes):
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(getattr(transformers, config)(**SIZES, **sizes))
    tensors = [Tensor(fqn, fqn, tuple(tensor.shape)) for fqn, tensor in model.state_dict().items()]
    found = load_layout(preset, {"head_dim": 8}).resolve(tensors, ["tp"])
    assert not found.faults, list(map(str, found.faults))
    plan = EXPERTS | {key: word for key, word in model.tp_plan.items() if word not in HOOKS}
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


@pytest.mark.parametrize("target", ["tp=2,pp=2", "tp=4"])
@pytest.mark.parametrize("preset, config, sizes", MODELS, ids=[row[0] for row in MODELS])
def test_a_model_that_is_cut_by_its_preset_comes_back_with_equal_logits(preset, config, sizes, target, tmp_path):
    """With tp=4 there are fewer key-value heads than ranks, where there are key-value heads."""
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(getattr(transformers, config)(**SIZES, **sizes)).eval()
    model.save_pretrained(tmp_path / "model")
    assert_done(run_mpi(2, "reshard", tmp_path / "model", tmp_path / "case", "--target", target, "--layout", preset))
    back = ("--format", "hf", "--hf-assets", tmp_path / "model")
    assert_done(run_mpi(3, "reshard", tmp_path / "case", tmp_path / "out", *back))
    loaded, info = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out", output_loading_info=True)
    assert not info["missing_keys"] and not info["unexpected_keys"]
    tokens = torch.arange(12).reshape(1, 12)
    with torch.no_grad():
        assert torch.equal(model(tokens).logits, loaded.eval()(tokens).logits)
