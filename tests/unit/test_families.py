"""What is recognised as held in a trainer's own way, by the names that it has or had, and what makes something else of it."""

import pytest

from reshard_mpi.checkpoint.wanted import Step
from reshard_mpi.layout.families import unfit

RECOGNISED = [
    ("decoder.layers.self_attention.linear_qkv.weight", "split", "megatron-llama"),
    ("module.decoder.layers.3.mlp.linear_fc1.weight", "split", "megatron-llama"),
    ("decoder.layers.3.mlp.experts.experts.linear_fc1.weight0", "split", "megatron-llama"),
    ("optimizer.state.exp_avg.decoder.layers.3.self_attention.linear_qkv.bias", "split", "megatron-llama"),
    ("layers.0.attention.wq.weight", "permute", "torchtitan-llama"),
    ("model.layers.11.attention.qkv_linear.wk.bias", "permute", "torchtitan-llama"),
    ("optimizer.state.layers.0.attention.wk.weight.exp_avg", "permute", "torchtitan-llama"),
    ("layers.0.attention.qkv_linear.wqkv.weight", "split", "torchtitan-llama, once"),
]
PLAIN = [
    "model.visual.blocks.3.mlp.linear_fc1.weight",  # of Qwen3-VL, in Hugging Face's own models
    "decoder.layers.3.mlp.linear_fc1.layer_norm_weight",
    "decoder.layers.3.mlp.linear_fc1.weight_w",
    "layers.0.attention.wv.weight",
    "layers.0.cross_attention.wq.weight",
    "model.layers.0.self_attn.q_proj.weight",
]


@pytest.mark.parametrize("fqn, operation, told", RECOGNISED)
def test_a_tensor_is_recognised_by_any_name_that_it_had_until_an_operation_has_changed_it(fqn, operation, told):
    renamed, changed = Step("rename", fqn), Step(operation, fqn)
    for name, steps in ((fqn, ()), ("q.weight", (renamed,)), ("q.weight", (renamed, Step("trim", "p.weight")))):
        (fault,) = unfit({"t": name, "other": "norm.weight"}, {"t": steps})
        assert told in str(fault) and name in str(fault) and operation in str(fault)
    for name, steps in ((fqn, (changed,)), ("q.weight", (changed, renamed)), ("q.weight", (renamed, changed))):
        assert not [*unfit({"t": name}, {"t": steps})]


@pytest.mark.parametrize("fqn", PLAIN)
def test_other_tensors_may_have_any_name(fqn):
    assert not [*unfit({"t": fqn}, {"t": (Step("rename", fqn),)})]
