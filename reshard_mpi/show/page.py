"""A page to draw on, laid out by hand in inches from its top left, so that it is known beforehand which label has room.

matplotlib is imported when a page is made, without pyplot and its state, and whatever the user's matplotlibrc says. The same
drawing gives the same bytes.
"""

import io
import math
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from reshard_mpi.errors import UsageError, one_line, storage_error

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

STYLE: dict[Any, Any] = {
    "svg.hashsalt": "reshard_mpi",
    "svg.fonttype": "none",  # text is text, which can be searched and read aloud
    "font.family": "sans-serif",
    "font.sans-serif": "DejaVu Sans",  # comes with matplotlib, and is wider than most others
    "hatch.linewidth": 0.5,
    "hatch.color": "0.75",
    "text.parse_math": False,  # a dollar in a tensor's name is a dollar
}
UNDATED: dict[str, dict[str, None]] = {".svg": {"Date": None, "Creator": None}, ".png": {"Software": None}}
DPI = 150
# Of a letter, about, as parts of its size; points an inch.
LETTER_WIDTH, LINE_HEIGHT, POINTS = 0.62, 1.3, 72
GREY = "0.35"
SMALL = 6.5  # points


def need_matplotlib() -> None:
    """UsageError where there is no matplotlib."""
    try:
        import matplotlib.figure  # noqa: F401
    except ImportError as error:
        raise UsageError(
            "--plot", f"needs matplotlib ({error}); install it with: pip install 'reshard_mpi[plot]'"
        ) from error


@contextmanager
def own_style() -> Iterator[None]:
    """Draw and save within this; also a decorator."""
    import matplotlib

    with matplotlib.rc_context():
        matplotlib.rcdefaults()
        matplotlib.rcParams.update(STYLE)
        yield


class Page:
    """A figure of `width` x `height` inches."""

    def __init__(self, width: float, height: float):
        from matplotlib.figure import Figure

        self.width, self.height = width, height
        self.figure: Figure = Figure(figsize=(width, height), facecolor="white")

    def axes(self, left: float, top: float, width: float, height: float) -> "Axes":
        """New axes that fill this rectangle; ticks and labels come outside of it."""
        bottom = self.height - top - height
        axes = self.figure.add_axes((left / self.width, bottom / self.height, width / self.width, height / self.height))
        axes.tick_params(labelsize=SMALL, length=2, width=0.5, pad=1.5, colors=GREY)
        for spine in axes.spines.values():
            spine.set(linewidth=0.5, color=GREY)
        return axes

    def text(self, left: float, top: float, text: str, size: float = 7.5, **style: Any) -> None:
        """Text whose first line begins at this point."""
        self.figure.text(
            left / self.width, 1 - top / self.height, text, fontsize=size, va="top", **{"color": GREY} | style
        )


def text_inches(text: str, size: float) -> tuple[float, float]:
    """About how wide and high a text of this size in points is."""
    lines = text.split("\n")
    width = max(map(len, lines)) * LETTER_WIDTH * size / POINTS
    return width, len(lines) * LINE_HEIGHT * size / POINTS


def every_so_often(count: int, apart: float, needed: float) -> list[int]:
    """Of `count` numbers from 0, which would stand `apart` inches apart, every k-th (a power of two), so that they have room.

    >>> every_so_often(10, 0.1, 0.3)
    [0, 4, 8]
    """
    step = 1
    while step * apart < needed and step < count:
        step *= 2
    return list(range(0, count, step))


def shortened(name: str, inches: float, size: float) -> str:
    """A name that has room, if need be without its middle; where two names differ is mostly their end.

    >>> shortened("model.layers.0.self_attn.q_proj.weight", 1.3, 8)
    'model...roj.weight'
    """
    name, most = one_line(name), math.floor(inches * POINTS / size / LETTER_WIDTH)
    if len(name) <= most:
        return name
    first = max((most - 3) // 3, 0)
    return f"{name[:first]}...{name[len(name) - max(most - 3 - first, 0) :]}"


@own_style()
def save(figure: "Figure", path: Path) -> None:
    """Write the figure to `path`, an svg or png, in one step: until then, what was there is there."""
    drawn = io.BytesIO()
    figure.savefig(drawn, format=path.suffix[1:].lower(), dpi=DPI, metadata=UNDATED[path.suffix.lower()])
    partial = path.with_name(f".{path.name}.{os.getpid()}.partial")
    try:
        try:
            partial.write_bytes(drawn.getvalue())
            os.replace(partial, path)
        finally:
            partial.unlink(missing_ok=True)
    except OSError as error:
        raise storage_error(path, error, "write the picture to") from error
