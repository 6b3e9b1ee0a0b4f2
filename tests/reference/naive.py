"""Reshard a case the slow, obvious way: whole arrays, one process, the specification read line by line.

expected = reshard(load("fixtures/v1/cases/tp2-pp2-to-single"), {"tp": 4})
expected.manifest     the case.json to expect
expected.shards       file -> the arrays to expect, in order
"""

import json
import math
import os
from collections import defaultdict
from dataclasses import dataclass

from tests.reference import dtypes
from tests.reference.case import SCHEMA_ID, Case, load
from tests.reference.checks import check_byte_boundary
from tests.reference.errors import Refused
from tests.reference.fragments import (
    Tensor,
    box_of,
    coordinates_of,
    has_elements,
    manifest_digest,
    mesh_of,
    replica_groups,
    sha256,
    shard_name,
    slices,
)
from tests.reference.mesh import parse_target, ranks_of, target_box
from tests.reference.rules import known_rule, rule_of
from tests.reference.shards import StoredArray, read_shard, write_shard

__all__ = ["Expected", "Refused", "load", "reshard", "write"]


@dataclass
class Expected:
    """A checkpoint case that has not been written."""

    manifest: dict
    shards: dict[str, dict[str, StoredArray]]  # file -> key -> array, in the order of the file
    metadata: dict[str, dict[str, str]]  # file -> what `__metadata__` holds
    oracles: dict[str, StoredArray]  # payload_key -> array


def payload_keys(case: Case) -> dict[str, str]:
    """logical_tensor_id -> key in the shards, the same on every rank."""
    keys = {}
    for name, tensor in case.tensors.items():
        namesakes = [other for other in case.tensors.values() if other.fqn == tensor.fqn]
        qualified = f"{tensor.component_id}/{tensor.fqn}"
        if len(namesakes) == 1:
            keys[name] = tensor.fqn
        elif tensor.component_id == "model" and sum(other.component_id == "model" for other in namesakes) == 1:
            keys[name] = tensor.fqn
        elif sum(f"{other.component_id}/{other.fqn}" == qualified for other in case.tensors.values()) == 1:
            keys[name] = qualified
        else:
            keys[name] = name
    if len(set(keys.values())) != len(keys) or "__metadata__" in keys.values():
        raise Refused(3, f"payload keys clash: {sorted(keys.values())}")
    return keys


def evidence(case: Case, tensor: Tensor, offset: list[int], extent: list[int]) -> list[str]:
    """The source fragments whose elements are in the box; a replica group is named by its first member."""
    used = set()
    for first, *_ in replica_groups(tensor):
        overlaps = [
            max(o, fo) < min(o + e, fo + fe)
            for o, e, fo, fe in zip(offset, extent, first["element_offset"], first["element_extent"], strict=True)
        ]
        if all(overlaps):
            used.add(f"{case.manifest['case_id']}#{first['fragment_id']}")
    return sorted(used) if len(used) <= 64 else [f"{case.manifest['case_id']}#*"]


def fragment_of(
    case: Case, tensor: Tensor, rank: int, coordinates: dict, rules: dict, target: dict, box, key: str
) -> dict:
    """The record of one box of the target; replicas are counted later."""
    offset, extent = box
    check_byte_boundary(f"{tensor.logical_tensor_id}|r{rank}", tensor.dtype, offset, extent, tensor.global_shape)
    raw = dtypes.to_bytes(tensor.cells[slices(offset, extent)], tensor.dtype)
    nothing = [0] * len(offset)
    return {
        "component_id": tensor.component_id,
        "dtype": tensor.dtype,
        "element_extent": extent,
        "element_offset": offset,
        "evidence_refs": evidence(case, tensor, offset, extent),
        "fqn": tensor.fqn,
        "fragment_digest": sha256(raw),
        "fragment_id": f"{tensor.logical_tensor_id}|r{rank}",
        "global_shape": tensor.global_shape,
        "local_shape": extent,
        "logical_tensor_id": tensor.logical_tensor_id,
        "padding": {"after": nothing, "before": nothing, "semantic": "none"},
        "partition_axes": sorted({rule for axis, rule in rules.items() if isinstance(rule, int) and target[axis] > 1}),
        "payload_file": shard_name(rank),
        "payload_key": key,
        "replica": {"group_id": None, "member_count": 1, "member_index": 0},
        "role": tensor.role,
        "shard_digest_ref": f"source-digest:{shard_name(rank)}",
        "shard_file_id": shard_name(rank),
        "shared_storage_id": None,
        "tie_group_id": tensor.tie_group_id,
        "topology_coordinates": sorted([[axis, index] for axis, index in coordinates.items()] + [["rank", rank]]),
    }


def count_replicas(fragments: list[dict]) -> None:
    """The same box on several ranks; boxes without elements are nobody's replica."""
    groups = defaultdict(list)
    for fragment in filter(has_elements, fragments):
        groups[fragment["logical_tensor_id"], box_of(fragment)].append(fragment)
    for (name, (offset, _)), members in groups.items():
        for position, member in enumerate(members if len(members) > 1 else []):
            group_id = f"{name}@{','.join(map(str, offset))}"
            member["replica"] = {"group_id": group_id, "member_count": len(members), "member_index": position}


def target_layout(case: Case, tensor: Tensor, rules: dict) -> dict:
    """What is to be remembered of the tensor: the origin's rule where it is known, else the one chosen."""
    axes = set(case.mesh) | set(rules) | set(case.layout.get(tensor.logical_tensor_id, {}))
    layout = {}
    for axis in sorted(axes):
        rule = known_rule(case, tensor, axis)
        rule = rules.get(axis) if rule is None else rule
        if rule is not None:
            layout[axis] = rule
    return layout


def reshard(case: Case, target: dict | None = None, stored_once: dict[str, dict[str, str]] | None = None) -> Expected:
    """The whole answer. `target`: mesh axis -> size, or {"world_size": 1}; absent: the case's own.

    `stored_once`: per file, alias key -> kept key. Which arrays are stored once for several tensors is
    the choice of whoever writes them, so whoever compares tells what was chosen.
    """
    target = parse_target(case.manifest["topology"]["target"] if target is None else target)
    keys = payload_keys(case)
    fragments, layout = [], {}
    for name, tensor in case.tensors.items():
        rules = {axis: rule_of(case, tensor, axis, size) for axis, size in mesh_of(target).items()}
        layout[name] = target_layout(case, tensor, rules)
        for rank, coordinates in enumerate(ranks_of(target)):
            if (box := target_box(case, tensor, rules, target, coordinates)) is not None:
                fragments.append(fragment_of(case, tensor, rank, coordinates, rules, target, box, keys[name]))
    fragments.sort(key=lambda f: (coordinates_of(f)["rank"], f["logical_tensor_id"], f["element_offset"]))
    count_replicas(fragments)
    files = [shard_name(rank) for rank in range(len(ranks_of(target)))]
    aliases = {file: (stored_once or {}).get(file, {}) for file in files}
    shards = {
        file: arrays_of(case, [f for f in fragments if f["payload_file"] == file], aliases[file]) for file in files
    }
    oracles = kept_oracles(case)
    return Expected(
        manifest_of(case, target, fragments, layout),
        shards,
        {f: {"format": "pt"} | aliases[f] for f in files},
        oracles,
    )


def arrays_of(case: Case, fragments: list[dict], aliases: dict[str, str]) -> dict[str, StoredArray]:
    """The arrays of one shard: widest elements first, then by key."""
    arrays = {}
    for fragment in fragments:
        tensor = case.tensors[fragment["logical_tensor_id"]]
        raw = dtypes.to_bytes(tensor.cells[slices(*box_of(fragment))], tensor.dtype)
        arrays[fragment["payload_key"]] = StoredArray(tensor.dtype, fragment["element_extent"], raw)
    for fragment in fragments:
        alias = fragment["payload_key"]
        if alias in aliases or alias in aliases.values():
            kept = aliases.get(alias, alias)
            assert arrays[alias] == arrays[kept], "stored once, but not the same"
            fragment["payload_key"] = kept
            fragment["shared_storage_id"] = f"{fragment['payload_file']}#{kept}"
    order = sorted(set(arrays) - set(aliases), key=lambda key: (-dtypes.bits(arrays[key].dtype), key))
    return {key: arrays[key] for key in order}


def kept_oracles(case: Case) -> dict[str, StoredArray]:
    if not case.manifest["oracles"]:
        return {}
    arrays = read_shard(os.path.join(case.folder, case.manifest["oracle_file"])).arrays
    return {oracle["payload_key"]: arrays[oracle["payload_key"]] for oracle in case.manifest["oracles"]}


def manifest_of(case: Case, target: dict, fragments: list[dict], layout: dict) -> dict:
    source = case.manifest
    return {
        "case_id": source["case_id"],
        "components": source["components"],
        "expected_manifest_digest": manifest_digest(fragments),
        "features": source["features"],
        "fragments": fragments,
        "oracle_file": source["oracle_file"] if source["oracles"] else None,
        "oracles": source["oracles"] or [],
        "schema_id": SCHEMA_ID,
        "schema_version": "1.0.0",
        "topology": {"layout": layout, "source": target, "target": source["topology"]["source"]},
        "world_size": math.prod(target.values()),
    }


def write(expected: Expected, folder) -> None:
    """As a case that can be loaded again, which is how chains of targets are followed."""
    os.makedirs(folder)
    with open(os.path.join(folder, "case.json"), "w", encoding="utf-8") as file:
        json.dump(expected.manifest, file, sort_keys=True, indent=2)
    for name, arrays in expected.shards.items():
        write_shard(os.path.join(folder, name), arrays, expected.metadata[name])
    if expected.oracles:
        write_shard(os.path.join(folder, expected.manifest["oracle_file"]), expected.oracles)
