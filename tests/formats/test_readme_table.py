"""The table of the README: every command in it does what it says."""

import re
import shlex
import shutil
from pathlib import Path

import pytest
from safetensors.numpy import load_file
from safetensors.torch import load_file as load_torch

from tests.formats.test_dcp import written
from tests.jobs.outcome import CASES, assert_done
from tests.mpirun import CHECKOUT, run_mpi, tail
from tests.needed import needed

torch = needed("torch")
transformers = needed("transformers")

README = (CHECKOUT / "README.md").read_text()
TABLE = README.partition("## What you have, what to type")[2].partition("\n\n**")[0]
COMMANDS = re.findall(r"\| `mpirun -n 4 python -m reshard_mpi ([^`]+)` \|", TABLE)


# Llamas of the size of MODEL, under the names of trainers; Megatron's layers are stacked.
TITAN = {f"layers.{layer}.attention.{name}.weight": (32, 32) for layer in range(2) for name in ("wq", "wk", "wv", "wo")}
TITAN |= {f"layers.{layer}.feed_forward.{name}.weight": (48, 32) for layer in range(2) for name in ("w1", "w3")}
TITAN |= {f"layers.{layer}.feed_forward.w2.weight": (32, 48) for layer in range(2)}
TITAN |= {f"layers.{layer}.{name}.weight": (32,) for layer in range(2) for name in ("attention_norm", "ffn_norm")}
TITAN |= {"tok_embeddings.weight": (64, 32), "norm.weight": (32,), "output.weight": (64, 32)}
MEGATRON = {
    "embedding.word_embeddings.weight": (80, 32),
    "decoder.layers.self_attention.linear_qkv.weight": (2, 96, 32),
    "decoder.layers.self_attention.linear_qkv.layer_norm_weight": (2, 32),
    "decoder.layers.self_attention.linear_proj.weight": (2, 32, 32),
    "decoder.layers.mlp.linear_fc1.weight": (2, 96, 32),
    "decoder.layers.mlp.linear_fc1.layer_norm_weight": (2, 32),
    "decoder.layers.mlp.linear_fc2.weight": (2, 32, 48),
    "decoder.final_layernorm.weight": (32,),
    "output_layer.weight": (80, 32),
    "optimizer.state.exp_avg.decoder.layers.mlp.linear_fc1.weight": (2, 96, 32),
}


def test_every_row_has_a_command():
    assert len(COMMANDS) == TABLE.count("\n|") - 2 >= 8


@pytest.fixture(scope="module")
def folders(tmp_path_factory) -> dict[str, Path]:
    """What the words in capitals stand for."""
    folder = tmp_path_factory.mktemp("have")
    config = transformers.LlamaConfig(
        hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4, vocab_size=64
    )
    model = transformers.LlamaForCausalLM(config)
    model.save_pretrained(folder / "model")
    torch.distributed.checkpoint.save(model.state_dict(), checkpoint_id=folder / "dcp", no_dist=True)
    shards, _ = written(folder, "hf", "fsdp", 2)
    for name, shapes in (("titan", TITAN), ("megatron", MEGATRON)):
        state = {fqn: torch.rand(shape) for fqn, shape in shapes.items()}
        torch.distributed.checkpoint.save(state, checkpoint_id=folder / name, no_dist=True)
    case, cut = CASES / "tp2-pp2-layers-tied", ("--target", "tp=2,pp=2", "--layout", "llama")
    assert_done(run_mpi(2, "reshard", case, folder / "hdf5", "--format", "hdf5", "--target", "tp=2"))
    assert_done(run_mpi(2, "reshard", folder / "model", folder / "bare", *cut))
    for name in ("case.json", "layout.toml"):
        (folder / "bare" / name).unlink()
    shutil.copytree(folder / "dcp", folder / "run" / "step_20")
    (folder / "run" / "latest").write_text("step_20\n")
    return {
        "CASE": CASES / "tp2-pp2-layers-tied",
        "DCP": folder / "dcp",
        "SHARDS": shards,
        "MODEL": folder / "model",
        "TITAN": folder / "titan",
        "MEGATRON": folder / "megatron",
        "HDF5": folder / "hdf5",
        "RUN": folder / "run",
        "BARE": folder / "bare",
    }


@pytest.mark.parametrize("command", COMMANDS)
def test_a_command_of_the_table_works(command, folders, tmp_path):
    have = {**folders, "OUT": tmp_path / "out"}
    done = run_mpi(4, *(have.get(word, word) for word in shlex.split(command)), timeout=120)
    assert done.returncode == 0, tail(done.stdout) + tail(done.stderr)
    assert (tmp_path / "out").exists() or command.startswith("compare")
    if command.startswith("reshard"):
        assert_holds_what_was_there(command, have, done.stdout)
    if {"TITAN", "MEGATRON"} & set(command.split()):
        expected = load_file(folders["MODEL"] / "model.safetensors")
        found = load_file(tmp_path / "out" / "model.safetensors")
        assert {fqn: tensor.shape for fqn, tensor in found.items()} == {fqn: t.shape for fqn, t in expected.items()}


def assert_holds_what_was_there(command: str, have: dict[str, Path], told: str) -> None:
    """Where tensors keep names and types OUT is equal to the source; where types alone change, numpy's rounding judges."""
    source, out = have[command.split()[1]], have["OUT"]
    if "-llama" in command:
        return  # other names: see below, and test_trainers.py
    if "--cast bfloat16" in command:
        before, after = load_torch(source_file(have)), load_torch(out / "model.safetensors")
        assert before.keys() == after.keys()
        assert all(torch.equal(before[fqn].to(torch.bfloat16), after[fqn]) for fqn in before)
        return
    done = run_mpi(2, "compare", source, out)
    assert done.returncode == 0, f"{told}\n{done.stdout}\n{tail(done.stderr)}"
    if "--hf-assets" in command:
        assert (out / "config.json").read_bytes() == (have["MODEL"] / "config.json").read_bytes()


def source_file(have: dict[str, Path]) -> Path:
    """What DCP holds, as transformers saved it."""
    return have["MODEL"] / "model.safetensors"
