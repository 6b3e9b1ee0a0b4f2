"""Checkpoints of trainers become Hugging Face models: transformers makes of some tokens what the trainer's own model did."""

import hashlib
import json
from pathlib import Path

import pytest

from tests.formats.contents import arrays_of
from tests.formats.rewritten import cast_bytes
from tests.jobs.outcome import assert_done, assert_refused
from tests.mpirun import run_mpi, run_python_mpi, tail
from tests.needed import needed

torch = needed("torch")
transformers = needed("transformers")

SIZES = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 60,
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": False,
}
TOKENS = torch.tensor([[3, 1, 4, 1, 5, 9, 2, 6, 59, 0]])


def run_writer(nranks: int, *arguments: object) -> None:
    done = run_python_mpi(nranks, "-m", *arguments, timeout=200)
    assert done.returncode == 0, tail(done.stderr)


@pytest.fixture(scope="module")
def torchtitan(tmp_path_factory) -> Path:
    """What torchtitan saved, its logits, and the configuration of the model."""
    folder = tmp_path_factory.mktemp("torchtitan")
    run_writer(4, "tests.formats.torchtitan_writer", folder / "dcp", folder / "rendezvous")
    transformers.LlamaConfig(**SIZES, attention_bias=True).save_pretrained(folder / "model")
    return folder


@pytest.fixture(scope="module")
def megatron(tmp_path_factory) -> Path:
    """The same of Megatron-Core: `stacked`, and `numbered`, as it saves what it loaded from there at tp = 2, pp = 2."""
    needed("megatron.core")
    folder = tmp_path_factory.mktemp("megatron")
    run_writer(4, "tests.formats.megatron_writer", folder, folder / "rendezvous")
    transformers.Qwen2Config(**SIZES).save_pretrained(folder / "model")  # a Llama whose q, k and v have a bias
    return folder


def converted(saved: Path, out: Path, preset: str, nranks: int, *options: object) -> Path:
    """A Hugging Face folder of what a trainer saved."""
    wanted = ("--format", "hf", "--layout", preset, "--hf-assets", saved.parent / "model")
    assert_done(run_mpi(nranks, "reshard", saved, out, *wanted, *options))
    return out


def digests(folder: Path) -> dict[str, str]:
    return {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in folder.iterdir()}


def assert_same_logits(out: Path, logits: Path) -> None:
    model, loading = transformers.AutoModelForCausalLM.from_pretrained(out, output_loading_info=True)
    assert not any(loading.values()), loading
    with torch.no_grad():
        torch.testing.assert_close(model(TOKENS).logits, torch.load(logits), rtol=1e-4, atol=1e-4)


def assert_cast(out: Path, whole: Path) -> None:
    """`out` is `whole` in bfloat16."""
    found, expected = (arrays_of(folder / "model.safetensors") for folder in (out, whole))
    assert found.keys() == expected.keys()
    for fqn, array in expected.items():
        assert found[fqn].data == cast_bytes(array.data, "float32", "bfloat16"), fqn


def test_a_llama_of_torchtitan_becomes_one_of_hugging_face(torchtitan, tmp_path):
    saved, preset = torchtitan / "dcp", "torchtitan-llama"
    out = converted(saved, tmp_path / "out", preset, 3)
    assert_same_logits(out, torchtitan / "dcp.logits.pt")
    for nranks, options in ((1, ("--verify", "none")), (4, ("--memory", "64K", "--verify", "full"))):
        assert digests(converted(saved, tmp_path / f"out-{nranks}", preset, nranks, *options)) == digests(out)
    assert_cast(converted(saved, tmp_path / "cast", preset, 2, "--cast", "bfloat16"), out)
    direct = ("--target", "tp=2", "--layout", preset, "--layout-set", "head_dim=8")
    assert_done(run_mpi(2, "reshard", saved, tmp_path / "case", *direct))
    assert_done(run_mpi(1, "compare", tmp_path / "case", out))


@pytest.mark.thorough
def test_a_llama_of_megatron_becomes_one_of_hugging_face(megatron, tmp_path):
    saved, preset = megatron / "stacked", "megatron-llama"
    out = converted(saved, tmp_path / "out", preset, 3)
    assert_same_logits(out, megatron / "logits.pt")
    for nranks, options in ((1, ("--verify", "none")), (4, ("--memory", "64K", "--verify", "full"))):
        assert digests(converted(saved, tmp_path / f"out-{nranks}", preset, nranks, *options)) == digests(out)
    # Layers by number, gate and up apart, two pipeline stages: the same model.
    assert digests(converted(megatron / "numbered", tmp_path / "numbered", preset, 2)) == digests(out)
    assert_cast(converted(saved, tmp_path / "cast", preset, 2, "--cast", "bfloat16"), out)


def test_a_flipped_byte_of_reordered_heads_is_found(tmp_path):
    """DCP's checksum is of the rows as they are stored."""
    saved = tmp_path / "dcp"
    state = {"layers.0.attention.wq.weight": torch.rand(32, 32), "layers.0.attention.wk.weight": torch.rand(16, 32)}
    torch.distributed.checkpoint.save(state, checkpoint_id=saved, no_dist=True)
    file = next(saved.glob("*.distcp"))
    content = bytearray(file.read_bytes())
    content[content.index(state["layers.0.attention.wk.weight"][5].numpy().tobytes()) + 1] ^= 1
    file.write_bytes(content)
    layout = tmp_path / "mine.toml"
    heads = "".join(
        f'[[operations]]\npermute = "layers.*.attention.{name}.weight"\nunit = 8\nto = "halves"\n'
        for name in ("wq", "wk")
    )
    layout.write_text(heads)
    plan = json.loads(assert_done(run_mpi(1, "plan", saved, "--layout", layout, "--json")))
    assert {tensor["tensor"] for tensor in plan["changes"]["permuted"]} == set(state)
    for options in ((), ("--cast", "bfloat16"), ("--verify", "full")):
        done = run_mpi(2, "reshard", saved, tmp_path / "out", "--layout", layout, "--restart", *options)
        assert_refused(done, 4, file.name, "crc32", "wk", out=tmp_path / "out")
