"""Hugging Face folders in and out: what transformers saves is resharded and loads in transformers again, with equal logits."""

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
import safetensors

from tests.formats.contents import arrays_of
from tests.formats.test_dcp import assert_holds, written
from tests.jobs.outcome import assert_done, assert_refused, run_alone
from tests.mpirun import run_mpi, tail
from tests.needed import needed

torch = needed("torch")
transformers = needed("transformers")

SIZES = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 128,
    "max_position_embeddings": 64,
}


def model_of(kind: str) -> "transformers.PreTrainedModel":
    """A small model: dense with grouped-query attention, the same with tied embeddings, or a mixture of experts."""
    torch.manual_seed(0)
    if kind == "experts":
        config = transformers.MixtralConfig(**SIZES, num_local_experts=4, num_experts_per_tok=2)
        return transformers.MixtralForCausalLM(config).to(torch.bfloat16).eval()
    config = transformers.LlamaConfig(**SIZES, tie_word_embeddings=kind == "tied")
    return transformers.LlamaForCausalLM(config).to(torch.bfloat16).eval()


def logits_of(model: "transformers.PreTrainedModel") -> "torch.Tensor":
    with torch.no_grad():
        return model.eval()(torch.arange(12).reshape(1, 12)).logits


@pytest.mark.parametrize("kind", ["dense", "tied", "experts"])
@pytest.mark.parametrize("most", ["50KB", "5GB"])
def test_a_model_of_transformers_comes_back_as_it_was(kind, most, tmp_path):
    model = model_of(kind)
    model.save_pretrained(tmp_path / "model", max_shard_size="60KB")
    # Cut, and put together again.
    layout = ("--target", "tp=2,pp=2", "--layout", "mixtral" if kind == "experts" else "llama")
    assert_done(run_mpi(2, "reshard", tmp_path / "model", tmp_path / "case", *layout))
    assert len(list((tmp_path / "case").glob("rank-*"))) == 4
    out, assets = tmp_path / "out", ("--hf-assets", tmp_path / "model")
    done = run_mpi(3, "reshard", tmp_path / "case", out, "--format", "hf", "--max-shard-size", most, *assets)
    assert done.returncode == 0, tail(done.stderr)
    files = sorted(path.name for path in out.iterdir())
    assert "config.json" in files and "case.json" not in files
    assert ("model.safetensors.index.json" in files) == (most == "50KB")
    loaded, info = type(model).from_pretrained(out, output_loading_info=True, dtype=torch.bfloat16)
    assert not info["missing_keys"] and not info["unexpected_keys"] and not info["mismatched_keys"]
    saved = type(model).from_pretrained(tmp_path / "model", dtype=torch.bfloat16)
    assert bool(torch.equal(logits_of(loaded), logits_of(saved)))
    for other in (tmp_path / "model", tmp_path / "case"):
        done = run_mpi(2, "compare", out, other)
        assert done.returncode == 0, done.stdout + done.stderr


def test_files_are_as_large_as_asked_for_and_the_index_names_them(tmp_path):
    model_of("dense").save_pretrained(tmp_path / "model")
    done = run_mpi(2, "reshard", tmp_path / "model", tmp_path / "out", "--format=hf", "--max-shard-size=50KB")
    assert done.returncode == 0, tail(done.stderr)
    index = json.loads((tmp_path / "out" / "model.safetensors.index.json").read_text())
    files = sorted(set(index["weight_map"].values()))
    assert files == [f"model-{n:05d}-of-{len(files):05d}.safetensors" for n in range(1, len(files) + 1)]
    sizes = {name: sum(len(array.data) for array in arrays_of(tmp_path / "out" / name).values()) for name in files}
    assert len(files) > 2 and max(sizes.values()) <= 50_000
    assert index["metadata"]["total_size"] == sum(sizes.values())
    for fqn, name in index["weight_map"].items():
        assert fqn in arrays_of(tmp_path / "out" / name)
    for name in files:  # what older versions of transformers ask for
        with safetensors.safe_open(tmp_path / "out" / name, "np") as file:
            assert file.metadata() == {"format": "pt"}


def test_the_same_bytes_whatever_the_ranks_and_the_memory(tmp_path):
    model_of("experts").save_pretrained(tmp_path / "model")
    contents = []
    for ranks, memory in ((1, "256M"), (4, "56K")):
        out = tmp_path / f"out-{ranks}"
        options = ("--format", "hf", "--max-shard-size", "100KB", "--memory", memory)
        assert run_mpi(ranks, "reshard", tmp_path / "model", out, *options).returncode == 0
        contents.append({path.name: path.read_bytes() for path in out.iterdir()})
    assert contents[0] == contents[1]


@pytest.mark.parametrize(
    ("why", "change", "exit_code", "word"),
    [
        ("a file is missing", lambda f: sorted(f.glob("model-*"))[1].unlink(), 5, "model-00002"),
        ("cut short", lambda f: cut(sorted(f.glob("model-*"))[1]), 3, "model-00002"),
        ("no index", lambda f: (f / "model.safetensors.index.json").write_text("{}"), 3, "weight_map"),
        ("a path", lambda f: rewrite(f, "../x"), 3, "paths"),
        ("a tensor in no file", lambda f: rewrite(f, None), 3, "lacks tensors"),
        ("two models", lambda f: shutil.copy(sorted(f.glob("model-*"))[1], f / "model.safetensors"), 3, "two models"),
        (
            "twice",
            lambda f: (f / "model.safetensors.index.json").write_text('{"weight_map": {"a": "b", "a": "c"}}'),
            3,
            "twice",
        ),
    ],
)
def test_a_damaged_folder_is_refused(why, change, exit_code, word, tmp_path):
    model_of("dense").save_pretrained(tmp_path / "model", max_shard_size="60KB")
    change(tmp_path / "model")
    assert_refused(run_mpi(2, "reshard", tmp_path / "model", tmp_path / "out"), exit_code, word, out=tmp_path / "out")


def test_files_may_have_any_names_that_the_index_gives(tmp_path):
    model_of("dense").save_pretrained(tmp_path / "model", max_shard_size="60KB")
    path = tmp_path / "model" / "model.safetensors.index.json"
    index = json.loads(path.read_text())
    for number, name in enumerate(sorted(set(index["weight_map"].values()))):
        (tmp_path / "model" / name).rename(tmp_path / "model" / f"part {number} of it.st")
        files = {key: f"part {number} of it.st" for key, file in index["weight_map"].items() if file == name}
        index["weight_map"] |= files
    path.write_text(json.dumps(index))
    assert_done(run_mpi(2, "reshard", tmp_path / "model", tmp_path / "out"))
    model_of("dense").save_pretrained(tmp_path / "whole")
    assert arrays_of(tmp_path / "out" / "rank-00000.safetensors") == arrays_of(tmp_path / "whole" / "model.safetensors")


def test_what_the_index_does_not_name_is_left_out_with_a_word(tmp_path):
    model_of("dense").save_pretrained(tmp_path / "model", max_shard_size="60KB")
    path = tmp_path / "model" / "model.safetensors.index.json"
    index = json.loads(path.read_text())
    del index["weight_map"]["model.norm.weight"]
    path.write_text(json.dumps(index))
    done = run_mpi(2, "reshard", tmp_path / "model", tmp_path / "out")
    assert "verified (source): the source has no digests, so its bytes could not be checked" in assert_done(done)
    assert "1 tensor in its files that it doesn't name" in done.stderr and "model.norm.weight" in done.stderr
    assert "model.norm.weight" not in arrays_of(tmp_path / "out" / "rank-00000.safetensors")


def test_a_snapshot_in_the_cache_of_the_hub_is_read_and_no_other_link(tmp_path):
    """There the files are links to blobs, which are named by their hashes."""
    snapshot, blobs = tmp_path / "models--a--b" / "snapshots" / "0123", tmp_path / "models--a--b" / "blobs"
    model_of("dense").save_pretrained(snapshot)
    blobs.mkdir()
    (snapshot / "model.safetensors").rename(blobs / "4567")
    (snapshot / "model.safetensors").symlink_to("../../blobs/4567")
    assert_done(run_mpi(2, "reshard", snapshot, tmp_path / "out"))
    assert arrays_of(tmp_path / "out" / "rank-00000.safetensors") == arrays_of(blobs / "4567")
    (snapshot.parent.parent / "snapshots").rename(tmp_path / "models--a--b" / "others")
    others = tmp_path / "models--a--b" / "others" / "0123"
    assert_refused(run_mpi(2, "reshard", others, tmp_path / "no"), 3, "is a link out of the")
    (blobs / "4567").rename(tmp_path / "4567")
    (others / "model.safetensors").unlink()
    (others / "model.safetensors").symlink_to(tmp_path / "4567")
    others.parent.rename(snapshot.parent)
    assert_refused(run_mpi(2, "reshard", snapshot, tmp_path / "no"), 3, "is a link out of the")


def test_of_two_formats_in_one_folder_the_one_that_is_read_is_told(tmp_path):
    model_of("dense").save_pretrained(tmp_path / "model")
    torch.distributed.checkpoint.save({"a": torch.ones(3)}, checkpoint_id=tmp_path / "model", no_dist=True)
    done = run_alone("inspect", tmp_path / "model")
    assert "1 tensor, " in assert_done(done)
    assert "is read as PyTorch DCP; it holds a Hugging Face model too, left out" in done.stderr


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-10])


def rewrite(folder: Path, file: str | None) -> None:
    """The index says that a tensor lies in another file."""
    path = folder / "model.safetensors.index.json"
    index = json.loads(path.read_text())
    first, *_, last = sorted(index["weight_map"])
    index["weight_map"][first] = file or index["weight_map"][last]
    path.write_text(json.dumps(index))


@pytest.mark.parametrize(
    ("options", "exit_code", "word"),
    [
        (("--format", "hf", "--target", "tp=2"), 3, "tp"),
        (("--format", "hf", "--target", "dp=2"), 2, "whole tensors"),
        (("--format", "hf", "--hf-assets", "/nowhere"), 5, "nowhere"),
        (("--format", "hf", "--max-shard-size", "5Gi"), 2, "5GB"),
        (("--format", "hf", "--max-shard-size", "0.5"), 2, "5GB"),
        (("--hf-assets", "/tmp"), 2, "--format hf"),
    ],
)
def test_what_makes_no_sense_is_refused(options, exit_code, word, tmp_path):
    model_of("dense").save_pretrained(tmp_path / "model")
    assert_refused(run_mpi(2, "reshard", tmp_path / "model", tmp_path / "out", *options), exit_code, word)


def test_a_folder_is_replaced_only_when_asked(tmp_path):
    model_of("dense").save_pretrained(tmp_path / "model")
    once = ("reshard", tmp_path / "model", tmp_path / "out", "--format", "hf")
    assert [
        run_mpi(1, *once).returncode,
        run_mpi(1, *once).returncode,
        run_mpi(1, *once, "--overwrite").returncode,
    ] == [0, 2, 0]


# The shards of HuggingFaceStorageWriter


@pytest.mark.parametrize(
    ("kind", "nranks"), [pytest.param("fsdp", 2, marks=pytest.mark.thorough), ("tp", 2), ("fsdp_tp", 4)]
)
def test_shards_with_saved_offsets_become_whole(kind, nranks, tmp_path):
    saved, truth = written(tmp_path, "hf", kind, nranks)
    done = run_mpi(3, "reshard", saved, tmp_path / "out")
    assert done.returncode == 0, tail(done.stderr)
    assert_holds(tmp_path / "out", truth)


def shard(folder: Path, rank: int, nranks: int, tensors: dict[str, tuple["torch.Tensor", list[int]]]) -> None:
    """A file as HuggingFaceStorageWriter(save_distributed=True) names and fills it."""
    from safetensors.torch import save_file

    folder.mkdir(exist_ok=True)
    offsets = {fqn: {"saved_offsets": offset} for fqn, (_, offset) in tensors.items()}
    metadata = {"DCP_SHARDING_INFO": json.dumps(offsets), "DCP_VERSION": "1.0", "format": "pt"}
    name = f"shard-{rank + 1:05d}-model-00001-of-00001.safetensors"
    save_file({fqn: tensor for fqn, (tensor, _) in tensors.items()}, folder / name, metadata)


ROWS = torch.arange(48, dtype=torch.float32).reshape(8, 6)


def rows(folder: Path, tensor: "torch.Tensor", nranks: int = 4) -> None:
    step = len(tensor) // nranks
    for rank in range(nranks):
        part = tensor[rank * step : (rank + 1) * step].contiguous()
        shard(folder, rank, nranks, {"w": (part, [rank * step] + [0] * (tensor.ndim - 1))})


@pytest.mark.parametrize(
    "dtype",
    [
        *("bool", "uint8", "int16", "uint32", "int64", "complex64", "float8_e8m0fnu", "float4_e2m1fn_x2"),
        *("float16", "bfloat16", "float32", "float64", "float8_e4m3fn", "float8_e5m2", "float8_e4m3fnuz"),
        "float8_e5m2fnuz",
    ],
)
def test_dtypes_on_which_the_consolidation_of_torch_fails_are_byte_exact(dtype, tmp_path):
    """It stops at integers and at the first two of these floats, and halves complex numbers; the rest it does well."""
    data = torch.arange(64, dtype=torch.uint8).reshape(8, 8)
    rows(tmp_path / "saved", data.bool() if dtype == "bool" else data.view(getattr(torch, dtype)))
    assert run_mpi(2, "reshard", tmp_path / "saved", tmp_path / "out").returncode == 0
    found = (tmp_path / "out" / "rank-00000.safetensors").read_bytes()[-64:]
    assert found == (data.bool().view(torch.uint8) if dtype == "bool" else data).numpy().tobytes()


def test_a_scalar_keeps_its_value(tmp_path):
    """It becomes 0.0 there."""
    shard(tmp_path / "saved", 0, 1, {"s": (torch.tensor(3.5), [])})
    assert run_mpi(1, "reshard", tmp_path / "saved", tmp_path / "out").returncode == 0
    assert arrays_of(tmp_path / "out" / "rank-00000.safetensors")["s"].data == np.float32(3.5).tobytes()


@pytest.mark.parametrize("lost", [0, 1, 2])
def test_a_shard_that_is_missing_is_refused(lost, tmp_path):
    """Rows of zeros, there."""
    rows(tmp_path / "saved", ROWS)
    sorted((tmp_path / "saved").iterdir())[lost].unlink()
    done = run_mpi(2, "reshard", tmp_path / "saved", tmp_path / "out")
    assert_refused(done, 3, f"ranks {lost + 1}", out=tmp_path / "out")


def test_that_the_last_shard_is_missing_can_not_be_seen_and_is_said(tmp_path):
    rows(tmp_path / "saved", ROWS)
    sorted((tmp_path / "saved").iterdir())[3].unlink()
    done = run_mpi(2, "reshard", tmp_path / "saved", tmp_path / "out")
    assert done.returncode == 0 and "don't say how large a tensor is" in done.stderr


def test_overlapping_pieces_are_refused(tmp_path):
    """The last file wins, there."""
    shard(tmp_path / "saved", 0, 2, {"w": (ROWS[:5].contiguous(), [0, 0])})
    shard(tmp_path / "saved", 1, 2, {"w": (ROWS[4:].contiguous() + 1, [4, 0])})
    done = run_mpi(2, "reshard", tmp_path / "saved", tmp_path / "out")
    assert_refused(done, 3, "w", "overlap", out=tmp_path / "out")


def test_pieces_of_different_dtypes_are_refused(tmp_path):
    """The first one's is taken, there."""
    shard(tmp_path / "saved", 0, 2, {"w": (ROWS[:4].contiguous(), [0, 0])})
    shard(tmp_path / "saved", 1, 2, {"w": (ROWS[4:].to(torch.bfloat16), [4, 0])})
    done = run_mpi(2, "reshard", tmp_path / "saved", tmp_path / "out")
    assert_refused(done, 3, "w", "dtype", out=tmp_path / "out")


# What we don't read


@pytest.mark.parametrize(
    ("files", "words"),
    [
        (["mp_rank_00_model_states.pt"], ["DeepSpeed ZeRO", "zero_to_fp32.py"]),
        (["zero_pp_rank_0_mp_rank_00_model_states.pt"], ["DeepSpeed ZeRO", "zero_to_fp32.py"]),
        (["global_step5/mp_rank_00_model_states.pt"], ["DeepSpeed ZeRO", "zero_to_fp32.py"]),
        (["global_step5/zero_pp_rank_0_mp_rank_00_model_states.pt"], ["DeepSpeed ZeRO", "zero_to_fp32.py"]),
        (["zero/layers.0.weight/fp32.pt"], ["DeepSpeed universal", "use DeepSpeed"]),
        (["iter_0000010/mp_rank_00/model_optim_rng.pt"], ["legacy Megatron", "tools/checkpoint/convert.py"]),
        (["mp_rank_00_000/model_optim_rng.pt"], ["legacy Megatron", "tools/checkpoint/convert.py"]),
        (["model_world_size_2_rank_0.pt"], ["verl", "model_merger"]),
        (["manifest.ocdbt"], ["an Orbax checkpoint", "orbax.checkpoint"]),
        (["_CHECKPOINT_METADATA"], ["an Orbax checkpoint", "orbax.checkpoint"]),
        (["pytorch_model.bin"], ["pickled Hugging Face", "transformers"]),
        ([], ["case.json"]),
    ],
    ids=lambda one: "".join(one),
)
def test_formats_that_are_not_read_are_refused_with_their_name_and_a_tool(files, words, tmp_path):
    (tmp_path / "saved").mkdir()
    for file in files:
        (tmp_path / "saved" / file).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "saved" / file).write_bytes(b"x")
    done = run_mpi(2, "reshard", tmp_path / "saved", tmp_path / "out")
    assert_refused(done, 3 if files else 5, *words, out=tmp_path / "out")
    shutil.rmtree(tmp_path / "saved")
