"""The journal of OUT.partial: what it takes, what it says when it is read again, and what it doesn't believe."""

import json

import pytest

from reshard_mpi.errors import UsageError
from reshard_mpi.run import journal as module
from reshard_mpi.run.journal import JOURNAL, Durable, Journal
from tests.unit.journals import said, sealed

IDENTITY = {"target": {"tp": 2}, "cast": [["bfloat16"], []], "version": "1"}
W0, B0, W1 = (digit * 64 for digit in "0bf")
FIRST = Durable({"w": [(0, 4)], "b": [(0, 2)]}, {"rank-0": ["w"]}, {"rank-0": {"w": W0}}, {"w": 2})
SECOND = Durable(
    {"w": [(4, 8)]}, {"rank-0": ["b"], "rank-1": ["w"]}, {"rank-0": {"b": B0}, "rank-1": {"w": W1}}, {"w": 1}
)
BOTH = Durable(
    {"w": [(0, 4), (4, 8)], "b": [(0, 2)]},
    {"rank-0": ["w", "b"], "rank-1": ["w"]},
    {"rank-0": {"w": W0, "b": B0}, "rank-1": {"w": W1}},
    {"w": 3},
)


@pytest.fixture
def noted(tmp_path):
    """The folder of a journal with two notes."""
    journal = Journal.begun(tmp_path, IDENTITY)
    journal.note(FIRST)
    journal.note(SECOND)
    journal.close()
    return tmp_path


def durable(folder, identity=IDENTITY) -> Durable:
    journal, found = Journal.continued(folder, identity)
    journal.close()
    return found


def test_what_was_noted_is_said_again_all_of_it(noted):
    assert durable(noted) == BOTH


def test_a_journal_that_goes_on_takes_further_notes(noted):
    journal, _ = Journal.continued(noted, IDENTITY)
    journal.note(Durable({"b": [(2, 9)]}))
    journal.close()
    assert durable(noted).written == {"w": [(0, 4), (4, 8)], "b": [(0, 2), (2, 9)]}


def test_where_there_is_none_nothing_is_durable(tmp_path):
    assert Journal.continued(tmp_path, IDENTITY) == (None, Durable())


def test_a_line_that_was_torn_does_not_count_wherever_it_was_torn_and_the_next_follows_the_last_whole_one(noted):
    text = (noted / JOURNAL).read_bytes()
    last = text.rstrip(b"\n").rindex(b"\n") + 1
    for length in range(last, len(text)):
        (noted / JOURNAL).write_bytes(text[:length])
        journal, found = Journal.continued(noted, IDENTITY)
        assert found == FIRST
        journal.note(SECOND)
        journal.close()
        assert durable(noted) == BOTH


@pytest.mark.parametrize(
    "identity, named",
    [
        (IDENTITY | {"target": {"tp": 4}}, "another target;"),
        (IDENTITY | {"version": "2", "cast": []}, "another cast and version;"),
        (IDENTITY | {"rename": []}, "another rename;"),
    ],
)
def test_another_job_is_refused_with_what_differs(identity, named, noted):
    with pytest.raises(UsageError, match=f"{named} --restart"):
        durable(noted, identity)


def test_tuples_and_lists_are_alike(noted):
    assert durable(noted, IDENTITY | {"cast": (("bfloat16",), ())}) == BOTH


def test_after_a_failure_nothing_can_be_continued(noted):
    journal, _ = Journal.continued(noted, IDENTITY)
    journal.fail("a digest")
    journal.close()
    with pytest.raises(UsageError, match="can't be continued; --restart"):
        durable(noted)


@pytest.mark.parametrize(
    "line",
    [
        "{}",
        "[1]",
        '{"durable": {"written": {"w": [[0]]}}}',
        '{"durable": {"written": {"w": [["0", 4]]}}}',
        '{"durable": {"written": {"w": [[-1, 4]]}}}',
        '{"durable": {"written": {"w": [[0, 9223372036854775808]]}}}',
        '{"durable": {"written": {"w": [[0, 1e3]]}}}',
        '{"durable": {"digests": {"rank-0": {"w": "00"}}}}',
        '{"durable": {"infinite": {"w": -1}}}',
        '{"durable": {"others": {}}}',
        '{"durable": null, "more": 1}',
        "[" * 10_000,
        "\xff",
    ],
)
@pytest.mark.parametrize("place", ["first", "last"])
def test_what_makes_no_sense_is_not_believed(line, place, noted):
    whole = [json.dumps(one).encode() for one in said((noted / JOURNAL).read_bytes())]
    odd = line.encode("latin-1")
    (noted / JOURNAL).write_bytes(sealed(odd, *whole) if place == "first" else sealed(*whole, odd))
    if (line, place) == ("{}", "last"):
        assert durable(noted) == BOTH  # says nothing
        return
    with pytest.raises(UsageError, match="can't be understood; --restart"):
        durable(noted)


def test_what_says_the_same_is_sealed_alike(noted):
    text = (noted / JOURNAL).read_bytes()
    assert sealed(*(line[8 : line.rindex(b',"crc32"')] for line in text.splitlines())) == text


def test_no_byte_of_it_may_change_and_no_line_be_missing_or_elsewhere(noted):
    text = (noted / JOURNAL).read_bytes()
    first, second, third = text.splitlines(keepends=True)
    changed = [text[:at] + bytes([text[at] ^ 1]) + text[at + 1 :] for at in range(len(text) - 1)]
    for odd in (*changed, second + third, first + third, first + third + second, text + third):
        (noted / JOURNAL).write_bytes(odd)
        try:
            found = durable(noted)
        except UsageError as error:
            assert "--restart" in str(error)
        else:  # the last line ends with the byte that is no end any more
            assert found == FIRST


def test_a_journal_that_is_too_large_is_not_read(noted, monkeypatch):
    monkeypatch.setattr(module, "LARGEST_JOURNAL", 100)
    with pytest.raises(UsageError, match="can't be understood"):
        durable(noted)


def test_each_line_is_synced_before_it_counts(noted, monkeypatch):
    events = []
    real = {name: getattr(module.os, name) for name in ("write", "fsync")}
    for name, function in real.items():
        monkeypatch.setattr(
            module.os,
            name,
            lambda *arguments, name=name, function=function: (events.append(name), function(*arguments))[1],
        )
    journal, _ = Journal.continued(noted, IDENTITY)
    journal.note(FIRST)
    assert events == ["write", "fsync"]
    assert json.loads((noted / JOURNAL).read_bytes().splitlines()[-1])["says"]["durable"]["written"]["b"] == [[0, 2]]
    journal.close()
