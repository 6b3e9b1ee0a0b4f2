"""What a job said and how it ended, for tests that look at it from outside."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

from tests.mpirun import CHECKOUT, job_environ, tail

FIXTURES = CHECKOUT / "fixtures" / "v1"
CASES, REJECTS = FIXTURES / "cases", FIXTURES / "rejects"
PYTHON = Path(sys.executable)

# Python that goes before `main()`: `at(name, rank, do)` has `do` called before the function of that name is, on one
# rank or, with None, on all.
AT = """
import importlib, os, time
from reshard_mpi.__main__ import main
def at(name, rank, do):
    module, _, path = name.partition(":")
    owner = importlib.import_module(module)
    *parts, last = path.split(".")
    for part in parts:
        owner = getattr(owner, part)
    function = getattr(owner, last)
    def changed(*arguments, **options):
        if rank is None or importlib.import_module("mpi4py.MPI").COMM_WORLD.rank == rank:
            do()
        return function(*arguments, **options)
    setattr(owner, last, changed)
def say_and_wait():
    open(os.path.join(os.environ["NOTES"], "waiting"), "w").close()
    time.sleep(3)
def wait():
    time.sleep(1)
def fail():
    raise RuntimeError("out of the blue")
"""


def error_lines(stderr: str) -> list[str]:
    return [line for line in stderr.splitlines() if "reshard_mpi: error:" in line]


def assert_refused(done: subprocess.CompletedProcess[str], exit_code: int, *words: str, out: Path | None = None) -> str:
    """The job ended with one line of ours that has all `words` in it, and OUT isn't there; the line."""
    shown = f"{tail(done.stdout)}\n{tail(done.stderr)}"
    errors = error_lines(done.stderr)
    assert (done.returncode, len(errors)) == (exit_code, 1), shown
    (line,) = errors
    assert line.startswith("reshard_mpi: error: "), shown
    assert "Traceback" not in done.stdout + done.stderr, shown
    missing = [word for word in words if word not in line]
    assert not missing, f"{missing} not in: {line}"
    assert out is None or not os.path.lexists(out), shown
    return line


def assert_done(done: subprocess.CompletedProcess[str], exit_code: int = 0) -> str:
    """The job ended as it should, without an error; what it printed."""
    shown = f"{tail(done.stdout)}\n{tail(done.stderr)}"
    assert done.returncode == exit_code, shown
    assert not error_lines(done.stderr), shown
    assert "Traceback" not in done.stderr, shown
    return done.stdout


def run_alone(*arguments: object, cwd: Path | None = None, **env: str | None) -> subprocess.CompletedProcess[str]:
    """`python -m reshard_mpi ARGUMENTS` without a launcher."""
    return subprocess.run(
        [PYTHON, "-m", "reshard_mpi", *map(str, arguments)],
        cwd=cwd,
        env=job_environ(PYTHON, env),
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=120,
    )


def copy_of(case: Path, folder: Path) -> Path:
    return Path(shutil.copytree(case, folder))


def write_sample(folder: Path, size: str, **options: object) -> Path:
    """A synthetic checkpoint, tp2·pp2 unless said otherwise."""
    flags = [part for name, value in ({"tp": 2, "pp": 2} | options).items() for part in (f"--{name}", value)]
    assert_done(run_alone("sample", folder, "--size", size, *flags))
    return folder
