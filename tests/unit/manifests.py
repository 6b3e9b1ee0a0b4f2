"""Small manifests for the tests, as plain JSON values: whole and sound, to be broken in one place each.

raw = manifest({"tp": 2}, tensor("w", (4, 6), {(0,): [((0, 0), (4, 3))], (1,): [((0, 3), (4, 3))]}, axes={"tp": 2}))
parsed(raw).case
"""

import copy
import json
import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from itertools import product
from typing import Any

from reshard_mpi.checkpoint.manifest import Case, ParsedCase, parse_case
from tests.reference.fragments import manifest_digest, sha256, shard_name

Box = tuple[tuple[int, ...], tuple[int, ...]]  # (offset, extent) in elements
MeshTuple = tuple[int, ...]  # an index on each mesh axis
SINGLE: dict[str, int] = {}


def everywhere(axes: Mapping[str, int]) -> list[MeshTuple]:
    """Every mesh tuple, in rank order.

    >>> everywhere({"pp": 1, "tp": 2})
    [(0, 0), (0, 1)]
    """
    return list(product(*(range(size) for size in axes.values())))


def whole(shape: Sequence[int]) -> Box:
    return (0,) * len(shape), tuple(shape)


def tensor(
    tensor_id: str,
    shape: Sequence[int],
    held: Mapping[MeshTuple, Sequence[Box]],
    axes: Mapping[str, int],
    **changes: Any,
) -> list[dict[str, Any]]:
    """The fragments of a tensor: `held` says which boxes each mesh tuple holds; equal boxes become a replica group."""
    ranks = {where: rank for rank, where in enumerate(everywhere(axes))}
    fragments, groups = [], defaultdict(list)
    for where, boxes in held.items():
        for n, box in enumerate(boxes):
            name = f"{tensor_id}|r{ranks[where]}" + (f"#{n}" if n else "")
            fragments.append(fragment(name, tensor_id, shape, box, ranks[where], dict(zip(axes, where, strict=True))))
            if 0 not in box[1]:
                groups[box].append(fragments[-1])
    for (offset, _), members in groups.items():
        for index, member in enumerate(members):
            if len(members) > 1:
                group_id = f"{tensor_id}@{','.join(map(str, offset))}"
                member["replica"] = {"group_id": group_id, "member_count": len(members), "member_index": index}
    return [one | copy.deepcopy(changes) for one in fragments]


def fragment(
    name: str, tensor_id: str, shape: Sequence[int], box: Box, rank: int, coordinates: Mapping[str, int]
) -> dict[str, Any]:
    none = [0] * len(shape)
    return {
        "component_id": "model",
        "dtype": "float32",
        "element_extent": list(box[1]),
        "element_offset": list(box[0]),
        "evidence_refs": ["synthetic"],
        "fqn": tensor_id,
        "fragment_digest": sha256(f"{tensor_id} {box}".encode()) if 0 not in box[1] else sha256(b""),
        "fragment_id": name,
        "global_shape": list(shape),
        "local_shape": list(box[1]),
        "logical_tensor_id": tensor_id,
        "padding": {"after": none, "before": list(none), "semantic": "none"},
        "partition_axes": [],
        "payload_file": shard_name(rank),
        "payload_key": name,
        "replica": {"group_id": None, "member_count": 1, "member_index": 0},
        "role": "parameter",
        "shard_digest_ref": f"source-digest:{shard_name(rank)}",
        "shard_file_id": shard_name(rank),
        "shared_storage_id": None,
        "tie_group_id": None,
        "topology_coordinates": sorted([[axis, index] for axis, index in coordinates.items()] + [["rank", rank]]),
    }


def manifest(axes: Mapping[str, int], *tensors: list[dict[str, Any]], **changes: Any) -> dict[str, Any]:
    """A whole `case.json` of these fragments, with its digest."""
    return sealed(
        {
            "case_id": "made",
            "components": ["full_model"],
            "features": [],
            "fragments": [one for fragments in tensors for one in fragments],
            "oracle_file": None,
            "oracles": [],
            "schema_id": "obliteratus.checkpoint-fixture-case",
            "schema_version": "1.0.0",
            "topology": {"source": dict(axes) or {"world_size": 1}, "target": {"world_size": 1}},
            "world_size": math.prod(axes.values()),
        }
        | changes
    )


def sealed(raw: dict[str, Any]) -> dict[str, Any]:
    """The same manifest with the digest that its fragments have now."""
    return raw | {"expected_manifest_digest": manifest_digest(raw["fragments"])}


def text_of(raw: object) -> bytes:
    return json.dumps(raw, sort_keys=True, indent=2).encode()


def parsed(raw: dict[str, Any]) -> ParsedCase:
    return parse_case(text_of(raw))


def case_of(axes: Mapping[str, int], *tensors: list[dict[str, Any]], **changes: Any) -> Case:
    return parsed(manifest(axes, *tensors, **changes)).case
