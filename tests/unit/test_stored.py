"""Tensors as bytes: every box, whatever its width and padding, held against the bytes of whole arrays."""

import random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from reshard_mpi.boxes import Boxes
from reshard_mpi.errors import InputError
from reshard_mpi.plan.stored import Place, StoredBoxes, byte_form, range_slabs, stacked
from tests.reference import dtypes
from tests.reference.dice import Dice
from tests.reference.fragments import slices
from tests.unit.tilings import Tile, pad, stored_bytes, tile, whole_cells

BY_WIDTH = {4: "float4_e2m1fn", 6: "float6_e3m2fn", 8: "uint8", 16: "bfloat16", 32: "float32", 64: "complex64"}


def place_of(tile: Tile) -> Place:
    return Place(tile.offset, tile.extent, tile.before, tile.local_shape)


def is_on_byte_boundaries(offset, extent, shape, nbits: int) -> bool:
    """Is every run of neighbouring elements of the box, within an array of `shape`, a number of whole bytes?"""
    inside = np.zeros((*shape, nbits), np.int8)
    inside[slices(offset, extent)] = 1
    edges = np.flatnonzero(np.diff(inside.reshape(-1), prepend=0, append=0))
    return not np.any(edges % 8)


def check_against_the_whole_array(dice: Dice, nbits: int) -> None:
    dtype = BY_WIDTH[nbits]
    shape = tuple(dice.integer(1, 6) for _ in range(dice.integer(0, 4)))
    if np.prod(shape, dtype=int) * nbits % 8:
        return  # no array at all
    noise = random.Random(str((shape, nbits)))
    tiles = [pad(dice, piece, dice.pick([0, 0, 60])) for piece in tile(dice, shape, percent=60)]
    tiles = [piece for piece in tiles if np.prod(piece.local_shape, dtype=int) * nbits % 8 == 0]
    if not tiles:
        return
    cells = whole_cells(noise, dtype, shape)
    allowed = all(
        is_on_byte_boundaries(piece.offset, piece.extent, shape, nbits)
        and is_on_byte_boundaries(piece.before, piece.extent, piece.local_shape, nbits)
        for piece in tiles
    )
    try:
        form = byte_form(shape, nbits, tuple(map(place_of, tiles)), "tensor w")
    except InputError as refused:
        is_stored_in_odd_rows = any(piece.is_padded and piece.local_shape[-1] * nbits % 8 for piece in tiles)
        assert not allowed or is_stored_in_odd_rows, f"{shape}, {tiles}: {refused}"
        assert str(refused).startswith("tensor w: ")
        return
    assert allowed
    in_bytes = np.frombuffer(dtypes.to_bytes(cells, dtype), np.uint8).reshape(form.shape)
    for row, piece in enumerate(tiles):
        raw = stored_bytes(noise, dtype, cells, piece)
        start, stop = form.boxes.start[row].tolist(), form.boxes.stop[row].tolist()
        extent = tuple(b - a for a, b in zip(start, stop, strict=True))
        found = np.ndarray(extent, np.uint8, raw, int(form.lead[row]), tuple(form.stride[row].tolist()))
        assert np.array_equal(found, in_bytes[tuple(slice(a, b) for a, b in zip(start, stop, strict=True))])


@pytest.mark.parametrize("nbits", BY_WIDTH)
def test_every_box_of_a_tiling_is_where_its_strides_say_or_is_cut_within_a_byte(nbits):
    @settings(max_examples=60)
    @given(st.integers(0, 1 << 32))
    def holds(seed):
        check_against_the_whole_array(Dice(seed), nbits)

    holds()


WHOLE = Place((0, 0), (4, 6), (0, 0), (4, 6))


@pytest.mark.parametrize(
    "why, shape, nbits, places, expected",
    [
        ("0-d: one axis, the bytes of one element", (), 32, [Place((), (), (), ())], (4,)),
        ("nobody cuts anything: one run", (4, 6), 16, [WHOLE], (48,)),
        (
            "rows: still one axis",
            (4, 6),
            16,
            [Place((0, 0), (1, 6), (0, 0), (1, 6)), Place((1, 0), (3, 6), (0, 0), (3, 6))],
            (48,),
        ),
        (
            "columns: two axes",
            (4, 6),
            16,
            [Place((0, 0), (4, 5), (0, 0), (4, 5)), Place((0, 5), (4, 1), (0, 0), (4, 1))],
            (4, 12),
        ),
        (
            "cut on axes 0 and 2: the last two of three merge",
            (8, 4, 14),
            16,
            [Place((0, 0, 0), (8, 4, 7), (0, 0, 0), (8, 4, 7)), Place((0, 0, 7), (8, 4, 7), (0, 0, 0), (8, 4, 7))],
            (32, 28),
        ),
        ("a first axis of size 1 is gone", (1, 4, 6), 8, [Place((0, 0, 0), (1, 4, 6), (0, 0, 0), (1, 4, 6))], (24,)),
        ("a later axis of size 1 is gone", (4, 1), 8, [Place((0, 0), (4, 1), (0, 0), (4, 1))], (4,)),
        ("padding keeps an axis", (4, 6), 8, [Place((0, 0), (4, 6), (0, 1), (4, 8))], (4, 6)),
        ("padding keeps an axis of size 1 too", (4, 1), 8, [Place((0, 0), (4, 1), (0, 0), (4, 2))], (4, 1)),
        ("half bytes in pairs", (3, 2), 4, [Place((0, 0), (3, 2), (0, 0), (3, 2))], (3,)),
        (
            "a row of half a byte is no matter while rows are whole together",
            (2, 3),
            4,
            [Place((0, 0), (2, 3), (0, 0), (2, 3))],
            (3,),
        ),
    ],
)
def test_axes_that_nobody_cuts_are_merged(why, shape, nbits, places, expected):
    assert byte_form(shape, nbits, tuple(places)).shape == expected


@pytest.mark.parametrize(
    "why, shape, nbits, place, advice",
    [
        ("begins within a byte", (6,), 4, Place((1,), (2,), (0,), (2,)), "multiples of 2"),
        ("ends within a byte", (6,), 4, Place((0,), (3,), (0,), (3,)), "multiples of 2"),
        ("six bits: four elements are three bytes", (8,), 6, Place((0,), (2,), (0,), (2,)), "multiples of 4"),
        ("stored after half a byte of padding", (6,), 4, Place((0,), (6,), (1,), (8,)), "multiples of 2"),
        ("stored in rows that end within a byte", (2, 2), 4, Place((0, 0), (2, 2), (0, 0), (2, 3)), "multiples of 2"),
        ("rows end within a byte", (4, 3), 4, Place((0, 0), (1, 3), (0, 0), (1, 3)), "multiples of 2"),
    ],
)
def test_a_cut_within_a_byte_is_refused_with_the_multiple_that_would_do(why, shape, nbits, place, advice):
    with pytest.raises(InputError, match=advice) as refused:
        byte_form(shape, nbits, (place,), "tensor w")
    assert refused.value.where == "tensor w"


def test_a_box_in_rows_that_end_within_a_byte_is_refused_even_if_it_is_all_in_one_row():
    """Two rows of three half bytes are stored; the box is the first two, and would be the first byte."""
    with pytest.raises(InputError, match="within a byte.* multiples of 2") as refused:
        byte_form((1, 2), 4, (Place((0, 0), (1, 2), (0, 0), (2, 3)),))
    assert refused.value.exit_code == 3


# Spans and slabs


@settings(max_examples=80)
@given(st.integers(0, 1 << 32))
def test_the_span_of_a_part_encloses_its_bytes_and_no_more(seed):
    dice = Dice(seed)
    shape = tuple(dice.integer(1, 5) for _ in range(dice.integer(1, 3)))
    tiles = [pad(dice, piece, 50) for piece in tile(dice, shape, percent=60)]
    form = byte_form(shape, 8, tuple(map(place_of, tiles)))
    offset = np.array([100 * n for n in range(len(tiles))]) + form.lead
    stored = StoredBoxes(form.boxes, form.stride, offset)
    bounds = [sorted((dice.integer(0, size), dice.integer(0, size))) for size in form.shape]
    slab = Boxes(*(np.array([[b[side] for b in bounds]], np.int64) for side in (0, 1)))
    rows = np.arange(len(tiles))
    parts = stored.parts(rows, slab)
    held = np.flatnonzero(parts.nonempty)
    first, last = stored.spans(held, parts.take(held))
    for n, row in enumerate(held.tolist()):
        box = form.boxes.take(slice(row, row + 1))
        steps = np.indices((box.stop - box.start)[0]).reshape(len(form.shape), -1).T
        where = steps + box.start
        inside = np.all((where >= slab.start) & (where < slab.stop), axis=1)
        positions = offset[row] + (steps[inside] * form.stride[row]).sum(axis=1)
        assert (first[n], last[n]) == (positions.min(), positions.max() + 1)


@settings(max_examples=150)
@given(st.lists(st.integers(1, 4), min_size=1, max_size=4), st.data())
def test_slabs_of_a_byte_range_are_that_range_in_order(shape, data):
    nbytes = int(np.prod(shape))
    first, last = sorted((data.draw(st.integers(0, nbytes)), data.draw(st.integers(0, nbytes))))
    flat = np.arange(nbytes).reshape(shape)
    slabs = list(range_slabs(tuple(shape), first, last))
    parts = [flat[tuple(slice(a, b) for a, b in zip(start, stop, strict=True))] for start, stop in slabs]
    assert all(part.size and np.array_equal(np.diff(part.reshape(-1)), np.ones(part.size - 1)) for part in parts)
    assert [byte for part in parts for byte in part.reshape(-1).tolist()] == list(range(first, last))
    assert len(slabs) <= 2 * len(shape)


def test_tensors_are_stacked_with_columns_put_in_front():
    one, two = np.array([[7], [8]]), np.array([[3, 4]])
    assert stacked(3, [one], 1).tolist() == [[1, 1, 7], [1, 1, 8]]
    assert stacked(2, [one, two, one[:0], one[:1]], 0).tolist() == [[0, 7], [0, 8], [3, 4], [0, 7]]
    assert stacked(1, [one], 0).tolist() == one.tolist()
    assert stacked(2, [], 0).shape == (0, 2)


def test_equal_tensors_have_one_form_whatever_their_names():
    place = Place((0, 0), (2, 3), (0, 0), (2, 3))
    forms = [byte_form((2, 3), 16, (place,), f"tensor {n}") for n in range(3)]
    assert forms[0] is forms[1] is forms[2]
