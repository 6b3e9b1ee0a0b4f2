"""Signals that ask for an orderly end: noted, looked at where ranks agree, and too late once the work is done."""

import signal
import subprocess
import sys

import pytest

from reshard_mpi.stop import SIGNALS

SELF = "import os, signal, sys\nfrom reshard_mpi import stop\nstop.listen()\n"


def run(code: str, *words: str) -> subprocess.CompletedProcess:
    """In a process of its own: handlers, and the note of a signal, are the process's."""
    return subprocess.run(
        [sys.executable, "-B", "-c", SELF + code, *words], capture_output=True, text=True, timeout=60, check=False
    )


def test_without_a_signal_nothing_is_asked_for():
    done = run("print(stop.request())")
    assert (done.returncode, done.stdout) == (0, "None\n")


@pytest.mark.parametrize("number", SIGNALS, ids=lambda number: number.name)
def test_a_signal_is_noted_and_the_process_goes_on(number):
    done = run(
        "os.kill(os.getpid(), int(sys.argv[1]))\nasked = stop.request()\nprint(asked.exit_code, asked)",
        str(int(number)),
    )
    assert done.returncode == 0
    assert done.stdout.startswith("75 job: stopped by a signal")
    assert "the same command" in done.stdout


def test_a_note_stays_until_it_is_looked_at_and_after():
    done = run("os.kill(os.getpid(), signal.SIGTERM)\nprint(bool(stop.request()), bool(stop.request()))")
    assert done.stdout == "True True\n"


@pytest.mark.parametrize("number", SIGNALS, ids=lambda number: number.name)
def test_a_second_signal_ends_the_process_at_once(number):
    done = run("for _ in range(2):\n    os.kill(os.getpid(), int(sys.argv[1]))\nprint('still here')", str(int(number)))
    assert (done.returncode, done.stdout) == (-number, "")


def test_a_second_signal_of_another_kind_ends_it_too():
    done = run("os.kill(os.getpid(), signal.SIGUSR1)\nos.kill(os.getpid(), signal.SIGTERM)\nprint('still here')")
    assert (done.returncode, done.stdout) == (-signal.SIGTERM, "")


@pytest.mark.parametrize("order", ["kill shield", "shield kill"])
def test_once_the_work_is_done_it_is_too_late_to_stop(order):
    steps = {"kill": "os.kill(os.getpid(), signal.SIGTERM)", "shield": "stop.shield()"}
    done = run("\n".join(steps[step] for step in order.split()) + "\nprint(stop.request())")
    assert (done.returncode, done.stdout) == (0, "None\n")


def test_who_does_not_listen_is_ended_by_the_first_signal():
    code = "import os, signal\nfrom reshard_mpi import stop\nos.kill(os.getpid(), signal.SIGTERM)\nprint('still here')"
    done = subprocess.run([sys.executable, "-B", "-c", code], capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stdout) == (-signal.SIGTERM, "")
