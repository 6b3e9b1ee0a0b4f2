"""The case to be written: which fragments and arrays each target rank holds, under which keys (SPEC section 1, "Output").

Nothing here knows bytes, files or MPI: arrays are named and shaped, and stored later.
"""

import math
from collections import Counter, defaultdict
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

import msgspec
import numpy as np

from reshard_mpi.boxes import Boxes, join
from reshard_mpi.checkpoint.checks import distinct_boxes
from reshard_mpi.checkpoint.dtypes import DTYPES, nbytes_of
from reshard_mpi.checkpoint.manifest import (
    CASE_FILE,
    ORACLE_FILE,
    Case,
    Coordinates,
    Fragment,
    Layout,
    Padding,
    Replica,
    Topology,
    by_tensor,
)
from reshard_mpi.checkpoint.mesh import Mesh, shard_name
from reshard_mpi.errors import InputError, ReshardError, names
from reshard_mpi.layout.cuts import Box, Cut, Misfit
from reshard_mpi.layout.rules import Held, Placement, Stacks, Tensor, partition_axes, placement_of, target_arrays

MOST_EVIDENCE = 64
PAIRS_AT_ONCE = 1 << 20  # of source and target boxes
ALONE = Replica(None, 1, 0)


class Exceptions(NamedTuple):
    """By logical tensor, where `torch.chunk` of it isn't what is stored: how mesh axes cut it, to which shape it is padded."""

    cuts: Mapping[str, Mapping[str, Cut]]
    padded: Mapping[str, tuple[int, ...]]


NO_EXCEPTIONS = Exceptions({}, {})


class TargetArray(NamedTuple):
    """One stored array of a target shard: in the shard of `rank`, under `key`.

    `boxes`: the boxes of the tensor that make it up, each with the elements stored before it per axis; one, but for fused
    tensors.
    """

    rank: int
    key: str
    tensor_id: str
    dtype: str
    shape: tuple[int, ...]
    boxes: tuple[tuple[Box, tuple[int, ...]], ...]

    @property
    def box(self) -> Box:
        """The only box."""
        ((box, _),) = self.boxes
        return box


@dataclass(frozen=True)
class Outgoing:
    """The case to be written, still without digests; `array_of[i]` is the array that holds `case.fragments[i]`.

    Arrays are in the order of the shards, within a shard in the order in which they are stored. `aliases[rank]` maps the key
    under which a tensor would have been stored to the key of the array that it shares; `keys` are those of all tensors, `padded`
    the shapes that their arrays make up, where that isn't the tensor's own.
    """

    case: Case
    arrays: tuple[TargetArray, ...]
    array_of: tuple[int, ...]
    aliases: Mapping[int, Mapping[str, str]]
    files: tuple[str, ...]
    keys: Mapping[str, str]
    padded: Mapping[str, tuple[int, ...]]

    @property
    def nranks(self) -> int:
        """How many files there are: one a target rank."""
        return len(self.files)


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


def outgoing_case(
    case: Case,
    layout: Layout,
    target: Mesh,
    included: Collection[str],
    exceptions: Exceptions = NO_EXCEPTIONS,
    suffix: str = "safetensors",
) -> Outgoing:
    """The case that holds the `included` tensors of `case` in the `target` topology. There must be no `misfits`.

    `suffix` is that of its shards.
    """
    keys = payload_keys(case)
    stacks = Stacks(fragment.fqn for fragment in case.fragments)
    kept = set(included)
    tensors = {tensor_id: fragments for tensor_id, fragments in by_tensor(case.fragments).items() if tensor_id in kept}
    stored_as = _shared_tensors(tensors)
    held = {
        tensor_id: _target_arrays(Tensor(tensor_id, f[0].fqn, f[0].global_shape), layout, target, stacks, exceptions)
        for tensor_id, f in tensors.items()
    }
    on_rank = {(array.rank, tensor_id): array for tensor_id, arrays in held.items() for array in arrays}
    boxes_of = {t: [(array.rank, box) for array in arrays for box, _ in array.boxes] for t, arrays in held.items()}
    evidence = _evidence(case.case_id, tensors, boxes_of)
    ranks = [_on_rank(target, rank, suffix) for rank in range(target.size)]
    fragments: list[Fragment] = []
    array_of_fragment: list[tuple[int, str]] = []
    aliases: defaultdict[int, dict[str, str]] = defaultdict(dict)
    sharing: set[tuple[int, str]] = set()
    for tensor_id, arrays in held.items():
        like, axes = tensors[tensor_id][0], partition_axes(layout[tensor_id], target)
        keeper_id = stored_as.get(tensor_id, tensor_id)
        replicas = replicas_of(tensor_id, boxes_of[tensor_id])
        for array in arrays:
            rank = array.rank
            keeper = keeper_id if on_rank.get((rank, keeper_id)) == array else tensor_id
            if keeper != tensor_id:
                aliases[rank][keys[tensor_id]] = keys[keeper]
                sharing |= {(rank, tensor_id), (rank, keeper)}
            elif len(array.boxes) > 1:
                sharing.add((rank, tensor_id))
            for number, (box, before) in enumerate(array.boxes):
                array_of_fragment.append((rank, keeper))
                fragments.append(
                    _fragment(
                        like,
                        f"{tensor_id}|r{rank}" + (f"#{number}" if len(array.boxes) > 1 else ""),
                        ranks[rank],
                        box,
                        before,
                        array.stored,
                        "view" if len(array.boxes) > 1 else "alignment",
                        next(replicas),
                        axes,
                        keys[keeper],
                        evidence[tensor_id, box],
                    )
                )
    arrays_written = _arrays(tensors, on_rank, set(array_of_fragment), keys)
    position = {(array.rank, array.tensor_id): index for index, array in enumerate(arrays_written)}
    holder = [rank for rank, _ in array_of_fragment]
    order = sorted(
        range(len(fragments)),
        key=lambda i: (holder[i], fragments[i].logical_tensor_id, fragments[i].element_offset),
    )
    for i in order if sharing else ():
        rank, keeper = array_of_fragment[i]
        if (rank, fragments[i].logical_tensor_id) in sharing:
            fragments[i] = msgspec.structs.replace(fragments[i], shared_storage_id=f"{keeper}|r{rank}")
    written = _case(case, layout, target, tensors, tuple(fragments[i] for i in order))
    files = tuple(rank.file for rank in ranks)
    array_of = tuple(position[array_of_fragment[i]] for i in order)
    keys_of = {tensor_id: keys[tensor_id] for tensor_id in held}
    padded = {tensor_id: shape for tensor_id, shape in exceptions.padded.items() if tensor_id in held}
    return Outgoing(written, tuple(arrays_written), array_of, aliases, files, keys_of, padded)


def misfits(
    case: Case, layout: Layout, target: Mesh, included: Collection[str], exceptions: Exceptions
) -> list[ReshardError]:
    """Of the `included` tensors those that can't be cut as they should be, with the reasons."""
    stacks, kept, cuts = Stacks(fragment.fqn for fragment in case.fragments), set(included), exceptions.cuts
    found: defaultdict[tuple[str, str], list[str]] = defaultdict(list)
    for tensor_id, fragments in by_tensor(case.fragments).items():
        if tensor_id in kept and tensor_id in cuts:
            tensor = Tensor(tensor_id, fragments[0].fqn, fragments[0].global_shape)
            try:
                _target_arrays(tensor, layout, target, stacks, exceptions)
            except Misfit as misfit:
                axes = (f"{axis} of axis {layout[tensor_id][axis]}" for axis in sorted(cuts[tensor_id]))
                found[names(axes), str(misfit)].append(tensor_id)
    return [
        InputError(
            f"tensor {names(tensors)}",
            f"can't be cut by {axes}: {reason}; choose another size of the mesh axis, or change the layout",
        )
        for (axes, reason), tensors in found.items()
    ]


def placements(
    case: Case, layout: Layout, target: Mesh, included: Collection[str], exceptions: Exceptions
) -> dict[str, Placement]:
    """How the `included` tensors are placed in the target."""
    stacks = Stacks(fragment.fqn for fragment in case.fragments)
    tensors = {f.logical_tensor_id: Tensor(f.logical_tensor_id, f.fqn, f.global_shape) for f in case.fragments}
    return {tensor_id: _placement(tensors[tensor_id], layout, target, stacks, exceptions) for tensor_id in included}


def _target_arrays(
    tensor: Tensor, layout: Layout, target: Mesh, stacks: Stacks, exceptions: Exceptions
) -> tuple[Held, ...]:
    return target_arrays(_placement(tensor, layout, target, stacks, exceptions))


def _placement(tensor: Tensor, layout: Layout, target: Mesh, stacks: Stacks, exceptions: Exceptions) -> Placement:
    cuts, padded = exceptions.cuts.get(tensor.tensor_id), exceptions.padded.get(tensor.tensor_id)
    return placement_of(tensor, layout[tensor.tensor_id], target, stacks, cuts, padded)


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


class _Rank(NamedTuple):
    """What all fragments of a target rank say alike."""

    file: str
    digest_ref: str
    coordinates: Coordinates


def _on_rank(target: Mesh, rank: int, suffix: str) -> _Rank:
    file = shard_name(rank, suffix)
    coordinates = tuple(sorted({**target.coordinates(rank), "rank": rank}.items()))
    return _Rank(file, f"source-digest:{file}", coordinates)


def replicas_of(tensor_id: str, boxes: Sequence[tuple[int, Box]]) -> Iterator[Replica]:
    """Of each box which replica it is: of as many as there are ranks that hold it, in their order."""
    count, met = Counter(box for _, box in boxes), Counter[Box]()
    for _, box in boxes:
        if count[box] > 1 and 0 not in box[1]:
            yield Replica(f"{tensor_id}@{','.join(map(str, box[0]))}", count[box], met[box])
            met[box] += 1
        else:
            yield ALONE


def _fragment(
    like: Fragment,
    fragment_id: str,
    on_rank: _Rank,
    box: Box,
    before: tuple[int, ...],
    stored: tuple[int, ...],
    semantic: str,
    replica: Replica,
    axes: tuple[int, ...],
    key: str,
    evidence: tuple[str, ...],
) -> Fragment:
    offset, extent = box
    return Fragment(
        fragment_id=fragment_id,
        logical_tensor_id=like.logical_tensor_id,
        fqn=like.fqn,
        component_id=like.component_id,
        role=like.role,
        global_shape=like.global_shape,
        element_offset=offset,
        element_extent=extent,
        local_shape=stored,
        padding=no_padding(len(extent)) if stored == extent else padding_around(before, extent, stored, semantic),
        dtype=like.dtype,
        payload_file=on_rank.file,
        payload_key=key,
        topology_coordinates=on_rank.coordinates,
        replica=replica,
        partition_axes=axes,
        shard_file_id=on_rank.file,
        shard_digest_ref=on_rank.digest_ref,
        tie_group_id=like.tie_group_id,
        evidence_refs=evidence,
    )


@lru_cache
def no_padding(naxes: int) -> Padding:
    return Padding((0,) * naxes, (0,) * naxes, "none")


def padding_around(before: tuple[int, ...], extent: tuple[int, ...], stored: tuple[int, ...], semantic: str) -> Padding:
    """The rest of an array as one box sees it: other boxes and what pads them."""
    after = tuple(whole - size - first for whole, size, first in zip(stored, extent, before, strict=True))
    return Padding(before, after, semantic)


def _arrays(
    tensors: Mapping[str, list[Fragment]],
    on_rank: Mapping[tuple[int, str], Held],
    kept: Collection[tuple[int, str]],
    keys: Mapping[str, str],
) -> list[TargetArray]:
    """In the order of storage: by rank, then item size, largest first, so that every array is aligned, then key."""
    arrays = [
        TargetArray(rank, keys[tensor_id], tensor_id, tensors[tensor_id][0].dtype, *on_rank[rank, tensor_id][1:])
        for rank, tensor_id in sorted(kept)
    ]
    for array in arrays:
        if DTYPES[array.dtype].nbits % 8:  # others fill whole bytes in any case
            where = f"tensor {array.tensor_id} on target rank {array.rank}"
            nbytes_of(math.prod(array.shape), DTYPES[array.dtype], where)
    return sorted(arrays, key=lambda array: (array.rank, -DTYPES[array.dtype].nbits, array.key))


def _evidence(
    case_id: str, tensors: Mapping[str, list[Fragment]], held: Mapping[str, Sequence[tuple[int, Box]]]
) -> dict[tuple[str, Box], tuple[str, ...]]:
    """For each target box the references to the source fragments that it is made of."""
    found: dict[tuple[str, Box], tuple[str, ...]] = {}
    sides: list[tuple[str, list[Fragment], set[Box]]] = []
    npairs = 0
    for tensor_id, fragments in tensors.items():
        sides.append((tensor_id, distinct_boxes(fragments), {box for _, box in held[tensor_id]}))
        npairs += len(sides[-1][1]) * len(sides[-1][2])
        if npairs > PAIRS_AT_ONCE:
            found.update(_evidence_of(case_id, sides))
            sides, npairs = [], 0
    found.update(_evidence_of(case_id, sides))
    return found


def _evidence_of(
    case_id: str, sides: Sequence[tuple[str, list[Fragment], set[Box]]]
) -> Iterator[tuple[tuple[str, Box], tuple[str, ...]]]:
    """Of some tensors, of which all source and target boxes are given."""
    sources = [fragment for _, fragments, _ in sides for fragment in fragments]
    targets = [(tensor_id, box) for tensor_id, _, boxes in sides for box in boxes]
    number = np.arange(len(sides))
    of_source, of_target = (np.repeat(number, [len(side[column]) for side in sides]) for column in (1, 2))
    naxes = max((len(box[0]) for _, box in targets), default=0)
    a, b = _boxes([fragment.box for fragment in sources], naxes), _boxes([box for _, box in targets], naxes)
    meets = np.flatnonzero(b.nonempty)
    j, i = join(b.take(meets), a, of_target[meets], of_source)
    count = np.bincount(meets[j], minlength=len(targets))
    few = np.flatnonzero(count[meets[j]] <= MOST_EVIDENCE)
    used: list[list[str]] = [[] for _ in targets]
    for target, source in zip(meets[j[few]].tolist(), i[few].tolist(), strict=True):
        used[target].append(f"{case_id}#{sources[source].fragment_id}")
    for target, refs, nrefs in zip(targets, used, count.tolist(), strict=True):
        yield target, tuple(sorted(refs)) if nrefs <= MOST_EVIDENCE else (f"{case_id}#*",)


def _boxes(boxes: Sequence[Box], naxes: int) -> Boxes:
    """Boxes of tensors of up to `naxes` axes; where there are fewer, the last ones are [0, 1)."""
    offset, extent = (
        np.array([box[side] + (fill,) * (naxes - len(box[side])) for box in boxes], np.int64).reshape(len(boxes), naxes)
        for side, fill in ((0, 0), (1, 1))
    )
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
