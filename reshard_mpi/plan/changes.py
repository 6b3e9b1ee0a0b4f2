"""What a job changes in tensors besides their layout: their names and their types; and which tensors it leaves out. Pure.

Renaming comes first: layouts, --include, --exclude and --cast know the new names. The source itself stays as it is, for what is
checked on it.
"""

import fnmatch
from collections.abc import Collection, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, replace
from typing import NamedTuple

from msgspec.structs import replace as with_fields

from reshard_mpi.checkpoint.manifest import Case, Fragment
from reshard_mpi.checkpoint.wanted import CAST_FROM, CastRule, Operated, RenameRule, Step, cast_rule_of, new_name
from reshard_mpi.errors import InputError, UsageError, names, plural
from reshard_mpi.layout.operations import KINDS
from reshard_mpi.layout.target import Outgoing
from reshard_mpi.storage.cast import CastArray
from reshard_mpi.storage.safetensors import StoredArray
from reshard_mpi.storage.source import Source


class Renamed(NamedTuple):
    """A tensor by its new id, and the fqn that it had and has."""

    tensor: str
    old: str
    new: str


class Cast(NamedTuple):
    """A tensor by id and fqn, and the dtype that it had and has."""

    tensor: str
    fqn: str
    old: str
    new: str


class Dropped(NamedTuple):
    """A tensor that is left out, by id and fqn."""

    tensor: str
    fqn: str


class Padded(NamedTuple):
    """A tensor by id, its shape, and the shape to which the arrays that hold it are padded."""

    tensor: str
    shape: tuple[int, ...]
    stored: tuple[int, ...]


@dataclass(frozen=True)
class Changes:
    """Every tensor that is not in the target as it was; `source_ids` are the ids that renamed ones had.

    `operated` are in the order in which operations were applied, the others sorted by id; `renamed` came after those.
    """

    renamed: tuple[Renamed, ...] = ()
    cast: tuple[Cast, ...] = ()
    dropped: tuple[Dropped, ...] = ()
    operated: tuple[Operated, ...] = ()
    padded: tuple[Padded, ...] = ()
    source_ids: Mapping[str, str] | None = None
    warnings: tuple[str, ...] = ()

    def facts(self) -> dict[str, list[dict[str, object]]]:
        """As JSON values."""
        operated: dict[str, list[dict[str, object]]] = {kind: [] for kind in KINDS.values()}
        for kind, fqn, detail in self.operated:
            operated[kind].append({"from": fqn, **detail} if kind == "renamed" else {"tensor": fqn, **detail})
        operated["renamed"] += [{"tensor": tensor, "from": old, "to": new} for tensor, old, new in self.renamed]
        return {
            **operated,
            "cast": [{"tensor": tensor, "fqn": fqn, "from": old, "to": new} for tensor, fqn, old, new in self.cast],
            "dropped": [{"tensor": tensor, "fqn": fqn} for tensor, fqn in self.dropped],
            "padded": [
                {"tensor": tensor, "from": list(shape), "to": list(stored)} for tensor, shape, stored in self.padded
            ],
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
    history = {
        ids[tensor]: source.history.get(tensor, ()) + ((Step("rename", fqn),) if new_fqns[fqn] != fqn else ())
        for tensor, fqn in fqns.items()
    }
    return replace(with_case(source, _renamed_case(case, new_fqns, ids)), history=history), changes


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
    fqns, unused = list(new_fqns), []
    for rule in rules:
        changed = [new_name(fqn, [rule]) for fqn in fqns]
        if changed == fqns:
            unused.append(f"--rename: '{rule}' changes no name of {len(fqns)}")
        fqns = changed
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


def cast_source(
    source: Source,
    kept: Collection[str],
    rules: Sequence[CastRule],
    exceptions: Sequence[str],
    scales: AbstractSet[str] = frozenset(),
) -> tuple[Source, tuple[Cast, ...], tuple[str, ...]]:
    """The source as if the kept tensors had been saved in the dtypes that they get, what is cast, and warnings.

    The `scales` of block-scaled tensors stay as they are: they belong to numbers that aren't cast either.
    Its arrays that are cast are shown behind the end of their files, under keys of their own. UsageError when tied tensors would
    get different dtypes.
    """
    if not rules:
        return source, (), ()
    tensors = {f.logical_tensor_id: f for f in source.case.fragments}
    tensors = {tensor: tensors[tensor] for tensor in kept}
    rule_of = {
        tensor: rule
        for tensor, f in tensors.items()
        if f.dtype in CAST_FROM and (rule := cast_rule_of(f.fqn, rules, exceptions))
    }
    new = {tensor: rule.dtype for tensor, rule in rule_of.items() if rule.dtype != tensors[tensor].dtype}
    spared = sorted(scales & new.keys())
    new = {tensor: dtype for tensor, dtype in new.items() if tensor not in spared}
    _check_ties(tensors, new)
    casts = tuple(
        sorted(Cast(tensor, tensors[tensor].fqn, tensors[tensor].dtype, dtype) for tensor, dtype in new.items())
    )
    warnings = [
        f"--cast: '{rule}' is for no tensor of a type that can be cast"
        for rule in rules
        if rule not in rule_of.values()
    ]
    warnings += [
        f"--cast-except: '{glob}' matches no tensor"
        for glob in exceptions
        if not any(fnmatch.fnmatchcase(f.fqn, glob) for f in tensors.values())
    ]
    if spared:
        warnings.append(f"--cast: {plural(len(spared), 'scale')} of block-scaled tensors kept: {names(spared)}")
    if rule_of and not new:
        warnings.append("--cast: every tensor is of the type that it should get; nothing is cast")
    lost = sorted(oracle.logical_tensor_id for oracle in source.case.oracles if oracle.logical_tensor_id in new)
    if lost:
        warnings.append(
            f"--cast: {plural(len(lost), 'oracle')} of cast tensors left out, which say what they were before: {names(lost)}"
        )
    return _as_if_saved_in(source, new), casts, tuple(warnings)


def _check_ties(tensors: Mapping[str, Fragment], new: Mapping[str, str]) -> None:
    tied: dict[str, tuple[str, str]] = {}
    for tensor, fragment in tensors.items():
        if fragment.tie_group_id is not None:
            dtype = new.get(tensor, fragment.dtype)
            other, other_dtype = tied.setdefault(fragment.tie_group_id, (tensor, dtype))
            if other_dtype != dtype:
                raise UsageError(
                    "--cast",
                    f"tied tensors {other!r} and {tensor!r} would be {other_dtype} and {dtype}; cast both alike, or neither",
                )


def _as_if_saved_in(source: Source, new: Mapping[str, str]) -> Source:
    """The source with these tensors in these dtypes: its fragments, its headers, and without oracles for them."""
    case = source.case
    fragments, wanted = [], set()
    for fragment in case.fragments:
        dtype = new.get(fragment.logical_tensor_id)
        if dtype is not None:
            wanted.add((fragment.payload_file, fragment.payload_key, dtype))
            fragment = with_fields(fragment, dtype=dtype, payload_key=_shown_key(fragment.payload_key, dtype))
        fragments.append(fragment)
    headers = {file: dict(arrays) for file, arrays in source.headers.items()}
    ends = {file: max((a.begin + a.nbytes for a in arrays.values()), default=0) for file, arrays in headers.items()}
    # Shown in the order in which they are stored: it is the order in which they are read.
    order = sorted(wanted, key=lambda place: (place[0], headers[place[0]][place[1]].begin, place))
    for file, key, dtype in order:
        stored = headers[file][key]
        begin = ends[file] + -ends[file] % 8 + 8  # apart from what lies before, and aligned
        cast = CastArray(key, stored.shape, stored.begin, stored.dtype, begin, dtype)
        headers[file][_shown_key(key, dtype)] = StoredArray(
            dtype, stored.shape, begin, cast.nbytes, order=stored.order, cast=cast
        )
        ends[file] = begin + cast.nbytes
    oracles = tuple(oracle for oracle in case.oracles if oracle.logical_tensor_id not in new)
    changed = with_case(source, with_fields(case, fragments=tuple(fragments), oracles=oracles))
    return replace(changed, headers=headers)


def _shown_key(key: str, dtype: str) -> str:
    """No array of a file is called so; some may be wanted in two dtypes."""
    return f"{key}\0{dtype}"


def dropped_from(case: Case, kept: Collection[str]) -> tuple[Dropped, ...]:
    """The tensors that aren't kept."""
    fqns = {fragment.logical_tensor_id: fragment.fqn for fragment in case.fragments}
    kept = set(kept)
    return tuple(sorted(Dropped(tensor, fqn) for tensor, fqn in fqns.items() if tensor not in kept))


def with_padding(changes: Changes, outgoing: Outgoing) -> Changes:
    """The changes, now that it is known how tensors will be stored."""
    shapes = {f.logical_tensor_id: f.global_shape for f in outgoing.case.fragments}
    return replace(
        changes,
        padded=tuple(Padded(tensor, shapes[tensor], stored) for tensor, stored in sorted(outgoing.padded.items())),
    )


def with_case(source: Source, case: Case) -> Source:
    """The source as if its manifest said `case`."""
    return replace(source, parsed=with_fields(source.parsed, case=case))
