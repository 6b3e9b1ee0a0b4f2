"""HDF5 files put together without their arrays: where those lie, and that the bytes around them are always the same."""

import hashlib
import math

import h5py
import numpy as np
import pytest

from reshard_mpi.checkpoint.dtypes import DTYPES
from reshard_mpi.formats.hdf5_target import build_hdf5
from reshard_mpi.storage.hdf5 import carrier_of, read_hdf5, stored_types
from reshard_mpi.storage.source import read_headers

ARRAYS = (
    ("a", "float64", (3, 5)),
    ("complex", "complex64", ()),
    ("deep/er/b", "float32", (7,)),
    ("none", "int32", (0, 4)),
    ("größe", "bfloat16", (3,)),
    ("c", "bool", (5,)),
    ("packed", "float4_e2m1fn", (3, 4)),
)


def built(arrays, aliases=()):
    build_hdf5.cache_clear()
    return build_hdf5(tuple(arrays), tuple(aliases))


def placed(path, arrays, aliases=()):
    """The file, whole, with bytes that tell where they are from."""
    head, spans = built(arrays, aliases)
    path.write_bytes(head)
    with open(path, "r+b") as file:
        file.truncate(max([len(head), *(span.begin + span.nbytes for span in spans)]))
        for number, span in enumerate(spans):
            file.seek(span.begin)
            file.write(bytes([number % 255 + 1]) * span.nbytes)
    return spans


def test_arrays_lie_behind_the_head_aligned_and_apart():
    head, spans = built(ARRAYS)
    position = len(head)
    for span in (span for span in spans if span.nbytes):
        assert position <= span.begin < position + 8 and span.begin % 8 == 0
        position = span.begin + span.nbytes


def test_the_same_arrays_give_the_same_bytes():
    assert built(ARRAYS, [("z", "c")]) == built(ARRAYS, [("z", "c")])


@pytest.mark.parametrize(
    "arrays, aliases, digest",
    [
        (ARRAYS, [("y/z", "c")], "c893a2d6a75ba2012f9e1fcbc144461b40d34a6b70e0f6e5474320e25779759f"),
        (
            [(f"layers.{n}.weight", "float32", (n % 5,)) for n in range(3000)],
            [],
            "7faf56efeca784095bc3e0b484015054aeb349dd3af40a04e1a7ec89de964c87",
        ),
    ],
)
def test_the_head_is_that_of_any_hdf5_library(arrays, aliases, digest):
    """As HDF5 1.10.8 (with MPI) and 2.0.0 (without) both wrote it: no version of theirs in it, no time of today."""
    assert hashlib.sha256(built(arrays, aliases)[0]).hexdigest() == digest


def test_what_was_put_together_is_read_by_h5py_and_by_us(tmp_path):
    spans = placed(tmp_path / "rank-00000.h5", ARRAYS, [("other", "c")])
    headers, faults = read_headers(tmp_path, ["rank-00000.h5"])
    assert not faults
    found = headers["rank-00000.h5"]
    assert found.pop("other") == found["c"]
    assert {key: (array.dtype, array.shape, array.nbytes) for key, array in found.items()} == {
        key: (dtype, shape, math.prod(shape) * DTYPES[dtype].nbits // 8) for key, dtype, shape in ARRAYS
    }
    assert all(found[key].begin == span.begin for (key, _, _), span in zip(ARRAYS, spans, strict=True) if span.nbytes)
    with h5py.File(tmp_path / "rank-00000.h5", "r") as file:
        for number, (key, dtype, _) in enumerate(ARRAYS):
            assert set(np.ascontiguousarray(file[key][()]).tobytes()) <= {number + 1}
            assert file[key].attrs["dtype"] == dtype


@pytest.mark.parametrize("count", [0, 1, 9, 300, 3000])
def test_any_number_of_arrays_has_one_head(count, tmp_path):
    """HDF5 keeps many links otherwise than few."""
    arrays = [(f"layers.{n}.weight", "float32", (n % 5,)) for n in range(count)]
    placed(tmp_path / "rank-00000.h5", arrays)
    with open(tmp_path / "rank-00000.h5", "rb") as file:
        assert len(read_hdf5(file.fileno(), "w")) == count


def test_a_large_array_takes_no_memory():
    head, (span,) = built([("large", "uint8", (1 << 50,))])
    assert len(head) < 10_000 and span.nbytes == 1 << 50


def test_every_dtype_has_a_carrier_of_its_width():
    types = stored_types()
    for name, dtype in DTYPES.items():
        assert types[carrier_of(name)].get_size() * 8 == max(dtype.nbits, 8)
