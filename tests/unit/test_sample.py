"""The synthetic checkpoint: a valid case of finite values, the same whatever its topology."""

import json
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest

from reshard_mpi.checkpoint.mesh import parse_target
from reshard_mpi.errors import UsageError
from reshard_mpi.sample import Llama, write_sample
from tests.reference.case import Case, load

NUMPY = {"bfloat16": ml_dtypes.bfloat16, "float16": np.float16, "float32": np.float32}


def sample(folder, target="single", dtype="bfloat16", seed=0, nbytes=1 << 18) -> Case:
    """Written by us, read and checked, digests and all, by the independent reader."""
    write_sample(folder, nbytes, parse_target(target), dtype, seed, overwrite=False)
    return load(folder, full=True)


def raw(case: Case) -> dict[str, bytes]:
    return {name: tensor.raw for name, tensor in case.tensors.items()}


@pytest.fixture(scope="module")
def plain(tmp_path_factory) -> Case:
    return sample(tmp_path_factory.mktemp("sample") / "plain")


@pytest.mark.parametrize("target", ["tp=2,pp=2", "dp=2,fsdp=3", "tp=3", "pp=3", "cp=2,tp=5"])
def test_tensors_are_the_same_whatever_the_topology(target, plain, tmp_path):
    case = sample(tmp_path / "out", target)
    assert raw(case) == raw(plain)
    mesh = parse_target(target)
    assert (case.manifest["topology"]["source"], case.manifest["world_size"]) == (dict(mesh.axes), mesh.size)


@pytest.mark.parametrize("dtype", NUMPY)
def test_every_value_is_finite_and_hardly_any_is_like_another(dtype, tmp_path):
    case = sample(tmp_path / "out", dtype=dtype)
    values = np.concatenate([np.frombuffer(tensor.raw, NUMPY[dtype]) for tensor in case.tensors.values()])
    assert np.isfinite(values.astype(np.float64)).all()
    assert np.abs(values.astype(np.float64)).max() < 2
    assert len(np.unique(values)) > min(len(values) // 2, 10_000)


def test_another_seed_makes_other_values_and_the_same_seed_the_same_files(plain, tmp_path):
    assert all(a != b for a, b in zip(raw(sample(tmp_path / "b", seed=1)).values(), raw(plain).values(), strict=True))
    again = sample(tmp_path / "again")
    for name in ("case.json", "rank-00000.safetensors"):
        assert (tmp_path / "again" / name).read_bytes() == (Path(plain.folder) / name).read_bytes()
    assert again.manifest["case_id"] == plain.manifest["case_id"]


def test_a_tensor_that_is_made_in_several_parts_is_the_same_in_every_topology(tmp_path, monkeypatch):
    monkeypatch.setattr("reshard_mpi.sample.ROWS_NBYTES", 1000)
    assert raw(sample(tmp_path / "a")) == raw(sample(tmp_path / "b", "tp=3,fsdp=2"))


def test_tensor_parallelism_cuts_as_a_llama_is_cut(tmp_path):
    sample(tmp_path / "out", "tp=2")
    fragments = json.loads((tmp_path / "out" / "case.json").read_text())["fragments"]
    axes = {f["fqn"].split(".")[-2]: f["partition_axes"] for f in fragments}
    columns, rows, whole = [0], [1], []
    assert axes == {
        "embed_tokens": columns,
        "q_proj": columns,
        "k_proj": columns,
        "v_proj": columns,
        "o_proj": rows,
        "gate_proj": columns,
        "up_proj": columns,
        "down_proj": rows,
        "input_layernorm": whole,
        "post_attention_layernorm": whole,
        "norm": whole,
        "lm_head": columns,
    }


@pytest.mark.parametrize("nelems", [0, 1, 10**6, 10**8, 10**9, 7 * 10**9])
def test_a_model_has_about_as_many_elements_as_asked_for(nelems):
    model = Llama.of_size(nelems)
    assert model.layers >= 1
    if nelems >= 10**6:
        assert abs(model.nelems / nelems - 1) < 0.1
    assert model.nelems == sum(int(np.prod(shape)) for _, shape in model.tensors())


@pytest.mark.parametrize("name", ["out", "out.partial"])
def test_out_or_its_partial_that_is_a_link_is_refused_and_not_followed(name, tmp_path):
    sample(tmp_path / "case")
    (tmp_path / "case" / "journal.json").write_text("{}")
    (tmp_path / name).symlink_to("case")
    with pytest.raises(UsageError, match="is a link"):
        write_sample(tmp_path / "out", 1 << 18, parse_target("tp=2"), "bfloat16", 0, overwrite=True)
    assert load(tmp_path / "case").manifest["world_size"] == 1


def test_a_sample_takes_the_place_of_another_only_when_told_to(tmp_path):
    sample(tmp_path / "out")
    with pytest.raises(UsageError, match="exists"):
        write_sample(tmp_path / "out", 1 << 18, parse_target("tp=2"), "bfloat16", 0, overwrite=False)
    write_sample(tmp_path / "out", 1 << 18, parse_target("tp=2"), "bfloat16", 0, overwrite=True)
    assert load(tmp_path / "out").manifest["world_size"] == 2
    assert [entry.name for entry in tmp_path.iterdir()] == ["out"]
