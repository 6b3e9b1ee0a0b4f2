"""What is to become of the names and types of tensors, as the command line says it: rules to rename and to cast.

Several rules to rename work one after the other, each on what the one before has made of the name, as `sed -e … -e …` does. Of
several rules to cast the last one that matches counts.
"""

import fnmatch
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from reshard_mpi.errors import UsageError, storage_error

ARROW = "=>"
CAST_FROM = ("float64", "float32", "float16", "bfloat16")
CAST_TO = ("float32", "float16", "bfloat16")


class Step(NamedTuple):
    """Something that was done to a tensor: which kind of operation, and the fqn that it had before."""

    kind: str
    fqn: str


History = Mapping[str, tuple[Step, ...]]  # tensor id -> all that was done to it, in order


class RenameRule(NamedTuple):
    """Every match of a regular expression in an fqn becomes `replacement`, a template of Python's `re.sub`."""

    pattern: str
    replacement: str

    def __str__(self) -> str:
        return f"{self.pattern}{ARROW}{self.replacement}"


class Operated(NamedTuple):
    """What an operation of a layout file does to a tensor, by the fqn that it had; `detail` is as JSON has it."""

    kind: str
    fqn: str
    detail: Mapping[str, object]


class CastRule(NamedTuple):
    """Tensors whose fqn matches the glob become of this dtype."""

    glob: str
    dtype: str

    def __str__(self) -> str:
        return self.dtype if self.glob == "*" else f"{self.glob}={self.dtype}"


def rename_rule(text: str) -> RenameRule:
    """The rule `PATTERN=>REPLACEMENT`; spaces around either are not part of it. UsageError when it is none.

    >>> rename_rule(r"^model\\. => ")
    RenameRule(pattern='^model\\\\.', replacement='')
    """
    pattern, arrow, replacement = (part.strip() for part in text.partition(ARROW))
    if not arrow or not pattern:
        raise UsageError("--rename", f"{text!r} is no rule; write it as 'PATTERN{ARROW}REPLACEMENT'")
    try:
        re.sub(pattern, replacement, "")  # looks through both, also where nothing matches
    except (re.error, IndexError) as error:
        raise UsageError("--rename", f"{text!r} is no regular expression of Python's re: {error}") from error
    return RenameRule(pattern, replacement)


def rename_rules(given: Iterable[RenameRule | Path]) -> tuple[RenameRule, ...]:
    """The rules as given, and in place of each file those that it holds: one a line, without empty lines and `# comments`."""
    rules: list[RenameRule] = []
    for item in given:
        rules += [item] if isinstance(item, RenameRule) else _rules_in(item)
    return tuple(rules)


def _rules_in(path: Path) -> list[RenameRule]:
    try:
        lines = path.read_text("utf-8").splitlines()
    except OSError as error:
        raise storage_error(path, error, "read") from error
    except UnicodeDecodeError as error:
        raise UsageError(str(path), f"is no text in UTF-8: {error.reason} at byte {error.start}") from error
    rules = []
    for number, line in enumerate(lines, 1):
        if line.strip() and not line.lstrip().startswith("#"):
            try:
                rules.append(rename_rule(line))
            except UsageError as error:
                raise UsageError(f"{path}, line {number}", error.message) from error
    return rules


def new_name(fqn: str, rules: Sequence[RenameRule]) -> str:
    """
    >>> new_name("model.layers.3.mlp.w1", [RenameRule(r"^model\\.", ""), RenameRule(r"\\.w1$", ".gate")])
    'layers.3.mlp.gate'
    """
    for pattern, replacement in rules:
        fqn = re.sub(pattern, replacement, fqn)
    return fqn


def cast_rule(text: str) -> CastRule:
    """The rule `DTYPE` or `GLOB=DTYPE`; UsageError when it is none.

    >>> cast_rule("*.norm.*=float32"), str(cast_rule("bfloat16"))
    (CastRule(glob='*.norm.*', dtype='float32'), 'bfloat16')
    """
    glob, equals, dtype = text.rpartition("=")
    if dtype not in CAST_TO or (equals and not glob):
        raise UsageError(
            "--cast", f"{text!r} is no rule; write it as DTYPE or 'GLOB=DTYPE', with one of {', '.join(CAST_TO)}"
        )
    return CastRule(glob or "*", dtype)


def cast_rule_of(fqn: str, rules: Sequence[CastRule], exceptions: Sequence[str]) -> CastRule | None:
    """The rule that says what becomes of a tensor, if any does.

    >>> cast_rule_of("a.norm", [CastRule("*", "bfloat16"), CastRule("*.norm", "float32")], []).dtype
    'float32'
    """
    if any(fnmatch.fnmatchcase(fqn, glob) for glob in exceptions):
        return None
    return next((rule for rule in reversed(rules) if fnmatch.fnmatchcase(fqn, rule.glob)), None)
