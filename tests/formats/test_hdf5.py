"""HDF5 shards as target and as source, with h5py as the judge: what it reads is what was saved, or it is refused."""

import json
import shutil
from pathlib import Path

import h5py
import numpy as np
import pytest

from reshard_mpi.cli import binary_size
from reshard_mpi.plan.planner import UNCOUNTED_NBYTES
from tests.formats.hdf5_cases import as_hdf5, carrier, case_of_every_kind, change, chunked, contiguous, gzipped, raw
from tests.jobs.large import MIB, run_watched, write_array
from tests.jobs.outcome import CASES, assert_done, assert_refused, run_alone
from tests.mpirun import run_mpi
from tests.reference import dtypes
from tests.reference.fragments import sha256
from tests.reference.generate import Written, generate

LAYOUTS = {"contiguous": contiguous, "chunked": chunked, "gzipped": gzipped}


def zipped_rows(shape: tuple[int, ...]) -> dict:
    return {"chunks": (1, *shape[1:]) if len(shape) > 1 else shape, "compression": "gzip"} if shape else {}


@pytest.fixture(scope="module")
def case(tmp_path_factory) -> Written:
    return case_of_every_kind(tmp_path_factory.mktemp("every") / "case")


def manifest_of(folder: Path) -> dict:
    return json.loads((folder / "case.json").read_text())


def files_of(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in sorted(folder.iterdir())}


def datasets_of(file: h5py.File) -> dict[str, h5py.Dataset]:
    found: dict[str, h5py.Dataset] = {}
    file.visititems(lambda name, item: found.update({name: item}) if isinstance(item, h5py.Dataset) else None)
    return found


def assert_shards_are_what_the_manifest_says(out: Path) -> None:
    """Every array by its key, contiguous, aligned, of a type that h5py reads, with the digest of its bytes."""
    named: dict[str, set[str]] = {}
    for fragment in manifest_of(out)["fragments"]:
        named.setdefault(fragment["payload_file"], set()).add(fragment["payload_key"])
        with h5py.File(out / fragment["payload_file"], "r") as file:
            dataset, dtype = file[fragment["payload_key"]], fragment["dtype"]
            assert (dataset.attrs["dtype"], dataset.dtype) == (dtype, carrier(dtype))
            if dtypes.bits(dtype) >= 8:
                assert dataset.shape == tuple(fragment["local_shape"])
            else:
                assert dataset.attrs["shape"].tolist() == fragment["local_shape"]
            assert sha256(raw(dataset)) == fragment["fragment_digest"]
            assert dataset.chunks is None
            if dataset.nbytes:
                content = (out / fragment["payload_file"]).read_bytes()
                offset = dataset.id.get_offset()
                assert offset % max(dtypes.bits(dtype) // 8, 1) == 0
                assert content[offset : offset + dataset.nbytes] == raw(dataset)
    for path in out.glob("rank-*.h5"):
        with h5py.File(path, "r") as file:
            assert set(datasets_of(file)) == named.get(path.name, set())


def assert_view_is_whole(out: Path, tensors: dict[str, bytes]) -> None:
    """global.h5 has every tensor, its bytes those that were saved."""
    with h5py.File(out / "global.h5", "r") as file:
        found = {dataset.attrs["logical_tensor_id"]: dataset for dataset in datasets_of(file).values()}
        shapes = {f["logical_tensor_id"]: (f["global_shape"], f["dtype"]) for f in manifest_of(out)["fragments"]}
        assert set(found) == set(tensors) == set(shapes)
        for tensor_id, dataset in found.items():
            shape, dtype = shapes[tensor_id]
            assert (dataset.attrs["dtype"], dataset.dtype) == (dtype, carrier(dtype))
            assert (dataset.attrs["shape"] if dtypes.bits(dtype) < 8 else np.array(dataset.shape)).tolist() == shape
            assert raw(dataset) == tensors[tensor_id], tensor_id


@pytest.mark.parametrize("target", ["single", "tp=2", "tp=3", "pp=2,tp=2"])
def test_h5py_reads_what_was_saved_and_the_view_has_it_whole(target, case, tmp_path):
    out = tmp_path / "out"
    assert_done(run_mpi(2, "reshard", case.folder, out, "--format", "hdf5", "--target", target, "--verify", "full"))
    assert_shards_are_what_the_manifest_says(out)
    assert_view_is_whole(out, case.tensors)
    assert_done(run_mpi(2, "compare", case.folder, out))
    assert "0 faults" in assert_done(run_mpi(2, "verify", out))


@pytest.mark.parametrize("seed", range(8))
def test_whatever_the_checkpoint_is_like(seed, tmp_path):
    written = generate(seed + 400, tmp_path / "case")
    out = tmp_path / "out"
    done = run_alone("reshard", written.folder, out, "--format", "hdf5", "--target", "single")
    if done.returncode == 3:
        pytest.skip("can't be made whole")
    assert_done(done)
    assert_view_is_whole(out, written.tensors)
    assert_done(run_mpi(2, "compare", written.folder, out))


def test_an_array_that_is_stored_once_has_a_link_for_its_other_name(case, tmp_path):
    out = tmp_path / "out"
    assert_done(run_alone("reshard", case.folder, out, "--format", "hdf5", "--target", "single"))
    with h5py.File(out / "rank-00000.h5", "r") as file:
        assert isinstance(file.get("shared", getlink=True), h5py.SoftLink)
        assert file["shared"] == file["kept"]
    assert "warning" not in run_alone("verify", out).stderr


def test_the_bytes_depend_on_neither_ranks_nor_memory(case, tmp_path):
    outs = []
    for nranks, memory in ((1, "256M"), (2, "56K"), (3, "64K")):
        out = tmp_path / f"out-{nranks}"
        options = ("--format", "hdf5", "--target", "tp=2", "--memory", memory)
        assert_done(run_mpi(nranks, "reshard", case.folder, out, *options))
        outs.append(files_of(out))
    assert outs[1] == outs[0] and outs[2] == outs[0]


def test_the_view_is_found_from_any_folder_and_after_a_move(case, tmp_path):
    assert_done(run_alone("reshard", case.folder, tmp_path / "out", "--format", "hdf5", "--target", "tp=2"))
    moved = tmp_path / "elsewhere" / "moved"
    moved.parent.mkdir()
    shutil.move(tmp_path / "out", moved)
    assert_view_is_whole(moved, case.tensors)


@pytest.mark.parametrize("mode", LAYOUTS)
@pytest.mark.parametrize(("nranks", "memory"), [(1, "56K"), (2, "56K"), (3, "256M")])
def test_shards_that_h5py_wrote_become_what_the_same_safetensors_become(mode, nranks, memory, case, tmp_path):
    source = as_hdf5(Path(case.folder), tmp_path / "case", LAYOUTS[mode])
    options = ("--target", "tp=3", "--memory", memory)
    assert_done(run_mpi(nranks, "reshard", source, tmp_path / "out", *options))
    assert_done(run_mpi(nranks, "reshard", case.folder, tmp_path / "expected", *options))
    assert files_of(tmp_path / "out") == files_of(tmp_path / "expected")


def test_what_is_compressed_is_verified_by_digests_or_not_at_all(case, tmp_path):
    source = as_hdf5(Path(case.folder), tmp_path / "case", LAYOUTS["gzipped"])
    found = manifest_of(source)
    nfragments = len(found["fragments"])
    assert f", {nfragments} digests and " in (told := assert_done(run_mpi(2, "verify", source)))
    assert ", 0 fragments unverifiable, 0 faults" in told
    for fragment in found["fragments"]:
        fragment["fragment_digest"] = None
    found |= {"expected_manifest_digest": None, "oracle_file": None, "oracles": []}
    (source / "case.json").write_text(json.dumps(found))
    told = assert_done(run_mpi(2, "verify", source))
    assert ", 0 digests and " in told and f", {nfragments} fragments unverifiable, 0 faults" in told
    told = assert_done(run_mpi(2, "reshard", source, tmp_path / "out"))
    assert told.rstrip().endswith("the source has no digests, so its bytes could not be checked")


def test_chunks_of_a_large_array_are_read_in_little_memory(tmp_path):
    """16 MiB in rows of chunks of 64 KiB, in 1 MiB: buffers, bands, and what is held as it is stored."""
    assert_done(run_alone("sample", tmp_path / "case", "--size", "16M", "--tp", "2", "--dtype", "float32"))
    source = as_hdf5(tmp_path / "case", tmp_path / "hdf5", zipped_rows)
    done = run_mpi(2, "reshard", source, tmp_path / "out", "--target", "tp=3", "--memory", "1M", "--verify", "full")
    assert_done(done)
    assert_done(run_mpi(2, "compare", tmp_path / "case", tmp_path / "out"))


def one_chunk(shape: tuple[int, ...]) -> dict:
    return {"chunks": shape, "compression": "gzip", "compression_opts": 1, "shuffle": True}


def test_a_row_of_chunks_larger_than_the_memory_is_refused_by_all_with_what_would_do(tmp_path):
    """A chunk of 24 MiB can't be read in parts. What would do is enough, and not exceeded."""
    case = write_array(tmp_path / "case", "w", (6144, 1024), "float32", {}, axis=0)
    source = as_hdf5(case, tmp_path / "hdf5", one_chunk)
    plain = tmp_path / "plain"
    commands = [("verify", source), ("compare", source, case), ("compare", source, source), ("reshard", source, plain)]
    for number, command in enumerate(commands):
        done = run_mpi(2, *command, "--memory", "48M")
        needed = assert_refused(done, 6, "--memory", "give at least", out=plain).split()[-1]
        done, notes = run_watched(2, tmp_path / f"notes-{number}", *command, "--memory", needed)
        assert_done(done)
        assert max(note["peak_rss_nbytes"] for note in notes) <= binary_size(needed) + 150 * MIB
    assert_refused(run_alone("plan", source, "--memory", "48M"), 6, needed)
    planned = json.loads(assert_done(run_alone("plan", source, "--memory", needed, "--json")))
    assert planned["buffers_nbytes"] <= binary_size(needed) + UNCOUNTED_NBYTES
    assert max(note["peak_rss_nbytes"] for note in notes) <= planned["peak_nbytes"]
    assert_done(run_alone("compare", case, plain))


@pytest.mark.parametrize("mode", LAYOUTS)
def test_bytes_in_the_other_order_are_turned(mode, case, tmp_path):
    source = as_hdf5(Path(case.folder), tmp_path / "case", LAYOUTS[mode], ">")
    done = run_mpi(2, "compare", case.folder, source)
    assert_refused(done, 3, "complex64", "expected an attribute")  # which h5py stores as a pair
    assert_done(run_alone("reshard", case.folder, tmp_path / "plain", "--exclude", "*complex*", "--exclude", "all.13"))
    source = as_hdf5(tmp_path / "plain", tmp_path / "again", LAYOUTS[mode], ">")
    assert_done(run_mpi(2, "compare", tmp_path / "plain", source))


def test_there_and_back_through_hdf5(case, tmp_path):
    a, b, c = (tmp_path / name for name in "abc")
    assert_done(run_mpi(2, "reshard", case.folder, a, "--format", "hdf5", "--target", "tp=3"))
    assert_done(run_mpi(2, "reshard", a, b, "--target", "pp=2"))
    assert_done(run_mpi(2, "reshard", b, c, "--format", "hdf5"))
    for one in (a, b, c):
        assert_done(run_mpi(2, "compare", case.folder, one))
    assert_done(run_mpi(2, "reshard", a, tmp_path / "d", "--format", "hdf5", "--target", "tp=3"))
    assert {name: content for name, content in files_of(tmp_path / "d").items() if name.endswith(".h5")} == {
        name: content for name, content in files_of(a).items() if name.endswith(".h5")
    }


def test_ranks_that_hold_nothing_have_their_file_and_are_read_again(tmp_path):
    source = CASES / "tp2-pp2-to-single"
    out = tmp_path / "out"
    assert_done(run_mpi(2, "reshard", source, out, "--format", "hdf5", "--target", "pp=16"))
    assert len(list(out.glob("rank-*.h5"))) == 16
    assert_done(run_mpi(2, "reshard", out, tmp_path / "back", "--target", "single", "--verify", "full"))
    assert_done(run_mpi(2, "compare", source, tmp_path / "back"))


def test_plan_and_inspect_know_hdf5_as_source_and_as_target(case, tmp_path):
    source = as_hdf5(Path(case.folder), tmp_path / "case", gzipped)
    facts = json.loads(assert_done(run_alone("plan", source, "--format", "hdf5", "--target", "tp=3", "--json")))
    assert_done(run_alone("reshard", source, tmp_path / "out", "--format", "hdf5", "--target", "tp=3"))
    sizes = {path.name: path.stat().st_size for path in (tmp_path / "out").glob("rank-*.h5")}
    assert {shard["file"]: shard["nbytes"] for shard in facts["shards"]} == sizes
    assert "34 tensors" in assert_done(run_alone("inspect", source))
    assert "[" in assert_done(run_alone("inspect", tmp_path / "out", "padded"))


def test_filters_and_keys_of_two_components(tmp_path):
    source = CASES / "adam-moments-one-fqn"
    assert_done(run_alone("reshard", source, tmp_path / "out", "--format", "hdf5"))
    assert_done(run_mpi(2, "compare", source, tmp_path / "out"))
    with h5py.File(tmp_path / "out" / "global.h5", "r") as file:
        assert any("/" in name for name in datasets_of(file))


# ---- what is refused


def replace_dataset(file: h5py.File, key: str, **options: object) -> None:
    old = file[key]
    attributes, values = dict(old.attrs), old[()]
    del file[key]
    file.create_dataset(key, **({"data": values} | options)).attrs.update(attributes)


def external_link(file: h5py.File, key: str) -> None:
    del file[key]
    file[key] = h5py.ExternalLink("/etc/passwd", "/x")


def soft_link_to_nothing(file: h5py.File, key: str) -> None:
    del file[key]
    file[key] = h5py.SoftLink("/../outside")


def soft_link_to_itself(file: h5py.File, key: str) -> None:
    del file[key]
    file[key] = h5py.SoftLink(f"/{key}")


def virtual(file: h5py.File, key: str) -> None:
    layout = h5py.VirtualLayout(file[key].shape, file[key].dtype)
    layout[:] = h5py.VirtualSource("other.h5", "x", file[key].shape)
    del file[key]
    file.create_virtual_dataset(key, layout)


def raw_bytes_in_another_file(file: h5py.File, key: str) -> None:
    replace_dataset(file, key, data=None, shape=file[key].shape, dtype="<f4", external=[("/etc/passwd", 0, 1 << 20)])


def never_written(file: h5py.File, key: str) -> None:
    replace_dataset(file, key, data=None, shape=file[key].shape, dtype="<f4")


def written_in_part(file: h5py.File, key: str) -> None:
    shape = file[key].shape
    replace_dataset(file, key, data=None, shape=shape, dtype="<f4", chunks=(1, shape[1]))
    file[key][0] = 1


def of_another_type(file: h5py.File, key: str) -> None:
    replace_dataset(file, key, data=file[key][()].astype("<i4"))


def of_another_shape(file: h5py.File, key: str) -> None:
    replace_dataset(file, key, data=file[key][()].reshape(-1))


def of_a_type_that_is_none(file: h5py.File, key: str) -> None:
    file[key].attrs["dtype"] = "float7"


def with_an_attribute_that_is_no_text(file: h5py.File, key: str) -> None:
    file[key].attrs["dtype"] = 7


def of_strings(file: h5py.File, key: str) -> None:
    replace_dataset(file, key, data=np.full(file[key].shape, "x", object), dtype=h5py.string_dtype())


def null(file: h5py.File, key: str) -> None:
    replace_dataset(file, key, data=h5py.Empty("<f4"))


def a_group(file: h5py.File, key: str) -> None:
    del file[key]
    file.create_group(key)


def gone(file: h5py.File, key: str) -> None:
    del file[key]


LIES = [
    (external_link, "out of the file"),
    (soft_link_to_nothing, "nothing in the file"),
    (soft_link_to_itself, "holds no array"),
    (virtual, "other files"),
    (raw_bytes_in_another_file, "other files"),
    (never_written, "never written"),
    (written_in_part, "never written"),
    (of_another_type, "int32"),
    (of_another_shape, "of one save"),
    (of_a_type_that_is_none, "float7"),
    (with_an_attribute_that_is_no_text, "attribute dtype"),
    (of_strings, "attribute dtype"),
    (null, "null"),
    (a_group, "holds no array"),
    (gone, "holds no array"),
]


@pytest.fixture(scope="module")
def plain(tmp_path_factory) -> Path:
    """Two shards of float32 in HDF5."""
    folder = tmp_path_factory.mktemp("plain")
    assert_done(run_alone("sample", folder / "case", "--size", "64K", "--tp", "2", "--dtype", "float32"))
    return as_hdf5(folder / "case", folder / "hdf5", contiguous)


def damaged(plain: Path, folder: Path) -> tuple[Path, Path, str]:
    """A copy, one of its files, and the key of a matrix there."""
    copy = shutil.copytree(plain, folder / "damaged")
    fragment = next(f for f in manifest_of(copy)["fragments"] if len(f["local_shape"]) == 2 and f["local_shape"][0] > 1)
    return copy, copy / fragment["payload_file"], fragment["payload_key"]


@pytest.mark.parametrize(("lie", "word"), LIES, ids=[lie.__name__ for lie, _ in LIES])
def test_a_file_that_lies_is_refused_with_one_line(lie, word, plain, tmp_path):
    copy, path, key = damaged(plain, tmp_path)
    with h5py.File(path, "r+") as file:
        lie(file, key)
    done = run_alone("reshard", copy, tmp_path / "out", "--target", "single")
    assert_refused(done, 3, path.name, word, out=tmp_path / "out")


def test_a_file_that_is_cut_short_missing_or_none_is_refused(plain, tmp_path):
    copy, path, _ = damaged(plain, tmp_path)
    content = path.read_bytes()
    for nbytes in (0, 7, 600, len(content) // 2, len(content) - 1):
        path.write_bytes(content[:nbytes])
        assert_refused(run_alone("inspect", copy), 3, path.name)
    path.write_bytes(b"not HDF5 " * 1000)
    assert_refused(run_mpi(2, "reshard", copy, tmp_path / "out"), 3, path.name, "signature", out=tmp_path / "out")
    path.unlink()
    assert_refused(run_mpi(2, "reshard", copy, tmp_path / "out"), 5, path.name, out=tmp_path / "out")
    path.symlink_to(plain / path.name)
    assert_refused(run_mpi(2, "reshard", copy, tmp_path / "out"), 3, path.name, out=tmp_path / "out")


def test_a_flipped_byte_is_found_in_plain_and_in_compressed_arrays(plain, tmp_path):
    copy, path, key = damaged(plain, tmp_path)
    with h5py.File(path, "r") as file:
        offset = file[key].id.get_offset()
    content = bytearray(path.read_bytes())
    content[offset + 5] ^= 1
    path.write_bytes(content)
    assert_refused(run_mpi(2, "reshard", copy, tmp_path / "out", "--target", "single"), 4, key, out=tmp_path / "out")
    with h5py.File(plain / path.name, "r") as old, h5py.File(path, "w") as file:
        for name, dataset in datasets_of(old).items():
            file.create_dataset(name, data=dataset[()], **gzipped(dataset.shape))
        offset = file[key].id.get_chunk_info(1).byte_offset
    content = bytearray(path.read_bytes())
    content[offset + 20] ^= 1
    path.write_bytes(content)
    done = run_mpi(2, "reshard", copy, tmp_path / "other", "--target", "single")
    assert_refused(done, 3, path.name, key, "HDF5 can't read it")


def test_a_rank_with_files_of_two_formats_is_refused(plain, tmp_path):
    copy, path, key = damaged(plain, tmp_path)
    change(
        copy,
        lambda f: f["payload_key"] == key and f.update(payload_file=f["payload_file"].replace("h5", "safetensors")),
    )
    assert_refused(run_alone("inspect", copy), 3, "two files", path.name)


@pytest.mark.parametrize(
    ("fqns", "word"), [(("a", "a/b"), "'a' is a tensor too"), (("a//b",), "no path"), (("./a",), "no path")]
)
def test_names_that_no_dataset_can_have_are_refused(fqns, word, tmp_path):
    from tests.reference.generate import write_case
    from tests.reference.handmade import case_of, tensor

    write_case(case_of(*(tensor(fqn) for fqn in fqns), mesh={}), tmp_path / "case")
    done = run_alone("reshard", tmp_path / "case", tmp_path / "out", "--format", "hdf5")
    assert_refused(done, 3, word, out=tmp_path / "out")


@pytest.mark.parametrize("seed", range(40))
def test_damage_anywhere_ends_in_an_error_or_in_arrays_of_the_file(seed, plain, tmp_path):
    from reshard_mpi.errors import ReshardError
    from reshard_mpi.storage.source import read_headers

    copy, path, _ = damaged(plain, tmp_path)
    noise = np.random.default_rng(seed)
    content = bytearray(path.read_bytes())
    for _ in range(6):
        content[noise.integers(2400)] = noise.integers(256)
    path.write_bytes(content)
    headers, faults = read_headers(copy, [path.name])
    assert all(isinstance(fault, ReshardError) for fault in faults)
    arrays = headers.get(path.name, {}).values()
    assert all(a.shown or a.begin + a.nbytes <= len(content) for a in arrays)


def heap_of(content: bytes) -> int:
    """Where the heap begins in which HDF5 keeps texts of any length: attributes, as h5py writes them."""
    return content.index(b"GCOL")


def test_a_heap_without_an_end_is_refused(plain, tmp_path):
    """HDF5 2.0 follows objects of no length for ever, while it holds Python's lock."""
    copy, path, _ = damaged(plain, tmp_path)
    content = bytearray(path.read_bytes())
    first = heap_of(content) + 16
    content[first : first + 16] = bytes(16)  # free space of no bytes
    path.write_bytes(content)
    assert_refused(run_mpi(2, "reshard", copy, tmp_path / "out"), 3, path.name, "has no end", out=tmp_path / "out")


@pytest.mark.parametrize("value", [np.zeros(8, "u1"), 5, [b"bfloat16"] * 100], ids=["bytes", "number", "texts"])
def test_an_attribute_dtype_that_is_no_text_is_refused(value, plain, tmp_path):
    copy, path, key = damaged(plain, tmp_path)
    with h5py.File(path, "r+", track_order=True, libver="latest") as file:
        del file[key].attrs["dtype"]
        file[key].attrs["dtype"] = value
    done = run_alone("inspect", copy)
    assert_refused(done, 3, path.name, "attribute dtype is")
