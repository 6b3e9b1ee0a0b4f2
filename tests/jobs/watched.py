"""Under mpirun: the program, with what it asks of files written down. Not a test by itself.

    mpirun -n 4 python tests/jobs/watched.py NOTES COMMAND ...

Rank r leaves NOTES/r.json: `{"peak_rss_nbytes": .., "calls": [["read" | "write", path, offset, nbytes], ..]}`, one entry a
call, two for one that copies from file to file.
"""

import json
import os
import resource
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

CALLS: list[tuple[str, str, int, int]] = []


def note(kind: str, fd: int, offset: int, nbytes: int) -> None:
    CALLS.append((kind, os.readlink(f"/proc/self/fd/{fd}"), offset, nbytes))


def watch(name: str, noted: Callable[..., None]) -> None:
    """Call `noted(result, *arguments)` after each call of a function of `os`."""
    function = getattr(os, name)

    def watched(*arguments: Any) -> Any:
        result = function(*arguments)
        noted(result, *arguments)
        return result

    setattr(os, name, watched)


def note_copy(nbytes: int, from_fd: int, fd: int, _most: int, from_offset: int, offset: int) -> None:
    note("read", from_fd, from_offset, nbytes)
    note("write", fd, offset, nbytes)


def main(notes: Path) -> None:
    watch("pread", lambda data, fd, _, offset: note("read", fd, offset, len(data)))
    watch("preadv", lambda nbytes, fd, _, offset: note("read", fd, offset, nbytes))
    watch("pwrite", lambda nbytes, fd, _, offset: note("write", fd, offset, nbytes))
    watch("copy_file_range", note_copy)
    from reshard_mpi.__main__ import main as run

    try:
        run()
    finally:
        from mpi4py import MPI

        peak_rss_nbytes = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
        found = {"peak_rss_nbytes": peak_rss_nbytes, "calls": CALLS}
        (notes / f"{MPI.COMM_WORLD.rank}.json").write_text(json.dumps(found))


if __name__ == "__main__":
    main(Path(sys.argv.pop(1)))
