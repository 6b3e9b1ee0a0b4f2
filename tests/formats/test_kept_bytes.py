"""What DCP holds beside tensors, kept as files: real torch finds in them what it saved, and no name leads out of the folder."""

import json

import pytest

from reshard_mpi.errors import InputError, StorageError
from reshard_mpi.formats.dcp import describe_dcp
from reshard_mpi.storage.entries import LONGEST_NAME, Entry, check_entries, file_name
from tests.formats.models import llama, write_hugging_face
from tests.jobs.outcome import assert_done, assert_refused
from tests.mpirun import run_mpi
from tests.needed import needed

torch = needed("torch")
checkpoint = needed("torch.distributed.checkpoint")

OBJECTS = {
    "step": 7,
    "scheduler": {"last": [0.5, None]},
    "../../escaped": b"1",
    "/tmp/absolute": 2,
    "..": 3,
    "a" * 400: 4,
    "a" * 399 + "b": 5,
    "Größe/1": 6,
}


def saved(folder):
    state = {"w": torch.arange(12.0), **OBJECTS}
    checkpoint.save(state, checkpoint_id=folder, no_dist=True)
    return folder


def entry_of(folder, name):
    return next(entry for entry in describe_dcp(folder).others if entry.name == name)


@pytest.mark.parametrize("form", ["safetensors", "hf"])
def test_every_entry_is_a_file_that_torch_reads(form, tmp_path):
    source, out, report = saved(tmp_path / "dcp"), tmp_path / "out", tmp_path / "report.json"
    options = ("--format", form, "--keep-bytes", "--report", report)
    done = run_mpi(3, "reshard", source, out, *options)
    assert "kept: " in assert_done(done) and "left out" not in done.stderr
    kept = {one["entry"]: one for one in json.loads(report.read_text())["kept_bytes"]}
    names = {entry.name for entry in describe_dcp(source).others}
    assert kept.keys() == names and {"step", "../../escaped", ".."} <= names
    assert {path.name for path in (out / "bytes").iterdir()} == {
        one["file"].removeprefix("bytes/") for one in kept.values()
    }
    for name in OBJECTS.keys() - {"scheduler"}:  # which torch takes apart
        path = out / kept[name]["file"]
        assert path.parent == out / "bytes" and path.stat().st_size == kept[name]["nbytes"]
        assert torch.load(path, weights_only=False) == OBJECTS[name]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["dcp", "out", "report.json"]
    assert_done(run_mpi(2, "reshard", source, out, "--format", form, "--overwrite"))
    assert not (out / "bytes").exists()


def test_names_are_told_apart_and_fit_a_file_system():
    names = [file_name(name) for name in OBJECTS]
    assert len(set(names)) == len(names) and all("/" not in name and name not in (".", "..") for name in names)
    assert max(map(len, names)) <= LONGEST_NAME + 3


def test_what_is_not_kept_is_told_with_how_to_keep_it(tmp_path):
    done = run_mpi(2, "reshard", saved(tmp_path / "dcp"), tmp_path / "out")
    assert_done(done)
    assert "left out" in done.stderr and "--keep-bytes" in done.stderr and not (tmp_path / "out" / "bytes").exists()


def test_an_entry_whose_bytes_have_changed_is_refused(tmp_path):
    source = saved(tmp_path / "dcp")
    entry = entry_of(source, "step")
    content = bytearray((source / entry.file).read_bytes())
    at = content.index(b"data.pkl", entry.offset)
    content[content.index(b"\x80\x02", at) + 3] ^= 1  # in the pickle
    (source / entry.file).write_bytes(content)
    done = run_mpi(2, "reshard", source, tmp_path / "out", "--keep-bytes")
    assert_refused(done, 4, "entry step", "CRC-32", out=tmp_path / "out")
    assert_done(run_mpi(2, "reshard", source, tmp_path / "out", "--keep-bytes", "--verify", "none", "--restart"))


@pytest.mark.parametrize(
    "entry, error, words",
    [
        (Entry("zz", "", 0, 0), InputError, "stored nowhere"),
        (Entry("zz", "gone", 0, 4), StorageError, "gone"),
        (Entry("zz", "there", 7, 4), InputError, "ends at byte 11, the file at 10"),
    ],
)
def test_an_entry_that_is_not_there_is_refused_before_anything_is_written(entry, error, words, tmp_path):
    (tmp_path / "there").write_bytes(bytes(10))
    with pytest.raises(error, match=words):
        check_entries(tmp_path, [Entry("a", "there", 0, 10), entry])


def test_other_formats_have_no_such_entries(tmp_path):
    source = write_hugging_face(tmp_path / "hf", llama())
    done = run_mpi(2, "reshard", source, tmp_path / "out", "--keep-bytes")
    assert_refused(done, 2, "--keep-bytes", "DCP", out=tmp_path / "out")
