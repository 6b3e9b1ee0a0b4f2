"""A matrix of bytes, drawn on a page: who gives how much to whom."""

import numpy as np

from reshard_mpi.plan.plan import Traffic
from reshard_mpi.report import size_text
from reshard_mpi.show.page import GREY, SMALL, Page, every_so_often, text_inches

MOST_CELLS = 128  # along a side; more ranks share cells
LEAST_PART = 0.4  # of the side, for the axis with fewer cells: its name needs room
MOST_SIZES = 9  # along a side of a matrix whose cells say how many bytes


def draw_matrix(page: Page, left: float, top: float, side: float, moved: Traffic, giver: str, taker: str) -> None:
    """Bytes from (down) to (across), with a scale below; where there are none, the cell is white."""
    from matplotlib import colormaps
    from matplotlib.colors import ListedColormap

    # So many neighbouring ranks as one that they aren't too fine to be seen.
    shares = -(-moved.shape[0] // MOST_CELLS), -(-moved.shape[1] // MOST_CELLS)
    cells = moved.matrix(shares)
    nrows, ncolumns = cells.shape
    height, width = (side * max(count / max(cells.shape), LEAST_PART) for count in cells.shape)
    axes = page.axes(left, top, width, height)
    colours = ListedColormap(colormaps["Blues"](np.linspace(0.2, 1, 256)), name="bytes")
    most = max(int(cells.max()), 1)
    # Edges are numbers of ranks: a cell of several goes from the first to after the last.
    image = axes.imshow(
        np.ma.masked_equal(cells, 0),
        cmap=colours,
        vmin=0,
        vmax=most,
        extent=(-0.5, ncolumns * shares[1] - 0.5, nrows * shares[0] - 0.5, -0.5),
        interpolation="nearest",
        aspect="auto",
    )
    widest = text_inches(str(moved.shape[1]), SMALL)[0] + 0.05
    axes.set_yticks(every_so_often(moved.shape[0], height / moved.shape[0], 0.2))
    axes.set_xticks(every_so_often(moved.shape[1], width / moved.shape[1], max(widest, 0.2)))
    axes.tick_params(top=True, labeltop=True, bottom=False, labelbottom=False)
    axes.set_xlabel(taker, fontsize=SMALL, color=GREY, labelpad=2)
    axes.xaxis.set_label_position("top")
    axes.set_ylabel(giver, fontsize=SMALL, color=GREY, labelpad=2)
    if max(cells.shape) <= MOST_SIZES:
        for row, column in np.argwhere(cells).tolist():
            value = int(cells[row, column])
            colour = "white" if value > 0.55 * most else "black"
            text = size_text(value).replace(" ", "\n")
            axes.text(column, row, text, fontsize=5.5, ha="center", va="center", color=colour)
    scale = page.axes(left, top + height + 0.08, width, 0.08)
    page.figure.colorbar(image, cax=scale, orientation="horizontal")
    scale.set_xticks([0, most], ["0", size_text(most)])
    for end, place in zip(scale.get_xticklabels(), ("left", "right"), strict=True):
        end.set(horizontalalignment=place)
