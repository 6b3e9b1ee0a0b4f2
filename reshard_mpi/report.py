"""What the user sees: progress on stderr, the summary at the end, numbers with units."""

import os
import resource
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from reshard_mpi.checkpoint.mesh import Mesh
from reshard_mpi.errors import StorageError, UsageError, one_line, plural, storage_error
from reshard_mpi.streams import stderr


def size_text(nbytes: float) -> str:
    """Bytes for people, in binary units.

    >>> size_text(1536), size_text(3)
    ('1.5 KiB', '3 B')
    """
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(nbytes) < 1024:
            return f"{nbytes:.0f} {unit}" if unit == "B" else f"{nbytes:.1f} {unit}"
        nbytes /= 1024
    return f"{nbytes:.1f} TiB"


def topology_text(topology: Mapping[str, int]) -> str:
    """`pp=2,tp=2` in rank order, or `single`."""
    return "single" if dict(topology) == {"world_size": 1} else str(Mesh.of(topology))


def warn(messages: Sequence[str]) -> None:
    for message in messages:
        stderr.write(f"reshard_mpi: warning: {one_line(message)}\n")


class Progress:
    """Bytes written so far, on stderr: a bar on a terminal, else a line now and then, or nothing.

    style: `auto`, `bar`, `plain` or `off`. Whether stdout is a terminal says nothing: Open MPI gives ranks one.
    """

    SECONDS_TO_FIRST_LINE = 2.0
    SECONDS_BETWEEN_LINES = 10.0

    def __init__(self, total_nbytes: int, style: str):
        if style == "auto":
            style = "bar" if stderr.isatty() else "plain"
        self._bar = None
        self._plain = style == "plain"
        self._total, self._done = total_nbytes, 0
        self._told = time.monotonic() + self.SECONDS_TO_FIRST_LINE - self.SECONDS_BETWEEN_LINES
        if style == "bar":
            from tqdm import tqdm

            self._bar = tqdm(
                total=total_nbytes,
                unit="B",
                unit_scale=True,
                unit_divisor=1024,
                desc="reshard",
                leave=False,
                file=stderr,
            )

    def advance(self, nbytes: int) -> None:
        self._done += nbytes
        if self._bar is not None:
            self._bar.update(nbytes)
        elif self._plain and time.monotonic() - self._told >= self.SECONDS_BETWEEN_LINES:
            self._told = time.monotonic()
            stderr.write(
                f"reshard_mpi: {size_text(self._done)} of {size_text(self._total)} "
                f"({100 * self._done // max(self._total, 1)} %)\n"
            )

    def close(self) -> None:
        if self._bar is not None:
            self._bar.close()


def rate_text(nbytes: int, seconds: float) -> str:
    return f"{nbytes / seconds / 1e9:.2f} GB/s" if seconds >= 0.01 else "-"


def peak_rss_nbytes() -> int:
    """The most memory that this process has held."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def summary_of(ranks: Sequence[Mapping[str, Any]], **facts: Any) -> dict[str, Any]:
    """The report of a job: `facts`, and totals and balance of what each rank measured."""

    def total(key: str) -> int:
        return sum(rank[key] for rank in ranks)

    moved = [rank["read_nbytes"] + rank["written_nbytes"] for rank in ranks]
    mean = sum(moved) / len(moved)
    phases = {}
    for phase, nbytes in (
        ("read", "read_nbytes"),
        ("hash", "hashed_nbytes"),
        ("exchange", "sent_nbytes"),
        ("write", "written_nbytes"),
    ):
        seconds = max(rank[f"{phase}_seconds"] for rank in ranks)
        phases[phase] = {
            "nbytes": total(nbytes),
            "seconds": round(seconds, 4),
            "gb_per_second": round(total(nbytes) / seconds / 1e9, 3) if seconds else None,
        }
    return {
        **facts,
        "nranks": len(ranks),
        "phases": phases,
        "read_again_nbytes": total("read_again_nbytes"),
        "busiest_over_mean": round(max(moved) / mean, 3) if mean else 1.0,
        "peak_rss_nbytes": max(rank["peak_rss_nbytes"] for rank in ranks),
        "ranks": list(ranks),
    }


def changes_text(changes: Mapping[str, Sequence[Mapping[str, object]]]) -> str:
    """How many tensors are not in the target as they were; nothing where there are none.

    >>> changes_text({"renamed": [{}, {}], "dropped": [{}]})
    'changed: 2 tensors renamed, 1 tensor dropped'
    """
    counts = [f"{plural(len(tensors), 'tensor')} {what}" for what, tensors in changes.items() if tensors]
    return f"changed: {', '.join(counts)}" if counts else ""


def check_file(path: Path, option: str, *folders: Path) -> None:
    """Before anything is done: an error when a file can't be written to `path`, or lies in one of the command's folders."""
    real = Path(os.path.realpath(path))
    for folder in map(Path, map(os.path.realpath, folders)):
        if folder == real or folder in real.parents:
            raise UsageError(str(path), f"is in {folder}, a folder of the job itself; give {option} a file elsewhere")
    if path.is_dir() or not os.access(path if path.exists() else path.parent, os.W_OK):
        raise StorageError(str(path), f"can't be written to; give {option} a file in a folder that is there")


def write_report(path: Path, report: Mapping[str, Any]) -> None:
    import json

    try:
        path.write_text(json.dumps(report, indent=2) + "\n")
    except OSError as error:
        raise storage_error(path, error, "write the report to") from error
