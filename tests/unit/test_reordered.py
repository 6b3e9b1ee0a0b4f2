"""Heads in another order: what is shown of an array, and the fragments that say which rows are where."""

import numpy as np
import pytest

from reshard_mpi.checkpoint.manifest import Case, Fragment, Oracle, Padding, Replica, Topology
from reshard_mpi.checkpoint.wanted import Operated, Step
from reshard_mpi.layout.operations import parse_operation
from reshard_mpi.layout.parts import parts, pieces_of_members, reordered
from reshard_mpi.storage import reordered as module
from reshard_mpi.storage.reordered import places
from reshard_mpi.storage.safetensors import StoredArray

UNIT, HEADS = 6, 4
CUTS = [(0, 24), (6, 18), (0, 0), (1, 2), (2, 5), (0, 7), (5, 13), (1, 23), (11, 12), (13, 17)]


def fragment(first: int, last: int, before: int = 0, after: int = 0, whole: int = UNIT * HEADS) -> Fragment:
    padding = Padding((before,), (after,), "view" if before or after else "none")
    shapes = (whole,), (first,), (last - first,), (before + last - first + after,)
    rest = ((("rank", 0),), Replica(None, 1, 0), (), "f", "f", "sha256:0")
    return Fragment("f", "t", "t", "model", "parameter", *shapes, padding, "uint8", "f", "k", *rest)


def in_order(to: str, rows: np.ndarray) -> np.ndarray:
    """What PyTorch's code does: a view, two axes exchanged."""
    shape = (-1, UNIT // 2, 2) if to == "halves" else (-1, 2, UNIT // 2)
    return rows.reshape(shape).swapaxes(1, 2).reshape(-1)


@pytest.mark.parametrize("to", module.ORDERS)
@pytest.mark.parametrize("first, last", CUTS)
def test_the_fragments_of_any_cut_say_where_its_rows_go(first, last, to):
    rows = np.arange(100, 100 + UNIT * HEADS, dtype=np.uint8)
    stored = np.concatenate([[7, 8], rows[first:last], [9]]).astype(np.uint8)
    one = fragment(first, last, before=2, after=1)
    shown, found = reordered(one, StoredArray("uint8", stored.shape, 50, len(stored)), 1000, UNIT, to)
    assert (shown.begin, shown.shape, found[0].fragment_digest if found else None) == (1000, (last - first,), None)
    content = bytearray(last - first)
    opened = shown.order.open(lambda at, into: into.__setitem__(slice(None), stored[at - 50 :][: len(into)].data), "w")
    opened.read(1000 - 1000, memoryview(content))
    whole = np.zeros(UNIT * HEADS, np.uint8)
    for part in found:
        before, size, offset = part.padding.before[0], part.element_extent[0], part.element_offset[0]
        assert part.local_shape == (before + size + part.padding.after[0],)
        whole[offset : offset + size] = np.frombuffer(content, np.uint8)[before : before + size]
    wanted = in_order(to, rows)
    is_here = np.isin(wanted, rows[first:last])
    assert np.array_equal(whole, np.where(is_here, wanted, 0))
    if to == "halves":
        assert len(found) <= 5


def test_a_digest_stays_with_all_of_an_array():
    _, (part,) = reordered(fragment(0, 24), StoredArray("uint8", (24,), 0, 24), 1000, UNIT, "halves")
    assert part.fragment_digest == "sha256:0" and part.padding.semantic == "none"


@pytest.mark.parametrize("band_nbytes", [1, 40, 1 << 20])
@pytest.mark.parametrize("step", [1, 3, 5, 17, 1000])
def test_any_span_of_what_is_shown_is_read_within_one_band(band_nbytes, step, monkeypatch):
    monkeypatch.setattr(module, "BAND_NBYTES", band_nbytes)
    rows = np.random.default_rng(1).integers(0, 256, (UNIT * HEADS - 5, 3), np.uint8)
    array = module.ReorderedArray("k", 10, 500, 3, len(rows), 2, UNIT, "halves")
    wanted = rows[np.argsort(places(2, 2 + len(rows), UNIT, "halves"))].tobytes()
    largest = 0

    def read(offset: int, into: memoryview) -> None:
        nonlocal largest
        largest = max(largest, len(into))
        into[:] = rows.tobytes()[offset - 10 :][: len(into)]

    opened, found = array.open(read, "w"), b""
    for offset in range(0, len(wanted), step):
        part = bytearray(min(step, len(wanted) - offset))
        opened.read(offset, memoryview(part))
        found += part
    assert found == wanted
    assert largest <= array.held_nbytes <= max(band_nbytes, UNIT * 3)


@pytest.mark.parametrize("first, last", [(0, 24), (6, 12), (5, 7), (0, 1), (7, 23), (4, 4)])
def test_what_a_cut_holds_of_every_member_of_every_group(first, last):
    """Two groups of 12: |q q q q q q k k k v v v|"""
    sizes = [12, 6, 6]
    rows = np.arange(24)
    stored = rows[first:last]
    wanted = np.split(
        np.concatenate([rows.reshape(2, 12)[:, a:b].ravel() for a, b in ((0, 6), (6, 9), (9, 12))]), [12, 18]
    )
    for member, pieces in zip(wanted, pieces_of_members(sizes, 2), strict=True):
        found = parts(fragment(first, last), 0, pieces)
        held = np.full(len(member), -1)
        for one in found:
            before, size, offset = one.padding.before[0], one.element_extent[0], one.element_offset[0]
            assert before + size + one.padding.after[0] == last - first and one.global_shape == member.shape
            held[offset : offset + size] = stored[before : before + size]
        assert np.array_equal(held, np.where(np.isin(member, stored), member, -1))
        assert len(found) == 1 or all(one.has_elements for one in found)


def test_pieces_that_touch_before_and_after_are_one():
    assert len(parts(fragment(0, 24), 0, pieces_of_members([24], 4)[0])) == 1


@pytest.mark.parametrize("kind, is_kept", [("permute", False), ("rename", True)])
def test_an_oracle_says_nothing_of_a_tensor_whose_heads_are_in_another_order(kind, is_kept):
    single = Topology({"world_size": 1}, {"world_size": 1})
    oracle = Oracle("t", "uint8", (UNIT * HEADS,), "t", "sha256:" + 64 * "0")
    case = Case("c", (), (), single, 1, (fragment(0, 24),), None, "oracles.safetensors", (oracle,))
    says = {"permute": {"permute": "t", "unit": UNIT, "to": "halves"}, "rename": {"rename": "t", "to": "t"}}[kind]
    headers = {"f": {"k": StoredArray("uint8", (24,), 0, 24)}}
    operation = parse_operation(says, "w")
    changed, _, history = operation.apply(case, headers, {}, lambda _, size: int(size))
    assert changed.oracles == ((oracle,) if is_kept else ())
    assert history == {"t": (Step(kind, "t"),)}
    told = {
        "permute": Operated("permuted", "t", {"unit": UNIT, "to": "halves"}),
        "rename": Operated("renamed", "t", {"to": "t"}),
    }
    assert [*operation.changes(case, lambda _, size: int(size))] == [told[kind]]
