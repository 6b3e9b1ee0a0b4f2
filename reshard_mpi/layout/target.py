"""The case to be written: which fragments and arrays each target rank holds, under which keys (SPEC section 1, "Output").

Nothing here knows bytes, files or MPI: arrays are named and shaped, and stored later.
"""

from collections import Counter, defaultdict
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

import msgspec
import numpy as np

from reshard_mpi.boxes import Boxes, join
from reshard_mpi.checkpoint.checks import distinct_boxes
from reshard_mpi.checkpoint.dtypes import DTYPES, nbytes_of
from reshard_mpi.checkpoint.manifest import (
    CASE_FILE,
    ORACLE_FILE,
    Case,
    Fragment,
    Layout,
    Padding,
    Replica,
    Topology,
    by_tensor,
)
from reshard_mpi.checkpoint.mesh import Mesh
from reshard_mpi.errors import InputError
from reshard_mpi.layout.rules import Box, Stacks, Tensor, partition_axes, target_boxes

MOST_EVIDENCE = 64


@dataclass(frozen=True)
class TargetArray:
    """One stored array of a target shard: the whole `box` of a tensor, in the shard of `rank`, under `key`."""

    rank: int
    key: str
    tensor_id: str
    dtype: str
    box: Box

    @property
    def shape(self) -> tuple[int, ...]:
        return self.box[1]


@dataclass(frozen=True)
class Outgoing:
    """The case to be written, still without digests; `array_of[i]` is the array that holds `case.fragments[i]`.

    Arrays are in the order of the shards, within a shard in the order in which they are stored. `aliases[rank]` maps the key
    under which a tensor would have been stored to the key of the array that it shares.
    """

    case: Case
    arrays: tuple[TargetArray, ...]
    array_of: tuple[int, ...]
    aliases: Mapping[int, Mapping[str, str]]
    nranks: int


def payload_keys(case: Case) -> dict[str, str]:
    """Logical tensor -> the key of its arrays; InputError when two tensors would share one."""
    tensors = {tensor_id: fragments[0] for tensor_id, fragments in by_tensor(case.fragments).items()}
    sharing: defaultdict[str, list[Fragment]] = defaultdict(list)
    for fragment in tensors.values():
        sharing[fragment.fqn].append(fragment)
    taken = Counter(fragment.fqn for fragment in tensors.values())
    taken.update(f"{fragment.component_id}/{fragment.fqn}" for fragment in tensors.values())
    keys = {}
    for tensor_id, fragment in tensors.items():
        components = Counter(other.component_id for other in sharing[fragment.fqn])
        alone = components[fragment.component_id] == 1
        qualified = f"{fragment.component_id}/{fragment.fqn}"
        if len(sharing[fragment.fqn]) == 1 or (fragment.component_id == "model" and alone):
            keys[tensor_id] = fragment.fqn
        else:
            keys[tensor_id] = qualified if taken[qualified] == 1 else tensor_id
    holder: dict[str, str] = {}
    for tensor_id, key in keys.items():
        if key == "__metadata__":
            raise InputError(CASE_FILE, f"tensor {tensor_id} would be stored as {key!r}, which is reserved; rename it")
        other = holder.setdefault(key, tensor_id)
        if other != tensor_id:
            raise InputError(CASE_FILE, f"tensors {tensor_id} and {other} would both be stored as {key!r}; rename one")
    return keys


def outgoing_case(case: Case, layout: Layout, target: Mesh, included: Collection[str]) -> Outgoing:
    """The case that holds the `included` tensors of `case` in the `target` topology."""
    keys = payload_keys(case)
    stacks = Stacks(fragment.fqn for fragment in case.fragments)
    tensors = {
        tensor_id: fragments for tensor_id, fragments in by_tensor(case.fragments).items() if tensor_id in included
    }
    stored_as = _shared_tensors(tensors)
    held: dict[str, list[tuple[int, Box]]] = {
        tensor_id: target_boxes(Tensor(tensor_id, f[0].fqn, f[0].global_shape), layout[tensor_id], target, stacks)
        for tensor_id, f in tensors.items()
    }
    on_rank = {(rank, tensor_id): box for tensor_id, boxes in held.items() for rank, box in boxes}
    evidence = _evidence(case.case_id, tensors, held)
    fragments: list[Fragment] = []
    array_of_fragment: list[tuple[int, str]] = []
    aliases: defaultdict[int, dict[str, str]] = defaultdict(dict)
    sharing: set[tuple[int, str]] = set()
    for tensor_id, boxes in held.items():
        holders: defaultdict[Box, list[int]] = defaultdict(list)
        for rank, box in boxes:
            holders[box].append(rank)
        axes = partition_axes(layout[tensor_id], target)
        kept = stored_as.get(tensor_id, tensor_id)
        for rank, box in boxes:
            keeper = kept if on_rank.get((rank, kept)) == box else tensor_id
            if keeper != tensor_id:
                aliases[rank][keys[tensor_id]] = keys[keeper]
                sharing |= {(rank, tensor_id), (rank, keeper)}
            array_of_fragment.append((rank, keeper))
            fragments.append(
                _fragment(
                    tensors[tensor_id][0], rank, box, holders[box], axes, keys[keeper], target, evidence[tensor_id, box]
                )
            )
    arrays = _arrays(tensors, on_rank, set(array_of_fragment), keys)
    position = {(array.rank, array.tensor_id): index for index, array in enumerate(arrays)}
    order = sorted(
        range(len(fragments)),
        key=lambda i: (fragments[i].rank, fragments[i].logical_tensor_id, fragments[i].element_offset),
    )
    for i in order:
        rank, keeper = array_of_fragment[i]
        if (rank, fragments[i].logical_tensor_id) in sharing:
            fragments[i] = msgspec.structs.replace(fragments[i], shared_storage_id=f"{keeper}|r{rank}")
    written = _case(case, layout, target, tensors, tuple(fragments[i] for i in order))
    return Outgoing(written, tuple(arrays), tuple(position[array_of_fragment[i]] for i in order), aliases, target.size)


def _shared_tensors(tensors: Mapping[str, list[Fragment]]) -> dict[str, str]:
    """Tensors that are one and the same stored bytes -> the first of them, by id."""
    first: dict[object, str] = {}
    same = {}
    for tensor_id in sorted(tensors):
        fragments = [fragment for fragment in tensors[tensor_id] if fragment.has_elements]
        if not fragments or any(fragment.shared_storage_id is None for fragment in fragments):
            continue
        places = frozenset(
            (f.payload_file, f.payload_key, f.box, f.padding.before, f.dtype, f.global_shape) for f in fragments
        )
        same[tensor_id] = first.setdefault(places, tensor_id)
    return same


def _fragment(
    like: Fragment,
    rank: int,
    box: Box,
    holders: Sequence[int],
    axes: tuple[int, ...],
    key: str,
    target: Mesh,
    evidence: tuple[str, ...],
) -> Fragment:
    offset, extent = box
    none = (0,) * len(extent)
    file = f"rank-{rank:05d}.safetensors"
    replicated = len(holders) > 1 and 0 not in extent
    return Fragment(
        fragment_id=f"{like.logical_tensor_id}|r{rank}",
        logical_tensor_id=like.logical_tensor_id,
        fqn=like.fqn,
        component_id=like.component_id,
        role=like.role,
        global_shape=like.global_shape,
        element_offset=offset,
        element_extent=extent,
        local_shape=extent,
        padding=Padding(none, none, "none"),
        dtype=like.dtype,
        payload_file=file,
        payload_key=key,
        topology_coordinates=tuple(sorted({**target.coordinates(rank), "rank": rank}.items())),
        replica=Replica(f"{like.logical_tensor_id}@{','.join(map(str, offset))}", len(holders), holders.index(rank))
        if replicated
        else Replica(None, 1, 0),
        partition_axes=axes,
        shard_file_id=file,
        shard_digest_ref=f"source-digest:{file}",
        tie_group_id=like.tie_group_id,
        evidence_refs=evidence,
    )


def _arrays(
    tensors: Mapping[str, list[Fragment]],
    on_rank: Mapping[tuple[int, str], Box],
    kept: Collection[tuple[int, str]],
    keys: Mapping[str, str],
) -> list[TargetArray]:
    """In the order of storage: by rank, then item size, largest first, so that every array is aligned, then key."""
    arrays = [
        TargetArray(rank, keys[tensor_id], tensor_id, tensors[tensor_id][0].dtype, on_rank[rank, tensor_id])
        for rank, tensor_id in sorted(kept)
    ]
    for array in arrays:
        nbytes_of(
            int(np.prod(array.shape, dtype=object)),
            DTYPES[array.dtype],
            f"tensor {array.tensor_id} on target rank {array.rank}",
        )
    return sorted(arrays, key=lambda array: (array.rank, -DTYPES[array.dtype].nbits, array.key))


def _evidence(
    case_id: str, tensors: Mapping[str, list[Fragment]], held: Mapping[str, list[tuple[int, Box]]]
) -> dict[tuple[str, Box], tuple[str, ...]]:
    """For each target box the references to the source fragments that it is made of."""
    found: dict[tuple[str, Box], tuple[str, ...]] = {}
    for tensor_id, fragments in tensors.items():
        sources, targets = distinct_boxes(fragments), sorted({box for _, box in held[tensor_id]})
        naxes = len(fragments[0].global_shape)
        a, b = _boxes([f.box for f in sources], naxes), _boxes(targets, naxes)
        meets = np.flatnonzero(b.nonempty)
        j, i = join(b.take(meets), a, np.zeros(len(meets), np.int64), np.zeros(len(sources), np.int64))
        used: defaultdict[int, list[str]] = defaultdict(list)
        for target_index, source_index in zip(meets[j].tolist(), i.tolist(), strict=True):
            used[target_index].append(f"{case_id}#{sources[source_index].fragment_id}")
        for index, box in enumerate(targets):
            refs = sorted(used[index])
            found[tensor_id, box] = tuple(refs) if len(refs) <= MOST_EVIDENCE else (f"{case_id}#*",)
    return found


def _boxes(boxes: Sequence[Box], naxes: int) -> Boxes:
    offset, extent = (np.array([box[side] for box in boxes], np.int64).reshape(len(boxes), naxes) for side in (0, 1))
    return Boxes(offset, offset + extent)


def _case(case: Case, layout: Layout, target: Mesh, tensors: Collection[str], fragments: tuple[Fragment, ...]) -> Case:
    oracles = tuple(oracle for oracle in case.oracles if oracle.logical_tensor_id in tensors)
    return Case(
        case_id=case.case_id,
        components=case.components,
        features=case.features,
        topology=Topology(
            target.topology(),
            case.topology.source,
            {tensor_id: dict(sorted(layout[tensor_id].items())) for tensor_id in tensors},
        ),
        world_size=target.size,
        fragments=fragments,
        expected_manifest_digest=None,
        oracle_file=ORACLE_FILE if oracles else None,
        oracles=oracles,
    )
