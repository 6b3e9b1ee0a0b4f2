"""Padding in whole jobs: a loader finds arrays of the size that it wants, and the way back leads to the same tensors."""

import json

import h5py
import numpy as np
import pytest
from safetensors.numpy import load_file

from tests.formats.models import HEAD_DIM, HEADS, HIDDEN, KV_HEADS, VOCABULARY, llama, write_hugging_face
from tests.jobs.outcome import assert_done, assert_refused
from tests.mpirun import run_mpi

CONFIG = {"num_attention_heads": HEADS, "num_key_value_heads": KV_HEADS, "head_dim": HEAD_DIM, "hidden_size": HIDDEN}
EMBED, HEAD, NORM = "model.embed_tokens.weight", "lm_head.weight", "model.norm.weight"
O_PROJ, DOWN_PROJ = "model.layers.1.self_attn.o_proj.weight", "model.layers.1.mlp.down_proj.weight"
LAYOUT = """
[axes.tp]
"embed_tokens" = "rowwise"
"lm_head" = "colwise"
"down_proj" = "rowwise"
"*" = "replicate"
[padding]
"embed_tokens.weight" = { multiple = "8 * tp" }
"lm_head.weight" = { to = 27 }
"model.norm" = { to = 19 }
"o_proj.weight" = { multiple = 7, axis = 1 }
"down_proj.weight" = { to = 40, axis = 1 }
"""


def with_zeros(array, *shape):
    return np.pad(array, [(0, size - have) for size, have in zip(shape, array.shape, strict=True)])


def source_and_layout(folder):
    (folder / "pad.toml").write_text(LAYOUT)
    return write_hugging_face(folder / "hf", llama(), **CONFIG), folder / "pad.toml"


def arrays(folder, name):
    if list(folder.glob("rank-*.h5")):
        files = [h5py.File(path) for path in sorted(folder.glob("rank-*.h5"))]
        return [file[name][()] for file in files if name in file]
    shards = map(load_file, sorted(folder.glob("*.safetensors")))
    return [shard[name] for shard in shards if name in shard]


JOBS = [  # ranks: those whose arrays, one after the other, are the whole embedding of `rows` rows
    ("tp=4", "safetensors", "64K", "none", [0, 1, 2, 3], 32),
    ("fsdp=3,tp=2", "safetensors", "256M", "full", [0, 2, 4, 1, 3, 5], 32),
    ("dp=2,tp=3", "safetensors", "256M", "full", [3, 4, 5], 24),
    ("tp=4", "hdf5", "256M", "source", [0, 1, 2, 3], 32),
    ("single", "hf", "256M", "full", [0], 24),
]


@pytest.mark.parametrize("target, form, memory, verify, ranks, rows", JOBS)
def test_shards_hold_padded_arrays_and_the_way_back_reads_past_them(
    target, form, memory, verify, ranks, rows, tmp_path
):
    tensors = llama()
    source, layout = source_and_layout(tmp_path)
    out, report = tmp_path / "out", tmp_path / "report.json"
    options = ("--layout", layout, "--format", form, "--memory", memory, "--verify", verify)
    done = run_mpi(3, "reshard", source, out, "--target", target, *options, "--report", report)
    assert "changed: 9 tensors padded" in assert_done(done)
    embedding = np.concatenate([arrays(out, EMBED)[rank] for rank in ranks])
    assert embedding.tobytes() == with_zeros(tensors[EMBED], rows, HIDDEN).tobytes()
    listed = json.loads(report.read_text())["changes"]["padded"]
    assert {"tensor": EMBED, "from": [VOCABULARY, HIDDEN], "to": [rows, HIDDEN]} in listed
    assert {"tensor": HEAD, "from": [VOCABULARY, HIDDEN], "to": [27, HIDDEN]} in listed
    if "fsdp" not in target:  # which splits all tensors
        assert arrays(out, NORM)[0].tobytes() == with_zeros(tensors[NORM], 19).tobytes()
        assert arrays(out, O_PROJ)[0].tobytes() == with_zeros(tensors[O_PROJ], HIDDEN, 35).tobytes()
    if target == "tp=4":  # of the last rank all is padding
        down = np.concatenate(arrays(out, DOWN_PROJ), axis=1)
        assert down.tobytes() == with_zeros(tensors[DOWN_PROJ], HIDDEN, 40).tobytes()
    if form == "hf":  # such a folder knows no padding: its tensors are as large as its arrays
        told = assert_done(run_mpi(2, "compare", source, out), exit_code=1)
        assert f"{EMBED}: float32 [20, 16] and float32 [24, 16]" in told
        return
    assert_done(run_mpi(2, "compare", source, out))
    if verify != "none":
        assert_done(run_mpi(3, "verify", out))
    back = tmp_path / "back"
    assert_done(run_mpi(2, "reshard", out, back, "--target", "single", "--verify", verify))
    written = load_file(back / "rank-00000.safetensors")
    assert {name: array.tobytes() for name, array in written.items()} == {n: a.tobytes() for n, a in tensors.items()}


def test_a_plan_lists_what_is_padded_and_refuses_what_can_not_be(tmp_path):
    source, layout = source_and_layout(tmp_path)
    told = json.loads(assert_done(run_mpi(1, "plan", source, "--target", "tp=2", "--layout", layout, "--json")))
    assert len(told["changes"]["padded"]) == 9
    layout.write_text(LAYOUT.replace("to = 27", "to = 17"))
    for command in (("reshard", source, tmp_path / "out"), ("plan", source)):
        done = run_mpi(2, *command, "--target", "tp=2", "--layout", layout)
        assert_refused(done, 3, 'padding."lm_head.weight"', "17", "20", out=tmp_path / "out")


def test_the_report_lists_what_operations_have_made_of_tensors(tmp_path):
    source = write_hugging_face(tmp_path / "hf", llama("fused"), **CONFIG)
    layout, report = tmp_path / "my.toml", tmp_path / "report.json"
    layout.write_text(
        """
[[operations]]
rename = "model.**"
to = "**"
[[operations]]
split = "layers.0.self_attn.qkv_proj.*"
into = { "layers.0.q.*" = 32, "layers.0.kv.*" = 32 }
[[operations]]
trim = "embed_tokens.weight"
to = 17
[[operations]]
unstack = "norm.weight"
to = "scale.{}"
"""
    )
    told = assert_done(run_mpi(2, "reshard", source, tmp_path / "out", "--layout", layout, "--report", report))
    assert "changed: 23 tensors renamed, 2 tensors split, 1 tensor unstacked, 1 tensor trimmed" in told
    changes = json.loads(report.read_text())["changes"]
    assert {"from": "model.norm.weight", "to": "norm.weight"} in changes["renamed"]
    at = "layers.0.self_attn.qkv_proj"
    assert changes["split"] == [
        {"tensor": f"{at}.bias", "into": ["layers.0.q.bias", "layers.0.kv.bias"]},
        {"tensor": f"{at}.weight", "into": ["layers.0.q.weight", "layers.0.kv.weight"]},
    ]
    assert changes["trimmed"] == [{"tensor": "embed_tokens.weight", "axis": 0, "from": VOCABULARY, "to": 17}]
    assert changes["unstacked"] == [{"tensor": "norm.weight", "into": [f"scale.{n}" for n in range(HIDDEN)]}]
