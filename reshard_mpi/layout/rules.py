"""What each mesh axis does to each tensor: read from a layout, inferred from coordinates, or by default (SPEC section 2).

    tp = 2 splits axis 1          dp = 2 replicates           pp = 2 places
    +-------+-------+             +-------+ +-------+         +-------+
    | tp 0  | tp 1  |             | dp 0  |=| dp 1  |         | pp 0  |  (nothing on pp 1)
    +-------+-------+             +-------+ +-------+         +-------+

The result, a Rule per tensor and mesh axis, is all that is needed to say which box of which tensor a target rank holds.
"""

import re
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

import numpy as np

from reshard_mpi.boxes import Ints, array_split_part, chunk
from reshard_mpi.checkpoint.manifest import CASE_FILE, Case, Coordinates, Fragment, Layout, Rule, Stages, by_tensor
from reshard_mpi.checkpoint.mesh import Mesh, canonical, mesh_from_topology, nesting_order
from reshard_mpi.errors import InputError, ReshardError, names
from reshard_mpi.layout.cuts import Box, Cut, Intervals, cut_axis, stored_boxes

LAYER = re.compile(r"(?:^|\.)(?:layers|layer|h|blocks|block)\.(\d+)\.", re.ASCII)
EXPERT = re.compile(r"(?:^|\.)experts\.(\d+)\.", re.ASCII)
EMBEDDING = ("embed", "wte", "wpe")
NUMBERED = {"pp": LAYER, "ep": EXPERT}  # the mesh axes that place by a number in the fqn

MeshTuple = tuple[int, ...]  # an index on each source mesh axis, in mesh order


@dataclass(frozen=True)
class Tensor:
    """What the layout needs to know of a logical tensor. Shapes count elements."""

    tensor_id: str
    fqn: str
    shape: tuple[int, ...]


class Stacks:
    """How many layers (or experts) each numbered stack of a case has: 1 + the highest number after its prefix."""

    def __init__(self, fqns: Iterable[str]):
        self._depth: defaultdict[tuple[str, str], int] = defaultdict(int)
        for fqn in set(fqns):
            for axis in NUMBERED:
                prefix, number = self._parse(axis, fqn)
                if number is not None:
                    self._depth[axis, prefix] = max(self._depth[axis, prefix], number + 1)

    @staticmethod
    def _parse(axis: str, fqn: str) -> tuple[str, int | None]:
        match = NUMBERED[axis].search(fqn) if axis in NUMBERED else None
        return (fqn[: match.start()], int(match[1])) if match else ("", None)

    def part(self, axis: str, fqn: str, nparts: int) -> int | None:
        """The part of its stack that the numbered tensor `fqn` goes to; None when it has no number for this mesh axis."""
        prefix, number = self._parse(axis, fqn)
        return None if number is None else array_split_part(self._depth[axis, prefix], nparts, number)


def target_layout(case: Case, target: Mesh, given: Layout | None = None) -> tuple[Layout, list[ReshardError]]:
    """The rule of every mesh axis that matters now or later, per tensor, and the reasons to refuse.

    `given` (a layout file, say) goes before `topology.layout` of the case, that before inference, that before defaults.
    """
    source = mesh_from_topology(case.topology.source, CASE_FILE)
    stacks = Stacks(fragment.fqn for fragment in case.fragments)
    layout: Layout = {}
    faults: list[ReshardError] = []
    without_rule: defaultdict[tuple[str, str], list[str]] = defaultdict(list)
    for tensor_id, fragments in by_tensor(case.fragments).items():
        tensor = Tensor(tensor_id, fragments[0].fqn, fragments[0].global_shape)
        known = _read_rules(tensor, case.topology.layout, given)
        faults += _rule_faults(tensor, known)
        inferred = _inferred_rules(source, fragments)
        rules = {axis: rule for axis, rule in inferred.items() if not isinstance(rule, Undetermined)} | known
        for axis, size in target.split_axes.items():
            if axis in rules:
                continue
            unclear = inferred.get(axis)
            default = default_rule(axis, size, tensor, stacks)
            if isinstance(unclear, Undetermined):
                without_rule[axis, unclear.reason].append(tensor_id)
            elif default is None:
                without_rule[axis, "the source has no such axis and no layout says what it does"].append(tensor_id)
            else:
                rules[axis] = default
        layout[tensor_id] = rules
    for (axis, reason), tensors in without_rule.items():
        faults.append(
            InputError(
                f"mesh axis {axis}",
                f"{reason}, for {len(tensors)} tensors: {names(tensors, most=20)}; say with --layout "
                "or in topology.layout what it does",
            )
        )
    return layout, faults


def _read_rules(tensor: Tensor, *layouts: Layout | None) -> dict[str, Rule]:
    rules: dict[str, Rule] = {}
    for layout in layouts:
        rules |= {canonical(axis): rule for axis, rule in ((layout or {}).get(tensor.tensor_id) or {}).items()}
    return rules


def _rule_faults(tensor: Tensor, rules: Mapping[str, Rule]) -> list[ReshardError]:
    where = f"{CASE_FILE}: topology.layout of {tensor.tensor_id}"
    faults: list[ReshardError] = []
    for axis, rule in rules.items():
        if isinstance(rule, int) and rule >= len(tensor.shape):
            faults.append(InputError(where, f"{axis} splits axis {rule} of a tensor with {len(tensor.shape)} axes"))
        elif isinstance(rule, Stages) and (not rule.stages or max(rule.stages) >= rule.of):
            faults.append(
                InputError(
                    where,
                    f"{axis} places it at stages {list(rule.stages)} of {rule.of}; expected stages from 0 to {rule.of - 1}",
                )
            )
    return faults


def default_rule(axis: str, size: int, tensor: Tensor, stacks: Stacks) -> Rule | None:
    """What an axis that the source doesn't have does to a tensor; None: only a layout can say."""
    if axis in ("dp", "cp") or 0 in tensor.shape:
        return "replicate"
    if axis == "fsdp":
        return 0 if tensor.shape else "replicate"
    if axis in NUMBERED:
        part = stacks.part(axis, tensor.fqn, size)
        if part is None and axis == "ep":
            return "replicate"
        if part is None:
            part = 0 if any(word in tensor.fqn for word in EMBEDDING) else size - 1
        return Stages((part,), size)
    return None if tensor.shape else "replicate"


@dataclass(frozen=True)
class Undetermined:
    """Why the coordinates don't show what a mesh axis does."""

    reason: str


def _inferred_rules(source: Mesh, fragments: Sequence[Fragment]) -> Mapping[str, Rule | Undetermined]:
    holders: defaultdict[MeshTuple, list[Box]] = defaultdict(list)
    for fragment in fragments:
        holders[_mesh_tuple(fragment.topology_coordinates, source)].append(fragment.box)
    held = tuple(sorted((where, tuple(sorted(boxes))) for where, boxes in holders.items()))
    return infer_rules(tuple(source.split_axes.items()), held)


@lru_cache(maxsize=1 << 16)  # every tensor of a rank has them
def _mesh_tuple(coordinates: Coordinates, mesh: Mesh) -> MeshTuple:
    index_of = {canonical(axis): index for axis, index in coordinates}
    return tuple(index_of[axis] for axis in mesh.split_axes)


@lru_cache(maxsize=4096)  # the layers of a model repeat each other
def infer_rules(
    axes: tuple[tuple[str, int], ...], held: tuple[tuple[MeshTuple, tuple[Box, ...]], ...]
) -> Mapping[str, Rule | Undetermined]:
    """What each mesh axis does to one tensor, from the boxes that each mesh tuple holds.

    >>> infer_rules((("dp", 2), ("tp", 2)), tuple(((d, t), (((0, 2 * t), (4, 2)),)) for d in (0, 1) for t in (0, 1)))
    {'dp': 'replicate', 'tp': 1}
    """
    boxes = dict(held)
    with_elements = {where: tuple(box for box in here if 0 not in box[1]) for where, here in held}
    with_elements = {where: here for where, here in with_elements.items() if here}
    rules: dict[str, Rule | Undetermined] = {}
    for index, (axis, size) in enumerate(axes):
        rules[axis] = _infer_axis(axis, size, _lines(boxes, index), _lines(with_elements, index))
    return rules


Line = dict[int, tuple[Box, ...]]  # the boxes at each index of one mesh axis, all other coordinates equal


def _lines(boxes: Mapping[MeshTuple, tuple[Box, ...]], index: int) -> list[Line]:
    lines: defaultdict[MeshTuple, Line] = defaultdict(dict)
    for where, here in boxes.items():
        lines[where[:index] + where[index + 1 :]][where[index]] = here
    return list(lines.values())


def _infer_axis(axis: str, size: int, lines: list[Line], lines_with_elements: list[Line]) -> Rule | Undetermined:
    followed = _axes_followed(lines)
    if len(followed) > 1:  # empty parts may stand anywhere: then they are no evidence
        lines = lines_with_elements
        followed = _axes_followed(lines)
    if len(followed) > 1:
        return Undetermined(f"its coordinate changes the boxes along tensor axes {names(sorted(followed))} at once")
    if followed:
        return followed.pop()
    if any(len(set(line.values())) > 1 for line in lines):
        return Undetermined("its coordinate changes which boxes are held, along no one tensor axis")
    indices = {index for line in lines for index in line}
    varies = any(set(line) != indices for line in lines)
    if varies and len({boxes for line in lines for boxes in line.values()}) > 1:
        return Undetermined("which of its coordinates hold a box depends on the other coordinates")
    if len(indices) in (0, size) or axis not in NUMBERED:
        return "replicate"  # on all coordinates, or saved by some of them once for all
    if varies:
        return Undetermined("where it places the tensor depends on the other coordinates")
    return Stages(tuple(sorted(indices)), size)


def _axes_followed(lines: list[Line]) -> set[int]:
    """The tensor axes along which boxes differ between two indices of a line."""
    followed: set[int] = set()
    for line in lines:
        if len(set(line.values())) > 1:
            naxes = len(next(iter(line.values()))[0][0])
            for axis in range(naxes):
                intervals = {
                    frozenset((offset[axis], extent[axis]) for offset, extent in boxes) for boxes in line.values()
                }
                if len(intervals) > 1:
                    followed.add(axis)
    return followed


class Placement(NamedTuple):
    """All that decides which ranks of a mesh hold a tensor of `shape`, and which box of it; equal for many tensors.

    `splits`: the tensor axis that each mesh axis splits; `stages`: the coordinates at which a mesh axis holds it; `cuts`: how
    a mesh axis splits, where it isn't as `torch.chunk` does; `padded`: the shape that is split in place of `shape`, if any.
    """

    shape: tuple[int, ...]
    splits: tuple[tuple[str, int], ...]
    stages: tuple[tuple[str, tuple[int, ...]], ...]
    mesh: Mesh
    cuts: tuple[tuple[str, Cut], ...] = ()
    padded: tuple[int, ...] | None = None


def placement_of(
    tensor: Tensor,
    rules: Mapping[str, Rule],
    mesh: Mesh,
    stacks: Stacks,
    cuts: Mapping[str, Cut] | None = None,
    padded: tuple[int, ...] | None = None,
) -> Placement:
    splits, stages = [], []
    for axis, size in mesh.split_axes.items():
        rule = rules[axis]
        if isinstance(rule, Stages):
            stages.append((axis, tuple(sorted(_stages(axis, size, rule, tensor, stacks)))))
        elif isinstance(rule, int):
            splits.append((axis, rule))
    held = tuple((axis, cut) for axis, cut in (cuts or {}).items() if axis in dict(splits))
    return Placement(tensor.shape, tuple(splits), tuple(stages), mesh, held, padded)


class Held(NamedTuple):
    """What a rank stores of a tensor: one array of shape `stored`, and each box with the elements stored before it, per axis."""

    rank: int
    stored: tuple[int, ...]
    boxes: tuple[tuple[Box, tuple[int, ...]], ...]


@lru_cache(maxsize=64)
def target_arrays(placement: Placement) -> tuple[Held, ...]:
    """What every rank that holds the tensor stores, by rank; Misfit when a cut of the placement doesn't fit.

    Several boxes to an array where the tensor is fused.
    """
    if not placement.cuts and placement.padded is None:
        none = (0,) * len(placement.shape)
        return tuple(Held(rank, box[1], ((box, none),)) for rank, box in target_boxes(placement))
    ranks, _, _ = boxes_of(placement)
    coordinates = _coordinates(placement.mesh)
    return tuple(
        _held(placement, rank, {axis: int(of[rank]) for axis, of in coordinates.items()}) for rank in ranks.tolist()
    )


def _held(placement: Placement, rank: int, coordinates: Mapping[str, int]) -> Held:
    sizes, tensor_axis_of, cuts = dict(placement.mesh.axes), dict(placement.splits), dict(placement.cuts)
    columns: list[Intervals] = [((0, size),) for size in placement.padded or placement.shape]
    for axis in nesting_order(tensor_axis_of):
        column = tensor_axis_of[axis]
        columns[column] = cut_axis(columns[column], sizes[axis], coordinates[axis], cuts.get(axis))
    return Held(rank, *stored_boxes(columns, placement.shape))


@lru_cache(maxsize=64)
def target_boxes(placement: Placement) -> tuple[tuple[int, Box], ...]:
    """(rank, box) of every rank that holds the tensor, by rank; parts without elements included."""
    ranks, offset, extent = boxes_of(placement)
    return tuple(
        (rank, (tuple(start), tuple(size)))
        for rank, start, size in zip(ranks.tolist(), offset.tolist(), extent.tolist(), strict=True)
    )


def boxes_of(placement: Placement) -> tuple[Ints, Ints, Ints]:
    """As `target_boxes`, in arrays: ranks (n,), offsets (n, naxes), extents (n, naxes)."""
    offset, extent = _all_boxes(placement.shape, placement.splits, placement.mesh)
    coordinates = _coordinates(placement.mesh)
    holds = np.ones(placement.mesh.size, bool)
    for axis, held in placement.stages:
        holds &= np.isin(coordinates[axis], held)
    ranks = np.flatnonzero(holds)
    return ranks, offset[ranks], extent[ranks]


@lru_cache(maxsize=64)  # the layers of a model repeat each other
def _all_boxes(shape: tuple[int, ...], splits: tuple[tuple[str, int], ...], mesh: Mesh) -> tuple[Ints, Ints]:
    """The box that a rank holds, if it holds any: offsets and extents (mesh.size, naxes).

    Parts are cut as by `torch.chunk`; mesh axes on one tensor axis nest.
    """
    sizes, coordinates, tensor_axis_of = dict(mesh.axes), _coordinates(mesh), dict(splits)
    offset = np.zeros((mesh.size, len(shape)), np.int64)
    extent = np.tile(np.array(shape, np.int64), (mesh.size, 1))
    for axis in nesting_order(tensor_axis_of):
        column = tensor_axis_of[axis]
        start, stop = chunk(extent[:, column], sizes[axis], coordinates[axis])
        offset[:, column] += start
        extent[:, column] = stop - start
    return offset, extent


@lru_cache(maxsize=4)
def _coordinates(mesh: Mesh) -> dict[str, Ints]:
    """Of every rank the index on each mesh axis."""
    sizes = dict(mesh.axes)
    indices = np.unravel_index(np.arange(mesh.size), tuple(sizes.values()) or (1,))
    return dict(zip(sizes, indices, strict=False))


def _stages(axis: str, size: int, rule: Stages, tensor: Tensor, stacks: Stacks) -> set[int]:
    """The coordinates of the target's mesh axis, of `size`, at which the tensor is held."""
    if rule.of == size:
        return set(rule.stages)
    part = stacks.part(axis, tensor.fqn, size)
    if part is not None:
        return {part}
    last = rule.of - 1
    return {size - 1 if rule.of > 1 and stage == last else stage * size // rule.of for stage in rule.stages}


def partition_axes(rules: Mapping[str, Rule], target: Mesh) -> tuple[int, ...]:
    """The tensor axes that a mesh axis of size > 1 splits."""
    return tuple(sorted({rule for axis in target.split_axes if isinstance(rule := rules[axis], int)}))
