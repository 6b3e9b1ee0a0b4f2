"""Parts of fragments as fragments of other tensors: nothing is moved, a part's padding is the rest of the stored array. Pure.

Every function is of one fragment; ids, names and what else follows from the whole tensor are the caller's.
"""

import itertools
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import msgspec
import numpy as np

from reshard_mpi.checkpoint.dtypes import DTYPES
from reshard_mpi.checkpoint.manifest import Fragment, Padding
from reshard_mpi.storage.reordered import ReorderedArray, places
from reshard_mpi.storage.safetensors import StoredArray


class Piece(NamedTuple):
    """The elements [first, first + size) of a tensor axis, as those from `at` on of an axis of `whole` elements."""

    first: int
    size: int
    at: int
    whole: int


def part(fragment: Fragment, axis: int, piece: Piece) -> Fragment:
    """What the fragment holds of the piece, as a fragment of the tensor that the piece is of; it may be nothing."""
    offset, extent = fragment.element_offset[axis], fragment.element_extent[axis]
    start = min(max(offset, piece.first), piece.first + piece.size)
    stop = max(start, min(offset + extent, piece.first + piece.size))
    skipped = min(max(start - offset, 0), extent)
    padding = Padding(
        with_size(fragment.padding.before, axis, fragment.padding.before[axis] + skipped),
        with_size(fragment.padding.after, axis, fragment.padding.after[axis] + extent - skipped - (stop - start)),
        "view" if fragment.padding.semantic == "none" and stop - start != extent else fragment.padding.semantic,
    )
    return msgspec.structs.replace(
        fragment,
        global_shape=with_size(fragment.global_shape, axis, piece.whole),
        element_offset=with_size(fragment.element_offset, axis, start - piece.first + piece.at),
        element_extent=with_size(fragment.element_extent, axis, stop - start),
        padding=padding,
    )


def pieces_of_members(sizes: Sequence[int], ngroups: int) -> list[list[Piece]]:
    """Of each member of a fused axis, of these sizes in all, its pieces: every group holds an equal part of each, in order.

    >>> pieces_of_members([4, 2], 2)
    [[Piece(first=0, size=2, at=0, whole=4), Piece(first=3, size=2, at=2, whole=4)],
     [Piece(first=2, size=1, at=0, whole=2), Piece(first=5, size=1, at=1, whole=2)]]
    """
    if len(sizes) == 1:
        ngroups = 1  # its pieces touch, before and after
    in_group = [size // ngroups for size in sizes]
    firsts = itertools.accumulate(in_group[:-1], initial=0)
    group = sum(in_group)
    return [
        [Piece(number * group + first, size, number * size, whole) for number in range(ngroups)]
        for first, size, whole in zip(firsts, in_group, sizes, strict=True)
    ]


def parts(fragment: Fragment, axis: int, pieces: Sequence[Piece]) -> list[Fragment]:
    """What the fragment holds of each of the pieces; of nothing at all one fragment without elements is left."""
    offset, extent = fragment.element_offset[axis], fragment.element_extent[axis]
    held = [one for one in pieces if max(offset, one.first) < min(offset + extent, one.first + one.size)]
    return [part(fragment, axis, one) for one in held or pieces[:1]]


def reordered(
    fragment: Fragment, array: StoredArray, shown_at: int, unit: int, to: str
) -> tuple[StoredArray, list[Fragment]]:
    """The rows that the fragment holds of `array`, shown at `shown_at` with every head of `unit` rows in the order `to`.

    The whole heads are one fragment; of a head that is there in part, rows that stay neighbours are one.
    """
    first, nrows = fragment.element_offset[0], fragment.element_extent[0]
    row_nbytes = array.nbytes // array.shape[0]
    begin = array.begin + fragment.padding.before[0] * row_nbytes
    order = ReorderedArray(fragment.payload_key, begin, shown_at, row_nbytes, nrows, first, unit, to)
    shown = StoredArray(array.dtype, (nrows, *array.shape[1:]), shown_at, order.nbytes, order=order)
    whole = msgspec.structs.replace(
        fragment,
        local_shape=shown.shape,
        padding=_padding_of_rows(fragment.padding, 0, 0),
        fragment_digest=fragment.fragment_digest if nrows == array.shape[0] else None,
    )
    return shown, [
        msgspec.structs.replace(
            whole,
            element_offset=with_size(whole.element_offset, 0, at),
            element_extent=with_size(whole.element_extent, 0, size),
            padding=_padding_of_rows(whole.padding, before, nrows - before - size),
        )
        for before, at, size in _runs(first, first + nrows, unit, to)
    ]


def _runs(first: int, last: int, unit: int, to: str) -> Iterator[tuple[int, int, int]]:
    """The rows [first, last), with their heads in order, as runs: rows before it, its first row in the tensor, rows.

    >>> list(_runs(3, 13, 4, "halves")), list(_runs(1, 4, 4, "halves"))
    ([(0, 3, 1), (1, 4, 8), (9, 12, 1)], [(0, 1, 3)])
    """
    inner = min(first + -first % unit, last)  # of the first whole head, if there is one
    outer = max(last - last % unit, inner)
    for low, high in ((first, inner), (inner, outer), (outer, last)):
        is_whole = low % unit == 0 and high % unit == 0
        rows = np.arange(low, high) if is_whole else np.sort(places(low, high, unit, to))
        begins = np.flatnonzero(np.diff(rows, prepend=-2) != 1)
        for begin, end in itertools.pairwise([*begins.tolist(), len(rows)]):
            yield low - first + begin, int(rows[begin]), end - begin


def index(fragment: Fragment, array: StoredArray, number: int) -> tuple[StoredArray, Fragment]:
    """Index `number` of axis 0 of those that the fragment holds, as an array and a fragment of their own."""
    before = fragment.padding.before[0] + number
    nbytes = DTYPES[array.dtype].nbits * int(np.prod(array.shape[1:], dtype=np.int64)) // 8
    within = StoredArray(array.dtype, array.shape[1:], array.begin + before * nbytes, nbytes)
    shared = fragment.shared_storage_id
    return within, msgspec.structs.replace(
        fragment,
        payload_key=f"{fragment.payload_key}[{before}]",
        global_shape=fragment.global_shape[1:],
        element_offset=fragment.element_offset[1:],
        element_extent=fragment.element_extent[1:],
        local_shape=fragment.local_shape[1:],
        padding=_padding_without_axis_0(fragment.padding),
        partition_axes=tuple(axis - 1 for axis in fragment.partition_axes if axis),
        fragment_digest=fragment.fragment_digest if fragment.local_shape[0] == 1 else None,
        shared_storage_id=f"{shared}[{before}]" if shared else None,
    )


def _padding_without_axis_0(padding: Padding) -> Padding:
    before, after = padding.before[1:], padding.after[1:]
    return Padding(before, after, padding.semantic if any(before + after) else "none")


def _padding_of_rows(padding: Padding, before: int, after: int) -> Padding:
    """The padding with so many rows of axis 0."""
    sides = (before, *padding.before[1:]), (after, *padding.after[1:])
    return Padding(
        *sides, "none" if not any(sum(sides, ())) else "view" if padding.semantic == "none" else padding.semantic
    )


def with_size(sizes: Sequence[int], axis: int, size: int) -> tuple[int, ...]:
    return (*sizes[:axis], size, *sizes[axis + 1 :])
