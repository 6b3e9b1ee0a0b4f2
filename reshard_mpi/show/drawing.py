"""A tensor drawn on a page: its tiles in the colours of the ranks that hold them."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from reshard_mpi.show.page import GREY, POINTS, SMALL, Page, every_so_often, text_inches
from reshard_mpi.show.tilings import Plane, Slice, Tile, Tiling, bands_of, ranks_text, slices_of

if TYPE_CHECKING:
    from matplotlib.axes import Axes

Colours = NDArray[np.float64]  # (nranks, 4): red, green, blue, alpha
Numbers = NDArray[np.float64]
# Okabe and Ito's colours, which colour-blind people tell apart, with grey for black. More ranks take viridis, in rank order.
FEW_COLOURS = ("#0072B2", "#E69F00", "#009E73", "#CC79A7", "#56B4E9", "#D55E00", "#F0E442", "#999999")
LIGHTEST = 0.93  # of viridis: the white line between two tiles must be seen
LUMINANCE = np.array([0.299, 0.587, 0.114])  # of red, green, blue (ITU-R BT.601)
MOST_BANDS = 16  # of a tile that more ranks hold
MOST_ALIKE = 0.9  # of the tiles must have room for a label, to be labelled alike
MOST_VECTORS = 2500  # tiles of a slice; more are drawn as pixels
# Inches, as all lengths on a page.
NARROWEST_LINED = 1.0  # points: tiles that a white line divides
STRIPE = 0.2  # wide, or narrower: of a tile that several ranks hold
STRIP = 0.28  # high: a tensor of one axis, or none
BESIDE, ABOVE, BELOW = 0.6, 0.17, 0.3  # a slice: the numbers along its axes, and what it is a slice of


def rank_colours(nranks: int) -> Colours:
    """A colour for each rank."""
    from matplotlib import colormaps
    from matplotlib.colors import to_rgba_array

    if nranks <= len(FEW_COLOURS):
        return to_rgba_array(FEW_COLOURS[:nranks])
    return np.asarray(colormaps["viridis"](np.linspace(0, LIGHTEST, nranks)))


def draw_legend(page: Page, left: float, top: float, width: float, colours: Colours) -> None:
    """A strip with the colour of every rank."""
    axes = page.axes(left, top, width, 0.13)
    axes.imshow(colours[np.newaxis], aspect="auto", interpolation="nearest")
    axes.set_yticks([])
    axes.set_xticks(every_so_often(len(colours), width / len(colours), 0.3))
    axes.set_ylabel("rank", rotation=0, ha="right", va="center", fontsize=SMALL, color=GREY, labelpad=3)


@dataclass(frozen=True)
class Look:
    """How a tensor is drawn on one side: within `width`, slices `height` high, `columns` a row, at most `most` of them.

    `labels` says what may stand in a tile, the most telling first: as many texts for one as for any other. `sizes` are those of
    labels in points; the last text may also be `small`.
    """

    colours: Colours
    labels: Callable[[Tile], Sequence[str]]
    width: float
    narrowest: float
    height: float
    columns: int
    most: int
    sizes: tuple[float, ...]
    small: tuple[float, ...]


def tiling_inches(tiling: Tiling, plane: Plane, look: Look) -> float:
    """How high the drawing of a tiling is."""
    nslices = min(slices_of(tiling, plane, 0)[1], look.most)
    return max(math.ceil(nslices / look.columns), 1) * _slice_inches(tiling, plane, look)


def _slice_inches(tiling: Tiling, plane: Plane, look: Look) -> float:
    above = ABOVE if len(tiling.shape) > 2 else 0
    return above + (STRIP if plane.down is None else look.height) + BELOW


def draw_tiling(page: Page, left: float, top: float, tiling: Tiling, plane: Plane, look: Look) -> None:
    """A tensor on one side, slice by slice."""
    if 0 in tiling.shape:
        page.text(left + BESIDE, top, "no elements", style="italic")
        return
    slices, nslices = slices_of(tiling, plane, look.most)
    width = look.width / min(nslices, look.columns) - BESIDE
    step, height = _slice_inches(tiling, plane, look), STRIP if plane.down is None else look.height
    size = (_width_of(tiling.shape, plane, width, height, look.narrowest), height)
    for number, part in enumerate(slices):
        row, column = divmod(number, look.columns)
        x, y = left + column * (width + BESIDE) + BESIDE, top + row * step
        if len(tiling.shape) > 2:
            more = f"  ... of {nslices} slices" if number == look.most - 1 < nslices - 1 else ""
            page.text(x, y, _slice_text(len(tiling.shape), part) + more, SMALL)
            y += ABOVE
        _draw_slice(page.axes(x, y, *size), size, tiling, part, plane, look)


def _width_of(shape: Sequence[int], plane: Plane, width: float, height: float, narrowest: float) -> float:
    """As a tensor is, but neither too narrow nor too wide to be read."""
    if plane.across is None:
        return 3 * STRIP
    if plane.down is None:
        return width
    return min(max(height * shape[plane.across] / shape[plane.down], narrowest), width)


def _slice_text(naxes: int, part: Slice) -> str:
    return "[" + ", ".join("{}:{}".format(*part.where[a]) if a in part.where else ":" for a in range(naxes)) + "]"


def _draw_slice(axes: "Axes", size: tuple[float, float], tiling: Tiling, part: Slice, plane: Plane, look: Look) -> None:
    """The axes count elements; `size` is theirs in inches."""
    across, down = ((1 if axis is None else tiling.shape[axis]) for axis in (plane.across, plane.down))
    axes.set(xlim=(0, across), ylim=(down, 0))
    axes.patch.set(facecolor="white", hatch="/////", edgecolor="0.75", linewidth=0)  # what no rank holds
    _draw_numbers(axes, size, tiling, plane)
    if not part.tiles:
        return
    scale = np.array([across, down]) / size
    corners = np.array([_corners(tile, plane) for tile in part.tiles])
    rooms = (corners[:, 1] - corners[:, 0]) / scale
    are_many = len(part.tiles) > MOST_VECTORS
    _draw_colours(axes, part.tiles, corners[:, 0], rooms, scale, look.colours, are_many)
    if not are_many:
        mute = _draw_labels(axes, part.tiles, corners.mean(axis=1), rooms, look)
        _draw_labels_beside(axes, [part.tiles[index] for index in mute], corners[mute], (across, down), size)


def _corners(tile: Tile, plane: Plane) -> list[list[int]]:
    """(across, down) of the first and of the last corner."""
    return [
        [default if axis is None else edge[axis] for axis in (plane.across, plane.down)]
        for edge, default in ((tile.start, 0), (tile.stop, 1))
    ]


def _draw_colours(
    axes: "Axes",
    tiles: Sequence[Tile],
    first: Numbers,
    rooms: Numbers,
    scale: Numbers,
    colours: Colours,
    as_pixels: bool,
) -> None:
    """Tiles with their first corner at `first` and of `rooms` inches; `scale` elements are an inch."""
    from matplotlib.collections import PolyCollection

    shown = [_stripes(_shown(tile.ranks), room.sum()) for tile, room in zip(tiles, rooms, strict=True)]
    bands = [
        corner + band * scale
        for corner, room, ranks in zip(first, rooms, shown, strict=True)
        for band in bands_of(room[0], room[1], len(ranks))
    ]
    fills = colours[np.concatenate(shown)]
    # A thin line of the same colour: else what lies behind shines through between two bands.
    fill = PolyCollection(bands, facecolors=fills, edgecolors=fills, linewidths=0.2, gid="bands")
    edges = PolyCollection(
        [corner + bands_of(room[0], room[1], 1)[0] * scale for corner, room in zip(first, rooms, strict=True)],
        facecolors="none",
        edgecolors="white",
        linewidths=_line_widths(rooms.min(axis=1) * POINTS),
        gid="tiles",
    )
    for collection in (fill, edges):
        collection.set_rasterized(as_pixels)
        axes.add_collection(collection, autolim=False)


def _line_widths(narrow: Numbers) -> Numbers:
    """Between tiles that are so many points narrow; where lines would cover the tiles there are none."""
    return np.where(narrow < NARROWEST_LINED, 0, np.clip(narrow * 0.15, 0.1, 1))


def _shown(ranks: Sequence[int]) -> list[int]:
    """Of the ranks that hold a tile those whose colours are shown."""
    if len(ranks) <= MOST_BANDS:
        return list(ranks)
    return [ranks[index] for index in np.linspace(0, len(ranks) - 1, MOST_BANDS).astype(int).tolist()]


def _stripes(ranks: list[int], inches: float) -> list[int]:
    """The ranks again and again, so that stripes which share so many inches are narrow; one rank needs but one."""
    return ranks * (1 if len(ranks) == 1 else max(int(inches / STRIPE / len(ranks)), 1))


def _draw_labels(axes: "Axes", tiles: Sequence[Tile], centres: Numbers, rooms: Numbers, look: Look) -> list[int]:
    """Label tiles, alike if most of them have room for it; the numbers of those that have no room for anything."""
    texts = [look.labels(tile) for tile in tiles]
    ways = [(text, size) for text in range(len(texts[0])) for size in look.sizes]
    ways += [(len(texts[0]) - 1, size) for size in look.small]
    fits = np.array(
        [[_has_room(each[text], size, room) for text, size in ways] for each, room in zip(texts, rooms, strict=True)]
    )
    alike = fits.mean(axis=0) >= MOST_ALIKE
    if alike.any():
        ways, fits = [ways[alike.argmax()]], fits[:, [alike.argmax()]]
    for index in np.flatnonzero(fits.any(axis=1)).tolist():
        text, size = ways[fits[index].argmax()]
        _draw_label(axes, centres[index], texts[index][text], size, look.colours[_shown(tiles[index].ranks)])
    return np.flatnonzero(~fits.any(axis=1)).tolist()


def _has_room(text: str, size: float, room: Numbers) -> bool:
    return bool(np.all(np.array(text_inches(text, size)) <= room - 0.02))


def _draw_label(axes: "Axes", centre: Numbers, text: str, size: float, colours: Colours) -> None:
    is_one = len(colours) == 1
    axes.text(
        centre[0],
        centre[1],
        text,
        fontsize=size,
        ha="center",
        va="center",
        color="white" if is_one and colours[0, :3] @ LUMINANCE < 0.55 else "black",
        bbox=None if is_one else {"boxstyle": "round,pad=0.15", "facecolor": "white", "linewidth": 0},
    )


def _draw_labels_beside(
    axes: "Axes", tiles: Sequence[Tile], corners: Numbers, ends: tuple[int, int], size: tuple[float, float]
) -> None:
    """The ranks of tiles without room for a label: of those at the right edge, or at the upper one, as many as have room."""
    at_right = corners[:, 1, 0] == ends[0]
    at_top = corners[:, 0, 1] == 0
    goes_down = at_right.sum() > at_top.sum()
    side = int(goes_down)
    reached = -math.inf
    for index in np.flatnonzero(at_right if goes_down else at_top).tolist():
        text = ranks_text(tiles[index].ranks)
        width, height = text_inches(text, 6)
        middle = corners[index, :, side].mean() / ends[side] * size[side]
        needed = (height if goes_down else width + 0.05) / 2
        if middle - needed < reached:
            continue
        reached = middle + needed
        if goes_down:
            x, y, across, down = 1 + 0.04 / size[0], 1 - middle / size[1], "left", "center"
        else:
            x, y, across, down = middle / size[0], 1 + 0.03 / size[1], "center", "bottom"
        axes.text(x, y, text, fontsize=6, color="black", transform=axes.transAxes, ha=across, va=down)


def _draw_numbers(axes: "Axes", size: tuple[float, float], tiling: Tiling, plane: Plane) -> None:
    """Where the tiles begin and end, as far as there is room for the numbers."""
    axes.set(xticks=[], yticks=[])
    if plane.across is not None:
        width = text_inches(str(tiling.shape[plane.across]), SMALL)[0] + 0.06
        axes.set_xticks(_apart(tiling.cuts(plane.across), width / size[0]))
    if plane.down is not None:
        axes.set_yticks(_apart(tiling.cuts(plane.down), text_inches("0", SMALL)[1] / size[1]))
        axes.set_xlabel(f"axis {plane.across}", labelpad=2, fontsize=SMALL, color=GREY)
        axes.set_ylabel(f"axis {plane.down}", labelpad=2, fontsize=SMALL, color=GREY)
    axes.ticklabel_format(style="plain", useOffset=False)


def _apart(cuts: Sequence[int], part: float) -> list[int]:
    """Of ascending numbers the first, the last, and those between them that are at least this part of the whole apart."""
    needed, shown = part * cuts[-1], [0]
    for cut in cuts[1:-1]:
        if cut - shown[-1] >= needed and cuts[-1] - cut >= needed:
            shown.append(cut)
    return [*shown, cuts[-1]]
