"""Fragments and the logical tensors they are pieces of: digests, coordinates, boxes, replica groups."""

import hashlib
import json
from dataclasses import dataclass, field

import numpy as np

from tests.reference import dtypes
from tests.reference.errors import Refused

OTHER_NAMES = {"dp_replicate": "dp", "dp_shard": "fsdp"}
AGREED = ("fqn", "component_id", "role", "dtype", "global_shape", "tie_group_id")


def sha256(data: bytes) -> str:
    return "sha256:" + hashlib.sha256(data).hexdigest()


def manifest_digest(fragments: list[dict]) -> str:
    """Digest of a fragment list: all that is in it, but for where the payloads are."""
    kept = [{k: v for k, v in f.items() if k not in ("payload_file", "payload_key")} for f in fragments]
    return sha256(json.dumps(kept, sort_keys=True, separators=(",", ":")).encode("ascii"))


def shard_name(rank: int) -> str:
    return f"rank-{rank:05d}.safetensors"


@dataclass
class Tensor:
    """A logical tensor: what its fragments agree on, the fragments, and the whole array."""

    logical_tensor_id: str
    fqn: str
    component_id: str
    role: str
    dtype: str
    global_shape: list[int]
    tie_group_id: str | None
    fragments: list[dict] = field(default_factory=list)
    cells: np.ndarray | None = None

    @property
    def nelems(self) -> int:
        return dtypes.nelems(self.global_shape)

    @property
    def raw(self) -> bytes:
        return dtypes.to_bytes(self.cells, self.dtype)


def by_tensor(fragments: list[dict]) -> dict[str, Tensor]:
    """Logical tensors in the order of their ids."""
    tensors: dict[str, Tensor] = {}
    for fragment in sorted(fragments, key=lambda f: f["logical_tensor_id"]):
        agreed = {name: fragment[name] for name in AGREED}
        tensor = tensors.setdefault(fragment["logical_tensor_id"], Tensor(fragment["logical_tensor_id"], **agreed))
        if agreed != {name: getattr(tensor, name) for name in AGREED}:
            raise Refused(3, f"{tensor.logical_tensor_id}: fragments disagree")
        tensor.fragments.append(fragment)
    return tensors


def mesh_of(topology: dict) -> dict[str, int]:
    """Mesh axes that have more than one coordinate; none for {"world_size": 1}.

    >>> mesh_of({"pp": 2, "tp": 1})
    {'pp': 2}
    """
    return {OTHER_NAMES.get(axis, axis): size for axis, size in topology.items() if axis != "world_size" and size > 1}


def coordinates_of(fragment: dict) -> dict[str, int]:
    """Mesh axis -> index, `rank` among them."""
    return {OTHER_NAMES.get(axis, axis): index for axis, index in fragment["topology_coordinates"]}


def box_of(fragment: dict) -> tuple:
    return tuple(fragment["element_offset"]), tuple(fragment["element_extent"])


def has_elements(fragment: dict) -> bool:
    return 0 not in fragment["element_extent"]


def slices(offset, extent) -> tuple[slice, ...]:
    return tuple(slice(o, o + e) for o, e in zip(offset, extent, strict=True))


def replica_groups(tensor: Tensor) -> list[list[dict]]:
    """Fragments with elements: members of a replica group together, in order; one of no group alone."""
    groups: dict = {}
    for fragment in filter(has_elements, tensor.fragments):
        replica = fragment["replica"]
        alone = replica["member_count"] == 1
        groups.setdefault(("alone", fragment["fragment_id"]) if alone else ("group", replica["group_id"]), []).append(
            fragment
        )
    return [sorted(group, key=lambda f: f["replica"]["member_index"]) for group in groups.values()]
