"""A matrix of bytes, drawn on a page: who gives how much to whom."""

import numpy as np

from reshard_mpi.boxes import Ints
from reshard_mpi.report import size_text
from reshard_mpi.show.page import GREY, SMALL, Page, every_so_often

MOST_CELLS = 128  # along a side; more ranks share cells
MOST_SIZES = 9  # along a side of a matrix whose cells say how many bytes


def draw_matrix(page: Page, left: float, top: float, side: float, nbytes: Ints, giver: str, taker: str) -> None:
    """Bytes from (down) to (across), with a scale below; where there are none, the cell is white."""
    from matplotlib import colormaps
    from matplotlib.colors import ListedColormap

    cells, shares = _summed(nbytes)
    nrows, ncolumns = cells.shape
    cell = side / max(cells.shape)
    axes = page.axes(left, top, cell * ncolumns, cell * nrows)
    colours = ListedColormap(colormaps["Blues"](np.linspace(0.2, 1, 256)), name="bytes")
    most = max(int(cells.max()), 1)
    # Edges are numbers of ranks: a cell of several goes from the first to after the last.
    image = axes.imshow(
        np.ma.masked_equal(cells, 0),
        cmap=colours,
        vmin=0,
        vmax=most,
        extent=(-0.5, ncolumns * shares - 0.5, nrows * shares - 0.5, -0.5),
        interpolation="nearest",
        aspect="auto",
    )
    axes.set_xticks(every_so_often(nbytes.shape[1], cell / shares, 0.2))
    axes.set_yticks(every_so_often(nbytes.shape[0], cell / shares, 0.2))
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
    scale = page.axes(left, top + cell * nrows + 0.08, cell * ncolumns, 0.08)
    page.figure.colorbar(image, cax=scale, orientation="horizontal")
    scale.set_xticks([0, most], ["0", size_text(most)])
    for end, place in zip(scale.get_xticklabels(), ("left", "right"), strict=True):
        end.set(horizontalalignment=place)


def _summed(nbytes: Ints) -> tuple[Ints, int]:
    """The matrix with so many neighbouring ranks as one that it isn't too fine to be seen; and how many."""
    shares = -(-max(nbytes.shape) // MOST_CELLS)
    padded = np.pad(nbytes, [(0, -n % shares) for n in nbytes.shape])
    rows, columns = (n // shares for n in padded.shape)
    return padded.reshape(rows, shares, columns, shares).sum(axis=(1, 3)), shares
