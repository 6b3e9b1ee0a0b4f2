"""The command line: python -m tests.benchmarks --help."""

import argparse
import json
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from fnmatch import fnmatchcase
from itertools import groupby
from pathlib import Path

from reshard_mpi.cli import binary_size
from tests.benchmarks.contenders import Contender, Task, all_contenders, peer, write_dcp
from tests.benchmarks.machine import machine_facts
from tests.benchmarks.measure import (
    Limits,
    Result,
    available_memory,
    remove_output,
    run_once,
    undisturbed_run,
)
from tests.benchmarks.table import LEGEND, Measured, against_row, facts, markdown
from tests.benchmarks.works import WORKS, Work

FIGURES = "cp,ours-4-none,ours-4-source,naive,consolidate*,dcp"


def parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m tests.benchmarks", description=__doc__)
    add = parser.add_argument
    add("--size", type=binary_size, default="1G", help="of each source (default 1G)")
    add("--rounds", type=int, default=5, help="in each, every contender runs once (default 5)")
    add("--works", default="*", metavar="GLOBS", help="separated by commas (default all)")
    add("--contenders", default=FIGURES, metavar="GLOBS", help="likewise (default %(default)s)")
    add(
        "--folder",
        type=Path,
        default="/dev/shm",
        help="where to write; what is written is removed (default %(default)s)",
    )
    add("--json", type=Path, metavar="FILE", help="write every run and all ratios there")
    add("--busy", type=float, default=0.1, metavar="SHARE", help="of CPU time that others may take (default 0.1)")
    add("--repeats", type=int, default=3, help="of a run in which others took more (default 3)")
    add("--patience", type=float, default=60, metavar="SECONDS", help="to wait for a quiet machine (default 60)")
    add("--timeout", type=float, default=600, metavar="SECONDS", help="of a run (default 600)")
    add("--list", action="store_true", help="say which works and contenders there are")
    return parser


def main() -> None:
    options = parser().parse_args()
    contenders = all_contenders()
    if options.list:
        print("\n".join(f"{work.name:22} {work.source} -> {work.target}" for work in WORKS))
        print("\n".join(f"{contender.name:22} {contender.about}" for contender in contenders.values()))
        return
    works = [work for work in WORKS if _is_chosen(work.name, options.works)]
    chosen = [contender for name, contender in contenders.items() if _is_chosen(name, options.contenders)]
    if not works or not chosen:
        raise SystemExit("benchmarks: no such work or contender; --list names them")
    machine = machine_facts(options.folder)
    print(f"```\n{json.dumps(machine, indent=2)}\n```\n\n{LEGEND}", flush=True)
    with _own_folder(options.folder) as folder:
        measured = []
        for one in _measure_all(works, chosen, options, folder):
            print(markdown(one), flush=True)
            measured.append(one)
            _write_json(options, machine, measured)
    print(against_row(measured), end="")


def _write_json(options: argparse.Namespace, machine: dict[str, object], measured: Sequence[Measured]) -> None:
    """After each work, so that nothing is lost when a later one is stopped."""
    if options.json:
        asked = {name: str(value) for name, value in vars(options).items()}
        text = json.dumps({"machine": machine, "options": asked, "works": [facts(one) for one in measured]}, indent=2)
        options.json.write_text(text + "\n")


def _is_chosen(name: str, globs: str) -> bool:
    return any(fnmatchcase(name, glob.strip()) for glob in globs.split(","))


@contextmanager
def _own_folder(parent: Path) -> Iterator[Path]:
    """A new folder, which goes away whatever happens."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("benchmarks: stopped"))
    folder = Path(tempfile.mkdtemp(prefix="reshard-benchmarks-", dir=parent))
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)  # a process that was just killed may still have written there
        if folder.exists():
            shutil.rmtree(folder)


def _measure_all(
    works: Sequence[Work], contenders: Sequence[Contender], options: argparse.Namespace, folder: Path
) -> Iterator[Measured]:
    """Every work, one source at a time."""
    for source, group in groupby(works, key=lambda work: work.source):
        subprocess.run(peer("sources", source, options.size, folder / "source"), check=True)
        for work in group:
            yield _measure(work, contenders, options, folder)
        for path in folder.iterdir():
            shutil.rmtree(path) if path.is_dir() else path.unlink()


def _measure(work: Work, contenders: Sequence[Contender], options: argparse.Namespace, folder: Path) -> Measured:
    """First every contender once, to see whether its output is right; then the rounds."""
    limits = Limits(options.busy, options.repeats, options.patience, options.timeout)
    source, out = folder / "source", folder / "out"
    nbytes = sum(path.stat().st_size for path in source.iterdir())
    task = Task(work, nbytes, source, folder / "dcp", out, out.with_name("out.report"), out.with_name("out.rendezvous"))
    results = [_tried(contender, task, limits) for contender in contenders]
    for number in range(options.rounds):
        for contender, result in zip(contenders, results, strict=True):
            if result.can_run:
                _tell(f"{work.name}: round {number + 1} of {options.rounds}: {contender.name}")
                result.runs += undisturbed_run(contender, task, limits)
                _drop_if_failed(result)
    remove_output(task)
    return Measured(work, nbytes, results)


def _tried(contender: Contender, task: Task, limits: Limits) -> Result:
    """The result before the rounds: can this contender do it, and is its output right?"""
    result = Result(contender.name, contender.cannot(task.work))
    needed = contender.memory(task) + task.nbytes
    if not result.note and needed > available_memory():
        result.note = f"not run: takes about {needed / (1 << 30):.1f} GiB of memory"
    if result.note:
        result.can_run = False
        return result
    _tell(f"{task.work.name}: check: {contender.name}")
    if contender.needs_dcp and not task.dcp.exists():
        remove_output(task)
        subprocess.run(write_dcp(task), env=contender.environ, check=True)
    first = run_once(contender, task, Limits(1, 0, 0, limits.timeout))
    if first.failure:
        result.note, result.can_run = first.failure, False
        return result
    faults = subprocess.run(contender.check(task), env=contender.environ, capture_output=True, text=True)
    lines = (faults.stdout + (faults.stderr if faults.returncode else "")).strip().splitlines()
    if lines or faults.returncode:
        result.note = f"WRONG: {lines[-1] if lines else faults.returncode} ({len(lines)} faults)"
    return result


def _drop_if_failed(result: Result) -> None:
    if result.runs[-1].failure:
        result.note, result.can_run = result.runs[-1].failure, False


def _tell(text: str) -> None:
    sys.stderr.write(f"{text}\n")


if __name__ == "__main__":
    main()
