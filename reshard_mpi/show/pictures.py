"""The pictures of `--plot`: the tiles of tensors, coloured by rank, and how many bytes go from whom to whom."""

import math
import textwrap
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from reshard_mpi.checkpoint.checks import box_text
from reshard_mpi.checkpoint.dtypes import DTYPES
from reshard_mpi.checkpoint.manifest import Fragment, by_tensor
from reshard_mpi.errors import names, one_line, plural
from reshard_mpi.plan.plan import Plan, Traffic, shard_traffic, traffic
from reshard_mpi.plan.prepare import Prepared
from reshard_mpi.report import size_text, topology_text
from reshard_mpi.show.drawing import Look, draw_legend, draw_tiling, rank_colours, tiling_inches
from reshard_mpi.show.matrix import draw_matrix
from reshard_mpi.show.page import LETTER_WIDTH, POINTS, Page, own_style, shortened
from reshard_mpi.show.tensors import layout_text, shape_text
from reshard_mpi.show.tilings import Kind, Tile, Tiling, kinds_of, plane_of, ranks_text, slices_of, tiling_of
from reshard_mpi.storage.source import Source

if TYPE_CHECKING:
    from matplotlib.figure import Figure

MOST_TENSORS = 6
# Inches, as all lengths here.
MARGIN, GAP = 0.3, 0.35
TILES, MATRIX = 3.9, 2.7  # wide: the tensors of one side; a matrix
TITLE, LEGEND = 0.38, 0.45  # high
BLACK = "black"


@own_style()
def tensor_picture(facts: Mapping[str, Any]) -> "Figure":
    """The tiles of one tensor, as `tensor_tiles` tells of it."""
    tiling = tiling_of(facts["shape"], [(tile["rank"], tile["offset"], tile["extent"]) for tile in facts["tiles"]])
    coordinates = {tile["rank"]: tile["coordinates"] for tile in facts["tiles"]}
    plane = plane_of([tiling])
    look = Look(
        colours=rank_colours(math.prod(facts["source_topology"].values())),
        labels=lambda tile: _tile_labels(tile, coordinates[tile.ranks[0]]),
        width=7.2,
        narrowest=3,
        height=2.8 if slices_of(tiling, plane, 0)[1] < 2 else 1.6,
        columns=3,
        most=9,
        sizes=(9, 8, 7, 6),
        small=(5, 4),
    )
    width = look.width + 2 * MARGIN
    page = Page(width, MARGIN + TITLE + LEGEND + tiling_inches(tiling, plane, look) + MARGIN / 2)
    page.text(MARGIN, MARGIN, shortened(facts["tensor"], look.width, 10), 10, color=BLACK)
    layout = layout_text(facts["layout"], facts["source_topology"])
    what = [f"{facts['dtype']} {facts['shape']}", size_text(facts["nbytes"]), topology_text(facts["source_topology"])]
    page.text(MARGIN, MARGIN + 0.2, ", ".join(what) + (f"; {layout}" if layout else ""))
    draw_legend(page, MARGIN + 0.6, MARGIN + TITLE, look.width - 0.6, look.colours)
    draw_tiling(page, MARGIN, MARGIN + TITLE + LEGEND, tiling, plane, look)
    return page.figure


def _tile_labels(tile: Tile, coordinates: Mapping[str, int]) -> list[str]:
    """From all there is to say of a tile to its ranks alone."""
    ranks = _short_labels(tile)[0]
    title = f"rank {ranks}" if len(tile.ranks) == 1 else ranks if " " in ranks else f"ranks {ranks}"
    extent = [b - a for a, b in zip(tile.start, tile.stop, strict=True)]
    box = box_text(tile.start, extent) if extent else ""
    where = ", ".join(f"{axis} {index}" for axis, index in coordinates.items()) if len(tile.ranks) == 1 else ""
    full, short = ("\n".join(filter(None, lines)) for lines in ([title, where, box], [title, box]))
    return [full, short, f"{title}  {box}".strip(), title, ranks]


def _short_labels(tile: Tile) -> list[str]:
    return [ranks_text(tile.ranks)]


@own_style()
def plan_picture(source: Source, prepared: Prepared) -> "Figure":
    """Tensors before and after, the largest of each kind, and beside them who gives how much to whom."""
    case, plan = prepared.outgoing.case, prepared.plan
    after = by_tensor(case.fragments)
    before = {t: fragments for t, fragments in by_tensor(source.case.fragments).items() if t in after}
    tilings = {t: (_tiling(before[t]), _tiling(after[t])) for t in after}
    kinds, left = kinds_of(tilings, {t: _nbytes(after[t][0]) for t in after}, MOST_TENSORS)
    counts = (source.case.world_size, prepared.outgoing.nranks)
    looks = [Look(rank_colours(n), _short_labels, TILES, 1.5, 1.25, 4, 4, (8, 7, 6), (5,)) for n in counts]
    planes = [plane_of(tilings[kind.tensor]) for kind in kinds]
    heights = [
        TITLE + max(tiling_inches(*pair) for pair in zip(tilings[kind.tensor], [plane] * 2, looks, strict=True))
        for kind, plane in zip(kinds, planes, strict=True)
    ]
    matrices = _matrices(plan, counts)
    beside = MARGIN + 2 * (TILES + GAP)
    width = beside + GAP + MATRIX + MARGIN
    footer = _footer(kinds, left, width - 2 * MARGIN)
    top = MARGIN + TITLE + 0.25 + LEGEND
    below = max(top + sum(heights), MARGIN + TITLE + len(matrices) * (MATRIX + 1.2))
    page = Page(width, below + 0.14 * len(footer) + MARGIN)
    sides = [topology_text(topology) for topology in (case.topology.target, case.topology.source)]
    title = f"{one_line(str(source.folder))}: {sides[0]} -> {sides[1]}"
    page.text(MARGIN, MARGIN, shortened(title, width - 2 * MARGIN, 11), 11, color=BLACK)
    for number, (side, topology, look) in enumerate(zip(("before", "after"), sides, looks, strict=True)):
        x = MARGIN + number * (TILES + GAP)
        page.text(x, MARGIN + TITLE, f"{side}: {topology}, {plural(counts[number], 'shard')}", 9, color=BLACK)
        draw_legend(page, x + 0.6, MARGIN + TITLE + 0.25, TILES - 0.6, look.colours)
        y = top
        for kind, plane, height in zip(kinds, planes, heights, strict=True):
            draw_tiling(page, x, y + TITLE - 0.05, tilings[kind.tensor][number], plane, look)
            if not number:
                page.text(x, y, _kind_text(kind, after[kind.tensor][0]), color=BLACK)
            y += height
    y = MARGIN + TITLE
    for title, nbytes, giver, taker in matrices:
        page.text(beside, y, title, 9, color=BLACK)
        draw_matrix(page, beside + GAP, y + 0.55, MATRIX, nbytes, giver, taker)
        y += MATRIX + 1.2
    page.text(MARGIN, below, "\n".join(footer), 7)
    return page.figure


def _tiling(fragments: Sequence[Fragment]) -> Tiling:
    return tiling_of(fragments[0].global_shape, ((f.rank, *f.box) for f in fragments))


def _nbytes(like: Fragment) -> int:
    return math.prod(like.global_shape) * DTYPES[like.dtype].nbits // 8


def _matrices(plan: Plan, nshards: tuple[int, int]) -> list[tuple[str, Traffic, str, str]]:
    """(title, bytes, what gives, what takes) of the matrices beside the tensors."""
    moved = traffic(plan)
    sent = int(moved.sent.sum())
    return [
        ("bytes by shard", shard_traffic(plan, nshards), "from source shard", "to target shard"),
        (f"bytes by MPI rank: {size_text(sent)} sent", moved, "read by rank", "written by rank (diagonal: not sent)"),
    ]


def _kind_text(kind: Kind, like: Fragment) -> str:
    what = f"   {like.dtype} {shape_text(like.global_shape)}, {size_text(_nbytes(like))}"
    what += f"; {kind.nothers} more cut alike" if kind.nothers else ""
    room = 2 * TILES - len(what) * LETTER_WIDTH * 7.5 / POINTS
    return shortened(kind.tensor, room, 7.5) + what


def _footer(kinds: Sequence[Kind], left: Sequence[str], width: float) -> list[str]:
    """What is not shown, in lines that have room."""
    nalike = sum(kind.nothers for kind in kinds)
    text = f"{plural(len(kinds) + nalike + len(left), 'tensor')}: {len(kinds)} shown, {nalike} cut as one of these"
    text += f", {len(left)} cut in other ways and left out: {names(map(one_line, left))}" if left else ""
    text += ". Striped: held by several ranks."
    return textwrap.wrap(text, math.floor(width * POINTS / 7 / LETTER_WIDTH), max_lines=3)
