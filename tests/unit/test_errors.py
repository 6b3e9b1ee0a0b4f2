"""Errors: one line whatever names they quote, and which of several is told."""

import errno
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from reshard_mpi import errors
from reshard_mpi.errors import (
    InputError,
    IntegrityError,
    Interrupted,
    PlanningError,
    ReshardError,
    StorageError,
    UsageError,
    first_to_tell,
    names,
    one_line,
    plural,
    storage_error,
)

anything = st.text(st.characters(codec=None))


@given(anything, anything)
def test_an_error_is_one_printable_line_whatever_the_names_contain(where, message):
    text = str(InputError(where, message))
    assert len(text.splitlines()) == 1
    assert text.isprintable()
    text.encode("utf-8")


@pytest.mark.parametrize(
    "why, name, shown",
    [
        ("a newline must not forge a second message", "a\nreshard_mpi: error: b", r"a\nreshard_mpi: error: b"),
        ("carriage return", "a\rb", r"a\rb"),
        ("escape sequences of terminals", "a\x1b[2Jb", r"a\x1b[2Jb"),
        ("NUL", "a\0b", r"a\x00b"),
        ("line separator", "a\u2028b", r"a\u2028b"),
        ("half a character", "a\ud800b", r"a\ud800b"),
        ("right-to-left override", "a\u202eb", r"a\u202eb"),
        ("letters of any alphabet stay", "größe/重み", "größe/重み"),
        ("quotes and backslashes stay", "a\"b'c\\d", "a\"b'c\\d"),
    ],
)
def test_what_can_not_be_printed_is_shown_escaped(why, name, shown):
    assert str(InputError(name, "found")) == f"{shown}: found"


@given(anything)
def test_one_line_is_printable_and_what_is_printable_stays_as_it_is(text):
    shown = one_line(text)
    assert shown.isprintable()
    assert one_line(shown) == shown
    assert shown == text or not text.isprintable()


@pytest.mark.parametrize(
    "count, text", [(0, "0 shards"), (1, "1 shard"), (2, "2 shards"), (1_000_000, "1000000 shards")]
)
def test_of_one_there_is_no_plural(count, text):
    assert plural(count, "shard") == text


@pytest.mark.parametrize(
    "kind, exit_code",
    [
        (UsageError, 2),
        (InputError, 3),
        (IntegrityError, 4),
        (StorageError, 5),
        (PlanningError, 6),
        (ReshardError, 70),
        (Interrupted, 75),
    ],
)
def test_exit_codes_are_those_of_the_specification(kind, exit_code):
    assert kind("w", "m").exit_code == exit_code


@pytest.mark.parametrize(
    "why, kinds, told",
    [
        ("nothing went wrong", [], None),
        ("one error", [StorageError], 0),
        ("input before storage", [StorageError, InputError], 1),
        ("storage before integrity", [IntegrityError, StorageError], 1),
        ("integrity before planning", [PlanningError, IntegrityError], 1),
        ("all four, in the wrong order", [PlanningError, IntegrityError, StorageError, InputError], 3),
        ("planning before anything else", [Interrupted, UsageError, PlanningError], 2),
        ("of equal ones the lowest rank's", [Interrupted, IntegrityError, StorageError, StorageError], 2),
    ],
)
def test_the_error_that_stands_for_all_is_the_lowest_of_3_5_4_6_then_the_earliest(why, kinds, told):
    found = [kind(f"rank {rank}", "m") for rank, kind in enumerate(kinds)]
    assert first_to_tell(iter(found)) is (None if told is None else found[told])


def test_an_error_of_the_operating_system_is_told_with_its_path_and_reason():
    error = storage_error(Path("a/b"), OSError(errno.ENOSPC, "No space left on device"), "write")
    assert isinstance(error, StorageError)
    assert "a/b: can't write: No space left on device" in str(error)
    assert "strange" in str(storage_error("a", OSError("strange"), "read"))
    assert "ulimit -n" in str(storage_error("a", OSError(errno.EMFILE, "Too many open files"), "open"))


def test_errors_can_travel_between_ranks():
    import pickle

    for kind in (getattr(errors, name) for name in dir(errors) if name.endswith("Error") or name == "Interrupted"):
        if isinstance(kind, type) and issubclass(kind, ReshardError):
            back = pickle.loads(pickle.dumps(kind("where", "message")))
            assert (type(back), str(back)) == (kind, "where: message")


@pytest.mark.parametrize(
    "items, most, text",
    [
        ([], 5, ""),
        (["a"], 5, "a"),
        (["a", "b"], 2, "a, b"),
        (["a", "b", "c"], 2, "a, b and 1 more"),
        (range(1000), 3, "0, 1, 2 and 997 more"),
    ],
)
def test_long_lists_are_cut(items, most, text):
    assert names(items, most=most) == text
