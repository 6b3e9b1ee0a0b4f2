"""Tensors as lines of a table: what each is, and what each mesh axis does to it."""

import math
import re
from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

from reshard_mpi.checkpoint.dtypes import DTYPES
from reshard_mpi.checkpoint.manifest import Fragment, Rule, Stages
from reshard_mpi.errors import one_line, plural
from reshard_mpi.report import size_text

MOST_LINES = 60
WIDEST_NAME = 60
_NUMBER = re.compile(r"(?<![A-Za-z0-9])\d+(?![A-Za-z0-9])", re.ASCII)


def tensor_facts(fragments: Sequence[Fragment], rules: Mapping[str, Rule]) -> dict[str, Any]:
    """What there is to say of one tensor, as JSON values."""
    like = fragments[0]
    return {
        "tensor": like.logical_tensor_id,
        "fqn": like.fqn,
        "component": like.component_id,
        "role": like.role,
        "dtype": like.dtype,
        "shape": list(like.global_shape),
        "nbytes": math.prod(like.global_shape) * DTYPES[like.dtype].nbits // 8,
        "nfragments": len(fragments),
        "layout": {axis: _rule_facts(rule) for axis, rule in sorted(rules.items())},
    }


def _rule_facts(rule: Rule) -> Any:
    return {"stages": list(rule.stages), "of": rule.of} if isinstance(rule, Stages) else rule


def layout_text(layout: Mapping[str, Any], mesh_axes: Mapping[str, int], grouped: bool = False) -> str:
    """`pp at 1 of 2; tp splits axis 0`. Axes that the topology doesn't have, which a layout remembers, are in brackets."""
    return "; ".join(
        text if axis in mesh_axes else f"({text})"
        for axis, rule in layout.items()
        if (text := _rule_text(axis, rule, grouped))
    )


def _rule_text(axis: str, rule: Any, grouped: bool) -> str:
    if isinstance(rule, dict):
        return f"{axis} places" if grouped else f"{axis} at {','.join(map(str, rule['stages']))} of {rule['of']}"
    return f"{axis} replicates" if rule == "replicate" else f"{axis} splits axis {rule}"


def tensor_lines(tensors: Sequence[Mapping[str, Any]], mesh_axes: Mapping[str, int]) -> list[str]:
    """A line a tensor; tensors that differ in numbers within their names alone (layers, experts) share one."""
    groups: defaultdict[tuple[object, ...], list[Mapping[str, Any]]] = defaultdict(list)
    for tensor in tensors:
        pattern = _NUMBER.sub("#", tensor["tensor"])
        layout = layout_text(tensor["layout"], mesh_axes, grouped=True)
        groups[pattern, tensor["dtype"], tuple(tensor["shape"]), layout].append(tensor)
    rows = [
        (one_line(_name_of(members)), members, layout_text(members[0]["layout"], mesh_axes, grouped=len(members) > 1))
        for members in groups.values()
    ]
    width = min(max((len(name) for name, _, _ in rows), default=0), WIDEST_NAME)
    lines = [
        f"  {name:<{width}}  {members[0]['dtype']:<13} {shape_text(members[0]['shape']):<14} "
        f"{size_text(sum(member['nbytes'] for member in members)):>10}  "
        f"{plural(sum(member['nfragments'] for member in members), 'fragment'):>14}  {layout}".rstrip()
        for name, members, layout in rows[:MOST_LINES]
    ]
    return lines + ([f"  ... and {len(rows) - MOST_LINES} more (--json has all)"] if len(rows) > MOST_LINES else [])


def _name_of(members: Sequence[Mapping[str, Any]]) -> str:
    """The name that stands for all members: `layers.{0-15}.weight`.

    >>> _name_of([{"tensor": "h.0.w"}, {"tensor": "h.2.w"}])
    'h.{0-2}.w'
    """
    first = members[0]["tensor"]
    numbers = [list(map(int, _NUMBER.findall(member["tensor"]))) for member in members]
    ranges = iter([(min(column), max(column)) for column in zip(*numbers, strict=True)])

    def text(match: re.Match[str]) -> str:
        low, high = next(ranges)
        return match[0] if low == high else f"{{{low}-{high}}}"

    return _NUMBER.sub(text, first)


def shape_text(shape: Sequence[int]) -> str:
    return "x".join(map(str, shape)) or "scalar"
