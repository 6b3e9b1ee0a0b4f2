"""What a case must hold before it is resharded; each check raises `Refused` with its exit code."""

import math
import os

import numpy as np

from tests.reference import dtypes
from tests.reference.errors import Refused
from tests.reference.fragments import (
    Tensor,
    box_of,
    coordinates_of,
    manifest_digest,
    replica_groups,
    sha256,
    shard_name,
    slices,
)
from tests.reference.shards import Shard

LISTS_OF_SIZES = ("global_shape", "element_offset", "element_extent", "local_shape")


def check_fragment(folder: str, fragment: dict, source: dict) -> None:
    """What a fragment's own record has to say."""
    where = fragment["fragment_id"]
    if fragment["dtype"] not in dtypes.DTYPES:
        raise Refused(3, f"{where}: dtype {fragment['dtype']}")
    check_boxes(where, fragment)
    check_place(where, folder, fragment, source)


def check_boxes(where: str, fragment: dict) -> None:
    sizes = {name: fragment[name] for name in LISTS_OF_SIZES}
    sizes |= {side: fragment["padding"][side] for side in ("before", "after")}
    if len({len(numbers) for numbers in sizes.values()}) != 1:
        raise Refused(3, f"{where}: shapes of several lengths")
    if any(type(number) is not int or number < 0 for numbers in sizes.values() for number in numbers):
        raise Refused(3, f"{where}: a size that is none")
    for before, extent, after, local in zip(
        sizes["before"], sizes["element_extent"], sizes["after"], sizes["local_shape"], strict=True
    ):
        if local != before + extent + after:
            raise Refused(3, f"{where}: local_shape is not before + element_extent + after")
    if fragment["padding"]["semantic"] == "none" and any(sizes["before"] + sizes["after"]):
        raise Refused(3, f"{where}: padding of semantic none")
    if 0 not in sizes["element_extent"]:
        for offset, extent, whole in zip(
            sizes["element_offset"], sizes["element_extent"], sizes["global_shape"], strict=True
        ):
            if offset + extent > whole:
                raise Refused(3, f"{where}: box outside the tensor")
        check_byte_boundary(
            where, fragment["dtype"], sizes["element_offset"], sizes["element_extent"], sizes["global_shape"]
        )
        check_byte_boundary(where, fragment["dtype"], sizes["before"], sizes["element_extent"], sizes["local_shape"])


def check_byte_boundary(where: str, dtype: str, offset, extent, shape) -> None:
    """Every run of neighbouring elements of a box must begin and end on a whole byte of what is around it."""
    if dtypes.bits(dtype) % 8 == 0 or 0 in extent:
        return
    inside = np.zeros(shape, np.int8)
    inside[slices(offset, extent)] = 1
    edges = np.flatnonzero(np.diff(inside.reshape(-1), prepend=0, append=0))
    if np.any(edges * dtypes.bits(dtype) % 8):
        raise Refused(3, f"{where}: box {offset} {extent} of {dtype} off a byte boundary")


def check_place(where: str, folder: str, fragment: dict, source: dict) -> None:
    """Its file and its coordinates."""
    coordinates = fragment["topology_coordinates"]
    if coordinates != sorted(coordinates) or {axis for axis, _ in coordinates} != (set(source) - {"world_size"}) | {
        "rank"
    }:
        raise Refused(3, f"{where}: coordinates {coordinates} in topology {source}")
    for axis, index in coordinates:
        if not 0 <= index < (math.prod(source.values()) if axis == "rank" else source[axis]):
            raise Refused(3, f"{where}: coordinate {axis} {index}")
    if fragment["payload_file"] != shard_name(coordinates_of(fragment)["rank"]):
        raise Refused(3, f"{where}: payload_file {fragment['payload_file']}")
    if os.path.islink(path := os.path.join(folder, fragment["payload_file"])):
        if os.path.dirname(os.path.realpath(path)) != os.path.realpath(folder):
            raise Refused(3, f"{where}: payload_file leaves the folder")


def check_ranks(fragments: list[dict], world_size: int) -> None:
    """One rank, one coordinate tuple, and the other way round."""
    pairs = {tuple(map(tuple, f["topology_coordinates"])) for f in fragments}
    ranks = [dict(pair)["rank"] for pair in pairs]
    places = {tuple((axis, index) for axis, index in pair if axis != "rank") for pair in pairs}
    if len(set(ranks)) != len(pairs) or len(places) != len(pairs):
        raise Refused(3, "a rank with two coordinate tuples, or two ranks with one")


def check_stored(fragment: dict, shards: dict[str, Shard]) -> None:
    stored = shards[fragment["payload_file"]].arrays.get(fragment["payload_key"])
    if stored is None:
        raise Refused(3, f"{fragment['fragment_id']}: no {fragment['payload_key']} in {fragment['payload_file']}")
    if (stored.dtype, stored.shape) != (fragment["dtype"], fragment["local_shape"]):
        raise Refused(
            3,
            f"{fragment['fragment_id']}: {fragment['dtype']} {fragment['local_shape']}, "
            f"in the file {stored.dtype} {stored.shape}",
        )


def check_shared_storage(fragments: list[dict]) -> None:
    seen: dict[tuple, list] = {}
    for fragment in fragments:
        seen.setdefault((fragment["payload_file"], fragment["payload_key"]), []).append(fragment["shared_storage_id"])
    for place, ids in seen.items():
        if len(ids) > 1 and (None in ids or len(set(ids)) > 1):
            raise Refused(3, f"{place}: stored once for several fragments, shared_storage_id {ids}")


def check_replica_groups(tensor: Tensor) -> None:
    for group in replica_groups(tensor):
        where = f"{tensor.logical_tensor_id}: replica group {group[0]['replica']['group_id']}"
        if any(f["replica"]["member_count"] != len(group) for f in group):
            raise Refused(3, f"{where}: {len(group)} members")
        if len({f["replica"]["member_index"] for f in group}) != len(group):
            raise Refused(3, f"{where}: a member_index twice")
        if len({box_of(f) for f in group}) != 1:
            raise Refused(3, f"{where}: boxes differ")


def check_coverage(tensor: Tensor) -> None:
    """Count, element by element, how many boxes hold it; a replica group counts once."""
    count = np.zeros(tensor.global_shape, np.int64)
    for first, *_ in replica_groups(tensor):
        count[slices(*box_of(first))] += 1
    if np.any(count == 0):
        raise Refused(3, f"{tensor.logical_tensor_id}: a hole at {np.argwhere(count == 0)[0].tolist()}")
    if np.any(count > 1):
        raise Refused(3, f"{tensor.logical_tensor_id}: an overlap at {np.argwhere(count > 1)[0].tolist()}")


def check_digests(manifest: dict, shards: dict[str, Shard]) -> None:
    if manifest["expected_manifest_digest"] != manifest_digest(manifest["fragments"]):
        raise Refused(4, "expected_manifest_digest")
    for fragment in manifest["fragments"]:
        raw = shards[fragment["payload_file"]].arrays[fragment["payload_key"]].raw
        if fragment["fragment_digest"] not in (None, sha256(raw)):
            raise Refused(4, f"{fragment['fragment_id']}: fragment_digest")


def check_ties(tensors: dict[str, Tensor]) -> None:
    first_of: dict[str, Tensor] = {}
    for tensor in tensors.values():
        if tensor.tie_group_id is None:
            continue
        first = first_of.setdefault(tensor.tie_group_id, tensor)
        if (first.dtype, first.global_shape) != (tensor.dtype, tensor.global_shape):
            raise Refused(
                3,
                f"{first.logical_tensor_id} and {tensor.logical_tensor_id} are tied: dtype or shape",
            )
        if not np.array_equal(first.cells, tensor.cells):
            raise Refused(4, f"{first.logical_tensor_id} and {tensor.logical_tensor_id} are tied and differ")
