"""How ranks agree: an error of any rank is the error of all, and what rank 0 has, all get."""

import itertools

import numpy as np
import pytest

from reshard_mpi.errors import InputError, IntegrityError, PlanningError, ReshardError, StorageError
from reshard_mpi.mpi.comm import Agreement, agreed, broadcast_arrays, gather_all, on_root, raise_together, root_value
from tests.mpi.together import faults_of_all, unequal

# Told first to last, as SPEC section 4 orders them.
ERRORS = {3: InputError, 5: StorageError, 4: IntegrityError, 6: PlanningError}


def error_of(code: int, rank: int) -> ReshardError:
    return ERRORS[code](f"rank {rank}", "found one thing, expected another; do a third")


def caught(function, *arguments) -> tuple[type, int, str] | None:
    """The error that `function` raises here."""
    try:
        function(*arguments)
    except ReshardError as error:
        return type(error), error.exit_code, str(error)
    return None


def seen(error: ReshardError) -> tuple[type, int, str]:
    return type(error), error.exit_code, str(error)


def run_agreed(comm, error: ReshardError | None) -> None:
    with agreed(comm):
        if error is not None:
            raise error


def together_by_hand(comm, error: ReshardError | None) -> None:
    agreement = Agreement()
    with agreement.held():
        if error is not None:
            raise error
    raise_together(comm, agreement.error)


@pytest.mark.parametrize("way", [run_agreed, raise_together, together_by_hand])
@pytest.mark.parametrize("code", ERRORS)
def test_an_error_on_any_one_rank_is_raised_on_all(comm, way, code):
    faults = []
    for failing in range(comm.size):
        found = caught(way, comm, error_of(code, failing) if comm.rank == failing else None)
        faults += unequal(f"rank {failing} fails", found, seen(error_of(code, failing)))
    assert not faults_of_all(comm, faults)


@pytest.mark.parametrize("way", [run_agreed, raise_together, together_by_hand])
def test_without_an_error_nothing_is_raised(comm, way):
    assert not faults_of_all(comm, unequal("no error", caught(way, comm, None), None))


def assignments(size: int) -> list[tuple[int | None, ...]]:
    """Which rank has which error, if any: all ways on two ranks, a good part of them on more."""
    return list(itertools.product([None, *ERRORS], repeat=size))[1 :: 1 if size == 2 else 7]


def test_of_different_errors_the_first_of_3_5_4_6_is_told_then_that_of_the_lowest_rank(comm):
    faults = []
    for codes in assignments(comm.size):
        own = codes[comm.rank]
        found = caught(raise_together, comm, None if own is None else error_of(own, comm.rank))
        told = next((code for code in ERRORS if code in codes), None)
        expected = None if told is None else seen(error_of(told, codes.index(told)))
        faults += unequal(f"errors {codes}", found, expected)
    assert not faults_of_all(comm, faults)


def test_the_first_error_of_a_rank_is_its_error(comm):
    agreement = Agreement()
    for code in (6, 3):
        with agreement.held():
            raise error_of(code, comm.rank)
    assert not faults_of_all(comm, unequal("held", seen(agreement.error), seen(error_of(6, comm.rank))))


def test_an_unexpected_error_is_not_held(comm):
    """On all ranks: one that is alone with it has to end the job."""

    def fails() -> None:
        with agreed(comm):
            raise ZeroDivisionError

    try:
        fails()
        faults = ["nothing was raised"]
    except ZeroDivisionError:
        faults = []
    assert not faults_of_all(comm, faults)


@pytest.mark.parametrize("way", [on_root, root_value])
def test_rank_0_alone_calls_the_function(comm, way):
    calls = []
    found = way(comm, lambda: calls.append(comm.rank) or {"a": [1]})
    expected = {"a": [1]} if comm.rank == 0 or way is root_value else None
    faults = [*unequal("value", found, expected), *unequal("calls", calls, [0] if comm.rank == 0 else [])]
    assert not faults_of_all(comm, faults)


@pytest.mark.parametrize("way", [on_root, root_value])
def test_an_error_on_rank_0_is_raised_on_all(comm, way):
    def fails() -> None:
        raise error_of(5, comm.rank)

    assert not faults_of_all(comm, unequal("error", caught(way, comm, fails), seen(error_of(5, 0))))


def test_after_an_error_the_ranks_still_understand_each_other(comm):
    """Nothing of the agreement is left under way."""
    faults = []
    for failing in range(comm.size):
        caught(raise_together, comm, error_of(4, failing) if comm.rank == failing else None)
        faults += unequal("the next value", root_value(comm, lambda failing=failing: failing), failing)
    assert not faults_of_all(comm, faults)


ARRAYS = [
    # why, values
    ("one number", [7]),
    ("an array without elements", [np.empty(0, np.int64)]),
    ("rows without columns, columns without rows", [np.empty((3, 0), np.int64), np.empty((0, 3), np.int64)]),
    ("empty ones between others", [np.arange(3), np.empty((0, 2), np.int64), -1, np.arange(6).reshape(2, 3)]),
    ("a 0-d array is no number", [np.array(5), 5]),
    ("the ends of int64", [np.iinfo(np.int64).max, np.array([np.iinfo(np.int64).min])]),
    ("not contiguous", [np.arange(24).reshape(4, 6)[::2, 1::2], np.arange(6).reshape(2, 3).T]),
]


@pytest.mark.parametrize(("why", "values"), ARRAYS, ids=[why for why, _ in ARRAYS])
def test_arrays_of_rank_0_arrive_as_they_are(comm, why, values):
    found = broadcast_arrays(comm, values if comm.rank == 0 else None)
    faults = list(unequal("count", len(found), len(values)))
    for got, want in zip(found, values, strict=False):
        faults += unequal("type", isinstance(got, np.ndarray), isinstance(want, np.ndarray))
        faults += unequal("shape", np.shape(got), np.shape(want))
        faults += unequal("dtype", np.asarray(got).dtype, np.int64)
        faults += unequal("values", np.asarray(got).tolist(), np.asarray(want).tolist())
    assert not faults_of_all(comm, faults)


def test_values_of_all_ranks_are_gathered_on_rank_0(comm):
    expected = [(rank, None) for rank in range(comm.size)] if comm.rank == 0 else []
    assert not faults_of_all(comm, unequal("gathered", gather_all(comm, (comm.rank, None)), expected))
