"""The mesh of a target: its axes in order, its ranks, and the boxes they hold."""

from itertools import product

from tests.reference.case import Case
from tests.reference.errors import Refused
from tests.reference.fragments import OTHER_NAMES, Tensor
from tests.reference.rules import NUMBERED, target_stages

# Unknown axes come first, by name.
RANK_ORDER = ("pp", "dp", "fsdp", "ep", "cp", "tp")  # slowest first
NESTING = ("pp", "ep", "cp", "tp", "dp", "fsdp")  # of splits of one tensor axis, outermost first


def parse_target(target: dict) -> dict[str, int]:
    """The target as `topology.source` of the output spells it."""
    if list(target) == ["world_size"]:
        if target["world_size"] != 1:
            raise Refused(3, f"target {target}: which mesh axes?")
        return dict(target)
    return {OTHER_NAMES.get(axis, axis): size for axis, size in target.items()}


def in_order(axes, known: tuple[str, ...]) -> list[str]:
    """Unknown axes by name, then the known ones.

    >>> in_order({"tp", "pp", "zz", "aa"}, RANK_ORDER)
    ['aa', 'zz', 'pp', 'tp']
    """
    return sorted(set(axes) - set(known)) + [axis for axis in known if axis in axes]


def ranks_of(target: dict[str, int]) -> list[dict[str, int]]:
    """Coordinates of rank 0, 1, ...; the last axis runs fastest."""
    axes = in_order(set(target) - {"world_size"}, RANK_ORDER)
    return [dict(zip(axes, index, strict=True)) for index in product(*(range(target[axis]) for axis in axes))]


def chunk(begin: int, end: int, parts: int, index: int) -> tuple[int, int]:
    """Part `index` of [begin, end) as torch.chunk cuts it.

    >>> [chunk(0, 5, 4, i) for i in range(4)]
    [(0, 2), (2, 4), (4, 5), (5, 5)]
    """
    length = -(-(end - begin) // parts)
    return min(begin + index * length, end), min(begin + (index + 1) * length, end)


def target_box(case: Case, tensor: Tensor, rules: dict, target: dict[str, int], coordinates: dict[str, int]):
    """Offset and extent of the box at these coordinates; None where the tensor is placed elsewhere."""
    intervals = [(0, extent) for extent in tensor.global_shape]
    for axis in in_order(rules, NESTING):
        rule = rules[axis]
        if isinstance(rule, dict) and axis in NUMBERED:
            if coordinates[axis] not in target_stages(case, tensor, axis, target[axis], rule):
                return None
        elif isinstance(rule, int):
            intervals[rule] = chunk(*intervals[rule], target[axis], coordinates[axis])
    return [begin for begin, _ in intervals], [end - begin for begin, end in intervals]
