"""Turns a hang into a failure, for tests that run on several ranks.

When one rank fails a test, the others may wait for it for ever, or go on and leave messages behind that
match those of the next test. So all ranks meet after each test, in a non-blocking barrier on a communicator
of our own:

- a rank that failed, and waits there for GRACE_S in vain, prints its traceback and aborts the job;
- a rank that hangs in a test prints where, and aborts, when the time of the test (`timeout`) is up;
- a rank that passed, and waits there in vain for longer than that, aborts;
- when all have come, each gets the failures of all. If only some failed, messages may be under way, and the
  session ends there.

All of it is printed by rank 0 alone, unless it ends in an abort.

Rules for tests: they are collected in the same order on all ranks; they don't skip, as the other ranks can't
know (`min_size` deselects instead); ranks assert nothing before their last collective.
"""

import hashlib
import os
import sys
import threading
import time
import traceback
from collections.abc import Generator
from pathlib import Path
from typing import Any, NoReturn

import pytest
from mpi4py import MPI

HERE = Path(__file__).parent
GRACE_S = float(os.environ.get("MPI_TEST_GRACE_S", 20))
TIMEOUT_S = 60.0

# Of our own: nothing that a test left behind can match what is sent here.
COMM = MPI.COMM_WORLD.Dup()

COLLECTION_ERRORS: list[str] = []
FAILURES = pytest.StashKey[list[str]]()


def is_here(item: pytest.Item) -> bool:
    return item.path.is_relative_to(HERE)


def abort(config: pytest.Config, text: str) -> NoReturn:
    """Print `text` past pytest's capture, and end all ranks."""
    with config.pluginmanager.getplugin("capturemanager").global_and_fixture_disabled():
        print(f"\n[rank {COMM.rank} of {COMM.size}] {text}", file=sys.stderr)
        # MPICH drops what is still buffered when it aborts.
        sys.stderr.flush()
        sys.stdout.flush()
    # Time for the launcher to pass it on.
    time.sleep(0.2)
    MPI.COMM_WORLD.Abort(1)
    raise AssertionError("MPI_Abort returned")


def meet(config: pytest.Config, grace_s: float, complaint: str) -> None:
    """Wait until all ranks are here; abort with `complaint` if that takes longer than `grace_s`."""
    request = COMM.Ibarrier()
    deadline = time.monotonic() + grace_s
    pause_s = 0.0
    while not request.Test():
        if time.monotonic() > deadline:
            abort(config, complaint)
        # Ranks may share a core with the one that they wait for.
        time.sleep(pause_s)
        pause_s = min(pause_s + 0.0005, 0.02)


def exchange(config: pytest.Config, value: Any, grace_s: float, complaint: str) -> list[Any]:
    """`value` of every rank, in rank order."""
    meet(config, grace_s, complaint)
    return COMM.allgather(value)


# ---- start and collection


@pytest.hookimpl(trylast=True)
def pytest_configure(config: pytest.Config) -> None:
    if COMM.rank != 0:
        config.pluginmanager.unregister(name="terminalreporter")
        # Kept open for as long as the process lives.
        silent = pytest.TerminalReporter(config, open(os.devnull, "w"))
        config.pluginmanager.register(silent, "terminalreporter")


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Mark, bound and select the tests of this folder."""
    too_large = []
    for item in items:
        if not is_here(item):
            continue
        # Being in this folder is the mark.
        if item.get_closest_marker("mpi") is None:
            item.add_marker(pytest.mark.mpi)
        if item.get_closest_marker("timeout") is None:
            item.add_marker(pytest.mark.timeout(TIMEOUT_S))
        for mark in item.iter_markers("mpi"):
            # pytest-mpi ignores what it doesn't know, `minsize` for one.
            if mark.args or not set(mark.kwargs) <= {"min_size"}:
                raise pytest.UsageError(f"{item.nodeid}: {mark}: only mpi(min_size=N) is known")
            if COMM.size < mark.kwargs.get("min_size", 1):
                too_large.append(item)
    # Deselected tests are counted apart. Skipped ones would look like those that a rank skipped on its own.
    if too_large:
        config.hook.pytest_deselected(items=too_large)
        items[:] = [item for item in items if item not in too_large]


def pytest_collectreport(report: pytest.CollectReport) -> None:
    if report.failed:
        COLLECTION_ERRORS.append(report.longreprtext)


def pytest_collection_finish(session: pytest.Session) -> None:
    """The same tests on all ranks, in the same order, or none."""
    digest = hashlib.sha256("\n".join(item.nodeid for item in session.items).encode()).hexdigest()
    own = (digest, len(session.items), COLLECTION_ERRORS)
    everyone = exchange(session.config, own, TIMEOUT_S, "another rank hangs in the collection")
    if len({digest for digest, _, _ in everyone}) == 1:
        return
    counts = [count for _, count, _ in everyone]
    errors = [f"rank {rank}: {error}" for rank, (_, _, errors) in enumerate(everyone) for error in errors]
    message = f"the ranks collected different tests (as many as {counts})"
    pytest.exit("\n".join([message, *errors]), returncode=4)


# ---- each test


def pytest_timeout_set_timer(item: pytest.Item, settings: Any) -> bool | None:
    """pytest-timeout's timers don't fire inside MPI (signal), or don't say on which rank (thread)."""
    if not is_here(item):
        return None
    main_thread = threading.current_thread()

    def give_up() -> None:
        frame = sys._current_frames()[main_thread.ident]
        abort(
            item.config,
            f"{item.nodeid}: not done after {settings.timeout:g} s; this rank is at\n"
            + "".join(traceback.format_stack(frame)[-6:]),
        )

    timer = threading.Timer(settings.timeout, give_up)
    timer.daemon = True
    timer.start()
    item.cancel_timeout = timer.cancel  # where pytest-timeout looks for it
    return True


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[None]) -> Generator[None, Any, Any]:
    report = yield
    if report.skipped and not hasattr(report, "wasxfail"):
        report.outcome = "failed"
        report.longrepr = f"skipped, which the other ranks can't know: {report.longreprtext}"
    failures = item.stash.setdefault(FAILURES, [])
    if report.failed:
        failures.append(report.longreprtext)
    if call.when == "teardown":
        settle(item, report, failures)
    return report


def settle(item: pytest.Item, report: pytest.TestReport, failures: list[str]) -> None:
    """Meet the other ranks after a test, and add their failures to the report."""
    item.config.hook.pytest_timeout_cancel_timer(item=item)
    if failures:
        text = "\n".join(failures)
        everyone = exchange(
            item.config, text, GRACE_S, f"{item.nodeid} failed here, and other ranks hang in it:\n{text}"
        )
    else:
        marker = item.get_closest_marker("timeout")
        limit_s = marker.args[0] if marker and marker.args else TIMEOUT_S
        complaint = f"{item.nodeid} passed here, but another rank never got to its end"
        everyone = exchange(item.config, None, limit_s + GRACE_S, complaint)
    failed_ranks = [rank for rank, text in enumerate(everyone) if text is not None]
    if not failed_ranks:
        return
    if not failures:
        report.outcome = "failed"
        report.longrepr = "\n".join(f"[rank {rank} of {COMM.size}] {everyone[rank]}" for rank in failed_ranks)
    if len(failed_ranks) < COMM.size:
        item.session.shouldfail = (
            f"{item.nodeid} failed on ranks {failed_ranks} of {COMM.size} only: messages may be under way"
        )


# ---- end


def pytest_unconfigure(config: pytest.Config) -> None:
    """Leave together: `python -m mpi4py` aborts the job as soon as one rank exits with an error."""
    sys.stdout.flush()
    sys.stderr.flush()
    meet(config, GRACE_S, "done, but another rank didn't come to the end of the session")


@pytest.fixture
def comm() -> MPI.Intracomm:
    return MPI.COMM_WORLD
