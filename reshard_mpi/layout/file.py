"""Layout files: for each mesh axis, by name of the tensors, which tensor axis it splits, and in what units (SPEC section 5).

    [model]                                   # numbers that the rules name; config.json and --layout-set know them too
    head_dim = 128

    [axes.tp]
    "layers.*.self_attn.q_proj" = { split = "colwise", unit = "head_dim" }
    "layers.*.self_attn.k_proj" = { split = "colwise", unit = "head_dim", repeat = true }
    "layers.*.mlp.down_proj"    = "rowwise"   # a word of transformers' tp_plan
    "layers.*.mlp.gate_up_proj" = { split = "colwise", members = 2 }
    "router.weight"             = 0           # or a tensor axis
    "norm"                      = "replicate"

A pattern is held against the end of the module path (the fqn without its last word, `weight` or `bias`) and of the fqn, whole
words each: `*` is one of the words between the dots or a part of one, `**` any number of them. So a `tp_plan` can be pasted,
with or without the `model.` before its keys, and `*` alone is every tensor. Of several patterns that match, the first counts.

`unit`: elements that must not be cut apart; a number, a name of [model], or a product of them, "3 * head_dim". `repeat`: where
there are fewer units than ranks, neighbouring ranks hold the same one. `members`: of a fused tensor, how many equal parts it has
or how large each is; every one is cut by itself (then `repeat` may be a list, too).

`axes_of = "llama"` before the first table has what that preset says of mesh axes after what this file says itself.

[[operations]] give tensors other names, take fused ones apart, trim padding and reorder heads: see `operations`; [padding] adds
some: see `padding`. [scales] speaks of block-scaled tensors: see `scales`, [opaque] of the state of single ranks: see `opaque`.
"""

import json
import re
import tomllib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import msgspec
from msgspec import Struct

from reshard_mpi.checkpoint.manifest import CASE_FILE, Case, Layout, Rule
from reshard_mpi.checkpoint.mesh import Mesh, canonical
from reshard_mpi.checkpoint.wanted import History, Operated
from reshard_mpi.errors import InputError, ReshardError, StorageError, UsageError, names, storage_error
from reshard_mpi.layout.cuts import Cut, Member
from reshard_mpi.layout.opaque import Treated, parse_treated
from reshard_mpi.layout.operations import Headers, Operation, parse_operation
from reshard_mpi.layout.padding import Pad, Padded, padded, parse_pad
from reshard_mpi.layout.patterns import is_pattern, matches
from reshard_mpi.layout.rules import Tensor
from reshard_mpi.layout.scales import APART, Scaled, parse_scaled
from reshard_mpi.layout.words import HOOKS, is_packed, is_word, known_words, tensor_axis

LAYOUT_FILE = "layout.toml"  # beside the case that was written by it
PRESETS = Path(__file__).parent.parent / "layouts"
CONFIG_FILE = "config.json"
NO_LAYOUT = "none"
LARGEST_FILE = 1 << 24
_FACTOR = re.compile(r"[A-Za-z_]\w*|\d{1,18}", re.ASCII)

Size = int | str


class Says(Struct, frozen=True, forbid_unknown_fields=True):
    """What a layout file says of the tensors of a pattern."""

    split: int | str
    unit: Size = 1
    repeat: bool | tuple[bool, ...] = False
    members: int | tuple[Size, ...] | None = None


@dataclass(frozen=True)
class Statement:
    """One line of a layout file; `where` names it."""

    where: str
    pattern: str
    says: Says

    def matches(self, fqn: str) -> bool:
        return matches(self.pattern, fqn)


@dataclass(frozen=True)
class Resolved:
    """What a layout file says of the tensors of a case."""

    layout: Layout
    cuts: dict[str, dict[str, Cut]]
    faults: list[ReshardError]


@dataclass(frozen=True)
class LayoutFile:
    """A layout file, read: per mesh axis its statements, in their order; `values`: the numbers that are known."""

    where: str
    axes: Mapping[str, tuple[Statement, ...]]
    values: Mapping[str, int]
    operations: tuple[Operation, ...] = ()
    pads: tuple[Pad, ...] = ()
    scales: tuple[Scaled, ...] = ()
    opaque: tuple[Treated, ...] = ()

    def with_values(self, values: Mapping[str, int]) -> "LayoutFile":
        """The same with further numbers, which go before those that were known."""
        return replace(self, values={**self.values, **values})

    def statement(self, axis: str, fqn: str) -> Statement | None:
        return next((one for one in self.axes.get(axis, ()) if one.matches(fqn)), None)

    def padded(self, tensors: Iterable[Tensor], target: Mesh) -> Padded:
        """The shapes to which tensors are padded in the target: those that are cut."""
        return padded(self.pads, tensors, dict(target.axes), self.number)

    def resolve(self, tensors: Iterable[Tensor], split_axes: Iterable[str]) -> Resolved:
        """The rules of all tensors; how they are cut by the mesh axes `split_axes`, those of the target."""
        resolved, cut_by = Resolved({}, {}, []), set(split_axes)
        for tensor in tensors:
            rules: dict[str, Rule] = {}
            for axis in self.axes:
                says = self.statement(axis, tensor.fqn)
                try:
                    rule = None if says is None else split_axis(says, tensor)
                    if says is not None and rule is not None:
                        rules[axis] = rule
                        cut = self._cut(says, tensor, rule) if axis in cut_by and isinstance(rule, int) else None
                        if cut is not None:
                            resolved.cuts.setdefault(tensor.tensor_id, {})[axis] = cut
                except InputError as fault:
                    resolved.faults.append(fault)
            if rules:
                resolved.layout[tensor.tensor_id] = rules
        once = {str(fault): fault for fault in resolved.faults}  # a number that isn't known is missed by every layer
        return replace(resolved, faults=list(once.values()))

    def _cut(self, statement: Statement, tensor: Tensor, axis: int) -> Cut | None:
        size = tensor.shape[axis]
        if not size:
            return None
        cut = self.cut(statement, size)
        if cut.size != size:
            said = " + ".join(str(member.size) for member in cut.members)
            raise InputError(
                statement.where,
                f"its members are {said} = {cut.size} elements, but axis {axis} of tensor {tensor.tensor_id} has {size}",
            )
        return None if cut == Cut((Member(size),)) else cut

    def cut(self, statement: Statement, size: int) -> Cut:
        """How an axis of `size` elements is cut."""
        says, members = statement.says, members_of(statement)
        if isinstance(members, int):
            if size % members:
                raise InputError(statement.where, f"{size} elements are no {members} equal members")
            sizes = [size // members] * members
        else:
            sizes = [self.number(statement.where, member) for member in members]
        unit = self.number(statement.where, says.unit)
        repeats = repeats_of(statement, len(sizes))
        return Cut(tuple(Member(size, unit, repeat) for size, repeat in zip(sizes, repeats, strict=True)))

    def number(self, where: str, size: Size, more: Mapping[str, int] | None = None) -> int:
        """The value of `128`, "head_dim" or "3 * head_dim"; `more` are names that are known unless the layout has them."""
        found, values = 1, {**(more or {}), **self.values}
        for factor in str(size).replace(" ", "").split("*"):
            if not factor.isdecimal() and factor not in values:
                raise InputError(
                    where,
                    f"{factor} isn't known; give it in [model] of the layout file, with --layout-set {factor}=N, or with "
                    "the model's config.json beside the source",
                )
            found *= int(factor) if factor.isdecimal() else values[factor]
        return found

    def applied(self, case: Case, headers: Headers) -> tuple[Case, Headers, tuple[Operated, ...], History]:
        """Case and headers after all operations; what these have done, and what was done to each tensor now there."""
        history: History = {}
        done: list[Operated] = []
        for operation in self.operations:
            before = case
            case, headers, history = operation.apply(case, headers, history, self.number)
            done += operation.changes(before, self.number)  # now that it is known to fit
        return case, headers, tuple(done), history

    def decides(self) -> list[object]:
        """All that the bytes of a target depend on, as JSON values."""
        return [self.text(), repr((self.operations, self.pads, self.opaque)), dict(self.values)]

    @property
    def lasts(self) -> bool:
        """Does it say anything that counts for a target and for what is made of it?"""
        return bool(self.axes or self.scales or self.opaque)

    def text(self) -> str:
        """What lasts of the layout, as a file, with the numbers that its rules name; operations a target has behind it."""
        says = [statement.says for statements in self.axes.values() for statement in statements]
        sizes = [size for one in says for size in (one.unit, *(one.members if isinstance(one.members, tuple) else ()))]
        named = {name for size in sizes for name in _FACTOR.findall(str(size)) if not name.isdecimal()}
        lines = ["[model]", *(f"{name} = {self.values[name]}" for name in sorted(named & self.values.keys()))]
        for axis, statements in self.axes.items():
            lines += ["", f"[axes.{axis}]"]
            lines += [f"{_toml(statement.pattern)} = {_toml(statement.says)}" for statement in statements]
        lines += ["", "[scales]"] if self.scales else []
        lines += [f"{_toml(one.pattern)} = {_toml(one.blocks or APART)}" for one in self.scales]
        lines += ["", "[opaque]"] if self.opaque else []
        lines += [f"{_toml(one.pattern)} = {_toml(one.treatment)}" for one in self.opaque if one.treatment != "drop"]
        return "\n".join(lines) + "\n"


def split_axis(statement: Statement, tensor: Tensor) -> Rule | None:
    """The tensor axis that a statement splits, or "replicate"; None: the word says nothing of parameters."""
    split, naxes = statement.says.split, len(tensor.shape)
    if isinstance(split, str):
        split = tensor_axis(split, tensor.fqn, naxes)
    elif -naxes <= split < 0:
        split += naxes
    if isinstance(split, int) and not 0 <= split < naxes:
        raise InputError(statement.where, f"splits axis {split} of tensor {tensor.tensor_id}, which has {naxes} axes")
    return "replicate" if split == "replicate" else int(split)


def members_of(statement: Statement) -> int | tuple[Size, ...]:
    """How many equal members the axis has, or how large each is."""
    says = statement.says
    if says.members is not None:
        return says.members
    return 2 if isinstance(says.split, str) and is_packed(says.split) else 1


def repeats_of(statement: Statement, nmembers: int) -> tuple[bool, ...]:
    repeat = statement.says.repeat
    repeats = (repeat,) * nmembers if isinstance(repeat, bool) else repeat
    if len(repeats) != nmembers:
        raise InputError(
            statement.where, f"repeat has {len(repeats)} entries for {nmembers} members; expected one each"
        )
    return repeats


# ---- reading


def preset_names() -> list[str]:
    return sorted(path.stem for path in PRESETS.glob("*.toml"))


def load_layout(name: str, values: Mapping[str, int], folders: Iterable[Path] = ()) -> LayoutFile:
    """The preset or the file of that name. Numbers: `values`, then those of the file, then of a config.json in `folders`."""
    path = PRESETS / f"{name}.toml" if name in preset_names() else Path(name)
    if not path.exists() and path.suffix != ".toml" and path.name == name:
        raise UsageError("--layout", f"{name!r} is no preset ({names(preset_names())}); give one, or a file NAME.toml")
    layout = parse_layout(_read(path), str(path) if path.parent != PRESETS else f"layout {name}")
    known: dict[str, int] = {}
    for folder in folders:
        known = {**_config_values(folder / CONFIG_FILE), **known}
    return replace(layout, values={**known, **layout.values, **values})


def layout_for(
    source: Path, name: str | None, values: Mapping[str, int], folders: Iterable[Path] = ()
) -> LayoutFile | None:
    """The layout that was asked for; else the one that `source` was written by, so that what it fused stays fused right."""
    if name == NO_LAYOUT:
        return None
    if name is None:
        if not ((source / CASE_FILE).is_file() and (source / LAYOUT_FILE).is_file()):
            return None
        name = str(source / LAYOUT_FILE)
    return load_layout(name, values, [source, *folders])


def _read(path: Path) -> bytes:
    try:
        if not path.is_file():
            raise StorageError(str(path), f"no such file; --layout takes {names(preset_names())}, or a TOML file")
        if path.stat().st_size > LARGEST_FILE:
            raise InputError(str(path), f"is larger than {LARGEST_FILE} bytes; expected a layout file")
        return path.read_bytes()
    except OSError as error:
        raise storage_error(path, error, "read") from error


def parse_layout(text: bytes, where: str) -> LayoutFile:
    """The layout that a TOML text holds; InputError at `where` and the key when there is none."""
    try:
        raw = tomllib.loads(text.decode("utf-8"))
    except (tomllib.TOMLDecodeError, UnicodeDecodeError, RecursionError) as error:
        raise InputError(where, f"no valid TOML: {error}") from error
    unknown = sorted(raw.keys() - {"model", "axes", "axes_of", "operations", "padding", "scales", "opaque"})
    if unknown:
        raise InputError(where, f"unknown table {names(unknown)}; expected [model] and [axes.tp], say")
    axes: dict[str, tuple[Statement, ...]] = {}
    for axis, patterns in _table(raw, "axes", where).items():
        here = f"{where}: axes.{axis}"
        if (
            canonical(axis) in axes
            or axis in ("rank", "world_size")
            or not re.fullmatch(r"[A-Za-z_]\w*", axis, re.ASCII)
        ):
            raise InputError(here, "is given twice, or is no name of a mesh axis; expected tp, ep, ...")
        if not isinstance(patterns, dict):
            raise InputError(here, f"is {patterns!r}; expected a table of patterns")
        statements = [_statement(pattern, entry, f'{here}."{pattern}"') for pattern, entry in patterns.items()]
        axes[canonical(axis)] = tuple(one for one in statements if one.says.split not in HOOKS)
    for axis, of_preset in _axes_of(raw, where).items():
        axes[axis] = axes.get(axis, ()) + of_preset
    listed = raw.get("operations", [])
    if not isinstance(listed, list):
        raise InputError(f"{where}: operations", "is no list of tables; expected [[operations]]")
    operations = tuple(parse_operation(one, f"{where}: operations[{index}]") for index, one in enumerate(listed))
    pads = tuple(parse_pad(pattern, entry, here) for pattern, entry, here in _patterns(raw, "padding", where))
    scales = tuple(parse_scaled(pattern, entry, here) for pattern, entry, here in _patterns(raw, "scales", where))
    opaque = tuple(parse_treated(pattern, entry, here) for pattern, entry, here in _patterns(raw, "opaque", where))
    if not (axes or operations or pads or scales or opaque):
        raise InputError(where, "has no table [axes.NAME]; expected one for each mesh axis that it speaks of")
    values = _table(raw, "model", where)
    for name, value in values.items():
        if not _is_number(value):
            raise InputError(f"{where}: model.{name}", f"is {value!r}; expected a number, 1 or more")
    return LayoutFile(where, axes, values, operations, pads, scales, opaque)


def _axes_of(raw: Mapping[str, Any], where: str) -> Mapping[str, tuple[Statement, ...]]:
    """What the preset that is named says of mesh axes."""
    if "axes_of" not in raw:
        return {}
    name = raw["axes_of"]
    if name not in preset_names():
        raise InputError(f"{where}: axes_of", f"{name!r} is no preset; expected one of {names(preset_names())}")
    return parse_layout(_read(PRESETS / f"{name}.toml"), f"layout {name}").axes


def _table(raw: Mapping[str, Any], key: str, where: str) -> dict[str, Any]:
    found = raw.get(key, {})
    if not isinstance(found, dict):
        raise InputError(f"{where}: {key}", f"is {found!r}; expected a table")
    return found


def _patterns(raw: Mapping[str, Any], key: str, where: str) -> Iterator[tuple[str, object, str]]:
    """The lines of a table of patterns: each pattern, what is said of it, and where."""
    for pattern, entry in _table(raw, key, where).items():
        here = f'{where}: {key}."{pattern}"'
        _check_pattern(pattern, here)
        yield pattern, entry, here


def _check_pattern(pattern: str, where: str) -> None:
    if not is_pattern(pattern):
        raise InputError(where, "is no pattern: between its dots there must be words")


def _statement(pattern: str, entry: object, where: str) -> Statement:
    try:
        says = msgspec.convert(entry if isinstance(entry, dict) else {"split": entry}, Says)
    except msgspec.ValidationError as error:
        raise InputError(where, f"{error}; expected a tensor axis, a word, or split, unit, repeat, members") from error
    if isinstance(says.split, str) and not is_word(says.split):
        raise InputError(where, f"{says.split!r} is no word that is known; expected a tensor axis, or {known_words()}")
    sizes = [("unit", says.unit)] + [
        ("members", size) for size in (says.members if isinstance(says.members, tuple) else ())
    ]
    for key, size in sizes:
        factors = str(size).replace(" ", "").split("*")
        if not all(_FACTOR.fullmatch(factor) and factor.strip("0") for factor in factors):
            raise InputError(
                f"{where}.{key}", f"is {size!r}; expected a number, a name, or a product like '3 * head_dim'"
            )
    if says.members in ((), 0) or (isinstance(says.members, int) and says.members < 0):
        raise InputError(f"{where}.members", f"is {says.members!r}; expected how many there are, or the size of each")
    _check_pattern(pattern, where)
    statement = Statement(where, pattern, says)
    members = members_of(statement)
    repeats_of(statement, members if isinstance(members, int) else len(members))
    return statement


def _is_number(value: object) -> bool:
    return type(value) is int and 0 < value < 1 << 62


def _config_values(path: Path) -> dict[str, int]:
    """The numbers of a model's config.json, if it is there; what it leaves out because it follows from others included."""
    try:
        if not path.is_file() or path.stat().st_size > LARGEST_FILE:
            return {}
        config = json.loads(path.read_bytes())
    except (OSError, ValueError, RecursionError):
        return {}
    if not isinstance(config, dict):
        return {}
    inner = config.get("text_config")
    found = {k: v for one in (inner, config) if isinstance(one, dict) for k, v in one.items() if _is_number(v)}
    heads = found.get("num_attention_heads", 0)
    if heads and "head_dim" not in found and found.get("hidden_size", 1) % heads == 0:
        found["head_dim"] = found["hidden_size"] // heads
    if heads:
        found.setdefault("num_key_value_heads", heads)
    return found


def _toml(value: object) -> str:
    """A value as TOML writes it."""
    if isinstance(value, Says):
        given = {key: getattr(value, key) for key in value.__struct_fields__}
        rest = {k: v for k, v in given.items() if v != getattr(Says(0), k) and k != "split"}
        if not rest:
            return _toml(value.split)
        return "{ " + ", ".join(f"{key} = {_toml(one)}" for key, one in {"split": value.split, **rest}.items()) + " }"
    if isinstance(value, tuple):
        return f"[{', '.join(map(_toml, value))}]"
    return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
