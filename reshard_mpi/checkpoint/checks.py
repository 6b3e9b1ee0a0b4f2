"""What a manifest may get wrong, without opening a shard: fields, coordinates, coverage, replicas, ties (SPEC section 1).

Every fault is found and returned, none is raised, so that `plan` and `verify` can tell them all.
"""

import math
import re
from collections import Counter, defaultdict
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from operator import attrgetter

import numpy as np

from reshard_mpi.boxes import Boxes, find_hole, find_overlaps
from reshard_mpi.checkpoint.dtypes import DTYPES, dtype_named, nbytes_of
from reshard_mpi.checkpoint.manifest import (
    CASE_FILE,
    Case,
    Coordinates,
    Fragment,
    Padding,
    ParsedCase,
    Shape,
    by_tensor,
)
from reshard_mpi.checkpoint.mesh import Mesh, canonical, mesh_from_topology, shard_name
from reshard_mpi.errors import InputError, IntegrityError, ReshardError, names, plural

MOST_BYTES = 1 << 62  # of a tensor: offsets and sums stay far inside int64
# What all fragments of a logical tensor must say alike.
IN_COMMON = ("fqn", "component_id", "role", "dtype", "global_shape", "tie_group_id")
_in_common = attrgetter(*IN_COMMON)
_member_index = attrgetter("replica.member_index")
SHARD_NAME = re.compile(r"rank-(\d{5,6})\.(safetensors|h5)", re.ASCII)


@dataclass
class Findings:
    """All faults of a manifest, and the comparisons that digests alone can't settle.

    `is_sound`: the fragments are well formed and agree with each other, so that one can reason about their boxes. `incomplete`:
    the tensors whose boxes don't make up a whole.
    """

    is_sound: bool = False
    incomplete: set[str] = field(default_factory=set)
    faults: list[ReshardError] = field(default_factory=list)
    replicas_to_read: list[list[Fragment]] = field(default_factory=list)
    ties_to_read: list[tuple[str, str]] = field(default_factory=list)


def check_case(parsed: ParsedCase) -> Findings:
    """Everything that the manifest alone can tell."""
    case, found = parsed.case, Findings()
    if case.expected_manifest_digest not in (None, parsed.fragments_digest):
        found.faults.append(
            IntegrityError(
                CASE_FILE,
                f"the fragments' digest is {parsed.fragments_digest}, expected_manifest_digest says "
                f"{case.expected_manifest_digest}; the manifest was changed after it was written: get it anew",
            )
        )
    try:
        mesh = mesh_from_topology(case.topology.source, f"{CASE_FILE}: topology.source")
    except InputError as fault:
        found.faults.append(fault)
        _check_fragments(case, None, found)
        found.is_sound = False
        return found
    if mesh.size != case.world_size:
        found.faults.append(
            InputError(
                CASE_FILE,
                f"world_size is {case.world_size}, but topology.source {mesh} has {plural(mesh.size, 'rank')}; expected the "
                "product of its axes",
            )
        )
    _check_fragments(case, mesh, found)
    return found


def check_described(case: Case) -> Findings:
    """What can be wrong with a case that nobody wrote: it describes a checkpoint of another format, which knows no mesh."""
    found = Findings()
    _check_fragments(case, None, found)
    return found


def _check_fragments(case: Case, mesh: Mesh | None, found: Findings) -> None:
    tensors = by_tensor(case.fragments)
    unsound: set[str] = set()  # tensors of which nothing more can be said
    for fragment in case.fragments:
        for message in _fragment_messages(fragment, mesh):
            found.faults.append(InputError(name_of(fragment), message))
            unsound.add(fragment.logical_tensor_id)
    for tensor_id, fragments in tensors.items():
        disagreeing = [] if tensor_id in unsound else [*_agreement_faults(fragments)]
        found.faults += disagreeing
        unsound |= {tensor_id} if disagreeing else set()
    found.is_sound = not unsound
    sound = [fragment for fragment in case.fragments if fragment.logical_tensor_id not in unsound]
    tensors = {tensor_id: fragments for tensor_id, fragments in tensors.items() if tensor_id not in unsound}
    found.faults += _identity_faults(sound) if mesh else ()
    found.faults += _storage_faults(sound)
    found.incomplete |= unsound
    found.faults += _replica_faults(sound, found)
    found.faults += _coverage_faults(tensors, found)
    found.faults += _tie_faults(tensors, found)
    found.faults += _oracle_faults(case, tensors, unsound)


def name_of(fragment: Fragment) -> str:
    return f"{CASE_FILE}: fragment {fragment.fragment_id} of tensor {fragment.logical_tensor_id}"


def box_text(offset: Sequence[int], extent: Sequence[int]) -> str:
    """`[0:2, 4:8]`, as numpy would slice it."""
    return f"[{', '.join(f'{start}:{start + size}' for start, size in zip(offset, extent, strict=True))}]"


def _fragment_messages(fragment: Fragment, mesh: Mesh | None) -> tuple[str, ...]:
    """What is wrong with a fragment, taken by itself."""
    boxes = _box_messages(
        fragment.global_shape,
        fragment.element_offset,
        fragment.element_extent,
        fragment.local_shape,
        fragment.padding,
        fragment.partition_axes,
        fragment.dtype,
    )
    return boxes + (_place_messages(fragment.topology_coordinates, fragment.payload_file, mesh) if mesh else ())


@lru_cache(maxsize=1 << 16)  # ranks and layers repeat each other
def _box_messages(
    shape: Shape, offset: Shape, extent: Shape, local: Shape, padding: Padding, partition_axes: Shape, dtype: str
) -> tuple[str, ...]:
    """What is wrong with the shapes of a fragment."""
    naxes = len(shape)
    if any(len(per_axis) != naxes for per_axis in (offset, extent, local, padding.before, padding.after)):
        return (
            f"global_shape has {naxes} axes, but offset, extent, local_shape or padding has another number; expected "
            "one number an axis",
        )
    found = []
    beyond = any(start + size > whole for start, size, whole in zip(offset, extent, shape, strict=True))
    if beyond and 0 not in extent:
        found.append(f"box {box_text(offset, extent)} lies outside the tensor's shape {list(shape)}")
    sums = tuple(
        before + size + after for before, size, after in zip(padding.before, extent, padding.after, strict=True)
    )
    if sums != local:
        found.append(
            f"local_shape {list(local)} is not before {list(padding.before)} + extent {list(extent)} + after "
            f"{list(padding.after)}"
        )
    if padding.semantic == "none" and (any(padding.before) or any(padding.after)):
        found.append(
            f"padding {list(padding.before)}, {list(padding.after)} with semantic none; expected zeros, or the semantic of "
            "the padding"
        )
    if any(axis >= naxes for axis in partition_axes):
        found.append(f"partition_axes {list(partition_axes)} names a tensor axis beyond the {naxes} of {list(shape)}")
    try:
        for name, sizes in (("global_shape", shape), ("local_shape", local)):
            if nbytes_of(math.prod(sizes), dtype_named(dtype, name), name) >= MOST_BYTES:
                found.append(f"{name} {list(sizes)} has more bytes than any file; expected less than 2**62")
    except InputError as fault:
        found.append(fault.message)
    return tuple(found)


@lru_cache(maxsize=1 << 16)
def _place_messages(coordinates: Coordinates, payload_file: str, mesh: Mesh) -> tuple[str, ...]:
    """What is wrong with where a fragment is: its coordinates and its file."""
    index_of = {canonical(axis): index for axis, index in coordinates}
    if list(coordinates) != sorted(coordinates) or len(index_of) < len(coordinates) or "rank" not in index_of:
        return (f"topology_coordinates {list(coordinates)} are not sorted pairs, each axis once, rank among them",)
    rank = index_of.pop("rank")
    sizes = dict(mesh.axes)
    found = []
    if not mesh.split_axes.keys() <= index_of.keys() <= sizes.keys():
        found.append(f"coordinates name the mesh axes {sorted(index_of)}, topology.source has {sorted(sizes)}")
    elif any(index >= sizes[axis] for axis, index in index_of.items()):
        found.append(f"coordinates {index_of} lie outside the mesh {mesh}")
    shard = SHARD_NAME.fullmatch(payload_file)
    if any(part in payload_file for part in ("/", "\\", "..", "\0")):
        found.append(f"payload_file {payload_file!r} is a path; expected a plain file name in the case folder")
    elif rank >= mesh.size:
        found.append(f"rank {rank} of {mesh.size}; expected ranks from 0")
    elif not shard or payload_file != shard_name(rank, shard[2]):
        found.append(
            f"payload_file {payload_file!r} is not the shard of rank {rank}; expected {shard_name(rank)} or .h5"
        )
    return tuple(found)


def _identity_faults(fragments: Sequence[Fragment]) -> Iterator[ReshardError]:
    for fragment_id, count in Counter(fragment.fragment_id for fragment in fragments).items():
        if count > 1:
            yield InputError(CASE_FILE, f"fragment_id {fragment_id!r} is used {count} times; expected each once")
    file_of_rank: dict[int, str] = {}
    for rank, file in sorted({(fragment.rank, fragment.payload_file) for fragment in fragments}):
        if file_of_rank.setdefault(rank, file) != file:
            yield InputError(CASE_FILE, f"rank {rank} has two files, {file_of_rank[rank]} and {file}; expected one")
    tuple_of_rank: dict[int, Coordinates] = {}
    rank_of_tuple: dict[Coordinates, int] = {}
    for coordinates in sorted({fragment.topology_coordinates for fragment in fragments}):
        rank = dict(coordinates)["rank"]
        mesh_tuple = tuple(pair for pair in coordinates if pair[0] != "rank")
        other = tuple_of_rank.setdefault(rank, mesh_tuple)
        if other != mesh_tuple or rank_of_tuple.setdefault(mesh_tuple, rank) != rank:
            yield InputError(
                CASE_FILE,
                f"rank {rank} has coordinates {dict(mesh_tuple)} and also {dict(other)}, or another rank has them too; "
                "expected one coordinate tuple a rank",
            )


def _storage_faults(fragments: Sequence[Fragment]) -> Iterator[ReshardError]:
    first_of: dict[tuple[str, str], Fragment] = {}
    for fragment in fragments:
        array = (fragment.payload_file, fragment.payload_key)
        first = first_of.setdefault(array, fragment)
        if first is fragment:
            continue
        stored = f"{fragment.payload_key!r} of {fragment.payload_file}"
        both = f"{first.fragment_id} and {fragment.fragment_id} name one stored array, {stored}"
        if fragment.shared_storage_id is None or fragment.shared_storage_id != first.shared_storage_id:
            yield InputError(
                CASE_FILE,
                f"{both}, without one shared_storage_id; expected arrays of their own, or the same shared_storage_id",
            )
        elif (first.dtype, first.local_shape) != (fragment.dtype, fragment.local_shape):
            yield InputError(CASE_FILE, f"{both}, with different dtype or local_shape")
        elif (
            None not in (first.fragment_digest, fragment.fragment_digest)
            and first.fragment_digest != fragment.fragment_digest
        ):
            yield IntegrityError(CASE_FILE, f"{both}, with different fragment_digest")


def _agreement_faults(tensor: list[Fragment]) -> Iterator[ReshardError]:
    first = tensor[0]
    agreed = _in_common(first)
    for fragment in tensor[1:]:
        if _in_common(fragment) != agreed:
            key, here, there = next(
                (key, here, there)
                for key, here, there in zip(IN_COMMON, _in_common(fragment), agreed, strict=True)
                if here != there
            )
            yield InputError(
                name_of(fragment),
                f"{key} is {here!r}, but {there!r} in {first.fragment_id} of the same tensor "
                f"{fragment.logical_tensor_id}; expected one",
            )
            return


def replica_groups(fragments: Sequence[Fragment]) -> dict[str, list[Fragment]]:
    """Members of each declared replica group, by member_index; boxes without elements take no part."""
    groups: defaultdict[str, list[Fragment]] = defaultdict(list)
    for fragment in fragments:
        if fragment.replica.member_count > 1 and 0 not in fragment.element_extent:
            groups[fragment.replica.group_id or ""].append(fragment)
    return {group_id: sorted(members, key=_member_index) for group_id, members in groups.items()}


def _replica_faults(fragments: Sequence[Fragment], found: Findings) -> Iterator[ReshardError]:
    for group_id, members in replica_groups(fragments).items():
        first, where = members[0], f"{CASE_FILE}: replica group {group_id}"
        if not group_id:
            yield InputError(
                name_of(first),
                f"member_count is {first.replica.member_count} without a group_id; expected the id that the replicas share",
            )
            continue
        counts = {member.replica.member_count for member in members}
        if counts != {len(members)}:
            yield InputError(
                where,
                f"{len(members)} members ({names(m.fragment_id for m in members)}), member_count says {names(sorted(counts))}",
            )
        elif len({member.replica.member_index for member in members}) < len(members):
            yield InputError(where, f"member_index {[m.replica.member_index for m in members]}, expected each once")
        elif len({(member.logical_tensor_id, member.box) for member in members}) > 1:
            yield InputError(
                where,
                f"the members ({names(m.fragment_id for m in members)}) hold different boxes; expected replicas of one box",
            )
        elif any(member.is_padded or member.fragment_digest is None for member in members):
            found.replicas_to_read.append(members)
        elif len({member.fragment_digest for member in members}) > 1:
            odd = next(member for member in members if member.fragment_digest != first.fragment_digest)
            yield IntegrityError(
                where,
                f"{odd.fragment_id} ({odd.payload_file}) and {first.fragment_id} ({first.payload_file}) have "
                "different digests; replicas must be equal",
            )


def distinct_boxes(tensor: Sequence[Fragment]) -> list[Fragment]:
    """The fragments with elements; of each replica group the first member."""
    first: dict[str, Fragment] = {}
    for fragment in tensor:
        replica = fragment.replica
        if replica.member_count > 1 and 0 not in fragment.element_extent:
            known = first.setdefault(replica.group_id or "", fragment)
            if replica.member_index < known.replica.member_index:
                first[replica.group_id or ""] = fragment
    return [
        f
        for f in tensor
        if 0 not in f.element_extent and (f.replica.member_count == 1 or f is first[f.replica.group_id or ""])
    ]


def _coverage_faults(tensors: dict[str, list[Fragment]], found: Findings) -> Iterator[ReshardError]:
    boxes_of = {tensor_id: distinct_boxes(tensor) for tensor_id, tensor in tensors.items()}
    everything = [fragment for boxes in boxes_of.values() for fragment in boxes]
    naxes = max((len(tensor[0].global_shape) for tensor in tensors.values()), default=0)
    fill = [(0,) * (naxes - k) for k in range(naxes + 1)]
    start = np.array([f.element_offset + fill[len(f.global_shape)] for f in everything], np.int64).reshape(
        len(everything), naxes
    )
    extent = np.array(
        [f.element_extent + tuple(1 for _ in fill[len(f.global_shape)]) for f in everything], np.int64
    ).reshape(len(everything), naxes)
    boxes = Boxes(start, start + extent)
    group = np.repeat(np.arange(len(boxes_of)), [len(fragments) for fragments in boxes_of.values()])
    overlapping = set()
    for first_box, second_box in find_overlaps(boxes, group):
        a, b = everything[first_box], everything[second_box]
        overlapping.add(a.logical_tensor_id)
        found.incomplete.add(a.logical_tensor_id)
        yield InputError(
            f"{CASE_FILE}: tensor {a.logical_tensor_id}",
            f"box {box_text(*a.box)} of {a.fragment_id} overlaps box {box_text(*b.box)} of {b.fragment_id}, and they "
            "are no declared replicas; expected boxes that tile the tensor",
        )
    covered = np.bincount(group, weights=None, minlength=len(boxes_of))  # boxes a tensor
    first = np.cumsum(covered) - covered
    for index, (tensor_id, tensor) in enumerate(tensors.items()):
        shape = tensor[0].global_shape
        mine = slice(int(first[index]), int(first[index] + covered[index]))
        covers = sum(math.prod(f.element_extent) for f in boxes_of[tensor_id]) == math.prod(shape)
        if covers or tensor_id in overlapping:
            continue
        found.incomplete.add(tensor_id)
        hole = find_hole(shape, Boxes(boxes.start[mine, : len(shape)], boxes.stop[mine, : len(shape)]))
        assert hole is not None
        held = names(f"{f.fragment_id} {box_text(*f.box)}" for f in boxes_of[tensor_id]) or "none"
        yield InputError(
            f"{CASE_FILE}: tensor {tensor_id}",
            f"box {box_text(hole[0], tuple(b - a for a, b in zip(*hole, strict=True)))} of shape {list(shape)} is "
            f"in no fragment (there are: {held}); "
            "nothing is filled in: find the missing shard or manifest entry",
        )


def _tie_faults(tensors: dict[str, list[Fragment]], found: Findings) -> Iterator[ReshardError]:
    ties: defaultdict[str, list[str]] = defaultdict(list)
    for tensor_id, tensor in tensors.items():
        if tensor[0].tie_group_id is not None:
            ties[tensor[0].tie_group_id].append(tensor_id)
    for tie, tied in ties.items():
        first = tensors[tied[0]]
        for other_id in tied[1:]:
            other, where = tensors[other_id], f"{CASE_FILE}: tie group {tie}"
            if (first[0].global_shape, first[0].dtype) != (other[0].global_shape, other[0].dtype):
                yield InputError(
                    where,
                    f"{tied[0]} is {first[0].dtype} {list(first[0].global_shape)}, {other_id} is {other[0].dtype} "
                    f"{list(other[0].global_shape)}; tied tensors must be alike",
                )
                continue
            here, there = _digest_of_boxes(first), _digest_of_boxes(other)
            differing = [box for box in here.keys() & there.keys() if here[box] != there[box]]
            if differing:
                yield IntegrityError(
                    where,
                    f"{tied[0]} and {other_id} have different digests for box {box_text(*min(differing))}; tied "
                    "tensors must be equal",
                )
            elif not {f.box for f in distinct_boxes(first)} <= here.keys() & there.keys():
                found.ties_to_read.append((tied[0], other_id))


def _digest_of_boxes(tensor: list[Fragment]) -> dict[tuple[tuple[int, ...], tuple[int, ...]], str]:
    return {
        f.box: f.fragment_digest for f in distinct_boxes(tensor) if f.fragment_digest is not None and not f.is_padded
    }


def _oracle_faults(case: Case, tensors: dict[str, list[Fragment]], unsound: Collection[str]) -> Iterator[ReshardError]:
    if case.oracles and case.oracle_file is None:
        yield InputError(
            CASE_FILE, f"{len(case.oracles)} oracles, but oracle_file is null; expected the file that holds them"
        )
    elif case.oracle_file is not None and (
        case.oracle_file != case.oracle_file.split("/")[-1].split("\\")[-1]
        or case.oracle_file in ("", ".", "..")
        or "\0" in case.oracle_file
    ):
        yield InputError(
            CASE_FILE, f"oracle_file {case.oracle_file!r} is a path; expected a plain file name in the case folder"
        )
    for tensor_id, count in Counter(oracle.logical_tensor_id for oracle in case.oracles).items():
        if count > 1:
            yield InputError(CASE_FILE, f"{count} oracles for tensor {tensor_id}; expected one")
    for oracle in case.oracles:
        where = f"{CASE_FILE}: oracle of {oracle.logical_tensor_id}"
        tensor = tensors.get(oracle.logical_tensor_id)
        if oracle.logical_tensor_id in unsound:
            continue
        if tensor is None:
            yield InputError(where, "no fragment belongs to that tensor; expected an oracle for a tensor of the case")
        elif (tensor[0].dtype, tensor[0].global_shape) != (oracle.dtype, oracle.shape):
            yield InputError(
                where,
                f"{oracle.dtype} {list(oracle.shape)}, but the fragments say {tensor[0].dtype} {list(tensor[0].global_shape)}",
            )
        elif oracle.dtype not in DTYPES:
            yield InputError(where, f"dtype {oracle.dtype!r} is not known")
