"""Arrays whose bytes are no span of their file: what planning and reading need of them.

Such an array is shown as if it lay in row-major order behind the end of its file: whoever plans and reads knows byte spans alone.
"""

from collections.abc import Callable
from typing import Protocol

ReadSpan = Callable[[int, memoryview], None]  # fills the view with the bytes of the file from an offset on


class ShownArray(Protocol):
    """`begin`: the byte of the file at which it is shown; `held_nbytes`: of memory, while it is read.

    `is_checked`: is it held against a checksum of its own wherever it is read?
    """

    @property
    def begin(self) -> int: ...

    @property
    def nbytes(self) -> int: ...

    @property
    def held_nbytes(self) -> int: ...

    @property
    def is_checked(self) -> bool: ...

    def open(self, read: ReadSpan, where: str) -> "OpenArray": ...


class OpenArray(Protocol):
    """A shown array that is being read."""

    def read(self, offset: int, into: memoryview) -> None:
        """Fill `into` with the bytes of the array, in row-major order, from `offset` on."""

    def close(self) -> None:
        """Let go of what is held."""
