"""What a layout file does to the tensors of a source before they are laid out: new names, fused tensors taken apart, padding off.

    [[operations]]
    rename = "module.**"                      # an fqn: `*` is one word, `**` any number; they stand for the same in `to`
    to = "**"

    [[operations]]
    split = "layers.*.qkv_proj.weight"        # along `axis` (0 if it isn't said), into tensors of these sizes, in this order
    into = { "layers.*.q_proj.weight" = "num_attention_heads * head_dim", "layers.*.kv_proj.weight" = 64 }

    [[operations]]
    unstack = "decoder.layers.**"             # index by index of axis 0, which is `{}` in `to`
    to = "decoder.layers.{}.**"

    [[operations]]
    trim = "embed_tokens.weight"              # to so many elements along `axis`: the padding of a vocabulary
    to = 32000

Nothing is moved for it: a part of a stored array is a fragment whose padding is the rest of it, and an index of it is an array of
its own, which has a digest only if it is all of the one that is stored. Operations are applied in their
order, each to what the ones before have made; one that finds no tensor is refused.
"""

import math
import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import msgspec
from msgspec import Struct

from reshard_mpi.checkpoint.dtypes import DTYPES
from reshard_mpi.checkpoint.manifest import Case, Fragment, Padding, Replica, Rule
from reshard_mpi.checkpoint.wanted import Operated
from reshard_mpi.errors import InputError
from reshard_mpi.storage.safetensors import StoredArray

# An operation, and what a tensor is after it.
KINDS = {"rename": "renamed", "split": "split", "unstack": "unstacked", "trim": "trimmed"}

Headers = Mapping[str, Mapping[str, StoredArray]]  # file -> key -> array
Number = Callable[[str, int | str], int]  # (where, size as the file has it) -> elements


class Says(Struct, frozen=True, forbid_unknown_fields=True):
    """An operation as the file has it; one of `rename`, `split`, `unstack`, `trim` is the pattern."""

    rename: str | None = None
    split: str | None = None
    unstack: str | None = None
    trim: str | None = None
    to: int | str | None = None
    into: dict[str, int | str] | None = None
    axis: int = 0


@dataclass(frozen=True)
class Operation:
    """One operation; `where` names it."""

    where: str
    says: Says

    @cached_property
    def _pattern(self) -> "re.Pattern[str]":
        return _captured(self.says.rename or self.says.split or self.says.unstack or self.says.trim or "")

    def _renamed(self, fqn: str, to: str) -> str | None:
        """The name that `to` makes of the words that the wildcards stand for; None: no match."""
        match = self._pattern.fullmatch(fqn)
        if match is None:
            return None
        words = iter(match.groups())
        return re.sub(r"\*\*|\*", lambda _: next(words), to)

    def apply(self, case: Case, headers: Headers, number: Number) -> tuple[Case, Headers]:
        """Case and headers after it; InputError where there is nothing to do, or it can't be done."""
        made: dict[str, dict[str, None]] = {}  # tensor -> the tensors that it becomes
        fragments: list[Fragment] = []
        arrays = {file: dict(of_file) for file, of_file in headers.items()}
        for fragment in case.fragments:
            parts = [*self._parts(fragment, arrays, number)]
            made.setdefault(fragment.logical_tensor_id, {}).update({part.logical_tensor_id: None for part in parts})
            fragments += parts
        if not any(self._pattern.fullmatch(fragment.fqn) for fragment in case.fragments):
            raise InputError(self.where, f"no tensor is called so; expected names like {case.fragments[0].fqn}")
        ids = Counter(tensor_id for names in made.values() for tensor_id in names)
        twice = [tensor_id for tensor_id, count in ids.items() if count > 1]
        if twice:
            raise InputError(self.where, f"two tensors would be called {twice[0]}; give each a name of its own")
        layout = case.topology.layout
        if layout is not None:
            unstacked = {old for old in made if self.says.unstack is not None and old not in made[old]}
            rules = {old: _without_axis_0(of) if old in unstacked else of for old, of in layout.items()}
            layout = {new: rules[old] for old, names in made.items() if old in rules for new in names}
        shapes = {fragment.logical_tensor_id: fragment.global_shape for fragment in fragments}
        oracles = [
            msgspec.structs.replace(oracle, logical_tensor_id=new)
            for oracle in case.oracles
            for new in made[oracle.logical_tensor_id]
            if len(made[oracle.logical_tensor_id]) == 1 and shapes[new] == oracle.shape
        ]
        changed = msgspec.structs.replace(
            case,
            fragments=tuple(fragments),
            topology=msgspec.structs.replace(case.topology, layout=layout),
            oracles=tuple(oracles),
            oracle_file=case.oracle_file if oracles else None,
            expected_manifest_digest=None,
        )
        return changed, arrays

    def changes(self, case: Case, number: Number) -> Iterator[Operated]:
        """What it does to the tensors of a case, each once, in the order of their ids."""
        says, kind = self.says, next(done for kind, done in KINDS.items() if getattr(self.says, kind) is not None)
        for _, fqn, shape in sorted({(f.logical_tensor_id, f.fqn, f.global_shape) for f in case.fragments}):
            if not self._pattern.fullmatch(fqn):
                continue
            if says.split is not None:
                detail: dict[str, object] = {"into": [self._renamed(fqn, to) for to in says.into or {}]}
            elif says.unstack is not None:
                names = (str(says.to).replace("{}", str(index)) for index in range(shape[0]))
                detail = {"into": [self._renamed(fqn, name) for name in names]}
            elif says.rename is not None:
                detail = {"to": self._renamed(fqn, str(says.to))}
            elif says.trim is not None:
                detail = {"axis": says.axis, "from": shape[says.axis], "to": number(self.where, says.to or 0)}
            else:
                detail = {}
            yield Operated(kind, fqn, detail)

    def _parts(
        self, fragment: Fragment, headers: dict[str, dict[str, StoredArray]], number: Number
    ) -> Iterator[Fragment]:
        says = self.says
        if not self._pattern.fullmatch(fragment.fqn):
            yield fragment
        elif says.rename is not None:
            yield _named(fragment, self._renamed(fragment.fqn, str(says.to)) or "")
        elif says.trim is not None:
            yield self._part(fragment, 0, number(self.where, says.to or 0))
        elif says.unstack is not None:
            yield from self._indices(fragment, headers[fragment.payload_file])
        else:
            yield from self._members(fragment, number)

    def _members(self, fragment: Fragment, number: Number) -> Iterator[Fragment]:
        sizes = {to: number(self.where, size) for to, size in (self.says.into or {}).items()}
        self._check_axis(fragment)
        size = fragment.global_shape[self.says.axis]
        if sum(sizes.values()) != size:
            said = " + ".join(map(str, sizes.values()))
            raise InputError(
                self.where, f"splits into {said} elements, but axis {self.says.axis} of {fragment.fqn} has {size}"
            )
        first, array = 0, f"{fragment.payload_file}:{fragment.payload_key}"
        for to, size in sizes.items():
            part = _named(self._part(fragment, first, size), self._renamed(fragment.fqn, to) or "")
            yield msgspec.structs.replace(
                part,
                fragment_id=f"{fragment.fragment_id}:{part.fqn}",
                shared_storage_id=fragment.shared_storage_id or array,
                tie_group_id=None,
                replica=_group_of(fragment.replica, part.fqn),
            )
            first += size

    def _indices(self, fragment: Fragment, arrays: dict[str, StoredArray]) -> Iterator[Fragment]:
        """Every index of axis 0 that the fragment holds."""
        self._check_axis(fragment)
        array, before = arrays[fragment.payload_key], fragment.padding.before[0]
        nindices = fragment.local_shape[0]
        nbits = DTYPES[array.dtype].nbits * math.prod(array.shape[1:])
        if array.strided or nbits % 8:
            raise InputError(self.where, f"{fragment.fragment_id} isn't stored index by index; unstack it elsewhere")
        for index in range(fragment.element_extent[0]):
            to = str(self.says.to).replace("{}", str(fragment.element_offset[0] + index))
            part = _named(fragment, self._renamed(fragment.fqn, to) or "")
            key = f"{fragment.payload_key}[{before + index}]"
            begin = array.begin + (before + index) * (nbits // 8)
            arrays[key] = StoredArray(array.dtype, array.shape[1:], begin, nbits // 8)
            replica, shared = fragment.replica, fragment.shared_storage_id
            yield msgspec.structs.replace(
                part,
                fragment_id=f"{fragment.fragment_id}:{part.fqn}",
                payload_key=key,
                global_shape=fragment.global_shape[1:],
                element_offset=fragment.element_offset[1:],
                element_extent=fragment.element_extent[1:],
                local_shape=fragment.local_shape[1:],
                padding=_padding_without_axis_0(fragment.padding),
                partition_axes=tuple(axis - 1 for axis in fragment.partition_axes if axis),
                fragment_digest=fragment.fragment_digest if nindices == 1 else None,
                shared_storage_id=f"{shared}[{before + index}]" if shared else None,
                replica=_group_of(replica, part.fqn),
                tie_group_id=None,
            )

    def _check_axis(self, fragment: Fragment) -> None:
        if not 0 <= self.says.axis < len(fragment.global_shape):
            raise InputError(
                self.where, f"is of axis {self.says.axis}, but {fragment.fqn} has {len(fragment.global_shape)} axes"
            )

    def _part(self, fragment: Fragment, first: int, size: int) -> Fragment:
        """What the fragment holds of the elements [first, first + size) along the axis, as a tensor of its own."""
        self._check_axis(fragment)
        axis, whole = self.says.axis, fragment.global_shape[self.says.axis]
        if first + size > whole:
            raise InputError(
                self.where, f"{first + size} elements are wanted of axis {axis} of {fragment.fqn}: {whole}"
            )
        offset, extent = fragment.element_offset[axis], fragment.element_extent[axis]
        start = min(max(offset, first), first + size)
        stop = max(start, min(offset + extent, first + size))
        skipped = min(max(start - offset, 0), extent)
        padding = Padding(
            _with(fragment.padding.before, axis, fragment.padding.before[axis] + skipped),
            _with(fragment.padding.after, axis, fragment.padding.after[axis] + extent - skipped - (stop - start)),
            "view" if fragment.padding.semantic == "none" and stop - start != extent else fragment.padding.semantic,
        )
        return msgspec.structs.replace(
            fragment,
            global_shape=_with(fragment.global_shape, axis, size),
            element_offset=_with(fragment.element_offset, axis, start - first),
            element_extent=_with(fragment.element_extent, axis, stop - start),
            padding=padding,
        )


def _group_of(replica: Replica, fqn: str) -> Replica:
    """The replicas of a part are a group of their own."""
    if replica.group_id is None:
        return replica
    return msgspec.structs.replace(replica, group_id=f"{replica.group_id}:{fqn}")


def _padding_without_axis_0(padding: Padding) -> Padding:
    before, after = padding.before[1:], padding.after[1:]
    return Padding(before, after, padding.semantic if any(before + after) else "none")


def _without_axis_0(rules: Mapping[str, Rule]) -> dict[str, Rule]:
    """What mesh axes do to a tensor of which axis 0 is gone."""
    return {
        axis: rule - 1 if isinstance(rule, int) else rule
        for axis, rule in rules.items()
        if not (isinstance(rule, int) and rule == 0)
    }


def _with(sizes: Sequence[int], axis: int, size: int) -> tuple[int, ...]:
    return (*sizes[:axis], size, *sizes[axis + 1 :])


def _named(fragment: Fragment, fqn: str) -> Fragment:
    """The fragment of a tensor of another name; an id that is the name changes with it."""
    is_id = fragment.logical_tensor_id == fragment.fqn
    return msgspec.structs.replace(
        fragment, fqn=fqn, logical_tensor_id=fqn if is_id else f"{fragment.logical_tensor_id}:{fqn}"
    )


def _captured(pattern: str) -> "re.Pattern[str]":
    """
    >>> _captured("a.*.**").fullmatch("a.0.b.c").groups()
    ('0', 'b.c')
    """
    parts = re.split(r"(\*\*|\*)", pattern)
    return re.compile("".join({"**": "(.*)", "*": r"([^.]*)"}.get(part, re.escape(part)) for part in parts))


def parse_operation(raw: object, where: str) -> Operation:
    """The operation that a table of a layout file holds; InputError at `where` when it is none."""
    try:
        says = msgspec.convert(raw, Says)
    except msgspec.ValidationError as error:
        raise InputError(where, f"{error}; expected rename, unstack or trim and to, or split and into") from error
    kinds = [kind for kind in KINDS if getattr(says, kind) is not None]
    if len(kinds) != 1:
        raise InputError(where, f"is {' and '.join(kinds) or 'nothing'}; expected one of {', '.join(KINDS)}")
    (kind,) = kinds
    if (says.into is None) == (kind == "split") or (says.to is None) == (kind != "split"):
        raise InputError(where, f"{kind} takes {'into' if kind == 'split' else 'to'}, and only that")
    pattern = getattr(says, kind)
    names = [str(says.to)] if kind in ("rename", "unstack") else [*(says.into or {})]
    wildcards = re.findall(r"\*\*|\*", pattern)
    for name in names:
        if not name or re.findall(r"\*\*|\*", name) != wildcards:
            raise InputError(where, f"{name!r} must have the wildcards of {pattern!r}, in the same order")
    if kind == "unstack" and ("{}" not in str(says.to) or says.axis):
        raise InputError(
            where, f"unstacks axis 0 into names with {{}} for the index; found {says.to!r}, axis {says.axis}"
        )
    if kind == "split" and not says.into:
        raise InputError(where, "into names no tensors; expected names and sizes")
    return Operation(where, says)
