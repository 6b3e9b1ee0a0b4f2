"""Under mpirun: every committed case to every target of its answers, back again, and compared. Not a test by itself.

    mpirun -n 4 python tests/jobs/every_case.py FOLDER [CASE ...]

Prints a line for each failure, and writes the digest of every file of every OUT and BACK to FOLDER/digests.json.
"""

import contextlib
import hashlib
import io
import json
import sys
from collections.abc import Collection, Iterator
from pathlib import Path

from mpi4py import MPI

from reshard_mpi.cli import parse
from reshard_mpi.commands import run_together
from reshard_mpi.errors import ReshardError
from tests.reference.targets import spelled

CASES = Path(__file__).resolve().parents[2] / "fixtures" / "v1" / "cases"


def every_target(names: Collection[str]) -> Iterator[tuple[Path, str]]:
    """Of the cases with these names, of all if there are none."""
    for case in sorted(path for path in CASES.iterdir() if not names or path.name in names):
        for answer in json.loads((case / "expected.json").read_text()):
            yield case, spelled(answer["target"])


def run(comm: MPI.Intracomm, *arguments: object) -> str:
    """Collective: what went wrong with a command line; empty if nothing did."""
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        try:
            code = run_together(comm, parse([str(argument) for argument in arguments]))
        except ReshardError as error:
            return f"exit {error.exit_code}: {error}"
    return f"exit {code}: {printed.getvalue()}" if code else ""


def there_and_back(comm: MPI.Intracomm, source: Path, target: str, folder: Path) -> list[str]:
    """Collective: the failures."""
    out, back = folder / "out", folder / "back"
    steps = [
        ("reshard", source, out, "--target", target, "--progress", "off"),
        ("reshard", out, back, "--progress", "off"),
        ("compare", source, back),
    ]
    for step in steps:
        wrong = run(comm, *step)
        if any(comm.allgather(wrong)):
            # The later steps need what this one makes.
            return [f"{source.name} to {target}, {step[0]} {step[2].name}, rank {comm.rank}: {wrong or 'went well'}"]
    return []


def digests(folder: Path) -> dict[str, str]:
    return {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in sorted(folder.iterdir())}


def main(comm: MPI.Intracomm, folder: Path, names: Collection[str]) -> None:
    found = {}
    for case, target in every_target(names):
        name = f"{case.name} to {target}"
        failures = there_and_back(comm, case, target, folder / name)
        for failure in [line for lines in comm.allgather(failures) for line in lines]:
            if comm.rank == 0:
                print(failure, flush=True)
        for step in ("out", "back"):
            if comm.rank == 0 and (folder / name / step).is_dir():
                found[f"{name}, {step}"] = digests(folder / name / step)
    if comm.rank == 0:
        (folder / "digests.json").write_text(json.dumps(found))


if __name__ == "__main__":
    main(MPI.COMM_WORLD, Path(sys.argv[1]), sys.argv[2:])
