"""A mesh of ranks: named axes with sizes, in rank order, slowest first."""

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass

from reshard_mpi.errors import InputError, ReshardError, UsageError

OTHER_NAMES = {"dp_replicate": "dp", "dp_shard": "fsdp"}
RANK_ORDER = ("pp", "dp", "fsdp", "ep", "cp", "tp")
# On one tensor axis the innermost split comes last: what FSDP shards is the TP shard.
NESTING_ORDER = ("pp", "ep", "cp", "tp", "dp", "fsdp")
MOST_RANKS = 100_000  # rank-00000 to rank-99999


def shard_name(rank: int, suffix: str = "safetensors") -> str:
    """The file of a rank in a case.

    >>> shard_name(3), shard_name(12, "h5")
    ('rank-00003.safetensors', 'rank-00012.h5')
    """
    return f"rank-{rank:05d}.{suffix}"


@dataclass(frozen=True)
class Mesh:
    """Mesh axes and their sizes in rank order, slowest first; no axes: one rank.

    >>> Mesh.of({"tp": 2, "pp": 3}).coordinates(3)
    {'pp': 1, 'tp': 1}
    """

    axes: tuple[tuple[str, int], ...]

    @classmethod
    def of(cls, sizes: Mapping[str, int]) -> "Mesh":
        """Axes in the rank order of SPEC section 2: unknown ones first, alphabetically."""
        known = [axis for axis in RANK_ORDER if axis in sizes]
        unknown = sorted(set(sizes) - set(known))
        return cls(tuple((axis, sizes[axis]) for axis in [*unknown, *known]))

    @property
    def size(self) -> int:
        return math.prod(size for _, size in self.axes)

    @property
    def split_axes(self) -> dict[str, int]:
        """The axes of more than one coordinate: an axis of size 1 does nothing to a tensor."""
        return {axis: size for axis, size in self.axes if size > 1}

    def coordinates(self, rank: int) -> dict[str, int]:
        found = {}
        for axis, size in reversed(self.axes):
            rank, found[axis] = divmod(rank, size)
        return dict(reversed(found.items()))

    def topology(self) -> dict[str, int]:
        """As `case.json` writes it."""
        return dict(self.axes) or {"world_size": 1}

    def __str__(self) -> str:
        return ",".join(f"{axis}={size}" for axis, size in self.axes) or "single"


def canonical(axis: str) -> str:
    """The one name of a mesh axis: `dp_shard` is `fsdp`."""
    return OTHER_NAMES.get(axis, axis)


def nesting_order(axes: Mapping[str, int]) -> list[str]:
    """Mesh axes that split one tensor axis, outermost first."""
    known = [axis for axis in NESTING_ORDER if axis in axes]
    return [*sorted(set(axes) - set(known)), *known]


def parse_target(text: str, where: str = "--target") -> Mesh:
    """`tp=4,pp=2` or `single`; UsageError for anything else.

    >>> str(parse_target("tp=4,pp=2"))
    'pp=2,tp=4'
    """
    if text.strip() == "single":
        return Mesh(())
    sizes: dict[str, int] = {}
    for word in text.split(","):
        match = re.fullmatch(r"\s*([A-Za-z_]\w*)\s*=\s*(\d{1,9})\s*", word, re.ASCII)
        if not match:
            raise UsageError(where, f"{word!r} is no mesh axis with a size; write it like tp=4, pp=2,tp=2 or single")
        axis = match[1]
        if canonical(axis) in map(canonical, sizes):
            raise UsageError(where, f"mesh axis {axis} is given twice; give each axis once")
        sizes[axis] = int(match[2])
    return mesh_from_topology(sizes, where, UsageError)


def mesh_from_topology(topology: Mapping[str, int], where: str, error: type[ReshardError] = InputError) -> Mesh:
    """The mesh that `case.json` (or an option) describes; `error` at `where` when it describes none."""
    if "world_size" in topology:
        if dict(topology) == {"world_size": 1}:
            return Mesh(())
        raise error(
            where,
            f"{dict(topology)} names no mesh axis; say how the ranks are divided, with axes such as "
            f"{', '.join(RANK_ORDER)} (tp=4, say)",
        )
    sizes: dict[str, int] = {}
    for name, size in topology.items():
        axis = canonical(name)
        if axis in sizes or axis == "rank" or not axis:
            raise error(
                where,
                f"mesh axis {name!r} can't be used: it is given twice or reserved; use {', '.join(RANK_ORDER)} or another name",
            )
        if size < 1:
            raise error(where, f"mesh axis {name} has size {size}; expected 1 or more")
        sizes[axis] = size
    mesh = Mesh.of(sizes)
    if not mesh.axes:
        raise error(where, "no mesh axis; expected axes such as tp=4, or single")
    if mesh.size > MOST_RANKS:
        raise error(where, f"{mesh} has {mesh.size} ranks; at most {MOST_RANKS} can be named")
    return mesh
