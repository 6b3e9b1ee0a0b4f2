"""PyTorch DCP folders as sources, written by real torch: what we make of them is what torch holds, or they are refused."""

import pickle
import shutil
from pathlib import Path

import numpy as np
import pytest

from reshard_mpi.check.whole import whole_array
from reshard_mpi.errors import InputError, ReshardError
from reshard_mpi.formats.dcp import describe_dcp
from reshard_mpi.storage.files import Files
from tests.formats.contents import arrays_of
from tests.jobs.outcome import assert_done, assert_refused
from tests.mpirun import run_mpi, run_python_mpi, tail
from tests.needed import needed

torch = needed("torch")
checkpoint = needed("torch.distributed.checkpoint")

KINDS = [("fsdp", 2), ("tp", 2), ("fsdp", 4), ("fsdp_tp", 4)]


def written(folder: Path, what: str, kind: str, nranks: int) -> tuple[Path, Path]:
    """A folder that torch saved, and the file with what it should become."""
    saved = folder / f"{what}-{kind}-{nranks}"
    arguments = ("-m", "tests.formats.torch_writer", what, kind, saved, folder / "rendezvous")
    done = run_python_mpi(nranks, *arguments, timeout=120)
    assert done.returncode == 0, tail(done.stderr)
    return saved, saved.with_name(f"{saved.name}.truth.safetensors")


def assert_holds(out: Path, truth: Path) -> None:
    """`single`: every tensor whole, every byte that of torch."""
    assert arrays_of(out / "rank-00000.safetensors") == arrays_of(truth)


@pytest.mark.parametrize(("kind", "nranks"), KINDS)
def test_what_torch_saved_on_several_ranks_becomes_whole(kind, nranks, tmp_path):
    saved, truth = written(tmp_path, "train", kind, nranks)
    for ranks, verify in ((1, "source"), (3, "none"), (nranks, "full")):
        out = tmp_path / f"out-{ranks}"
        done = run_mpi(ranks, "reshard", saved, out, "--verify", verify)
        assert done.returncode == 0, tail(done.stderr)
        assert_holds(out, truth)
        assert "1 entry that is no tensor is left out: step" in done.stderr
    compared = run_mpi(2, "compare", saved, tmp_path / "out-1")
    assert compared.returncode == 0, compared.stdout + compared.stderr


def test_a_sharded_tensor_becomes_whole(tmp_path):
    """What FSDP saved before there were DTensors."""
    saved, truth = written(tmp_path, "sharded", "rows", 3)
    assert_done(run_mpi(2, "reshard", saved, tmp_path / "out"))
    assert_holds(tmp_path / "out", truth)


def test_tensors_that_are_stored_compressed_are_refused(saved, tmp_path):
    """As torch marks what its stream transforms (zstd, say) have written."""
    copy, _ = damaged(saved, tmp_path)
    metadata = pickle.loads((copy / ".metadata").read_bytes())
    next(iter(metadata.storage_data.values())).transform_descriptors = ["stream.zstd"]
    (copy / ".metadata").write_bytes(pickle.dumps(metadata))
    done = run_mpi(2, "reshard", copy, tmp_path / "out")
    assert_refused(done, 3, "transposed", "compressed or transformed", out=tmp_path / "out")


@pytest.mark.parametrize("what", ["nested", "flat"])
def test_a_sole_top_level_key_is_unwrapped_with_a_word(what, tmp_path):
    saved, truth = written(tmp_path, what, "fsdp", 2)
    done = run_mpi(2, "reshard", saved, tmp_path / "out")
    assert done.returncode == 0, tail(done.stderr)
    assert ("all names begin with 'model.'" in done.stderr) == (what == "nested")
    assert_holds(tmp_path / "out", truth)


TENSORS = {
    "transposed": torch.arange(40.0).reshape(4, 10).t(),
    "channels_last": torch.arange(2 * 3 * 4 * 5).reshape(2, 3, 4, 5).to(memory_format=torch.channels_last),
    "view": torch.arange(100.0).reshape(10, 10)[2:4],
    "strided_view": torch.arange(100.0).reshape(10, 10)[:, ::2],
    "0-d": torch.tensor(3.5),
    "empty": torch.empty(0, 3),
    **{
        f"of {dtype}": torch.arange(24, dtype=torch.uint8).view(dtype)
        for dtype in (
            *(
                torch.bool,
                torch.uint8,
                torch.int8,
                torch.uint16,
                torch.int16,
                torch.uint32,
                torch.int32,
                torch.uint64,
                torch.int64,
            ),
            *(torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.complex64),
            *(
                torch.float8_e4m3fn,
                torch.float8_e5m2,
                torch.float8_e4m3fnuz,
                torch.float8_e5m2fnuz,
                torch.float8_e8m0fnu,
            ),
        )
        if dtype != torch.bool
    },
    "of bool": torch.tensor([True, False, True]),
    "packed": torch.arange(24, dtype=torch.uint8).reshape(4, 6).view(torch.float4_e2m1fn_x2),
}


def raw(tensor: "torch.Tensor") -> bytes:
    return (
        tensor.contiguous().view(torch.uint8).numpy().tobytes()
        if tensor.ndim
        else tensor.reshape(1).view(torch.uint8).numpy().tobytes()
    )


@pytest.fixture(scope="module")
def saved(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("dcp") / "saved"
    checkpoint.save(TENSORS, checkpoint_id=folder, no_dist=True)
    return folder


@pytest.mark.parametrize("memory", ["64K", "256M"])
def test_every_dtype_and_every_order_of_storage_is_byte_equal(memory, saved, tmp_path):
    done = run_mpi(2, "reshard", saved, tmp_path / "out", "--memory", memory)
    assert done.returncode == 0, tail(done.stderr)
    from safetensors import safe_open

    with safe_open(tmp_path / "out" / "rank-00000.safetensors", "pt") as found:
        assert set(found.keys()) == set(TENSORS)
    shard = arrays_of(tmp_path / "out" / "rank-00000.safetensors")
    assert {fqn: array.data for fqn, array in shard.items()} == {fqn: raw(tensor) for fqn, tensor in TENSORS.items()}


# What torch takes without a word


def damaged(saved: Path, folder: Path) -> tuple[Path, Path]:
    """A copy, and its file of tensors."""
    copy = shutil.copytree(saved, folder / "damaged")
    return copy, next(copy.glob("*.distcp"))


@pytest.mark.parametrize("fqn", ["view", "transposed", "strided_view", "of torch.uint16", "0-d"])
def test_a_flipped_byte_is_found_by_its_checksum(fqn, tmp_path):
    """torch loads it as it is."""
    checkpoint.save({fqn: TENSORS[fqn]}, checkpoint_id=tmp_path / "saved", no_dist=True)
    file = next((tmp_path / "saved").glob("*.distcp"))
    content = bytearray(file.read_bytes())
    content[content.index(raw(torch.stack([TENSORS[fqn].reshape(-1)[-1]]))) + 1] ^= 1
    file.write_bytes(content)
    for verify in ("source", "full"):
        done = run_mpi(2, "reshard", tmp_path / "saved", tmp_path / "out", "--restart", "--verify", verify)
        assert_refused(done, 4, "crc", out=tmp_path / "out") if "CRC" not in done.stderr else assert_refused(
            done, 4, "CRC-32"
        )
    assert_refused(run_mpi(2, "verify", tmp_path / "saved"), 4, file.name)


@pytest.mark.parametrize("tensor", [torch.conj(torch.tensor([1 + 2j, 3 - 4j])), torch._neg_view(torch.ones(3))])
def test_a_tensor_that_torch_would_change_on_loading_is_refused(tensor, tmp_path):
    """The archive holds what the tensor was before, and a flag."""
    checkpoint.save({"a": tensor}, checkpoint_id=tmp_path / "lazy", no_dist=True)
    checkpoint.save({"a": tensor.resolve_conj().resolve_neg()}, checkpoint_id=tmp_path / "plain", no_dist=True)
    with pytest.raises(InputError, match="tensor a: is stored before it was conjugated or negated"):
        describe_dcp(tmp_path / "lazy")
    describe_dcp(tmp_path / "plain")


def test_a_summary_says_that_views_are_held_against_their_checksums_too(saved, tmp_path):
    for options in ((), ("--cast", "bfloat16")):
        done = run_mpi(2, "reshard", saved, tmp_path / f"out{len(options)}", *options)
        assert "verified (source): every fragment read holds its digest" in assert_done(done)


def test_a_file_that_is_missing_or_cut_short_is_named(saved, tmp_path):
    copy, file = damaged(saved, tmp_path)
    file.write_bytes(file.read_bytes()[:-200])
    assert_refused(run_mpi(2, "reshard", copy, tmp_path / "out"), 3, file.name, out=tmp_path / "out")
    file.unlink()
    assert_refused(run_mpi(2, "reshard", copy, tmp_path / "out"), 5, file.name, out=tmp_path / "out")


class _Evil:
    def __reduce__(self):
        return (__import__("os").system, ("touch /tmp/reshard-evil",))


@pytest.mark.parametrize(
    ("content", "word"),
    [
        (pickle.dumps({"x": _Evil()}), "system"),
        (pickle.dumps(print), "builtins.print"),
        (pickle.dumps({1: 2}), "metadata"),
        (b"\x80\x04garbage", "pickle"),
        (b"", "pickle"),
        (b"\x80\x04\x96" + (1 << 62).to_bytes(8, "little"), "pickle"),
    ],
)
def test_a_pickle_is_read_but_never_run(content, word, tmp_path):
    (tmp_path / ".metadata").write_bytes(content)
    with pytest.raises(InputError, match=word):
        describe_dcp(tmp_path)
    assert not Path("/tmp/reshard-evil").exists()


@pytest.mark.parametrize("seed", range(60))
def test_damage_anywhere_ends_in_an_error_or_in_the_same_tensors(seed, saved, tmp_path):
    """What of a damaged file holds its checksum has the bytes that were saved. `.metadata` has none: it must make sense."""
    copy, file = damaged(saved, tmp_path)
    noise = np.random.default_rng(seed)
    path = copy / ".metadata" if seed % 2 else file
    content = bytearray(path.read_bytes())
    for _ in range(4):
        content[noise.integers(len(content))] = noise.integers(256)
    path.write_bytes(content)
    try:
        described = describe_dcp(copy)
    except ReshardError:
        return
    assert len(described.case.fragments) <= len(TENSORS)
    for fragment in described.case.fragments if path == file else ():
        array = described.headers[fragment.payload_file][fragment.payload_key]
        whole = whole_array(fragment.payload_file, fragment.payload_key, array, "crc32")
        with Files(copy) as files:
            try:
                found = whole.read(files, 0, whole.nbytes).tobytes() if whole.nbytes else b""
                is_whole = fragment.fragment_digest in (None, whole.digest(files))
            except ReshardError:
                continue
        assert found == raw(TENSORS[fragment.fqn]) or not is_whole, fragment.fqn


def test_a_dtype_that_safetensors_has_no_name_for_is_refused_by_name(tmp_path):
    checkpoint.save({"w": torch.zeros(3, dtype=torch.complex128)}, checkpoint_id=tmp_path / "saved", no_dist=True)
    done = run_mpi(2, "reshard", tmp_path / "saved", tmp_path / "out")
    assert_refused(done, 3, "w", "complex128", out=tmp_path / "out")
