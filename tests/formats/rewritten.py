"""A checkpoint as it would be if its tensors had been saved with other names and types: what a job that changes them must equal.

Stored arrays are converted whole, padding included, by numpy and ml_dtypes.
"""

import json
import os
from collections.abc import Callable
from pathlib import Path

import ml_dtypes
import numpy as np

from tests.reference.case import Case, load
from tests.reference.fragments import manifest_digest, sha256
from tests.reference.shards import StoredArray, read_shard, write_shard

FLOATS = {
    "float64": np.dtype("f8"),
    "float32": np.dtype("f4"),
    "float16": np.dtype("f2"),
    "bfloat16": np.dtype(ml_dtypes.bfloat16),
}


def cast_bytes(raw: bytes, old: str, new: str) -> bytes:
    with np.errstate(all="ignore"):
        return np.frombuffer(raw, FLOATS[old]).astype(FLOATS[new]).tobytes()


def rewritten(
    source: Path,
    folder: Path,
    new_name: Callable[[str], str] = lambda fqn: fqn,
    new_dtype: Callable[[str, str], str] = lambda _fqn, dtype: dtype,
) -> Case:
    """`source`, saved to `folder` with the names `new_name(fqn)`, and the types `new_dtype(new fqn, dtype)`; loaded.

    Oracles of cast tensors are left out.
    """
    folder.mkdir()
    manifest = json.loads((source / "case.json").read_text())
    shards = {path.name: read_shard(path) for path in source.glob("rank-*.safetensors")}
    ids, cast = {}, set()
    for fragment in manifest["fragments"]:
        fqn, tensor = fragment["fqn"], fragment["logical_tensor_id"]
        fragment["fqn"] = new_name(fqn)
        fragment["logical_tensor_id"] = ids[tensor] = new_name(fqn) if tensor == fqn else tensor
        old, new = fragment["dtype"], new_dtype(fragment["fqn"], fragment["dtype"])
        if old == new:
            continue
        cast.add(tensor)
        fragment["dtype"] = new
        arrays = shards[fragment["payload_file"]].arrays
        array = arrays[fragment["payload_key"]]
        if array.dtype == old:  # not seen to already, with another tensor that shares it
            array = StoredArray(new, array.shape, cast_bytes(array.raw, old, new))
            arrays[fragment["payload_key"]] = array
        if fragment["fragment_digest"]:
            fragment["fragment_digest"] = sha256(array.raw)
    oracles = [oracle for oracle in manifest["oracles"] if oracle["logical_tensor_id"] not in cast]
    manifest["oracles"] = [o | {"logical_tensor_id": ids[o["logical_tensor_id"]]} for o in oracles]
    layout = manifest["topology"].get("layout")
    if layout:
        manifest["topology"]["layout"] = {ids.get(tensor, tensor): rules for tensor, rules in layout.items()}
    manifest["expected_manifest_digest"] = manifest_digest(manifest["fragments"])
    (folder / "case.json").write_text(json.dumps(manifest))
    for name, shard in shards.items():
        write_shard(folder / name, shard.arrays)
    if manifest["oracle_file"]:
        os.link(source / manifest["oracle_file"], folder / manifest["oracle_file"])
    return load(folder)
