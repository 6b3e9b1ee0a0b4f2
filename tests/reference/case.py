"""Read a checkpoint case, check all that can be checked, and join every logical tensor into one array."""

import math
import os
from dataclasses import dataclass

import numpy as np

from tests.reference import dtypes
from tests.reference.checks import (
    check_coverage,
    check_digests,
    check_fragment,
    check_ranks,
    check_replica_groups,
    check_shared_storage,
    check_stored,
    check_ties,
)
from tests.reference.errors import Refused
from tests.reference.fragments import (
    Tensor,
    box_of,
    by_tensor,
    mesh_of,
    replica_groups,
    sha256,
    shard_name,
    slices,
)
from tests.reference.shards import Shard, StoredArray, read_shard, strict_json

SCHEMA_ID = "obliteratus.checkpoint-fixture-case"


@dataclass
class Case:
    """A checkpoint that has passed every check."""

    folder: str
    manifest: dict
    tensors: dict[str, Tensor]
    shards: dict[str, Shard]
    mesh: dict[str, int]  # mesh axis -> size, axes of size 1 left out
    layout: dict[str, dict]  # logical tensor -> mesh axis -> what it does, as it was read

    @property
    def unnamed_arrays(self) -> list[tuple[str, str]]:
        named = {(f["payload_file"], f["payload_key"]) for f in self.manifest["fragments"]}
        return [(file, key) for file, shard in self.shards.items() for key in shard.arrays if (file, key) not in named]


def load(folder, full: bool = False) -> Case:
    """The case in `folder`, checked as `--verify source` does, or as `full` does (oracles too)."""
    folder = str(folder)
    manifest = read_manifest(folder)
    fragments = manifest["fragments"]
    for fragment in fragments:
        check_fragment(folder, fragment, manifest["topology"]["source"])
    check_ranks(fragments, manifest["world_size"])
    shards = {
        shard_name(rank): read_shard(os.path.join(folder, shard_name(rank))) for rank in range(manifest["world_size"])
    }
    for fragment in fragments:
        check_stored(fragment, shards)
    check_shared_storage(fragments)
    tensors = by_tensor(fragments)
    for tensor in tensors.values():
        check_replica_groups(tensor)
        check_coverage(tensor)
    check_digests(manifest, shards)
    for tensor in tensors.values():
        join(tensor, shards)
    check_ties(tensors)
    case = Case(
        folder,
        manifest,
        tensors,
        shards,
        mesh_of(manifest["topology"]["source"]),
        layout_of(manifest, tensors),
    )
    if full:
        check_oracles(case)
    return case


def read_manifest(folder: str) -> dict:
    path = os.path.join(folder, "case.json")
    try:
        with open(path, encoding="utf-8") as file:
            manifest = strict_json(file.read(), path)
    except OSError as error:
        raise Refused(5, f"{path}: {error}") from None
    if manifest.get("schema_id") != SCHEMA_ID or manifest.get("schema_version", "").split(".")[0] != "1":
        raise Refused(3, f"{path}: schema {manifest.get('schema_id')} {manifest.get('schema_version')}")
    for key in ("case_id", "topology", "world_size", "fragments", "expected_manifest_digest"):
        if key not in manifest:
            raise Refused(3, f"{path}: no {key}")
    source = manifest["topology"]["source"]
    if math.prod(source.values()) != manifest["world_size"]:
        raise Refused(3, f"{path}: {source} is not {manifest['world_size']} ranks")
    if len({f["fragment_id"] for f in manifest["fragments"]}) != len(manifest["fragments"]):
        raise Refused(3, f"{path}: a fragment_id twice")
    return manifest


def box_cells(fragment: dict, stored: StoredArray) -> np.ndarray:
    """The box within its stored array: the unpadded middle."""
    cells = dtypes.to_cells(stored.raw, stored.dtype, stored.shape)
    return cells[slices(fragment["padding"]["before"], fragment["element_extent"])]


def join(tensor: Tensor, shards: dict[str, Shard]) -> None:
    """Put every box where it belongs; replicas must agree."""
    tensor.cells = dtypes.empty_cells(tensor.dtype, tensor.global_shape)
    for group in replica_groups(tensor):
        members = [box_cells(f, shards[f["payload_file"]].arrays[f["payload_key"]]) for f in group]
        if any(not np.array_equal(member, members[0]) for member in members):
            raise Refused(4, f"{tensor.logical_tensor_id}: replicas of {box_of(group[0])} differ")
        tensor.cells[slices(*box_of(group[0]))] = members[0]


def layout_of(manifest: dict, tensors: dict[str, Tensor]) -> dict[str, dict]:
    layout = manifest["topology"].get("layout") or {}
    for name, axes in layout.items():
        for axis, rule in axes.items():
            if name in tensors and not is_rule(rule, len(tensors[name].global_shape)):
                raise Refused(3, f"topology.layout: {name}, {axis}: {rule}")
    return {name: layout[name] for name in layout if name in tensors}


def is_rule(rule, ndim: int) -> bool:
    if type(rule) is int:
        return 0 <= rule < ndim
    if isinstance(rule, dict):
        return bool(rule["stages"]) and all(0 <= stage < rule["of"] for stage in rule["stages"])
    return rule == "replicate"


def check_oracles(case: Case) -> None:
    oracles = case.manifest["oracles"]
    if not oracles:
        return
    arrays = read_shard(os.path.join(case.folder, case.manifest["oracle_file"])).arrays
    for oracle in oracles:
        tensor = case.tensors[oracle["logical_tensor_id"]]
        stored = arrays[oracle["payload_key"]]
        if (oracle["dtype"], oracle["shape"]) != (
            tensor.dtype,
            tensor.global_shape,
        ) or stored.shape != tensor.global_shape:
            raise Refused(3, f"oracle of {tensor.logical_tensor_id}: dtype or shape")
        if not oracle["sha256"] == sha256(stored.raw) == sha256(tensor.raw):
            raise Refused(4, f"oracle of {tensor.logical_tensor_id}: sha256")
