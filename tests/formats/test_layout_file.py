"""Layouts in whole jobs: sources without coordinates go to any target and come back, and shards hold what they should."""

import json

import numpy as np
import pytest
from safetensors.numpy import load_file

from tests.formats.models import HEAD_DIM, HEADS, HIDDEN, INNER, KV_HEADS, filled, llama, write_hugging_face
from tests.jobs.outcome import assert_done, assert_refused, run_alone
from tests.mpirun import run_mpi
from tests.needed import needed

CONFIG = {"num_attention_heads": HEADS, "num_key_value_heads": KV_HEADS, "head_dim": HEAD_DIM, "hidden_size": HIDDEN}


def assert_equal(one, other):
    assert set(one) == set(other)
    for fqn, array in one.items():
        assert array.shape == other[fqn].shape, fqn
        assert np.array_equal(array.view(np.uint32), other[fqn].view(np.uint32)), fqn


def shards(folder):
    return [load_file(path) for path in sorted(folder.glob("rank-*.safetensors"))]


@pytest.mark.parametrize("kind", ["plain", "fused"])
@pytest.mark.parametrize("target", ["tp=2,pp=2", "tp=8", "fsdp=3,tp=4"])
def test_a_hugging_face_folder_goes_to_any_target_and_comes_back(kind, target, tmp_path):
    tensors = llama(kind)
    source = write_hugging_face(tmp_path / "hf", tensors, **CONFIG)
    out, back = tmp_path / "out", tmp_path / "back"
    options = ("--target", target, "--layout", "llama", "--verify", "full")
    assert_done(run_mpi(2, "reshard", source, out, *options))
    assert_done(run_mpi(3, "verify", out))
    assert_done(run_mpi(2, "reshard", out, back, "--target", "single", "--verify", "full"))
    assert_equal(load_file(back / "rank-00000.safetensors"), tensors)
    assert_done(run_mpi(1, "compare", source, out))
    # The layout that was used lies beside the case, with the numbers that it took from elsewhere.
    text = (out / "layout.toml").read_text()
    assert f"head_dim = {HEAD_DIM}" in text and "layers.*.self_attn.q_proj" in text
    again = tmp_path / "again"
    options = ("--target", target, "--layout", out / "layout.toml", "--verify", "none", "--memory", "64K")
    assert_done(run_mpi(2, "reshard", back, again, *options))
    for one, other in zip(shards(out), shards(again), strict=True):
        assert_equal(one, other)


def test_every_shard_holds_its_part_of_every_member(tmp_path):
    tensors = llama("fused")
    source = write_hugging_face(tmp_path / "hf", tensors, **CONFIG)
    assert_done(run_mpi(2, "reshard", source, tmp_path / "out", "--target", "tp=8", "--layout", "llama"))
    q, kv = HEADS * HEAD_DIM, KV_HEADS * HEAD_DIM
    qkv, gate_up = (tensors[f"model.layers.1.{name}.weight"] for name in ("self_attn.qkv_proj", "mlp.gate_up_proj"))
    for rank, shard in enumerate(shards(tmp_path / "out")):
        head = rank // 2 * HEAD_DIM  # two neighbours share a key-value head
        parts = [
            qkv[rank * HEAD_DIM : (rank + 1) * HEAD_DIM],
            qkv[q + head : q + head + HEAD_DIM],
            qkv[q + kv + head : q + kv + head + HEAD_DIM],
        ]
        part = INNER // 8
        gate, up = (gate_up[first + rank * part : first + (rank + 1) * part] for first in (0, INNER))
        assert_equal(
            {
                "qkv": shard["model.layers.1.self_attn.qkv_proj.weight"],
                "gate_up": shard["model.layers.1.mlp.gate_up_proj.weight"],
            },
            {"qkv": np.concatenate(parts), "gate_up": np.concatenate([gate, up])},
        )
    case = json.loads((tmp_path / "out" / "case.json").read_text())
    held = [f for f in case["fragments"] if f["fqn"] == "model.layers.1.self_attn.qkv_proj.bias"][:3]
    assert [f["fragment_id"][-3:] for f in held] == ["0#0", "0#1", "0#2"]
    assert len({(f["payload_file"], f["payload_key"], f["shared_storage_id"]) for f in held}) == 1
    assert [(f["padding"]["semantic"], f["padding"]["before"], f["local_shape"]) for f in held] == [
        ("view", [HEAD_DIM * index], [3 * HEAD_DIM]) for index in range(3)
    ]
    assert [f["replica"]["member_count"] for f in held] == [1, 2, 2]


@pytest.mark.parametrize("memory", ["56K", "256M"])
def test_members_of_an_inner_axis_do_not_write_over_each_other(memory, tmp_path):
    """Stacked experts: [expert, gate and up, hidden], of which tp cuts the middle axis and ep the first."""
    tensors = filled(
        {"layers.0.mlp.experts.gate_up_proj": (6, 40, 300), "layers.0.mlp.experts.down_proj": (6, 300, 20)}
    )
    source = write_hugging_face(tmp_path / "hf", tensors)
    out = tmp_path / "out"
    options = ("--target", "ep=2,tp=2", "--layout", "qwen3_moe", "--memory", memory, "--verify", "full")
    assert_done(run_mpi(3, "reshard", source, out, *options))
    gate_up = tensors["layers.0.mlp.experts.gate_up_proj"]
    for rank, shard in enumerate(shards(out)):
        experts, tp = gate_up[rank // 2 * 3 :][:3], rank % 2
        wanted = np.concatenate([experts[:, first + 10 * tp : first + 10 * (tp + 1)] for first in (0, 20)], axis=1)
        assert_equal({"": shard["layers.0.mlp.experts.gate_up_proj"]}, {"": wanted})
    assert_done(run_mpi(2, "reshard", out, tmp_path / "back", "--target", "single", "--memory", memory))
    assert_equal(load_file(tmp_path / "back" / "rank-00000.safetensors"), tensors)


def test_a_dcp_folder_goes_to_any_target_and_comes_back(tmp_path):
    torch = needed("torch")
    checkpoint = needed("torch.distributed.checkpoint")
    tensors = llama()
    checkpoint.save({k: torch.from_numpy(v) for k, v in tensors.items()}, checkpoint_id=tmp_path / "dcp", no_dist=True)
    out, back = tmp_path / "out", tmp_path / "back"
    options = ("--target", "tp=2,pp=2", "--layout", "llama", "--layout-set", f"head_dim={HEAD_DIM}")
    assert_done(run_mpi(2, "reshard", tmp_path / "dcp", out, *options))
    assert_done(run_mpi(2, "reshard", out, back, "--target", "single"))
    assert_equal(load_file(back / "rank-00000.safetensors"), tensors)


REFUSED = [
    ("no layout", (), 3, ["mesh axis tp", "--layout"]),
    ("no such preset", ("--layout", "lama"), 2, ["'lama'", "llama"]),
    ("no such file", ("--layout", "lama.toml"), 5, ["lama.toml"]),
    ("a number isn't known", ("--layout", "llama"), 3, ["head_dim", "--layout-set head_dim=N", "k_proj"]),
    (
        "a cut within a head",
        ("--layout", "llama", "--layout-set", "head_dim=16"),
        3,
        ["o_proj", "axis 1", "unit of 16"],
    ),
    ("a model of other names", ("--layout", "gpt-neox", "--layout-set", "head_dim=4"), 3, ["q_proj", "no layout says"]),
    ("no number", ("--layout", "llama", "--layout-set", "head_dim"), 2, ["head_dim"]),
]


@pytest.mark.parametrize("why, options, code, words", REFUSED, ids=[row[0] for row in REFUSED])
def test_a_layout_that_does_not_do_is_refused(why, options, code, words, tmp_path):
    source = write_hugging_face(tmp_path / "hf", llama())
    for command in (("reshard", source, tmp_path / "out"), ("plan", source)):
        done = run_mpi(1, *command, "--target", "tp=4", *options)
        assert_refused(done, code, *words, out=tmp_path / "out")


def test_a_plan_says_what_a_layout_makes_of_a_folder(tmp_path):
    source = write_hugging_face(tmp_path / "hf", llama(), **CONFIG)
    done = run_mpi(1, "plan", source, "--target", "tp=2", "--layout", "llama", "--json")
    facts = json.loads(assert_done(done))
    assert facts["target_topology"] == {"tp": 2}


def test_what_was_fused_stays_fused_right_from_target_to_target(tmp_path):
    """The layout beside the case is used without being asked for."""
    source = write_hugging_face(tmp_path / "hf", llama("fused"), **CONFIG)
    out, direct, on = tmp_path / "out", tmp_path / "direct", tmp_path / "on"
    assert_done(run_mpi(2, "reshard", source, out, "--target", "tp=2", "--layout", "llama"))
    assert_done(run_mpi(2, "reshard", source, direct, "--target", "tp=4,pp=3", "--layout", "llama"))
    assert_done(run_mpi(2, "reshard", out, on, "--target", "tp=4,pp=3"))
    for one, other in zip(shards(direct), shards(on), strict=True):
        assert_equal(one, other)
    assert (on / "layout.toml").read_bytes() == (direct / "layout.toml").read_bytes()
    assert_done(run_mpi(2, "reshard", out, tmp_path / "plain", "--target", "tp=4", "--layout", "none"))
    assert not (tmp_path / "plain" / "layout.toml").exists()


# Shards that come with no manifest


def bare(out, folder, names=None):
    """The shards of a case alone."""
    folder.mkdir()
    for rank, path in enumerate(sorted(out.glob("rank-*.safetensors"))):
        (folder / (names[rank] if names else path.name)).write_bytes(path.read_bytes())
    return folder


AXES = ["tp=2,pp=2", "tp=8", "fsdp=3,tp=4", "dp=2,tp=2"]


@pytest.mark.parametrize("kind", ["plain", "fused"])
@pytest.mark.parametrize("axes", AXES)
def test_shards_without_a_manifest_are_described_and_become_whole(kind, axes, tmp_path):
    tensors = llama(kind)
    source = write_hugging_face(tmp_path / "hf", tensors, **CONFIG)
    assert_done(run_mpi(2, "reshard", source, tmp_path / "out", "--target", axes, "--layout", "llama"))
    folder = bare(tmp_path / "out", tmp_path / "bare")
    numbers = [word for name, value in CONFIG.items() for word in ("--layout-set", f"{name}={value}")]
    described = ("describe", folder, "--from", axes, "--layout", "llama", *numbers)
    assert_done(run_mpi(1, *described, "--out", tmp_path / "case.json"))
    assert not (folder / "case.json").exists()
    assert assert_done(run_mpi(1, *described)) == (tmp_path / "case.json").read_text()
    written, found = (json.loads((tmp_path / name).read_text())["fragments"] for name in ("out/case.json", "case.json"))
    for one, other in zip(written, found, strict=True):
        ours = {key: one[key] for key in one if key not in ("evidence_refs", "fragment_digest")}
        assert {key: other[key] for key in ours} == ours
    (folder / "case.json").write_bytes((tmp_path / "case.json").read_bytes())
    assert_done(run_mpi(2, "reshard", folder, tmp_path / "back"))
    assert_equal(load_file(tmp_path / "back" / "rank-00000.safetensors"), tensors)


def test_shards_of_other_names_are_described_with_a_word_on_how_to_name_them(tmp_path):
    source = write_hugging_face(tmp_path / "hf", llama(), **CONFIG)
    assert_done(run_mpi(2, "reshard", source, tmp_path / "out", "--target", "pp=2,tp=2", "--layout", "llama"))
    names = [f"pp{pp}-tp{tp:02d}.safetensors" for pp in range(2) for tp in range(2)]
    folder = bare(tmp_path / "out", tmp_path / "bare", names)
    options = ("--layout", tmp_path / "out" / "layout.toml", "--file-pattern", "pp{pp}-tp{tp:02d}.safetensors")
    done = run_mpi(1, "describe", folder, "--from", "pp=2,tp=2", *options)
    assert '"case_id": "bare"' in assert_done(done)
    assert "link pp0-tp00.safetensors" in done.stderr


LOST = [
    ("a layout says nothing", {}, ("--from", "tp=2"), 3, ["mesh axis tp", "--layout"]),
    ("too few ranks", {}, ("--from", "tp=1", "--layout", "llama"), 3, ["rank-00001.safetensors", "--from"]),
    ("too many ranks", {}, ("--from", "tp=3", "--layout", "llama"), 5, ["rank-00002.safetensors"]),
    (
        "replicas of two shapes",
        {"model.norm.weight": (9,)},
        ("--from", "tp=2", "--layout", "llama"),
        3,
        ["norm", "rank 1"],
    ),
    (
        "another number of axes",
        {"model.norm.weight": (4, 4)},
        ("--from", "tp=2", "--layout", "llama"),
        3,
        ["norm", "axes"],
    ),
    (
        "a tensor of one rank",
        {"lm_head.weight": (4, 4)},
        ("--from", "tp=2", "--layout", "llama"),
        3,
        ["lm_head", "'tp': 0"],
    ),
    ("two ranks, one file", {}, ("--from", "tp=2", "--file-pattern", "rank-00000.safetensors"), 2, ["--file-pattern"]),
    ("an unknown field", {}, ("--from", "tp=2", "--file-pattern", "{pp}"), 2, ["{pp}", "tp"]),
    ("a path", {}, ("--from", "tp=2", "--file-pattern", "../{rank}"), 2, ["--file-pattern"]),
]


@pytest.mark.parametrize("why, changed, options, code, words", LOST, ids=[row[0] for row in LOST])
def test_shards_that_do_not_fit_together_are_refused(why, changed, options, code, words, tmp_path):
    shapes = {"model.norm.weight": (8,)}
    for rank, here in enumerate((shapes, shapes | changed)):
        write_hugging_face(tmp_path / f"{rank}", filled(here))
    folder = tmp_path / "bare"
    folder.mkdir()
    for rank in (0, 1):
        content = (tmp_path / f"{rank}" / "model.safetensors").read_bytes()
        (folder / f"rank-{rank:05d}.safetensors").write_bytes(content)
    assert_refused(run_mpi(1, "describe", folder, *options), code, *words)
    inside = folder / "case.json"
    done = run_mpi(1, "describe", folder, "--from", "tp=2", "--layout", "llama", "--out", inside)
    assert_refused(done, 2, "SOURCE", out=inside)


# Operations

TAKEN_APART = """
[[operations]]
rename = "model.**"
to = "module.**"
[[operations]]
split = "module.layers.*.self_attn.qkv_proj.*"
into = { "module.layers.*.q.*" = "num_attention_heads * head_dim", "module.layers.*.kv.*" = "2*num_key_value_heads*head_dim" }
[[operations]]
trim = "lm_head.weight"
to = 17
[[operations]]
trim = "module.embed_tokens.weight"
to = 17
"""


def taken_apart(tensors):
    found = {}
    for fqn, array in tensors.items():
        name = fqn.replace("model.", "module.")
        if "qkv_proj" in name:
            q, kv = (name.replace("self_attn.qkv_proj", other) for other in ("q", "kv"))
            found |= {q: array[: HEADS * HEAD_DIM], kv: array[HEADS * HEAD_DIM :]}
        else:
            found[name] = array[:17] if name in ("lm_head.weight", "module.embed_tokens.weight") else array
    return found


@pytest.mark.parametrize("verify", ["none", "full"])
@pytest.mark.parametrize("source_target", [None, "single", "tp=2,pp=2", "tp=8"])
def test_operations_rename_take_apart_and_trim_whatever_the_source(source_target, verify, tmp_path):
    tensors = llama("fused")
    source = write_hugging_face(tmp_path / "hf", tensors, **CONFIG)
    if source_target:
        assert_done(run_mpi(2, "reshard", source, tmp_path / "case", "--target", source_target, "--layout", "llama"))
        source = tmp_path / "case"
    layout = tmp_path / "mine.toml"
    numbers = "\n".join(f"{name} = {value}" for name, value in CONFIG.items())
    layout.write_text(f"[model]\n{numbers}\n{TAKEN_APART}")
    options = ("--target", "single", "--layout", layout, "--verify", verify)
    assert_done(run_mpi(1, "plan", source, *options))
    assert_done(run_mpi(3, "reshard", source, tmp_path / "out", *options))
    assert_equal(load_file(tmp_path / "out" / "rank-00000.safetensors"), taken_apart(tensors))
    if verify == "full":
        assert_done(run_mpi(2, "verify", tmp_path / "out"))
    assert not (tmp_path / "out" / "layout.toml").exists()


@pytest.mark.parametrize("source_target", [None, "tp=2", "fsdp=2"])
def test_a_stack_of_layers_becomes_layers_with_names(source_target, tmp_path):
    tensors = filled(
        {"decoder.layers.fc1.weight": (3, 8, 5), "decoder.layers.norm.weight": (3, 5), "embed.weight": (6, 5)}
    )
    source = write_hugging_face(tmp_path / "hf", tensors)
    first = tmp_path / "first.toml"
    first.write_text('[axes.tp]\n"fc1.weight" = 1\n"*" = "replicate"\n')
    if source_target:
        assert_done(run_mpi(2, "reshard", source, tmp_path / "case", "--target", source_target, "--layout", first))
        source = tmp_path / "case"
    layout = tmp_path / "mine.toml"
    layout.write_text(
        '[[operations]]\nunstack = "decoder.layers.**"\nto = "layers.{}.**"\n[axes.tp]\n"fc1" = 0\n"*" = "replicate"\n'
    )
    options = ("--target", "pp=3,tp=2", "--layout", layout, "--verify", "full")
    assert_done(run_mpi(2, "reshard", source, tmp_path / "out", *options))
    assert_done(run_mpi(2, "reshard", tmp_path / "out", tmp_path / "back", "--target", "single"))
    wanted = {"embed.weight": tensors["embed.weight"]}
    for layer in range(3):
        for name in ("fc1", "norm"):
            wanted[f"layers.{layer}.{name}.weight"] = tensors[f"decoder.layers.{name}.weight"][layer]
    assert_equal(load_file(tmp_path / "back" / "rank-00000.safetensors"), wanted)


OPERATIONS = [
    ("no index in the name", 'unstack = "lm_head.weight"\nto = "x"', ["operations[0]", "{}"]),
    ("finds nothing", 'rename = "no.such"\nto = "x"', ["operations[0]", "no tensor"]),
    ("two of one name", 'rename = "model.norm.weight"\nto = "lm_head.weight"', ["operations[0]", "lm_head.weight"]),
    ("other wildcards", 'rename = "a.*"\nto = "b"', ["operations[0]", "'b'", "'a.*'"]),
    ("other sizes", 'split = "lm_head.weight"\ninto = { a = 1, b = 2 }', ["operations[0]", "1 + 2", "has 20"]),
    ("no such axis", 'trim = "lm_head.weight"\nto = 3\naxis = 2', ["operations[0]", "axis 2"]),
    ("more than there is", 'trim = "lm_head.weight"\nto = 21', ["operations[0]", "21", "20"]),
    ("nothing", "axis = 0", ["operations[0]", "rename, split, unstack, trim, permute"]),
    ("two at once", 'rename = "a"\ntrim = "b"\nto = 3', ["operations[0]", "rename and trim"]),
    ("an unknown key", 'rename = "a"\nto = "b"\nfrom = 3', ["operations[0]", "from"]),
    (
        "no equal groups",
        'split = "lm_head.weight"\ngroups = 3\ninto = { a = 12, b = 8 }',
        ["operations[0]", "12 + 8", "3 equal groups"],
    ),
    ("no whole heads", 'permute = "lm_head.weight"\nunit = 6\nto = "halves"', ["operations[0]", "20 rows", "6 rows"]),
    ("heads without halves", 'permute = "lm_head.weight"\nunit = 5\nto = "halves"', ["operations[0]", "5 rows"]),
    (
        "no order",
        'permute = "lm_head.weight"\nunit = 4\nto = "pairs"',
        ["operations[0]", "halves or interleaved", "pairs"],
    ),
    ("heads of no size", 'permute = "lm_head.weight"\nto = "halves"', ["operations[0]", "unit None"]),
    ("groups of nothing", 'trim = "lm_head.weight"\nto = 3\ngroups = 2', ["operations[0]", "groups of split"]),
    ("a number that isn't known", 'trim = "lm_head.weight"\nto = "vocab"', ["operations[0]", "vocab", "--layout-set"]),
]


@pytest.mark.parametrize("why, text, words", OPERATIONS, ids=[row[0] for row in OPERATIONS])
def test_an_operation_that_does_not_do_is_refused(why, text, words, tmp_path):
    source = write_hugging_face(tmp_path / "hf", llama())
    (tmp_path / "mine.toml").write_text(f"[[operations]]\n{text}\n")
    done = run_mpi(1, "reshard", source, tmp_path / "out", "--layout", tmp_path / "mine.toml")
    assert_refused(done, 3, "mine.toml", *words, out=tmp_path / "out")


@pytest.mark.parametrize("include", [(), ("--include", "*.q.*")])
@pytest.mark.parametrize("where", [0, -1])
def test_a_flipped_byte_of_a_tensor_that_is_taken_apart_is_found(include, where, tmp_path):
    """The digest is that of the whole stored array, of which a part may be all that is wanted."""
    source = write_hugging_face(tmp_path / "hf", llama("fused"), **CONFIG)
    case = tmp_path / "case"
    assert_done(run_mpi(2, "reshard", source, case, "--target", "tp=2", "--layout", "llama"))
    shard = case / "rank-00001.safetensors"
    content = bytearray(shard.read_bytes())
    begin = int.from_bytes(content[:8], "little")
    header = json.loads(content[8 : 8 + begin])
    first, last = header["model.layers.2.self_attn.qkv_proj.weight"]["data_offsets"]
    content[8 + begin + (first if where == 0 else last - 1)] ^= 1
    shard.write_bytes(content)
    layout = tmp_path / "mine.toml"
    numbers = "\n".join(f"{name} = {value}" for name, value in CONFIG.items())
    layout.write_text(f"[model]\n{numbers}\n{TAKEN_APART.replace('module', 'model')}")
    options = ("--target", "single", "--layout", layout, *include)
    done = run_mpi(2, "reshard", case, tmp_path / "out", *options)
    assert_refused(done, 4, "rank-00001", "qkv_proj", out=tmp_path / "out")


# Fused by groups, and heads in another order


def grouped(q, k, v):
    """As Megatron-Core holds them: of every group its query heads, its key, its value."""
    parts = [x.reshape(KV_HEADS, -1, *x.shape[1:]) for x in (q, k, v)]
    return np.concatenate(parts, axis=1).reshape(-1, *q.shape[1:])


def interleaved(w):
    """The two halves of every head, row by row in turn."""
    return w.reshape(-1, 2, HEAD_DIM // 2, *w.shape[1:]).swapaxes(1, 2).reshape(w.shape)


QKV_SHAPES = {"q": HEADS * HEAD_DIM, "k": KV_HEADS * HEAD_DIM, "v": KV_HEADS * HEAD_DIM}
OF_A_TRAINER = f"""
[[operations]]
split = "qkv.*"
groups = {KV_HEADS}
into = {{ "q.*" = {QKV_SHAPES["q"]}, "k.*" = {QKV_SHAPES["k"]}, "v.*" = {QKV_SHAPES["v"]} }}
[[operations]]
permute = "w*.*"
unit = {HEAD_DIM}
to = "halves"
"""
CUTS = [None, "single", "fsdp=3", "fsdp=5", "tp=2,fsdp=3", "tp=8", "dp=2,tp=4"]


def of_a_trainer(tmp_path, cut):
    """A source that is cut so, and what operations make of it."""
    whole = filled(
        {
            f"{name}.{kind}": (size, *rest)
            for name, size in QKV_SHAPES.items()
            for kind, rest in (("weight", (6,)), ("bias", ()))
        }
    )
    tensors = {f"qkv.{kind}": grouped(*(whole[f"{name}.{kind}"] for name in "qkv")) for kind in ("weight", "bias")}
    heads = filled(
        {"wq.weight": (HEADS * HEAD_DIM, 3), "wq.bias": (HEADS * HEAD_DIM,), "wk.bias": (KV_HEADS * HEAD_DIM,)}
    )
    heads = {name: (w.view(np.uint32) + 1000).view(np.float32) for name, w in heads.items()}
    tensors |= {name: interleaved(w) for name, w in heads.items()}
    source = write_hugging_face(tmp_path / "hf", tensors)
    if cut:
        (tmp_path / "cut.toml").write_text('[axes.tp]\n"*" = 0\n')
        options = ("--target", cut, "--layout", tmp_path / "cut.toml")
        assert_done(run_mpi(2, "reshard", source, tmp_path / "case", *options))
        source = tmp_path / "case"
    (tmp_path / "mine.toml").write_text(OF_A_TRAINER)
    return source, whole | heads


@pytest.mark.parametrize("cut", CUTS)
def test_fused_groups_and_heads_are_put_in_order_however_they_are_cut(cut, tmp_path):
    source, wanted = of_a_trainer(tmp_path, cut)
    for nranks, options in ((3, ("--verify", "full", "--memory", "56K")), (1, ("--verify", "none"))):
        out, report = tmp_path / f"out-{nranks}", tmp_path / "report"
        arguments = ("--target", "single", "--layout", tmp_path / "mine.toml", "--report", report, *options)
        done = run_mpi(nranks, "reshard", source, out, *arguments)
        assert_done(done)
        changes = json.loads(report.read_text())["changes"]
        assert sorted(one["tensor"] for one in changes["permuted"]) == sorted(name for name in wanted if name[0] == "w")
        assert "have no digest" not in done.stderr or cut is None
        assert_equal(load_file(out / "rank-00000.safetensors"), wanted)


def test_heads_are_put_in_the_other_order_too(tmp_path):
    """Of interleaved heads few rows stay neighbours where a head is cut; there is a fragment for each then."""
    source, wanted = of_a_trainer(tmp_path, "fsdp=5")
    layout = tmp_path / "back.toml"
    back = '[[operations]]\npermute = "w*.*"\nunit = {unit}\nto = "interleaved"\n'
    layout.write_text(OF_A_TRAINER + back.format(unit=HEAD_DIM))
    assert_refused(
        run_mpi(2, "reshard", source, tmp_path / "twice", "--layout", layout), 3, "operations[2]", "row by row"
    )
    assert_done(
        run_mpi(2, "reshard", source, tmp_path / "out", "--target", "fsdp=5", "--layout", tmp_path / "mine.toml")
    )
    layout.write_text(back.format(unit=HEAD_DIM))
    assert_done(run_mpi(2, "reshard", tmp_path / "out", tmp_path / "back", "--target", "single", "--layout", layout))
    found = load_file(tmp_path / "back" / "rank-00000.safetensors")
    assert_equal(found, {name: interleaved(w) if name[0] == "w" else w for name, w in wanted.items()})


def test_an_optional_operation_may_find_nothing(tmp_path):
    source = write_hugging_face(tmp_path / "hf", filled({"a.weight": (4,)}))
    (tmp_path / "mine.toml").write_text('[[operations]]\nrename = "b.*"\nto = "c.*"\noptional = true\n')
    assert_done(run_mpi(1, "reshard", source, tmp_path / "out", "--layout", tmp_path / "mine.toml"))
    assert set(load_file(tmp_path / "out" / "rank-00000.safetensors")) == {"a.weight"}


@pytest.mark.parametrize(
    "fqn, preset",
    [("layers.0.attention.wq.weight", "torchtitan-llama"), ("decoder.layers.mlp.linear_fc1.weight", "megatron-llama")],
)
def test_what_a_new_name_alone_would_make_wrong_is_refused(fqn, preset, tmp_path):
    """Of what is recognised, `tests/unit/test_families.py` has more."""
    source = write_hugging_face(tmp_path / "hf", filled({fqn: (4, 4), "norm.weight": (4,)}))
    out, hf = tmp_path / "out", ("--format", "hf")
    rename = ("--rename", f"^{fqn}$=>model.q.weight")
    layout = tmp_path / "mine.toml"
    layout.write_text(f'[[operations]]\nrename = "{fqn}"\nto = "model.q.weight"\n')
    told = (preset, "1 tensor ", "--layout none")
    assert_refused(run_alone("reshard", source, out, *hf), 3, fqn, *told, out=out)
    assert_refused(run_alone("plan", source, *hf, *rename), 3, "model.q.weight", *told)
    assert_refused(run_alone("reshard", source, out, *hf, "--layout", layout), 3, "model.q.weight", *told, out=out)
    assert_done(run_alone("reshard", source, tmp_path / "case", *rename))
    assert_done(run_alone("plan", source, *hf, "--exclude", fqn))
    assert_done(run_alone("reshard", source, out, *hf, *rename, "--layout", "none"))
    assert set(load_file(out / "model.safetensors")) == {"model.q.weight", "norm.weight"}
