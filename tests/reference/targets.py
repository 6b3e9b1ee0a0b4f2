"""Targets that a given case may be asked for."""

import math

from tests.reference.case import Case
from tests.reference.dice import Dice

ANYONE = ("pp", "dp", "fsdp", "ep", "cp")  # axes with a default rule


def describe_target(dice: Dice, case: Case, max_ranks: int = 12) -> dict[str, int]:
    """Mesh axes that there may be a rule for; `single` now and then. May still be refused."""
    known = set(case.mesh) | {axis for rules in case.layout.values() for axis in rules}
    if dice.chance(12):
        return {"world_size": 1}
    preferred = dice.shuffled(sorted(known))[:2] + dice.shuffled(sorted(set(ANYONE) | known))[:2]
    target: dict[str, int] = {}
    for axis in preferred[: dice.integer(1, 3)]:
        size = dice.pick([2, 2, 3, 4])
        if axis not in target and math.prod(target.values()) * size <= max_ranks:
            target[axis] = size
    return target


def spelled(target: dict[str, int]) -> str:
    """As `--target` takes it.

    >>> spelled({"pp": 2, "tp": 2}), spelled({"world_size": 1})
    ('pp=2,tp=2', 'single')
    """
    return "single" if "world_size" in target else ",".join(f"{axis}={size}" for axis, size in target.items())
