"""Patterns of layout files, and what they are held against: the end of an fqn and of its module path, whole words each.

`*` is one of the words between the dots or a part of one, `**` any number of them.
"""

import re
from functools import lru_cache

OPTIMIZER_STATES = frozenset("exp_avg exp_avg_sq max_exp_avg_sq momentum_buffer master_param".split())


def is_pattern(text: str) -> bool:
    """Are there words between its dots?"""
    return "" not in text.split(".")


def matches(pattern: str, fqn: str) -> bool:
    """
    >>> matches("layers.*.up", "model.layers.3.up.weight"), matches("up", "layers.3.up.lora.weight")
    (True, False)
    """
    return any(_compiled(pattern).fullmatch(f"{name}.") for name in _names_of(fqn))


def _names_of(fqn: str) -> list[str]:
    """What patterns are held against: the fqn and the module path, without the name of an optimizer's state."""
    path, _, last = fqn.rpartition(".")
    whole = path if path and last in OPTIMIZER_STATES else fqn
    return [fqn, whole, whole.rpartition(".")[0] or whole]


@lru_cache(maxsize=1 << 12)
def _compiled(pattern: str) -> re.Pattern[str]:
    """What names match that have a dot after every word."""
    parts = []
    for word in pattern.split("."):
        if word == "**":
            parts.append(r"(?:[^.]+\.)*")
        elif word == "*":
            parts.append(r"[^.]+\.")
        else:
            parts.append(re.escape(word).replace(r"\*", "[^.]*") + r"\.")
    return re.compile(r"(?:.*\.)?" + "".join(parts))
