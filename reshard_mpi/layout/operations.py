"""What a layout file does to the tensors of a source before they are laid out: new names, fused tensors taken apart, padding off.

    [[operations]]
    rename = "module.**"                      # an fqn: `*` is one word, `**` any number; they stand for the same in `to`
    to = "**"

    [[operations]]
    split = "layers.*.qkv_proj.weight"        # along `axis` (0 if it isn't said), into tensors of these sizes, in this order
    into = { "layers.*.q_proj.weight" = "num_attention_heads * head_dim", "layers.*.kv_proj.weight" = 64 }
    groups = "num_key_value_heads"            # every group holds its part of each of them: q q k v q q k v (1 if it isn't said)

    [[operations]]
    unstack = "decoder.layers.**"             # index by index of axis 0, which is `{}` in `to`
    to = "decoder.layers.{}.**"

    [[operations]]
    trim = "embed_tokens.weight"              # to so many elements along `axis`: the padding of a vocabulary
    to = 32000

    [[operations]]
    permute = "layers.*.wq.weight"            # the rows of every head, for rotary embeddings: from pairs that are neighbours
    unit = "head_dim"                         # (0 1 2 3 4 5) to first and second ones (0 2 4 1 3 5), or back
    to = "halves"                             # or "interleaved"

Nothing is moved for it: a part of a stored array is a fragment whose padding is the rest of it, and an index of it is an array of
its own, which has a digest only if it is all of the one that is stored; rows are put in order as they are read. Operations are
applied in their order, each to what the ones before have made; one that finds no tensor is refused, unless it is
`optional = true`.
"""

import math
import re
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import msgspec
from msgspec import Struct

from reshard_mpi.checkpoint.dtypes import DTYPES
from reshard_mpi.checkpoint.manifest import Case, Fragment, Replica, Rule
from reshard_mpi.checkpoint.wanted import History, Operated, Step
from reshard_mpi.errors import InputError
from reshard_mpi.layout.parts import Piece, index, part, parts, pieces_of_members, reordered
from reshard_mpi.storage.reordered import ORDERS
from reshard_mpi.storage.safetensors import StoredArray

# An operation, and what a tensor is after it.
KINDS = {"rename": "renamed", "split": "split", "unstack": "unstacked", "trim": "trimmed", "permute": "permuted"}

Headers = Mapping[str, Mapping[str, StoredArray]]  # file -> key -> array
Number = Callable[[str, int | str], int]  # (where, size as the file has it) -> elements
APART = 8  # bytes at least between what is shown behind the end of a file, which is aligned to as many


class Says(Struct, frozen=True, forbid_unknown_fields=True):
    """An operation as the file has it; one of KINDS is the pattern."""

    rename: str | None = None
    split: str | None = None
    unstack: str | None = None
    trim: str | None = None
    permute: str | None = None
    to: int | str | None = None
    into: dict[str, int | str] | None = None
    groups: int | str = 1
    unit: int | str | None = None
    axis: int = 0
    optional: bool = False

    @property
    def kinds(self) -> list[str]:
        return [kind for kind in KINDS if getattr(self, kind) is not None]


@dataclass(frozen=True)
class Operation:
    """One operation; `where` names it."""

    where: str
    says: Says

    @property
    def kind(self) -> str:
        return self.says.kinds[0]

    @cached_property
    def _pattern(self) -> "re.Pattern[str]":
        return _captured(getattr(self.says, self.kind))

    def _renamed(self, fqn: str, to: str) -> str:
        """The name that `to` makes of the words that the wildcards stand for in an fqn that matches."""
        match = self._pattern.fullmatch(fqn)
        words = iter(match.groups() if match else ())
        return re.sub(r"\*\*|\*", lambda _: next(words), to)

    def apply(self, case: Case, headers: Headers, history: History, number: Number) -> tuple[Case, Headers, History]:
        """Case, headers and history after it; InputError where there is nothing to do, or it can't be done."""
        if not any(self._pattern.fullmatch(fragment.fqn) for fragment in case.fragments):
            if self.says.optional:
                return case, headers, history
            raise InputError(self.where, f"no tensor is called so; expected names like {case.fragments[0].fqn}")
        made: dict[str, dict[str, None]] = {}  # tensor -> the tensors that it becomes
        changed: dict[str, str] = {}  # the fqn that a tensor had
        fragments: list[Fragment] = []
        arrays = _Arrays(headers)
        for fragment in case.fragments:
            found = [fragment]
            if self._pattern.fullmatch(fragment.fqn):
                changed[fragment.logical_tensor_id] = fragment.fqn
                found = [*self._parts(fragment, arrays, number)]
            made.setdefault(fragment.logical_tensor_id, {}).update({one.logical_tensor_id: None for one in found})
            fragments += found
        ids = Counter(tensor_id for names in made.values() for tensor_id in names)
        twice = [tensor_id for tensor_id, count in ids.items() if count > 1]
        if twice:
            raise InputError(self.where, f"two tensors would be called {twice[0]}; give each a name of its own")
        done: dict[str, tuple[Step, ...]] = {}
        for old, names in made.items():
            steps = history.get(old, ())
            steps += (Step(self.kind, changed[old]),) if old in changed else ()
            done |= dict.fromkeys(names, steps) if steps else {}
        return self._case(case, tuple(fragments), made, changed), arrays.by_file, done

    def _case(
        self,
        case: Case,
        fragments: tuple[Fragment, ...],
        made: Mapping[str, Collection[str]],
        changed: Collection[str],
    ) -> Case:
        """The case of these fragments; what was said of a tensor is said of those that it becomes."""
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
            if len(made[oracle.logical_tensor_id]) == 1
            and shapes[new] == oracle.shape
            and not (self.kind == "permute" and oracle.logical_tensor_id in changed)
        ]
        return msgspec.structs.replace(
            case,
            fragments=fragments,
            topology=msgspec.structs.replace(case.topology, layout=layout),
            oracles=tuple(oracles),
            oracle_file=case.oracle_file if oracles else None,
            expected_manifest_digest=None,
        )

    def changes(self, case: Case, number: Number) -> Iterator[Operated]:
        """What it does to the tensors of a case, each once, in the order of their ids."""
        says = self.says
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
                detail = {"unit": number(self.where, says.unit or 0), "to": says.to}
            yield Operated(KINDS[self.kind], fqn, detail)

    def _parts(self, fragment: Fragment, arrays: "_Arrays", number: Number) -> Iterator[Fragment]:
        """What becomes of a fragment that the operation is for."""
        says, axis = self.says, self.says.axis
        if not 0 <= axis < len(fragment.global_shape) and says.rename is None:
            raise InputError(self.where, f"is of axis {axis}, but {fragment.fqn} has {len(fragment.global_shape)} axes")
        if says.rename is not None:
            yield _named(fragment, self._renamed(fragment.fqn, str(says.to)))
        elif says.trim is not None:
            size, whole = number(self.where, says.to or 0), fragment.global_shape[axis]
            if size > whole:
                raise InputError(self.where, f"{size} elements are wanted of axis {axis} of {fragment.fqn}: {whole}")
            yield part(fragment, axis, Piece(0, size, 0, size))
        elif says.unstack is not None:
            yield from self._indices(fragment, arrays)
        elif says.permute is not None:
            yield from self._reordered(fragment, arrays, number)
        else:
            yield from self._members(fragment, number)

    def _members(self, fragment: Fragment, number: Number) -> Iterator[Fragment]:
        into = self.says.into or {}
        sizes = [number(self.where, size) for size in into.values()]
        ngroups, size = number(self.where, self.says.groups), fragment.global_shape[self.says.axis]
        if sum(sizes) != size:
            said = " + ".join(map(str, sizes))
            raise InputError(
                self.where, f"splits into {said} elements, but axis {self.says.axis} of {fragment.fqn} has {size}"
            )
        if any(size % ngroups for size in sizes):
            raise InputError(self.where, f"{' + '.join(map(str, sizes))} elements are no {ngroups} equal groups")
        for to, pieces in zip(into, pieces_of_members(sizes, ngroups), strict=True):
            fqn = self._renamed(fragment.fqn, to)
            yield from _several(fragment, [_named(one, fqn) for one in parts(fragment, self.says.axis, pieces)])

    def _reordered(self, fragment: Fragment, arrays: "_Arrays", number: Number) -> Iterator[Fragment]:
        unit, nrows = number(self.where, self.says.unit or 0), fragment.global_shape[0]
        if unit % 2 or nrows % unit:
            raise InputError(
                self.where, f"{nrows} rows of {fragment.fqn} are no heads of {unit} rows, half of them and half"
            )
        if not fragment.has_elements:
            yield fragment
            return
        array = arrays.of(fragment)
        if array.shown or array.order or array.nbytes * 8 != _nbits(array) * array.shape[0] or _nbits(array) % 8:
            raise InputError(self.where, f"{fragment.fragment_id} isn't stored row by row; permute it elsewhere")
        shown, found = reordered(fragment, array, arrays.end(fragment.payload_file), unit, str(self.says.to))
        key = f"{fragment.payload_key}\0{shown.begin}"  # no array of a file is called so
        arrays.add(fragment.payload_file, key, shown)
        yield from _several(fragment, [msgspec.structs.replace(one, payload_key=key) for one in found])

    def _indices(self, fragment: Fragment, arrays: "_Arrays") -> Iterator[Fragment]:
        """Every index of axis 0 that the fragment holds."""
        array = arrays.of(fragment)
        if array.shown or array.order or _nbits(array) % 8:
            raise InputError(self.where, f"{fragment.fragment_id} isn't stored index by index; unstack it elsewhere")
        for number in range(fragment.element_extent[0]):
            to = str(self.says.to).replace("{}", str(fragment.element_offset[0] + number))
            within, one = index(fragment, array, number)
            arrays.add(one.payload_file, one.payload_key, within)
            one = _named(one, self._renamed(fragment.fqn, to))
            yield msgspec.structs.replace(
                one,
                fragment_id=f"{fragment.fragment_id}:{one.fqn}",
                replica=_group_of(fragment.replica, one.fqn),
                tie_group_id=None,
            )


class _Arrays:
    """The arrays of a source, to which those are added that an operation makes of them."""

    def __init__(self, headers: Headers):
        self.by_file = {file: dict(arrays) for file, arrays in headers.items()}
        self._ends: dict[str, int] = {}

    def of(self, fragment: Fragment) -> StoredArray:
        return self.by_file[fragment.payload_file][fragment.payload_key]

    def add(self, file: str, key: str, array: StoredArray) -> None:
        self.by_file[file][key] = array
        if file in self._ends:
            self._ends[file] = max(self._ends[file], array.begin + array.nbytes)

    def end(self, file: str) -> int:
        """Where an array can be shown: apart from all others of the file, and aligned."""
        if file not in self._ends:
            self._ends[file] = max((a.begin + a.nbytes for a in self.by_file[file].values()), default=0)
        return self._ends[file] + -self._ends[file] % APART + APART


def _nbits(array: StoredArray) -> int:
    """Bits of an index of axis 0."""
    return DTYPES[array.dtype].nbits * math.prod(array.shape[1:])


def _several(fragment: Fragment, found: Sequence[Fragment]) -> Iterator[Fragment]:
    """The fragments of one tensor that a fragment has become: they lie in one stored array."""
    for number, one in enumerate(found):
        suffix = f"#{number}" if len(found) > 1 else ""
        yield msgspec.structs.replace(
            one,
            fragment_id=f"{fragment.fragment_id}:{one.fqn}{suffix}",
            shared_storage_id=fragment.shared_storage_id or f"{fragment.payload_file}:{fragment.payload_key}",
            tie_group_id=None,
            replica=_group_of(fragment.replica, f"{one.fqn}{suffix}"),
        )


def _group_of(replica: Replica, fqn: str) -> Replica:
    """The replicas of a part are a group of their own."""
    if replica.group_id is None:
        return replica
    return msgspec.structs.replace(replica, group_id=f"{replica.group_id}:{fqn}")


def _without_axis_0(rules: Mapping[str, Rule]) -> dict[str, Rule]:
    """What mesh axes do to a tensor of which axis 0 is gone."""
    return {
        axis: rule - 1 if isinstance(rule, int) else rule
        for axis, rule in rules.items()
        if not (isinstance(rule, int) and rule == 0)
    }


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
        raise InputError(
            where, f"{error}; expected rename, unstack, trim or permute and to, or split and into"
        ) from error
    if len(says.kinds) != 1:
        raise InputError(where, f"is {' and '.join(says.kinds) or 'nothing'}; expected one of {', '.join(KINDS)}")
    (kind,) = says.kinds
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
    if kind == "permute" and (says.unit is None or says.to not in ORDERS or says.axis):
        raise InputError(
            where,
            f"permutes heads of axis 0, of `unit` rows, to {' or '.join(ORDERS)}; found unit {says.unit}, to {says.to}",
        )
    if (says.unit is not None and kind != "permute") or (says.groups != 1 and kind != "split"):
        raise InputError(where, f"{kind} takes no unit, or no groups: unit is of permute, groups of split")
    return Operation(where, says)
