"""On what it was measured."""

import os
import platform
import re
import subprocess
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from tests.mpirun import CHECKOUT, MPIS, mpi_environment

PACKAGES = ("reshard_mpi", "mpi4py", "numpy", "safetensors", "torch")


def machine_facts(folder: Path) -> dict[str, object]:
    """The machine, and the file system of `folder`, in words."""
    return {
        "cpu": _first_value("/proc/cpuinfo", "model name") or platform.machine(),
        "cores": len(os.sched_getaffinity(0)),
        "memory_gib": round(int(_first_value("/proc/meminfo", "MemTotal").split()[0]) / (1 << 20), 1),
        "kernel": platform.release(),
        "file_system": _file_system(folder),
        "python": platform.python_version(),
        "commit": _printed(["git", "-C", str(CHECKOUT), "describe", "--always", "--dirty"]),
        "cp": _printed(["cp", "--version"]),
        "packages": {name: _version(name) for name in PACKAGES},
        "mpi": {mpi: _mpi_version(found[1]) for mpi in MPIS if (found := mpi_environment(mpi))},
    }


def _first_value(path: str, key: str) -> str:
    lines = (line.split(":", 1) for line in Path(path).read_text().splitlines() if ":" in line)
    return next((value.strip() for name, value in lines if name.strip() == key), "")


def _file_system(folder: Path) -> str:
    """The type of the mount that `folder` lies on: the longest mount point above it, the last one there."""
    mounts = (line.split()[1:3] for line in Path("/proc/self/mounts").read_text().splitlines())
    above = [(len(point), kind) for point, kind in mounts if folder.resolve().is_relative_to(point)]
    return max(above, key=lambda mount: mount[0])[1] if above else "unknown"


def _printed(command: list[str]) -> str:
    """The first line that a command prints."""
    try:
        lines = subprocess.run(command, capture_output=True, text=True, timeout=60).stdout.splitlines()
    except OSError:
        return "unknown"
    return lines[0].strip() if lines else "unknown"


def _mpi_version(mpirun: Path) -> str:
    """The first number in what `mpirun --version` prints."""
    printed = subprocess.run([mpirun, "--version"], capture_output=True, text=True, timeout=60).stdout
    found = re.search(r"\d+(\.\d+)+", printed)
    return found[0] if found else "unknown"


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "none"
