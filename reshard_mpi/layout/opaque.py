"""State of single ranks that is no part of a global tensor: of random number generators, of data loaders.

    [opaque]
    "rng_state.*" = "copy"     # rank r of the target has what rank r of the source had; refused unless there are as many
    "loader.**"   = "drop"     # left out, and listed
    "scratch"     = "refuse"

In a case such a state is a tensor of its own for every rank, held whole by that rank alone. Where the ranks are others, nobody
can say whose it should be, so it is never dealt anew. Tensors of the roles `rng_state` and `opaque` that one of several ranks
holds are copied so without being asked for.
"""

from collections import defaultdict
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple, get_args

from reshard_mpi.checkpoint.manifest import CASE_FILE, Case, Layout, Stages, by_tensor
from reshard_mpi.checkpoint.mesh import Mesh, mesh_from_topology
from reshard_mpi.errors import InputError, ReshardError, names
from reshard_mpi.layout.patterns import matches

ROLES = ("rng_state", "opaque")
Treatment = Literal["copy", "drop", "refuse"]


@dataclass(frozen=True)
class Treated:
    """One line of [opaque]; `where` names it."""

    where: str
    pattern: str
    treatment: Treatment


class Opaque(NamedTuple):
    """The states of a case, by the ids of their tensors: those to be left out, and by line those to be copied or refused.

    None: no line says so, but the role. `warnings` tell of lines without effect.
    """

    dropped: frozenset[str]
    copied: dict[Treated | None, list[str]]
    refused: dict[Treated, list[str]]
    warnings: tuple[str, ...]


def parse_treated(pattern: str, raw: object, where: str) -> Treated:
    """One line of [opaque]; InputError at `where` when it is none."""
    for treatment in get_args(Treatment):
        if raw == treatment:
            return Treated(where, pattern, treatment)
    raise InputError(where, f"is {raw!r}; expected {', '.join(get_args(Treatment))}")


def find_opaque(case: Case, said: Sequence[Treated]) -> Opaque:
    """What is to become of the states of ranks. The first line that matches counts."""
    dropped: set[str] = set()
    copied: defaultdict[Treated | None, list[str]] = defaultdict(list)
    refused: defaultdict[Treated, list[str]] = defaultdict(list)
    if not said and not any(f.role in ROLES for f in case.fragments):
        return Opaque(frozenset(), {}, {}, ())
    idle = dict.fromkeys(said)
    for tensor_id, fragments in by_tensor(case.fragments).items():
        like = fragments[0]
        line = next((one for one in said if matches(one.pattern, like.fqn)), None)
        idle.pop(line, None)  # type: ignore[arg-type]
        if line is None:
            if like.role in ROLES and case.world_size > 1 and len({f.rank for f in fragments}) == 1:
                copied[None].append(tensor_id)
        elif line.treatment == "drop":
            dropped.add(tensor_id)
        else:
            (copied if line.treatment == "copy" else refused)[line].append(tensor_id)
    warnings = tuple(f"{line.where}: matches no tensor" for line in idle)
    return Opaque(frozenset(dropped), dict(copied), dict(refused), warnings)


def opaque_rules(
    case: Case, target: Mesh, included: Collection[str], opaque: Opaque
) -> tuple[Layout, list[ReshardError]]:
    """The rules that leave the copied states of the `included` tensors on their ranks; and the reasons to refuse."""
    source, tensors, kept = (
        mesh_from_topology(case.topology.source, CASE_FILE),
        by_tensor(case.fragments),
        set(included),
    )
    rules: Layout = {}
    faults: list[ReshardError] = []
    for refusing, states in opaque.refused.items():
        wanted = [tensor for tensor in states if tensor in kept]
        if wanted:
            faults.append(
                InputError(refusing.where, f"refuses {names(wanted)}; drop it, or leave it out with --exclude")
            )
    for line, states in opaque.copied.items():
        states = [tensor for tensor in states if tensor in kept]
        shared = [tensor for tensor in states if source.size > 1 and len({f.rank for f in tensors[tensor]}) > 1]
        if shared and line is not None:
            faults.append(InputError(line.where, f"{names(shared)} is held by several ranks: it is the state of none"))
        elif states and source.size != target.size:
            faults.append(
                InputError(
                    f"tensor {names(states)}",
                    f"is the state of single ranks, of which the source has {source.size} and the target {target.size}; "
                    'say "drop" in [opaque] of a layout file, or leave it out with --exclude',
                )
            )
        for tensor in states:
            at = target.coordinates(tensors[tensor][0].rank) if source.size == target.size > 1 else {}
            rules[tensor] = {axis: Stages((at[axis],), size) for axis, size in target.split_axes.items() if axis in at}
    return rules, faults
