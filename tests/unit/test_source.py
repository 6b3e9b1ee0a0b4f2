"""A case folder as every command sees it: manifest and headers, and whether they are of one save."""

import json
import os
from pathlib import Path

import pytest

from reshard_mpi.checkpoint.checks import check_case
from reshard_mpi.checkpoint.mesh import parse_target
from reshard_mpi.errors import InputError, ReshardError, StorageError, UsageError, first_to_tell
from reshard_mpi.plan.planner import Resources
from reshard_mpi.plan.prepare import Selection, outgoing_of, prepare, select_tensors, target_mesh
from reshard_mpi.storage.source import Source, load_alone
from tests.reference.generate import generate
from tests.reference.shards import StoredArray, read_shard, write_shard
from tests.unit.manifests import SINGLE, case_of, manifest, parsed, sealed, tensor, text_of, whole

KNOBS = {"null_digests": 0, "extra_arrays": 0, "minor_version": 0, "sub_byte": 0, "fused": 0, "padding": 0, "shared": 0}


@pytest.fixture
def case(tmp_path):
    """A generated case of several ranks, some of which hold several tensors."""
    generate(4, tmp_path / "case", **KNOBS)
    return tmp_path / "case"


def manifest_of(folder) -> dict:
    return json.loads((folder / "case.json").read_text())


def some_fragment(folder) -> dict:
    """One with elements."""
    return next(f for f in manifest_of(folder)["fragments"] if 0 not in f["element_extent"])


def told(source: Source) -> ReshardError:
    return first_to_tell(source.findings.faults)


def replaced(folder, fragment: dict, array: StoredArray | None, key: str | None = None) -> None:
    """The shard of a fragment with its array replaced, or renamed, or gone."""
    path = folder / fragment["payload_file"]
    arrays = read_shard(path).arrays
    del arrays[fragment["payload_key"]]
    if array is not None:
        arrays[key or fragment["payload_key"]] = array
    write_shard(path, arrays)


def test_a_sound_case_has_no_faults_and_no_warnings(case):
    source = load_alone(case)
    assert (source.findings.faults, source.warnings) == ([], [])
    assert source.shard_files() == sorted({f["payload_file"] for f in manifest_of(case)["fragments"]})


def test_an_array_that_is_missing_is_bad_input_that_says_what_is_there(case):
    fragment = some_fragment(case)
    replaced(case, fragment, None)
    fault = told(load_alone(case))
    assert isinstance(fault, InputError)
    assert fragment["fragment_id"] in str(fault) and repr(fragment["payload_key"]) in str(fault)


@pytest.mark.parametrize(
    "why, change",
    [
        ("another dtype", lambda a: StoredArray("uint8", [len(a.raw)], a.raw)),
        ("another shape", lambda a: StoredArray(a.dtype, [1, *a.shape], a.raw)),
    ],
)
def test_an_array_that_is_not_what_the_manifest_says_is_bad_input(why, change, case):
    fragment = some_fragment(case)
    array = read_shard(case / fragment["payload_file"]).arrays[fragment["payload_key"]]
    replaced(case, fragment, change(array))
    fault = told(load_alone(case))
    assert isinstance(fault, InputError)
    assert fragment["fragment_id"] in str(fault) and "of one save" in str(fault)


def test_arrays_that_no_fragment_names_are_one_warning(case):
    for name in ("rank-00000.safetensors", "rank-00001.safetensors"):
        arrays = read_shard(case / name).arrays
        write_shard(
            case / name, arrays | {"extra": StoredArray("uint8", [1], b"x"), "more": StoredArray("bool", [0], b"")}
        )
    source = load_alone(case)
    assert source.findings.faults == []
    (warning,) = source.warnings
    assert "4 arrays that no fragment names" in warning and "rank-00001.safetensors:extra" in warning


def test_digests_that_are_lacking_are_one_warning_with_their_count(tmp_path):
    generate(3, tmp_path / "case", **KNOBS | {"null_digests": 100})
    lacking = sum(f["fragment_digest"] is None for f in manifest_of(tmp_path / "case")["fragments"])
    warnings = [w for w in load_alone(tmp_path / "case").warnings if "digest" in w]
    assert lacking and len(warnings) == 1 and f" {lacking} of " in warnings[0]


@pytest.mark.parametrize(
    "why, spoil, kind",
    [
        ("gone", lambda path: path.unlink(), StorageError),
        ("empty", lambda path: path.write_bytes(b""), InputError),
        ("cut short", lambda path: os.truncate(path, path.stat().st_size - 1), InputError),
        ("longer", lambda path: os.truncate(path, path.stat().st_size + 1), InputError),
        ("a folder", lambda path: (path.unlink(), path.mkdir()), InputError),
        ("a link out", lambda path: (path.rename(path.parent.parent / "x"), path.symlink_to("../x")), InputError),
        ("a FIFO", lambda path: (path.unlink(), os.mkfifo(path)), InputError),
    ],
)
def test_a_shard_that_can_not_be_used_is_named(why, spoil, kind, case):
    path = case / some_fragment(case)["payload_file"]
    spoil(path)
    fault = told(load_alone(case))
    assert type(fault) is kind
    assert path.name in str(fault)


def test_all_shards_that_can_not_be_used_are_named_at_once(case):
    for name in ("rank-00000.safetensors", "rank-00001.safetensors"):
        (case / name).write_bytes(b"")
    text = " ".join(map(str, load_alone(case).findings.faults))
    assert "rank-00000.safetensors" in text and "rank-00001.safetensors" in text


def test_a_fault_of_the_manifest_does_not_hide_a_missing_shard(case):
    raw = manifest_of(case)
    raw["fragments"][0]["role"] = "changed"  # the digest no longer holds
    (case / "case.json").write_text(json.dumps(raw))
    (case / "rank-00001.safetensors").unlink()
    assert any("rank-00001.safetensors" in str(fault) for fault in load_alone(case).findings.faults)


@pytest.mark.parametrize("is_there", [True, False])
def test_the_shard_of_a_rank_without_data_must_be_there_too(is_there, tmp_path):
    """Two ranks, and no fragment that names the file of the second."""
    axes = {"tp": 2}
    raw = manifest(axes, tensor("w", (2,), {(0,): [whole((2,))]}, axes))
    raw["fragments"][0]["fragment_digest"] = None
    (tmp_path / "case.json").write_bytes(text_of(sealed(raw)))
    write_shard(tmp_path / "rank-00000.safetensors", {"w|r0": StoredArray("float32", [2], bytes(8))})
    if is_there:
        write_shard(tmp_path / "rank-00001.safetensors", {})
    faults = load_alone(tmp_path).findings.faults
    assert [type(fault) for fault in faults] == ([] if is_there else [StorageError])


@pytest.mark.parametrize(
    "why, make, kind",
    [
        ("nothing there", lambda path: None, StorageError),
        ("a file", lambda path: path.write_text("{}"), UsageError),
        ("a folder without a manifest", lambda path: path.mkdir(), StorageError),
        ("a manifest that is a folder", lambda path: (path / "case.json").mkdir(parents=True), InputError),
        ("a manifest that is a FIFO", lambda path: (path.mkdir(), os.mkfifo(path / "case.json")), InputError),
    ],
)
def test_what_is_no_case_folder_is_refused(why, make, kind, tmp_path):
    make(tmp_path / "source")
    with pytest.raises(kind) as refused:
        load_alone(tmp_path / "source")
    assert "source" in str(refused.value)


def test_a_manifest_beyond_any_size_is_refused_before_it_is_read(tmp_path):
    (tmp_path / "case.json").touch()
    os.truncate(tmp_path / "case.json", (1 << 30) + 1)  # sparse: takes no space
    with pytest.raises(InputError, match="expected at most"):
        load_alone(tmp_path)


# What is made of it


@pytest.mark.parametrize(
    "why, include, exclude, kept",
    [
        ("everything", (), (), "abc"),
        ("what a pattern includes", ("model.[ab].w",), (), "ab"),
        ("what any of two includes", ("*.a.*", "*.c.*"), (), "ac"),
        ("but for what one excludes", (), ("*.b.*",), "ac"),
        ("excluding goes before including", ("*",), ("*.a.*", "*.b.*"), "c"),
        ("case matters", ("MODEL.*", "*.c.w"), (), "c"),
    ],
)
def test_tensors_are_selected_by_their_fqn(why, include, exclude, kept):
    vectors = [tensor(f"id {n}", (2,), {(): [whole((2,))]}, SINGLE, fqn=f"model.{n}.w") for n in "abc"]
    case = case_of(SINGLE, *vectors)
    assert select_tensors(case, Selection(None, include, exclude)) == [f"id {n}" for n in kept]
    with pytest.raises(UsageError, match="no tensor is left of 3: model.a.w"):
        select_tensors(case, Selection(None, ("nothing",)))


def test_the_target_is_that_of_the_case_unless_another_is_asked_for(case):
    source = load_alone(case)
    assert str(target_mesh(source.case, Selection(parse_target("pp=7")))) == "pp=7"
    assert target_mesh(source.case, Selection(None)).topology() == manifest_of(case)["topology"]["target"]


@pytest.mark.parametrize("kind", [("owner", False), ("shared", True)])
@pytest.mark.parametrize("nranks", [1, 2, 3, 9])
def test_what_is_prepared_is_the_same_whatever_the_ranks_but_for_the_plan(nranks, kind, case):
    source = load_alone(case)
    selection = Selection(parse_target("dp=2"))
    (outgoing, faults), (again, _) = outgoing_of(source, selection), outgoing_of(load_alone(case), selection)
    assert faults == []
    prepared = prepare(source, outgoing, Resources(nranks, 1 << 14, *kind))
    other = prepare(source, again, Resources(1, 1 << 20, "owner", True))
    assert prepared.outgoing == other.outgoing
    assert prepared.target_files == other.target_files
    assert prepared.plan.nranks == nranks
    for file in prepared.target_files:
        assert len(file.head) % 8 == 0 and file.nbytes >= len(file.head)


def test_every_fault_of_the_target_is_told_at_once():
    raw = manifest(SINGLE, tensor("w", (4, 4), {(): [whole((4, 4))]}, SINGLE))
    read = parsed(raw)
    source = Source(Path("."), read, check_case(read))
    outgoing, faults = outgoing_of(source, Selection(parse_target("tp=2,zz=2")))
    assert outgoing is None
    assert [fault.where for fault in faults] == ["mesh axis zz", "mesh axis tp"]
