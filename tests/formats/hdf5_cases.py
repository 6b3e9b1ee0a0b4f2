"""Checkpoint cases whose shards are HDF5 files, written by h5py as others would write them."""

import json
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import h5py
import numpy as np

from tests.reference import dtypes
from tests.reference.describe import Held, Split, TensorSpec
from tests.reference.generate import Written, write_case
from tests.reference.handmade import case_of, tensor
from tests.reference.shards import StoredArray, read_shard

NATIVE = {"float16": "<f2", "float32": "<f4", "float64": "<f8", "complex64": "<c8"} | {
    f"{sign}int{nbits}": f"<{sign or 'i'}{nbits // 8}" for sign in ("", "u") for nbits in (8, 16, 32, 64)
}

Options = Callable[[tuple[int, ...]], Mapping[str, Any]]  # of a dataset of that shape


def carrier(dtype: str) -> np.dtype:
    """As what numpy holds elements of `dtype`: itself, or unsigned integers of the same width."""
    return np.dtype(NATIVE.get(dtype, f"<u{max(dtypes.bits(dtype), 8) // 8}"))


def contiguous(_shape: tuple[int, ...]) -> dict[str, Any]:
    return {}


def chunked(shape: tuple[int, ...]) -> dict[str, Any]:
    """Chunks that divide nothing evenly, and several along each axis."""
    if not shape or 0 in shape:
        return {}
    return {"chunks": tuple(max(1, min(n, (n + 1) // 2, 3 + axis)) for axis, n in enumerate(shape))}


def gzipped(shape: tuple[int, ...]) -> dict[str, Any]:
    options = chunked(shape)
    return options | {"compression": "gzip", "shuffle": True, "fletcher32": True} if options else {}


def put(file: h5py.File, key: str, array: StoredArray, options: Options, order: str = "<") -> h5py.Dataset:
    """One array as a dataset; `order` is that of its bytes."""
    kind = carrier(array.dtype)
    shape = tuple(array.shape) if dtypes.bits(array.dtype) >= 8 else (len(array.raw),)
    values = np.frombuffer(array.raw, kind).reshape(shape)
    dataset = file.create_dataset(key, data=values, dtype=kind.newbyteorder(order), **options(shape))
    dataset.attrs["dtype"] = array.dtype
    if dtypes.bits(array.dtype) < 8:
        dataset.attrs["shape"] = np.array(array.shape)
    return dataset


def as_hdf5(case: Path, into: Path, options: Options, order: str = "<") -> Path:
    """The same case with its shards as HDF5 files."""
    shutil.copytree(case, into)
    for shard in sorted(into.glob("rank-*.safetensors")):
        with h5py.File(shard.with_suffix(".h5"), "w") as file:
            for key, array in read_shard(shard).arrays.items():
                put(file, key, array, options, order)
        shard.unlink()
    change(into, lambda fragment: fragment.update(payload_file=fragment["payload_file"].replace("safetensors", "h5")))
    return into


def change(case: Path, of_fragment: Callable[[dict[str, Any]], None]) -> None:
    """Change every fragment of a manifest in what its digest does not cover."""
    manifest = json.loads((case / "case.json").read_text())
    for fragment in manifest["fragments"]:
        of_fragment(fragment)
    (case / "case.json").write_text(json.dumps(manifest, sort_keys=True, indent=2))


def case_of_every_kind(folder: Path) -> Written:
    """On tp 2, dp 2: every dtype, 0-d, empty, padded, cut along other axes, on one rank alone, tied and stored once."""
    tensors = [
        tensor(f"all.{n}", n, dtype=dtype, shape=(6, 8), uses={"tp": Split(0)}) for n, dtype in enumerate(dtypes.DTYPES)
    ]
    more: list[TensorSpec] = [
        tensor("0-d", 50, shape=()),
        tensor("0-d.complex", 51, shape=(), dtype="complex64"),
        tensor("empty", 52, shape=(0, 5)),
        tensor("one/deep/er", 53, uses={"tp": Split(1)}),
        tensor("padded", 54, shape=(5, 3), uses={"tp": Split(0)}, padding_percent=100),
        tensor("padded.packed", 55, shape=(5, 8), dtype="float4_e2m1fn", uses={"tp": Split(0)}, padding_percent=100),
        tensor("columns.packed", 56, shape=(3, 2, 16), dtype="float4_e2m1fn", uses={"tp": Split(2, 1)}),
        tensor("packed.rows", 57, shape=(4, 3, 2), dtype="float6_e2m3fn", uses={"tp": Split(0)}),
        tensor("last", 58, shape=(3,), dtype="bfloat16", uses={"tp": Split(0)}),
        tensor("once", 59, uses={"tp": Held((1,))}),
        tensor("kept", 60, tie_group_id="tied", stored_with="storage"),
        tensor("shared", 60, tie_group_id="tied", stored_with="storage"),
    ]
    return write_case(case_of(*tensors, *more, mesh={"dp": 2, "tp": 2}), folder)


def raw(dataset: h5py.Dataset) -> bytes:
    return np.ascontiguousarray(dataset[()]).tobytes()
