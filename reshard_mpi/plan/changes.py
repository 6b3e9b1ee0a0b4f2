"""What a job changes in tensors besides their layout: their names and their types; and which tensors it leaves out. Pure.

Renaming comes first: layouts, --include, --exclude and --cast know the new names. The source itself stays as it is, for what is
checked on it.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from msgspec.structs import replace as with_fields

from reshard_mpi.checkpoint.manifest import Case, Fragment
from reshard_mpi.checkpoint.wanted import RenameRule, new_name
from reshard_mpi.errors import InputError
from reshard_mpi.storage.source import Source


class Renamed(NamedTuple):
    """A tensor by its new id, and the fqn that it had and has."""

    tensor: str
    old: str
    new: str


class Dropped(NamedTuple):
    """A tensor that is left out, by id and fqn."""

    tensor: str
    fqn: str


@dataclass(frozen=True)
class Changes:
    """Every tensor that is not in the target as it was, sorted by id; `source_ids` are the ids that renamed ones had."""

    renamed: tuple[Renamed, ...] = ()
    dropped: tuple[Dropped, ...] = ()
    source_ids: Mapping[str, str] | None = None
    warnings: tuple[str, ...] = ()

    def facts(self) -> dict[str, list[dict[str, str]]]:
        """As JSON values."""
        return {
            "renamed": [{"tensor": tensor, "from": old, "to": new} for tensor, old, new in self.renamed],
            "dropped": [{"tensor": tensor, "fqn": fqn} for tensor, fqn in self.dropped],
        }


def renamed_source(source: Source, rules: Sequence[RenameRule]) -> tuple[Source, Changes]:
    """The source with its tensors renamed; InputError when two would have one name.

    An id that is the fqn is renamed with it. Ids and keys of fragments, as what they are in the source, stay.
    """
    if not rules:
        return source, Changes()
    case = source.case
    fqns = {fragment.logical_tensor_id: fragment.fqn for fragment in case.fragments}
    new_fqns = {fqn: new_name(fqn, rules) for fqn in dict.fromkeys(fqns.values())}
    _check_names(new_fqns)
    ids = {tensor: new_fqns[fqn] if tensor == fqn else tensor for tensor, fqn in fqns.items()}
    _check_ids(ids, fqns)
    renamed = sorted(Renamed(ids[tensor], fqn, new_fqns[fqn]) for tensor, fqn in fqns.items() if new_fqns[fqn] != fqn)
    changes = Changes(
        tuple(renamed),
        source_ids={new: old for old, new in ids.items()},
        warnings=_without_effect(new_fqns, rules),
    )
    return with_case(source, _renamed_case(case, new_fqns, ids)), changes


def _check_names(new_fqns: Mapping[str, str]) -> None:
    holder: dict[str, str] = {}
    for fqn, new in new_fqns.items():
        if not new:
            raise InputError("--rename", f"{fqn!r} would have an empty name; change the rule")
        other = holder.setdefault(new, fqn)
        if other != fqn:
            raise InputError("--rename", f"{other!r} and {fqn!r} would both be called {new!r}; change the rule")


def _check_ids(ids: Mapping[str, str], fqns: Mapping[str, str]) -> None:
    holder: dict[str, str] = {}
    for tensor, new in ids.items():
        other = holder.setdefault(new, tensor)
        if other != tensor:
            raise InputError(
                "--rename", f"tensors {other!r} and {tensor!r} would both have the id {new!r}; change the rule"
            )


def _without_effect(new_fqns: Mapping[str, str], rules: Sequence[RenameRule]) -> tuple[str, ...]:
    """A rule that changes nothing is hardly what was meant."""
    names, unused = list(new_fqns), []
    for rule in rules:
        changed = [new_name(name, [rule]) for name in names]
        if changed == names:
            unused.append(f"--rename: '{rule}' changes no name of {len(names)}")
        names = changed
    return tuple(unused)


def _renamed_case(case: Case, new_fqns: Mapping[str, str], ids: Mapping[str, str]) -> Case:
    def renamed(fragment: Fragment) -> Fragment:
        fqn, tensor = new_fqns[fragment.fqn], ids[fragment.logical_tensor_id]
        if (fqn, tensor) == (fragment.fqn, fragment.logical_tensor_id):
            return fragment
        return with_fields(fragment, fqn=fqn, logical_tensor_id=tensor)

    layout = case.topology.layout
    if layout is not None:
        layout = {ids.get(tensor, tensor): rules for tensor, rules in layout.items()}
    return with_fields(
        case,
        topology=with_fields(case.topology, layout=layout),
        fragments=tuple(map(renamed, case.fragments)),
        oracles=tuple(
            with_fields(oracle, logical_tensor_id=ids.get(oracle.logical_tensor_id, oracle.logical_tensor_id))
            for oracle in case.oracles
        ),
    )


def dropped_from(case: Case, kept: Collection[str]) -> tuple[Dropped, ...]:
    """The tensors that aren't kept."""
    fqns = {fragment.logical_tensor_id: fragment.fqn for fragment in case.fragments}
    kept = set(kept)
    return tuple(sorted(Dropped(tensor, fqn) for tensor, fqn in fqns.items() if tensor not in kept))


def with_case(source: Source, case: Case) -> Source:
    """The source as if its manifest said `case`."""
    return replace(source, parsed=with_fields(source.parsed, case=case))
