"""--cast: OUT is what it would be if the source had been saved in the new types; numpy and ml_dtypes are the judges."""

import fnmatch
import json
import random
import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from tests.formats.rewritten import FLOATS, cast_bytes, rewritten
from tests.jobs.outcome import AT, CASES, assert_done, assert_refused, run_alone, write_sample
from tests.mpirun import run_mpi, run_python_mpi
from tests.needed import needed
from tests.reference.case import load
from tests.reference.fragments import sha256, shard_name
from tests.reference.generate import generate
from tests.reference.judge import judge, raw_tensors
from tests.reference.shards import StoredArray, read_shard, write_shard
from tests.unit.manifests import everywhere, manifest, sealed, tensor, text_of

TO = ("float32", "float16", "bfloat16")
SINGLE = {"world_size": 1}


def to(dtype: str, except_for: str = "") -> Callable[[str, str], str]:
    """What becomes of a type."""
    return lambda fqn, old: dtype if old in FLOATS and not fnmatch.fnmatchcase(fqn, except_for) else old


def odd_values(dtype: str, count: int) -> bytes:
    """Numbers that are hard to round: NaNs, infinities, subnormals, the largest, ties of every narrower type; and any bits."""
    rng = np.random.default_rng(7)
    with np.errstate(all="ignore"):
        found = [
            0.0,
            -0.0,
            np.inf,
            -np.inf,
            np.nan,
            -np.nan,
            1e300,
            3.4e38,
            65504,
            65519.99,
            65520,
            65536,
            1e-45,
            6e-8,
            3e-8,
        ]
        for bits in (7, 8, 10, 11, 23):  # of the fraction: ties, and their neighbours
            for base in (1.0, 1 + 2.0**-bits, 2.0**-14, 2.0**-126, 2.0**15):
                tie = base * (1 + 2.0 ** -(bits + 1))
                found += [tie, -tie, np.nextafter(tie, 0), np.nextafter(tie, 9e9), base * (1 + 3 * 2.0 ** -(bits + 1))]
        found += [np.ldexp(1.0, e) * s for e in (-149, -150, -133, -134, -24, -25, 127, 128) for s in (1, 1.5, -0.75)]
        special = np.array(found).astype(FLOATS[dtype])
    size = FLOATS[dtype].itemsize
    noise = np.frombuffer(rng.bytes(size * max(count - len(special), 0)), FLOATS[dtype])
    return np.concatenate([special, noise])[:count].tobytes()


def became_infinite(raw: bytes, old: str, new: str) -> int:
    if old not in FLOATS:
        return 0
    values = np.frombuffer(raw, FLOATS[old])
    with np.errstate(all="ignore"):
        return int(np.sum(np.isfinite(values) & np.isinf(values.astype(FLOATS[new]))))


def checkpoint(folder: Path, tensors: dict[str, tuple[str, tuple[int, ...]]], nranks: int, raw: Callable) -> Path:
    """Tensors of (dtype, shape), each cut along its first axis, where it has one, for tp of `nranks`."""
    folder.mkdir()
    axes, all_fragments = {"tp": nranks}, []
    shards: list[dict[str, StoredArray]] = [{} for _ in range(nranks)]
    for name, (dtype, shape) in tensors.items():
        size = FLOATS[dtype].itemsize if dtype in FLOATS else np.dtype(dtype).itemsize
        whole = raw(name, dtype, int(np.prod(shape, dtype=int)))
        held = {}
        for (rank,) in everywhere(axes):
            n = shape[0] if shape else 0
            low, high = n * rank // nranks, n * (rank + 1) // nranks
            held[(rank,)] = [((low, *(0,) * (len(shape) - 1)), (high - low, *shape[1:])) if shape else ((), ())]
        fragments = tensor(name, shape, held, axes, dtype=dtype)
        for (rank,), fragment in zip(everywhere(axes), fragments, strict=True):
            ((offset, extent),) = held[(rank,)]
            row = size * int(np.prod(shape[1:], dtype=int))
            part = whole[offset[0] * row : (offset[0] + extent[0]) * row] if shape else whole
            fragment["fragment_digest"] = sha256(part)
            shards[rank][fragment["payload_key"]] = StoredArray(dtype, list(extent), part)
        all_fragments.append(fragments)
    for rank, arrays in enumerate(shards):
        write_shard(folder / shard_name(rank), arrays)
    (folder / "case.json").write_bytes(text_of(manifest(axes, *all_fragments)))
    return folder


PAIRS = {f"{dtype}.w": (dtype, (9, 1001)) for dtype in FLOATS} | {
    "float32.scale": ("float32", ()),
    "float32.empty": ("float32", (0, 3)),
    "steps": ("int64", (5,)),
    "mask": ("bool", (7,)),
}


def pairs_bytes(_name: str, dtype: str, count: int) -> bytes:
    return (
        odd_values(dtype, count) if dtype in FLOATS else bytes(n % 2 for n in range(count * np.dtype(dtype).itemsize))
    )


@pytest.mark.parametrize("dtype", TO)
def test_every_type_becomes_every_other_as_numpy_has_it(dtype, tmp_path):
    """At 1, 2 and 3 ranks, with little memory and with much, hashing or not: the same bytes."""
    source = checkpoint(tmp_path / "source", PAIRS, 2, pairs_bytes)
    expected = rewritten(source, tmp_path / "expected", new_dtype=to(dtype))
    outs, told = {}, set()
    for nranks, memory, verify in (
        (1, "56K", "source"),
        (2, "56K", "full"),
        (3, "256M", "source"),
        (3, "56K", "none"),
        (1, "256M", "none"),
    ):
        out = tmp_path / f"{nranks}-{memory}-{verify}"
        done = run_mpi(
            nranks,
            *("reshard", source, out, "--target", "tp=3", "--cast", dtype, "--memory", memory, "--verify", verify),
        )
        assert_done(done)
        told |= {line for line in done.stderr.splitlines() if "infinite" in line}
        outs.setdefault(verify == "none", []).append(
            {path.name: path.read_bytes() for path in out.iterdir() if verify != "none" or path.name != "case.json"}
        )
        if verify == "none":
            assert raw_tensors(load(out)) == raw_tensors(expected)
        else:
            judge(expected, {"tp": 3}, out)
    assert all(same == outs[verify][0] for verify in outs for same in outs[verify])
    assert len(told) == 1, told  # the same numbers each time
    (line,) = told
    for name, (old, shape) in PAIRS.items():
        if old in FLOATS and old != dtype and shape == (9, 1001):
            count = became_infinite(odd_values(old, 9009), old, dtype)
            assert (f"{name}: {count} element" in line) == (count > 0), (name, count, line)


@pytest.mark.parametrize("seed", range(12))
def test_a_generated_case_is_cast_whatever_it_is_like(seed, tmp_path):
    """Padding, replicas, ties, shared and fused arrays, empty parts; every third without hashing."""
    dice = random.Random(f"cast {seed}")
    generate(f"cast {seed}", tmp_path / "source", sub_byte=0, padding=60, shared=60, fused=40)
    dtype, nranks = dice.choice(TO), dice.choice((1, 2, 3))
    source = rewritten(tmp_path / "source", tmp_path / "expected", new_dtype=to(dtype))
    verify = ("source", "full", "none")[seed % 3]
    done = run_mpi(
        nranks,
        *("reshard", tmp_path / "source", tmp_path / "out", "--target", "dp=2", "--cast", dtype),
        *("--memory", dice.choice(("56K", "256M")), "--verify", verify, "--report", tmp_path / "report"),
    )
    assert_done(done)
    told = {one["tensor"]: one["count"] for one in json.loads((tmp_path / "report").read_text())["infinite"]}
    before, shared = load(tmp_path / "source"), json.loads((tmp_path / "source" / "case.json").read_text())["fragments"]
    may_be_stored_once = {f["logical_tensor_id"] for f in shared if f["shared_storage_id"] or f["tie_group_id"]}
    for name, one in before.tensors.items():
        count = became_infinite(one.raw, one.dtype, dtype)
        assert told.get(name, 0) == count or (name in may_be_stored_once and name not in told), name
    if verify == "none":
        assert raw_tensors(load(tmp_path / "out")) == raw_tensors(source)
    else:
        judge(source, {"dp": 2}, tmp_path / "out")


@pytest.mark.parametrize("case", sorted(path.name for path in CASES.iterdir()))
def test_a_committed_case_is_cast_and_its_oracles_left_out(case, tmp_path):
    source = rewritten(CASES / case, tmp_path / "expected", new_dtype=to("bfloat16", "*norm*"))
    out = tmp_path / "out"
    command = ("--target", "single", "--verify", "full", "--cast", "bfloat16", "--cast-except", "*norm*")
    done = run_mpi(2, "reshard", CASES / case, out, *command)
    assert_done(done)
    written = judge(source, SINGLE, out)
    before = json.loads((CASES / case / "case.json").read_text())
    lost = len(before["oracles"]) - len(written.manifest["oracles"])
    warnings = [line for line in done.stderr.splitlines() if "oracle" in line]
    assert len(warnings) == (lost > 0)
    if lost:
        assert f"{lost} oracle" in warnings[0]
    assert_done(run_mpi(2, "verify", out))


LARGE = {"a.w": ("float32", (300, 257)), "b.norm": ("float32", (513,)), "c.w": ("bfloat16", (100, 40))}


def noise(name: str, dtype: str, count: int) -> bytes:
    values = np.random.default_rng(len(name)).standard_normal(count)
    return values.astype(FLOATS[dtype]).tobytes()


def test_the_last_rule_counts_and_the_report_names_every_tensor(tmp_path):
    source = checkpoint(tmp_path / "source", LARGE, 2, noise)
    rules = ("--dtype", "bfloat16", "--cast", "*.norm=float16", "--exclude", "c.*", "--rename", "^a=>x")
    report = tmp_path / "report.json"
    done = run_mpi(2, "reshard", source, tmp_path / "out", "--target", "single", "--report", report, *rules)
    assert "changed: 1 tensor renamed, 2 tensors cast, 1 tensor dropped" in assert_done(done)
    told = json.loads(report.read_text())
    assert {what: tensors for what, tensors in told["changes"].items() if tensors} == {
        "renamed": [{"tensor": "x.w", "from": "a.w", "to": "x.w"}],
        "cast": [
            {"tensor": "b.norm", "fqn": "b.norm", "from": "float32", "to": "float16"},
            {"tensor": "x.w", "fqn": "x.w", "from": "float32", "to": "bfloat16"},
        ],
        "dropped": [{"tensor": "c.w", "fqn": "c.w"}],
    }
    assert told["phases"]["read"]["nbytes"] == 4 * (300 * 257 + 513)
    planned = json.loads(assert_done(run_alone("plan", source, "--target", "single", "--json", *rules)))
    assert planned["changes"] == told["changes"]
    assert planned["read_nbytes"] == 4 * (300 * 257 + 513)
    assert planned["written_nbytes"] == 2 * (300 * 257 + 513)


@pytest.mark.parametrize(
    "why, rules, words",
    [
        (
            "a rule for nothing",
            ["--cast", "float16", "--cast", "nothing*=float32"],
            "'nothing*=float32' is for no tensor",
        ),
        ("an exception for nothing", ["--cast", "float16", "--cast-except", "nobody"], "'nobody' matches no tensor"),
        ("as it is already", ["--cast", "float32", "--include", "[ab]*"], "nothing is cast"),
    ],
)
def test_a_rule_without_effect_is_told(why, rules, words, tmp_path):
    source = checkpoint(tmp_path / "source", LARGE, 1, noise)
    done = run_alone("reshard", source, tmp_path / "out", *rules)
    assert_done(done)
    assert words in done.stderr
    planned = run_alone("plan", source, *rules)
    assert words in planned.stderr


@pytest.mark.parametrize("rule", ["float64", "int8", "=bfloat16", "a=", "bf16"])
def test_what_is_no_rule_is_refused(rule, tmp_path):
    assert_refused(
        run_mpi(2, "plan", CASES / "vocab-padding", "--cast", rule), 2, "--cast", "float32, float16, bfloat16"
    )


def test_padding_that_becomes_infinite_is_not_told(tmp_path):
    source = checkpoint(
        tmp_path / "source", {"w": ("float32", (4, 4))}, 1, lambda *_: np.full(16, 1e30, "f4").tobytes()
    )
    case = json.loads((source / "case.json").read_text())
    (fragment,) = case["fragments"]
    fragment["padding"] = {"before": [1, 0], "after": [0, 2], "semantic": "alignment"}
    fragment["element_extent"] = fragment["global_shape"] = [3, 2]
    (source / "case.json").write_bytes(text_of(sealed(case)))
    done = run_mpi(2, "reshard", source, tmp_path / "out", "--cast", "float16")
    assert_done(done)
    assert "w: 6 elements" in done.stderr
    shard = read_shard(tmp_path / "out" / "rank-00000.safetensors")
    assert shard.arrays["w"].raw == np.full(6, np.inf, "f2").tobytes()


def test_a_changed_byte_of_a_cast_array_is_found(tmp_path):
    source = checkpoint(tmp_path / "source", LARGE, 2, noise)
    path = source / "rank-00001.safetensors"
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)
    done = run_mpi(2, "reshard", source, tmp_path / "out", "--target", "single", "--cast", "float16")
    assert_refused(done, 4, "rank-00001.safetensors", "array 'c.w|r1' has digest", out=tmp_path / "out")


def test_compare_says_that_types_differ_and_a_cast_copy_equals_itself(tmp_path):
    source = checkpoint(tmp_path / "source", LARGE, 2, noise)
    out = tmp_path / "out"
    assert_done(run_mpi(2, "reshard", source, out, "--target", "single", "--cast", "bfloat16"))
    compared = run_mpi(2, "compare", source, out)
    assert compared.returncode == 1
    assert "a.w: float32 [300, 257] and bfloat16 [300, 257]" in compared.stdout
    assert "c.w" not in compared.stdout
    again = tmp_path / "again"
    assert_done(run_alone("reshard", source, again, "--target", "tp=3", "--cast", "bfloat16", "--memory", "56K"))
    assert_done(run_alone("compare", out, again))


def test_another_cast_does_not_continue_a_job(tmp_path):
    source = checkpoint(tmp_path / "source", LARGE, 2, noise)
    broken = f"{AT}at('reshard_mpi.run.lead:Lead.commit', 0, fail)\nmain()"
    arguments = ("reshard", source, tmp_path / "out", "--target", "single", "--cast")
    assert run_python_mpi(1, "-c", broken, *arguments, "bfloat16").returncode == 70
    assert_refused(run_alone(*arguments, "float16"), 2, "out.partial", "--restart")
    assert_done(run_alone(*arguments, "bfloat16"))


def test_tied_tensors_are_cast_alike_or_refused(tmp_path):
    case = json.loads((CASES / "tp2-pp2-layers-tied" / "case.json").read_text())
    tied = sorted({f["fqn"] for f in case["fragments"] if f["tie_group_id"]})
    command = ("reshard", CASES / "tp2-pp2-layers-tied", tmp_path / "out", "--cast", "float16", "--cast-except")
    assert_refused(run_alone(*command, tied[0]), 2, "tied tensors", *tied, out=tmp_path / "out")
    assert_done(run_alone(*command, tied[0], "--cast-except", tied[1]))


def test_a_hugging_face_folder_can_be_of_another_type(tmp_path):
    sample = write_sample(tmp_path / "sample", "1M", dtype="float32")
    command = ("--target", "single", "--format", "hf", "--max-shard-size", "200KB", "--cast", "bfloat16")
    assert_done(run_mpi(2, "reshard", sample, tmp_path / "hf", *command))
    whole = raw_tensors(load(sample))
    arrays = {}
    for path in (tmp_path / "hf").glob("*.safetensors"):
        arrays |= read_shard(path).arrays
    assert set(arrays) == set(whole)
    for name, array in arrays.items():
        assert (array.dtype, array.raw) == ("bfloat16", cast_bytes(whole[name], "float32", "bfloat16")), name


def test_the_memory_for_the_cast_is_within_what_was_promised(tmp_path):
    source = checkpoint(tmp_path / "source", LARGE, 2, noise)
    facts = json.loads(
        assert_done(run_alone("plan", source, "--target", "single", "--cast", "float16", "--memory", "56K", "--json"))
    )
    assert 0 < facts["buffers_nbytes"] <= 56 << 10


@pytest.fixture(scope="module")
def dcp(tmp_path_factory) -> tuple[Path, dict]:
    """A PyTorch DCP folder, with arrays that don't lie in row-major order, and the tensors in it."""
    torch = needed("torch")
    checkpoint = needed("torch.distributed.checkpoint")
    torch.manual_seed(0)
    tensors = {
        "plain": torch.randn(31, 47),
        "transposed": torch.randn(60, 70).t(),
        "view": torch.randn(40, 30)[3:9],
        "strided": torch.randn(40, 30)[:, ::2],
        "doubles": torch.randn(7, 9, dtype=torch.float64),
        "0-d": torch.tensor(3.14159),
        "empty": torch.empty(0, 3),
        "steps": torch.arange(5),
    }
    folder = tmp_path_factory.mktemp("dcp") / "saved"
    checkpoint.save(tensors, checkpoint_id=folder, no_dist=True)
    return folder, tensors


@pytest.mark.parametrize("dtype", TO)
@pytest.mark.parametrize("nranks, memory", [(1, "128K"), (3, "256M")])
def test_what_torch_saved_is_cast_as_torch_does(dtype, nranks, memory, dcp, tmp_path):
    import torch
    from safetensors.torch import load_file

    saved, tensors = dcp
    done = run_mpi(nranks, "reshard", saved, tmp_path / "out", "--cast", dtype, "--memory", memory)
    assert_done(done)
    found = load_file(tmp_path / "out" / "rank-00000.safetensors")
    assert found.keys() == tensors.keys()
    for name, one in tensors.items():
        expected = one.to(getattr(torch, dtype)) if one.is_floating_point() else one
        assert found[name].dtype == expected.dtype, name
        assert torch.equal(found[name], expected), name


def test_a_flipped_byte_of_what_torch_saved_is_found_though_it_is_cast(dcp, tmp_path):
    saved, tensors = dcp
    copy = shutil.copytree(saved, tmp_path / "copy")
    file = next(copy.glob("*.distcp"))
    content = bytearray(file.read_bytes())
    content[content.index(tensors["plain"].numpy()[5:9].tobytes())] ^= 1
    file.write_bytes(content)
    done = run_mpi(2, "reshard", copy, tmp_path / "out", "--cast", "bfloat16")
    assert_refused(done, 4, "'plain", "crc32", out=tmp_path / "out")
