"""Where a generated case takes its choices from: a seed, or hypothesis, which can shrink them."""

import random

from hypothesis import strategies as st


class Dice:
    """Choices by a seed. Every other choice is made of `integer`, so that a subclass needs only that."""

    def __init__(self, seed):
        self.random = seed if isinstance(seed, random.Random) else random.Random(seed)

    def integer(self, low: int, high: int) -> int:
        """From low to high, both possible."""
        return self.random.randint(low, high)

    def chance(self, percent: int) -> bool:
        """True so often. Low draws are False: what hypothesis shrinks to has no oddities."""
        return percent > 0 and self.integer(1, 100) > 100 - percent

    def pick(self, options):
        options = list(options)
        return options[self.integer(0, len(options) - 1)]

    def some(self, options, percent: int = 50) -> list:
        return [option for option in options if self.chance(percent)]

    def shuffled(self, options) -> list:
        left, out = list(options), []
        while left:
            out.append(left.pop(self.integer(0, len(left) - 1)))
        return out


class HypothesisDice(Dice):
    """The same choices, drawn."""

    def __init__(self, draw):
        self.draw = draw

    def integer(self, low: int, high: int) -> int:
        return self.draw(st.integers(low, high))
