"""What each mesh axis does to each tensor, from the layout, the coordinates, or by default.

A rule is an int (the tensor axis that the mesh axis splits), "replicate", or {"stages": [..], "of": S}.
"""

import re
from collections import defaultdict

from tests.reference.case import Case
from tests.reference.errors import Refused
from tests.reference.fragments import Tensor, box_of, coordinates_of, has_elements

LAYER = re.compile(r"(^|\.)(layers|layer|h|blocks|block)\.(\d+)\.")
EXPERT = re.compile(r"(^|\.)(experts)\.(\d+)\.")
NUMBERED = {"pp": LAYER, "ep": EXPERT}
REPLICATE = "replicate"


def rule_of(case: Case, tensor: Tensor, axis: str, size: int):
    """For a mesh axis that the target has: from the layout, else inferred, else by default."""
    rule = known_rule(case, tensor, axis)
    if rule is None and axis in case.mesh:
        raise Refused(3, f"{tensor.logical_tensor_id}: the coordinates don't show what {axis} does")
    return default_rule(case, tensor, axis, size) if rule is None else rule


def known_rule(case: Case, tensor: Tensor, axis: str):
    """What the layout says, else what the source's coordinates show, else None."""
    rule = case.layout.get(tensor.logical_tensor_id, {}).get(axis)
    return inferred_rule(case, tensor, axis) if rule is None and axis in case.mesh else rule


def inferred_rule(case: Case, tensor: Tensor, axis: str):
    """From fragments that differ in the coordinate of `axis` alone. None: they explain nothing."""
    fragments = tensor.fragments
    split_axes = tensor_axes_that_follow(lines_along(case, fragments, axis), tensor)
    if len(split_axes) > 1:
        fragments = list(filter(has_elements, fragments))
        split_axes = tensor_axes_that_follow(lines_along(case, fragments, axis), tensor)
    if len(split_axes) > 1:
        return None
    if split_axes:
        return split_axes.pop()
    if not fragments:  # no elements, and parts that stand anywhere
        return REPLICATE
    return held_rule(lines_along(case, fragments, axis), axis, case.mesh[axis])


def lines_along(case: Case, fragments: list[dict], axis: str) -> list[dict[int, set]]:
    """One line per setting of the other mesh axes: index along `axis` -> the boxes held there."""
    lines: dict[tuple, dict[int, set]] = defaultdict(lambda: defaultdict(set))
    for fragment in fragments:
        coordinates = coordinates_of(fragment)
        others = tuple(coordinates[other] for other in sorted(case.mesh) if other != axis)
        lines[others][coordinates[axis]].add(box_of(fragment))
    return [dict(line) for line in lines.values()]


def tensor_axes_that_follow(lines: list[dict[int, set]], tensor: Tensor) -> set[int]:
    """Tensor axes along which the boxes of a line aren't the same intervals at every index that holds any."""
    return {
        a
        for a in range(len(tensor.global_shape))
        for line in lines
        if len({frozenset((offset[a], extent[a]) for offset, extent in boxes) for boxes in line.values()}) > 1
    }


def held_rule(lines: list[dict[int, set]], axis: str, size: int):
    """No tensor axis follows: the same boxes at all indices, or at the same few of them on every line."""
    if any(boxes != other for line in lines for boxes in line.values() for other in line.values()):
        return None
    stages = sorted(set().union(*lines))
    if any(sorted(line) != stages for line in lines):  # then only one box, the same everywhere, is no riddle
        same = len({frozenset(boxes) for line in lines for boxes in line.values()}) == 1
        return REPLICATE if same and (len(stages) == size or axis not in NUMBERED) else None
    if len(stages) == size or axis not in NUMBERED:
        return REPLICATE
    return {"stages": stages, "of": size}


def default_rule(case: Case, tensor: Tensor, axis: str, size: int):
    """For an axis that neither the layout nor the source knows."""
    if tensor.nelems == 0 or not tensor.global_shape and axis not in NUMBERED or axis in ("dp", "cp"):
        return REPLICATE
    if axis == "fsdp":
        return 0 if tensor.global_shape else REPLICATE
    if axis == "pp" or (axis == "ep" and EXPERT.search(tensor.fqn)):
        return {"stages": target_stages(case, tensor, axis, size, None), "of": size}
    if axis == "ep":
        return REPLICATE
    raise Refused(3, f"{tensor.logical_tensor_id}: nothing says what {axis} does")


def target_stages(case: Case, tensor: Tensor, axis: str, size: int, known: dict | None) -> list[int]:
    """Indices along `axis` of the target that get the tensor; `known`: the stages where it came from."""
    if known and known["of"] == size:
        return sorted(known["stages"])
    if match := NUMBERED[axis].search(tensor.fqn):
        return [stage_of_number(int(match[3]), stack_height(case, NUMBERED[axis], tensor.fqn[: match.start()]), size)]
    if known:
        of = known["of"]
        return sorted({size - 1 if of > 1 and stage == of - 1 else stage * size // of for stage in known["stages"]})
    return [0 if any(word in tensor.fqn for word in ("embed", "wte", "wpe")) else size - 1]


def stack_height(case: Case, pattern: re.Pattern, prefix: str) -> int:
    """1 + the highest number among the tensors whose name has `prefix` before the match."""
    matches = [(tensor.fqn, pattern.search(tensor.fqn)) for tensor in case.tensors.values()]
    return 1 + max(int(match[3]) for fqn, match in matches if match and fqn[: match.start()] == prefix)


def stage_of_number(number: int, height: int, size: int) -> int:
    """Which part of `numpy.array_split(range(height), size)` holds `number`.

    The first height % size parts are longer by one.

    >>> [stage_of_number(layer, 30, 4) for layer in (7, 8, 15, 16, 22, 23, 29)]
    [0, 1, 1, 2, 2, 3, 3]
    """
    end = 0
    for stage in range(size):
        end += height // size + (stage < height % size)
        if number < end:
            return stage
    raise AssertionError("a number above its stack")
