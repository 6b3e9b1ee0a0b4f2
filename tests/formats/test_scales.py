"""Block-scaled weights in whole jobs: real torch multiplies them out again, shard by shard, and finds the same numbers."""

import json

from tests.jobs.outcome import assert_done, assert_refused
from tests.mpirun import run_mpi
from tests.needed import needed

torch = needed("torch")
safetensors = needed("safetensors.torch")

SHAPES = {"q_proj": (512, 384), "down_proj": (320, 512), "gate_up_proj": (1024, 130)}
LAYOUT = """
[axes.tp]
"q_proj" = { split = "colwise", unit = 64 }
"down_proj" = "rowwise"
"gate_up_proj" = "packed_colwise"
"*" = "replicate"
"""


def multiplied(weight, scale):
    """As DeepSeek's weight_dequant does, in blocks of 128 from the first element of both on."""
    blocks = scale.repeat_interleave(128, 0).repeat_interleave(128, 1)
    return weight.float() * blocks[: weight.shape[0], : weight.shape[1]]


def written(folder):
    torch.manual_seed(0)
    tensors = {"norm.weight": torch.rand(7)}
    for name, shape in SHAPES.items():
        tensors[f"layers.0.{name}.weight"] = torch.randn(shape).to(torch.float8_e4m3fn)
        tensors[f"layers.0.{name}.weight_scale_inv"] = torch.rand(*(-(-size // 128) for size in shape))
    folder.mkdir()
    safetensors.save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    (folder.parent / "my.toml").write_text(LAYOUT)
    return folder, tensors, folder.parent / "my.toml"


def test_weights_and_scales_are_cut_together_and_come_back(tmp_path):
    source, tensors, layout = written(tmp_path / "hf")
    out, report = tmp_path / "out", tmp_path / "report.json"
    options = ("--target", "fsdp=2,tp=2", "--layout", layout, "--cast", "bfloat16", "--report", report)
    done = run_mpi(3, "reshard", source, out, *options)
    assert_done(done)
    assert "3 scales of block-scaled tensors kept" in done.stderr
    assert [one["fqn"] for one in json.loads(report.read_text())["changes"]["cast"]] == ["norm.weight"]
    assert_done(run_mpi(3, "reshard", out, tmp_path / "tp", "--target", "tp=2"))
    shards = [safetensors.load_file(tmp_path / "tp" / f"rank-{rank:05d}.safetensors") for rank in (0, 1)]
    whole = {n: multiplied(*(tensors[f"layers.0.{n}.{w}"] for w in ("weight", "weight_scale_inv"))) for n in SHAPES}
    parts = {
        n: [multiplied(*(s[f"layers.0.{n}.{w}"] for w in ("weight", "weight_scale_inv"))) for s in shards]
        for n in SHAPES
    }
    assert torch.equal(torch.cat(parts["q_proj"]), whole["q_proj"])
    assert torch.equal(torch.cat(parts["down_proj"], 1), whole["down_proj"])
    gate_up = [
        torch.cat([whole["gate_up_proj"][at : at + 256] for at in (256 * rank, 512 + 256 * rank)]) for rank in (0, 1)
    ]
    assert all(map(torch.equal, parts["gate_up_proj"], gate_up))
    assert_done(run_mpi(2, "reshard", tmp_path / "tp", tmp_path / "back", "--target", "single"))
    back = safetensors.load_file(tmp_path / "back" / "rank-00000.safetensors")
    for name in tensors.keys() - {"norm.weight"}:
        assert torch.equal(back[name].view(torch.uint8), tensors[name].view(torch.uint8)), name


def test_a_cut_within_a_block_is_refused_by_plan_and_job(tmp_path):
    source, _, layout = written(tmp_path / "hf")
    for command in (("reshard", source, tmp_path / "out"), ("plan", source)):
        done = run_mpi(3, *command, "--target", "tp=8", "--layout", layout)
        words = ("layers.0.down_proj.weight", "element 64 of axis 1", "block of 128")
        assert_refused(done, 3, *words, out=tmp_path / "out")
    assert_done(run_mpi(2, "reshard", source, tmp_path / "out", "--target", "tp=2", "--layout", layout))
    assert_refused(run_mpi(2, "reshard", tmp_path / "out", tmp_path / "on", "--target", "tp=8"), 3, "block of 128")
    layout.write_text(f'{LAYOUT}[scales]\n"*" = "apart"\n')
    options = ("--target", "tp=8", "--layout", layout, "--include", "*down*")
    assert_done(run_mpi(2, "reshard", source, tmp_path / "apart", *options))
    assert '"*" = "apart"' in (tmp_path / "apart" / "layout.toml").read_text()
