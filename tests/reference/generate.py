"""Write a described checkpoint to a folder: valid digests, and garbage wherever no element lives.

written = generate(7, "somewhere")          # by seed
@given(cases()) ... write_case(spec, folder)  # by hypothesis
"""

import json
import os
import random
from collections import defaultdict
from dataclasses import dataclass
from itertools import product

import numpy as np
from hypothesis import strategies as st

from tests.reference import dtypes
from tests.reference.case import SCHEMA_ID
from tests.reference.describe import SUB_BYTE_UNIT, CaseSpec, Held, Knobs, Split, TensorSpec, describe
from tests.reference.dice import Dice, HypothesisDice
from tests.reference.fragments import manifest_digest, sha256, shard_name, slices
from tests.reference.mesh import chunk
from tests.reference.shards import StoredArray, write_shard


@dataclass
class Written:
    """A case on disk and what it was made of: logical_tensor_id -> raw bytes of the whole tensor."""

    folder: str
    spec: CaseSpec
    tensors: dict[str, bytes]


@dataclass
class Part:
    """A box of one tensor within a stored array: `before` elements come first along each tensor axis."""

    tensor: TensorSpec
    offset: list[int]
    extent: list[int]
    before: list[int]


@dataclass
class Array:
    """A stored array to be: the parts fill it, but for padding around them."""

    key: str
    shape: list[int]
    parts: list[Part]
    fill: str = "none"  # semantic of the padding: none (there isn't any), alignment or view
    shared_storage_id: str | None = None


def generate(seed, folder, **knobs) -> Written:
    """A checkpoint by seed (or `random.Random`) in the new `folder`; `knobs` as in `describe.Knobs`."""
    return write_case(describe(Dice(seed), Knobs(**knobs)), folder)


@st.composite
def cases(draw, **knobs) -> CaseSpec:
    """Hypothesis: described checkpoints, to be written by `write_case`."""
    return describe(HypothesisDice(draw), Knobs(**knobs))


def write_case(spec: CaseSpec, folder) -> Written:
    """The files of a case. All bytes come from `spec`: the same description gives the same files."""
    os.makedirs(folder)
    noise = random.Random(spec.seed)
    wholes = {tensor.logical_tensor_id: content_of(spec, tensor) for tensor in spec.tensors}
    fragments = []
    for rank, coordinates in ranks_of(spec):
        arrays = [array for group in storages(spec) for array in arrays_of(spec, group, rank, coordinates)]
        arrays = [pad(noise, array) for array in arrays]
        stored = {array.key: fill(noise, array, wholes) for array in noise.sample(arrays, len(arrays))}
        if noise.random() * 100 < spec.knobs.extra_arrays:
            stored["nobody's"] = StoredArray("uint8", [3], noise.randbytes(3))
        write_shard(
            os.path.join(folder, shard_name(rank)),
            stored,
            noise.choice([None, {"format": "pt"}]),
            noise.random() < 0.7,
        )
        for array in arrays:
            fragments += fragments_of(spec, noise, array, stored[array.key], rank, coordinates)
    number_replicas(noise, fragments)
    noise.shuffle(fragments)
    write_oracles(spec, folder, wholes)
    write_manifest(spec, folder, fragments, wholes)
    return Written(
        str(folder),
        spec,
        {name: dtypes.to_bytes(cells, dtype_of(spec, name)) for name, cells in wholes.items()},
    )


def dtype_of(spec: CaseSpec, name: str) -> str:
    return next(tensor.dtype for tensor in spec.tensors if tensor.logical_tensor_id == name)


def content_of(spec: CaseSpec, tensor: TensorSpec) -> np.ndarray:
    """Cells of a whole tensor: any bytes will do, but a bool is 0 or 1."""
    nbytes = dtypes.nelems(tensor.shape) * dtypes.bits(tensor.dtype) // 8
    raw = random.Random(f"{spec.seed}/{tensor.content}").randbytes(nbytes)
    cells = dtypes.to_cells(raw, tensor.dtype, tensor.shape)
    return cells & 1 if tensor.dtype == "bool" else cells


def ranks_of(spec: CaseSpec) -> list[tuple[int, dict[str, int]]]:
    """(rank, coordinates); the mesh's own order of axes, or no order at all."""
    places = list(product(*(range(size) for size in spec.mesh.values())))
    return sorted(
        (rank, dict(zip(spec.mesh, place, strict=True))) for rank, place in zip(spec.rank_order, places, strict=True)
    )


# Boxes


def boxes_of(spec: CaseSpec, tensor: TensorSpec, coordinates: dict[str, int]) -> list[tuple[list[int], list[int]]]:
    """(offset, extent) of what these coordinates hold, one box a group."""
    if tensor.boxes:
        here = tuple(coordinates.values())
        return [(list(offset), list(extent)) for place, offset, extent in tensor.boxes if place == here]
    if any(
        isinstance(u, Held) and u.indices is not None and coordinates[m] not in u.indices
        for m, u in tensor.uses.items()
    ):
        return []
    boxes = []
    begin = 0
    for length in tensor.groups or (None,):
        intervals = [(0, extent) for extent in tensor.shape]
        if length is not None:
            intervals[tensor.fused_axis] = (begin, begin + length)
            begin += length
        for axis in tensor.nesting:
            if isinstance(use := tensor.uses[axis], Split):
                a = use.tensor_axis
                unit = SUB_BYTE_UNIT.get(tensor.dtype, 1) if a == len(tensor.shape) - 1 else 1
                intervals[a] = part(use, intervals[a], spec.mesh[axis], coordinates[axis], unit)
        boxes.append(([low for low, _ in intervals], [high - low for low, high in intervals]))
    return [
        careless(spec, tensor, box)
        for box in boxes
        if not (tensor.unwritten_empty and 0 in box[1] and 0 not in tensor.shape)
    ]


def part(use: Split, interval: tuple[int, int], parts: int, index: int, unit: int) -> tuple[int, int]:
    """Part `index` of an interval. Irregular cuts depend on the interval alone: its ranks agree."""
    low, high = interval
    if use.irregular_seed is None:
        return chunk(low, high, parts, index)
    places = random.Random(f"{use.irregular_seed}/{interval}")
    cuts = sorted(low + unit * places.randint(0, (high - low) // unit) for _ in range(parts - 1))
    cuts = [low, *cuts, high]
    return cuts[index], cuts[index + 1]


def careless(spec: CaseSpec, tensor: TensorSpec, box):
    """Some writers record a part without elements as whatever has none."""
    if not tensor.careless_empty or 0 not in box[1] or 0 in tensor.shape:
        return box
    places = random.Random(f"{spec.seed}/{tensor.logical_tensor_id}/{box}")
    extent = list(box[1])
    extent[places.randrange(len(extent))] = 0
    return [
        places.randint(0, whole) if e == 0 else o for o, e, whole in zip(box[0], extent, tensor.shape, strict=True)
    ], extent


# Stored arrays


def storages(spec: CaseSpec) -> list[list[TensorSpec]]:
    """Tensors that share their stored arrays, and each other tensor alone."""
    groups = defaultdict(list)
    for tensor in spec.tensors:
        groups[tensor.stored_with or ("alone", tensor.logical_tensor_id)].append(tensor)
    return list(groups.values())


def arrays_of(spec: CaseSpec, tensors: list[TensorSpec], rank: int, coordinates: dict[str, int]) -> list[Array]:
    """The arrays in which a rank keeps what it holds of these tensors."""
    name = f"{tensors[0].logical_tensor_id}@{rank}"
    held = [(tensor, box) for tensor in tensors for box in boxes_of(spec, tensor, coordinates)]
    if not held:
        return []
    tensor = tensors[0]
    if len(tensors) > 1 and not tensor.stored_side_by_side:
        parts = [Part(t, *box, before=[0] * len(box[0])) for t, box in held]
        return [Array(name, list(parts[0].extent), parts, "none", f"storage of {name}")]
    if len(held) > 1 and (len(tensors) > 1 or tensor.fused_in_one_array):
        return [side_by_side(name, held, 0 if len(tensors) > 1 else tensor.fused_axis)]
    return [
        Array(
            f"{name}.{n}" if len(held) > 1 else name,
            list(box[1]),
            [Part(tensor, *box, before=[0] * len(box[0]))],
        )
        for n, (tensor, box) in enumerate(held)
    ]


def side_by_side(name: str, held: list, axis: int) -> Array:
    """One array with the boxes one after the other along a tensor axis."""
    shape = list(held[0][1][1])
    shape[axis] = 0
    parts = []
    for tensor, (offset, extent) in held:
        before = [0] * len(shape)
        before[axis] = shape[axis]
        shape[axis] += extent[axis]
        parts.append(Part(tensor, offset, extent, before))
    return Array(name, shape, parts, "view", f"storage of {name}")


def pad(noise: random.Random, array: Array) -> Array:
    """Alignment around what is stored, on any side of any axis; rows of a sub-byte dtype stay whole bytes."""
    tensor = array.parts[0].tensor
    if not array.shape or noise.random() * 100 >= tensor.padding_percent:
        return array
    units = [1] * (len(array.shape) - 1) + [SUB_BYTE_UNIT.get(tensor.dtype, 1)]
    before = [unit * noise.choice([0, 0, 1, 2]) for unit in units]
    after = [unit * noise.choice([0, 1, 2]) for unit in units]
    array.shape = [b + extent + a for b, extent, a in zip(before, array.shape, after, strict=True)]
    for piece in array.parts:
        piece.before = [b + own for b, own in zip(before, piece.before, strict=True)]
    if any(before + after):
        array.fill = "view" if array.fill == "view" else noise.choice(["alignment", "vocab"])
    return array


def fill(noise: random.Random, array: Array, wholes: dict[str, np.ndarray]) -> StoredArray:
    """Garbage, then the boxes."""
    dtype = array.parts[0].tensor.dtype
    raw = noise.randbytes(dtypes.nelems(array.shape) * dtypes.bits(dtype) // 8)
    cells = (dtypes.to_cells(raw, dtype, array.shape) & (1 if dtype == "bool" else 255)).copy()
    for piece in array.parts:
        whole = wholes[piece.tensor.logical_tensor_id]
        cells[slices(piece.before, piece.extent)] = whole[slices(piece.offset, piece.extent)]
    return StoredArray(dtype, array.shape, dtypes.to_bytes(cells, dtype))


# The manifest


def fragments_of(
    spec: CaseSpec, noise: random.Random, array: Array, stored: StoredArray, rank: int, coordinates: dict
) -> list[dict]:
    """One record a part; replicas are numbered when all ranks are there."""
    null = noise.random() * 100 < spec.knobs.null_digests * noise.choice([0, 1, 2])
    return [
        fragment_of(spec, array, n, None if null else sha256(stored.raw), rank, coordinates)
        for n in range(len(array.parts))
    ]


def fragment_of(spec: CaseSpec, array: Array, n: int, digest: str | None, rank: int, coordinates: dict) -> dict:
    piece, tensor = array.parts[n], array.parts[n].tensor
    after = [whole - b - e for whole, b, e in zip(array.shape, piece.before, piece.extent, strict=True)]
    padded = any(piece.before + after)
    split_axes = {
        use.tensor_axis for axis, use in tensor.uses.items() if isinstance(use, Split) and spec.mesh[axis] > 1
    }
    fragment = {
        "component_id": tensor.component_id,
        "dtype": tensor.dtype,
        "element_extent": piece.extent,
        "element_offset": piece.offset,
        "evidence_refs": [f"synthetic:{spec.seed}"],
        "fqn": tensor.fqn,
        "fragment_digest": digest,
        "fragment_id": f"{tensor.logical_tensor_id}/{array.key}/{n}",
        "global_shape": list(tensor.shape),
        "local_shape": array.shape,
        "logical_tensor_id": tensor.logical_tensor_id,
        "padding": {"after": after, "before": piece.before, "semantic": array.fill if padded else "none"},
        "partition_axes": sorted(split_axes),
        "payload_file": shard_name(rank),
        "payload_key": array.key,
        "replica": {"group_id": None, "member_count": 1, "member_index": 0},
        "role": tensor.role,
        "shard_digest_ref": f"source-digest:{shard_name(rank)}",
        "shard_file_id": shard_name(rank),
        "shared_storage_id": array.shared_storage_id,
        "tie_group_id": tensor.tie_group_id,
        "topology_coordinates": sorted([[axis, index] for axis, index in coordinates.items()] + [["rank", rank]]),
    }
    return fragment | ({"colour": "blue"} if spec.unknown_keys else {})


def number_replicas(noise: random.Random, fragments: list[dict]) -> None:
    """Every box with elements that several ranks hold is a replica group; members in any order."""
    groups = defaultdict(list)
    for fragment in fragments:
        if 0 not in fragment["element_extent"]:
            groups[fragment["logical_tensor_id"], tuple(fragment["element_offset"])].append(fragment)
    for n, members in enumerate(groups.values()):
        if len(members) > 1:
            for index, member in enumerate(noise.sample(members, len(members))):
                member["replica"] = {
                    "group_id": f"group {n}",
                    "member_count": len(members),
                    "member_index": index,
                }


def write_oracles(spec: CaseSpec, folder, wholes: dict[str, np.ndarray]) -> None:
    if not spec.oracles:
        return
    arrays = {}
    for n, tensor in enumerate(t for t in spec.tensors if t.logical_tensor_id in spec.oracles):
        raw = dtypes.to_bytes(wholes[tensor.logical_tensor_id], tensor.dtype)
        arrays[f"tensor_{n:03d}"] = StoredArray(tensor.dtype, list(tensor.shape), raw)
    write_shard(os.path.join(folder, "oracles.safetensors"), arrays)


def oracle_records(spec: CaseSpec, wholes: dict[str, np.ndarray]) -> list[dict]:
    return [
        {
            "dtype": tensor.dtype,
            "logical_tensor_id": tensor.logical_tensor_id,
            "payload_key": f"tensor_{n:03d}",
            "sha256": sha256(dtypes.to_bytes(wholes[tensor.logical_tensor_id], tensor.dtype)),
            "shape": list(tensor.shape),
        }
        for n, tensor in enumerate(t for t in spec.tensors if t.logical_tensor_id in spec.oracles)
    ]


def write_manifest(spec: CaseSpec, folder, fragments: list[dict], wholes: dict[str, np.ndarray]) -> None:
    topology = {"source": spec.mesh or {"world_size": 1}, "target": spec.target}
    if spec.layout is not None:
        topology["layout"] = spec.layout
    manifest = {
        "case_id": spec.case_id,
        "components": ["full_model"],
        "expected_manifest_digest": manifest_digest(fragments),
        "features": ["generated"],
        "fragments": fragments,
        "oracle_file": "oracles.safetensors" if spec.oracles else None,
        "oracles": oracle_records(spec, wholes),
        "schema_id": SCHEMA_ID,
        "schema_version": spec.schema_version,
        "topology": topology,
        "world_size": len(spec.rank_order),
    }
    with open(os.path.join(folder, "case.json"), "w", encoding="utf-8") as file:
        json.dump(manifest | ({"colour": "blue"} if spec.unknown_keys else {}), file, sort_keys=True, indent=2)
