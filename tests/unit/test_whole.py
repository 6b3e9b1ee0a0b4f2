"""Whole tensors, read from whatever boxes and padding hold them, in bounded parts."""

import hashlib
import random

import numpy as np
import pytest

from reshard_mpi.check import whole as whole_module
from reshard_mpi.check.whole import WholeTensor, whole_array, whole_box, whole_tensor
from reshard_mpi.errors import StorageError
from reshard_mpi.plan.stored import Place
from reshard_mpi.storage.files import Files
from reshard_mpi.storage.safetensors import StoredArray
from tests.reference import dtypes
from tests.reference.describe import SUB_BYTE_UNIT
from tests.reference.dice import Dice
from tests.unit.manifests import SINGLE, case_of, everywhere, tensor
from tests.unit.manifests import whole as whole_box_of
from tests.unit.tilings import pad, stored_bytes, tile, whole_cells


def stored_tensor(dice: Dice, folder, shape, dtype: str, percent_padded: int) -> tuple[WholeTensor, bytes]:
    """A tensor in as many files as tiles, each somewhere in its file; and its bytes."""
    noise = random.Random(dice.integer(0, 1 << 30))
    unit = SUB_BYTE_UNIT.get(dtype, 1)
    cells = whole_cells(noise, dtype, shape)
    tiles = [pad(dice, piece, percent_padded, unit) for piece in tile(dice, shape, 75, unit)]
    begins = []
    for n, piece in enumerate(tiles):
        before = bytes(dice.integer(0, 9))
        (folder / str(n)).write_bytes(before + stored_bytes(noise, dtype, cells, piece) + b"after")
        begins.append(len(before))
    places = tuple(Place(t.offset, t.extent, t.before, t.local_shape) for t in tiles)
    files = tuple(str(n) for n in range(len(tiles)))
    return WholeTensor("w", shape, dtype, places, files, tuple(begins)), dtypes.to_bytes(cells, dtype)


KINDS = [
    ("0-d", (), "float32", 0),
    ("one axis", (37,), "uint8", 0),
    ("rows and columns", (9, 8), "bfloat16", 0),
    ("padded", (9, 8), "float32", 100),
    ("three axes, some padded", (4, 5, 6), "uint8", 50),
    ("four axes, padded", (2, 3, 4, 3), "complex64", 100),
    ("axis 0 of size 1, padded", (1, 6, 7), "uint8", 100),
    ("half bytes", (5, 8), "float4_e2m1fn", 0),
    ("six bits, padded", (3, 8), "float6_e2m3fn", 100),
]


@pytest.mark.parametrize("most_span", [6, 1 << 24], ids=["spans halved", "spans whole"])
@pytest.mark.parametrize("why, shape, dtype, padded", KINDS, ids=[row[0] for row in KINDS])
def test_any_range_of_bytes_is_that_of_the_whole_array(why, shape, dtype, padded, most_span, tmp_path, monkeypatch):
    monkeypatch.setattr(whole_module, "MOST_SPAN_NBYTES", most_span)
    for seed in range(4):
        dice = Dice(f"{why} {seed}")
        folder = tmp_path / str(seed)
        folder.mkdir()
        whole, expected = stored_tensor(dice, folder, shape, dtype, padded)
        assert whole.nbytes == len(expected)
        with Files(folder) as files:
            assert whole.read(files, 0, len(expected)).tobytes() == expected
            for _ in range(8):
                first, last = sorted(dice.integer(0, len(expected)) for _ in range(2))
                assert whole.read(files, first, last).tobytes() == expected[first:last]


def test_a_digest_is_computed_in_parts(tmp_path, monkeypatch):
    whole, expected = stored_tensor(Dice(5), tmp_path, (9, 8), "float32", 50)
    sizes = []
    monkeypatch.setattr(whole_module, "PART_NBYTES", 50)
    plain = WholeTensor.read
    monkeypatch.setattr(WholeTensor, "read", lambda self, files, a, b: sizes.append(b - a) or plain(self, files, a, b))
    with Files(tmp_path) as files:
        assert whole.digest(files) == "sha256:" + hashlib.sha256(expected).hexdigest()
    assert sizes == [50] * 5 + [38]


def test_a_tensor_without_elements_has_the_digest_of_nothing(tmp_path):
    empty = WholeTensor("w", (0, 3), "float32", (), (), ())
    with Files(tmp_path) as files:
        assert (empty.nbytes, empty.digest(files)) == (0, "sha256:" + hashlib.sha256(b"").hexdigest())


def test_what_is_read_at_once_is_bounded_however_much_padding_lies_between(tmp_path, monkeypatch):
    """Two columns of a wide stored array: the span of the box is 100 times the box."""
    monkeypatch.setattr(whole_module, "MOST_SPAN_NBYTES", 1000)
    content = np.random.default_rng(1).integers(0, 255, (100, 200), np.uint8)
    (tmp_path / "f").write_bytes(content.tobytes())
    whole = WholeTensor("w", (100, 2), "uint8", (Place((0, 0), (100, 2), (0, 7), (100, 200)),), ("f",), (0,))
    with Files(tmp_path) as files:
        sizes = []
        plain = files.read
        monkeypatch.setattr(files, "read", lambda name, at, into: sizes.append(len(into)) or plain(name, at, into))
        assert whole.read(files, 0, 200).tobytes() == content[:, 7:9].tobytes()
    assert max(sizes) <= 1000


def test_a_file_that_is_too_short_is_a_storage_error(tmp_path):
    whole, _ = stored_tensor(Dice(5), tmp_path, (9, 8), "float32", 0)
    for file in tmp_path.iterdir():
        file.write_bytes(b"short")
    with Files(tmp_path) as files, pytest.raises(StorageError):
        whole.digest(files)


def test_a_tensor_is_made_of_one_member_of_each_replica_group_and_no_empty_part():
    axes = {"dp": 2, "fsdp": 3}
    held = {(d, f): [((2 * f,), (2,))] if f < 2 else [((4,), (0,))] for d, f in everywhere(axes)}
    case = case_of(axes, tensor("w", (4,), held, axes))
    arrays = {
        f.payload_file: {f.payload_key: StoredArray("float32", f.element_extent, 8 + f.rank, 8)} for f in case.fragments
    }
    whole = whole_tensor(case.fragments, arrays)
    assert whole.files == ("rank-00000.safetensors", "rank-00001.safetensors")
    assert whole.begins == (8, 9)
    assert [place.offset for place in whole.places] == [(0,), (2,)]


def test_a_box_is_read_without_its_padding_and_an_array_with_it(tmp_path):
    raw = tensor("w", (2, 2), {(): [whole_box_of((2, 2))]}, SINGLE, dtype="uint8", local_shape=[3, 4])
    raw[0]["padding"] = {"before": [1, 1], "after": [0, 1], "semantic": "alignment"}
    (fragment,) = case_of(SINGLE, raw).fragments
    (tmp_path / fragment.payload_file).write_bytes(b"head" + bytes(range(12)))
    array = StoredArray("uint8", (3, 4), 4, 12)
    arrays = {fragment.payload_file: {fragment.payload_key: array}}
    with Files(tmp_path) as files:
        assert whole_box(fragment, arrays).read(files, 0, 4).tobytes() == bytes([5, 6, 9, 10])
        padded = whole_array(fragment.payload_file, fragment.payload_key, array)
        assert padded.read(files, 0, 12).tobytes() == bytes(range(12))


def test_an_array_without_elements_is_read_as_nothing(tmp_path):
    empty = whole_array("gone", "k", StoredArray("float32", (0, 3), 8, 0))
    with Files(tmp_path) as files:
        assert empty.digest(files) == "sha256:" + hashlib.sha256(b"").hexdigest()
