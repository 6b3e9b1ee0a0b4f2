"""Block-scaled tensors: a weight of 8 bits, and the scale of each of its blocks, which must be cut together.

    weight        float8_e4m3fn [out, in]                       |----|----|--  in blocks of 128 by 128; the last may be smaller
    weight_scale_inv  float32 [ceil(out/128), ceil(in/128)]     |  s |  s | s

A tensor of a float8 type and one that is called as it is with `_scale_inv` behind, of as many axes, are such a pair (as
DeepSeek and transformers write them), in blocks of 128 where that fits. A layout file can say more:

    [scales]
    "mlp.*.weight_scale" = [128, 128]    # other blocks, or scales of another name: of what is called so without `_scale`
    "router.weight_scale_inv" = "apart"  # no pair: each is cut by itself

The scale follows its weight: what a layout says of the weight counts for both, in blocks. Refused is a weight that would be cut
within a block, and a scale that would be cut elsewhere than its weight (unless it is whole wherever its weight is). `fsdp` may
cut anywhere: what it shards is put together before it is used.
"""

import math
from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

from reshard_mpi.checkpoint.manifest import Case, Fragment
from reshard_mpi.errors import InputError, ReshardError, names
from reshard_mpi.layout.cuts import Box, Cut, Member, Misfit
from reshard_mpi.layout.patterns import matches
from reshard_mpi.layout.rules import Placement, target_arrays

SUFFIXES = ("_scale_inv", "_scale")
USUAL_BLOCK = 128
APART = "apart"
ANYWHERE = "fsdp"  # the mesh axis that may cut within blocks

Blocks = tuple[int, ...]  # elements along each axis


@dataclass(frozen=True)
class Scaled:
    """One line of [scales]; `where` names it. `blocks` is None for "apart"."""

    where: str
    pattern: str
    blocks: Blocks | None


class Pair(NamedTuple):
    """A weight and its scale, by the ids of their tensors. `blocks` is None where nothing says how large they are."""

    weight: str
    scale: str
    blocks: Blocks | None


class Pairs(NamedTuple):
    """Those that are cut together, the scales among all tensors, and what is wrong with what a layout says of them."""

    together: tuple[Pair, ...]
    scales: frozenset[str]
    faults: tuple[ReshardError, ...]


def parse_scaled(pattern: str, raw: object, where: str) -> Scaled:
    """One line of [scales]; InputError at `where` when it is none."""
    if raw == APART:
        return Scaled(where, pattern, None)
    if not isinstance(raw, list) or not raw or not all(type(size) is int and 0 < size < 1 << 62 for size in raw):
        raise InputError(where, f'is {raw!r}; expected the sizes of a block like [128, 128], or "{APART}"')
    return Scaled(where, pattern, tuple(raw))


def find_pairs(case: Case, said: Sequence[Scaled]) -> Pairs:
    """The block-scaled pairs of a case. The first line that matches a scale counts; one may match none."""
    tensors = {(f.component_id, f.fqn): f for f in case.fragments}
    together: list[Pair] = []
    scales: set[str] = set()
    faults: list[ReshardError] = []
    for (component, fqn), scale in tensors.items():
        weight = next((tensors.get((component, fqn.removesuffix(s))) for s in SUFFIXES if fqn.endswith(s)), None)
        line = next((one for one in said if weight and matches(one.pattern, fqn)), None)
        if weight is None or not (line or _is_usual(weight, scale)):
            continue
        scales.add(scale.logical_tensor_id)
        if line is None or line.blocks is not None:
            blocks = line.blocks if line else (USUAL_BLOCK,) * len(weight.global_shape)
            fits = blocks is not None and _fits(weight, scale, blocks)
            together.append(Pair(weight.logical_tensor_id, scale.logical_tensor_id, blocks if fits else None))
            if line is not None and not fits:
                shapes = f"{list(weight.global_shape)} and {list(scale.global_shape)}"
                faults.append(InputError(line.where, f"doesn't fit {weight.fqn} and its scale: {shapes}"))
    return Pairs(tuple(together), frozenset(scales), tuple(faults))


def _is_usual(weight: Fragment, scale: Fragment) -> bool:
    """Without a word in a layout; one scale for all of a tensor is none of blocks."""
    is_named = scale.fqn == weight.fqn + SUFFIXES[0] and weight.dtype.startswith("float8")
    naxes, is_one = len(weight.global_shape), math.prod(scale.global_shape) == 1
    return (
        is_named
        and len(scale.global_shape) == naxes
        and not (is_one and max(weight.global_shape, default=0) > USUAL_BLOCK)
    )


def _fits(weight: Fragment, scale: Fragment, blocks: Blocks) -> bool:
    shape = weight.global_shape
    return len(shape) == len(blocks) and scale.global_shape == tuple(
        -(-n // b) for n, b in zip(shape, blocks, strict=True)
    )


def in_blocks(cut: Cut, block: int) -> Cut:
    """How a scale is cut where its weight is cut so.

    >>> in_blocks(Cut((Member(512, 64), Member(200))), 128)
    Cut(members=(Member(size=4, unit=1, repeats=False), Member(size=2, unit=1, repeats=False)))
    """
    return Cut(tuple(Member(-(-m.size // block), math.lcm(m.unit, block) // block, m.repeats) for m in cut.members))


def pair_faults(pairs: Collection[Pair], placements: Mapping[str, Placement]) -> list[ReshardError]:
    """Why pairs can't be cut as they would be. `placements`: of every tensor of a pair in the target."""
    found: defaultdict[str, list[str]] = defaultdict(list)
    for pair in pairs:
        weight, scale = (_but_anywhere(placements[tensor]) for tensor in (pair.weight, pair.scale))
        reason = _misfit(weight, scale, pair.blocks)
        if reason:
            found[reason].append(pair.weight)
    return [InputError(f"tensor {names(tensors)}", reason) for reason, tensors in found.items()]


def _but_anywhere(placement: Placement) -> Placement:
    """The placement without what may cut anywhere."""
    return placement._replace(
        splits=tuple(split for split in placement.splits if split[0] != ANYWHERE),
        cuts=tuple(cut for cut in placement.cuts if cut[0] != ANYWHERE),
    )


@lru_cache(maxsize=256)  # the layers of a model repeat each other
def _misfit(weight: Placement, scale: Placement, blocks: Blocks | None) -> str | None:
    if blocks is None and weight.splits:
        return (
            "is scaled in blocks of unknown size and would be cut; say in [scales] of a layout file how large they are"
        )
    try:
        arrays = target_arrays(weight)
    except Misfit:
        return None  # which is told of the weight itself
    try:
        wanted = {
            held.rank: sorted(
                _blocks_of(box, weight.shape, blocks or weight.shape) for box, _ in held.boxes if 0 not in box[1]
            )
            for held in arrays
        }
        found = {held.rank: sorted(box for box, _ in held.boxes) for held in target_arrays(scale)}
    except Misfit as misfit:
        return f'{misfit}; choose another size of the mesh axis, or say "{APART}" in [scales] of a layout file'
    whole = [((0,) * len(scale.shape), scale.shape)]
    for rank, boxes in wanted.items():
        if boxes and found.get(rank) not in (boxes, whole):
            return (
                f"has a scale that would be cut elsewhere, on target rank {rank}; say with --layout what mesh axes do to "
                f'both, or "{APART}" in its [scales]'
            )
    return None


def _blocks_of(box: Box, shape: Sequence[int], blocks: Blocks) -> Box:
    """A box in blocks; Misfit when its ends are none of theirs."""
    offset, extent = [], []
    for axis, (start, size, whole, block) in enumerate(zip(*box, shape, blocks, strict=True)):
        for end in (start, start + size):
            if end % block and end != whole:
                raise Misfit(
                    f"would be cut at element {end} of axis {axis}, within a block of {block} that has one scale"
                )
        offset.append(start // block)
        extent.append(-(-(start + size) // block) - start // block)
    return tuple(offset), tuple(extent)
