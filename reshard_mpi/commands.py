"""The commands, wired: options in, text and exit code out."""

import argparse
import json
import os
import sys
from collections.abc import Callable, Mapping
from importlib import resources
from pathlib import Path
from typing import TYPE_CHECKING, Any

from reshard_mpi.checkpoint.manifest import CASE_FILE
from reshard_mpi.checkpoint.mesh import Mesh
from reshard_mpi.cli import DEMO
from reshard_mpi.errors import ReshardError, UsageError, first_to_tell
from reshard_mpi.plan.prepare import Selection
from reshard_mpi.report import size_text, summary_text, warn, write_report
from reshard_mpi.sample import write_sample
from reshard_mpi.show.inspection import case_facts, case_text, tensor_tiles, tiles_text
from reshard_mpi.show.planning import plan_facts, plan_text, refusals_of, refusals_text
from reshard_mpi.storage.source import Source, load_alone

if TYPE_CHECKING:
    from mpi4py import MPI

SAMPLE_CASE = "tp2-pp2-to-single"
SAMPLE_OUT = Path("reshard-sample")


def run_alone(options: argparse.Namespace) -> int:
    """A command that one process carries out; its exit code."""
    alone: dict[str, Callable[[argparse.Namespace], int]] = {"plan": _plan, "inspect": _inspect, "sample": _sample}
    return alone[options.command](options)


def run_together(comm: "MPI.Comm", options: argparse.Namespace) -> int:
    """Collective: a command on all ranks; the exit code, the same on all of them."""
    from reshard_mpi.mpi.comm import root_value

    together: dict[str, Callable[[MPI.Comm, argparse.Namespace], int]] = {
        DEMO: _demo,
        "reshard": _reshard,
        "verify": _verify,
        "compare": _compare,
    }
    if options.command in together:
        return together[options.command](comm, options)
    if getattr(options, "ranks", 0) is None:
        options.ranks = comm.size
    return root_value(comm, lambda: run_alone(options))


def _say(text: str) -> None:
    sys.stdout.write(text + "\n")
    sys.stdout.flush()


def _say_json(facts: object) -> None:
    _say(json.dumps(facts, indent=2))


def _selection(options: argparse.Namespace) -> Selection:
    return Selection(options.target, tuple(options.include), tuple(options.exclude))


def _reshard(comm: "MPI.Comm", options: argparse.Namespace) -> int:
    from reshard_mpi.mpi.comm import on_root
    from reshard_mpi.run.job import Job, reshard

    job = Job(
        source=options.source,
        out=options.out,
        selection=_selection(options),
        memory_nbytes=options.memory,
        writers=options.writers,
        verify=options.verify,
        overwrite=options.overwrite,
        restart=options.restart,
        progress=options.progress,
    )
    report = reshard(comm, job)

    def tell() -> None:
        assert report is not None
        _say(summary_text(report))
        if options.report:
            write_report(options.report, report)

    on_root(comm, tell)
    return 0


def _demo(comm: "MPI.Comm", _options: argparse.Namespace) -> int:
    from reshard_mpi.mpi.comm import on_root
    from reshard_mpi.run.job import Job, reshard

    def replaceable() -> None:
        if os.path.lexists(SAMPLE_OUT) and _case_id(SAMPLE_OUT) != SAMPLE_CASE:
            raise UsageError(
                str(SAMPLE_OUT),
                "is not a former run of the sample, so it is not replaced; remove it, or run in another folder",
            )

    on_root(comm, replaceable)
    with resources.as_file(resources.files("reshard_mpi") / "data" / SAMPLE_CASE) as source:
        job = Job(
            source=source,
            out=SAMPLE_OUT,
            selection=Selection(Mesh(())),
            memory_nbytes=1 << 24,
            writers="auto",
            verify="full",
            overwrite=True,
            restart=True,
            progress="off",
        )
        report = reshard(comm, job)
    on_root(comm, lambda: _say(_demo_text(report)))
    return 0


def _case_id(folder: Path) -> str | None:
    try:
        found = json.loads((folder / CASE_FILE).read_bytes())
        return found.get("case_id") if isinstance(found, dict) else None
    except (OSError, ValueError):
        return None


def _demo_text(report: Mapping[str, Any] | None) -> str:
    assert report is not None
    return "\n".join(
        [
            f"Resharded the built-in sample: {report['source_topology']} (4 shards) -> single, with "
            f"{report['nranks']} ranks, into ./{SAMPLE_OUT}/",
            f"  one tensor, {size_text(report['phases']['write']['nbytes'])}; source digests, target digests and "
            "the whole tensor's oracle hold",
            "Next, on a checkpoint of your own (a folder with case.json and rank-00000.safetensors, ...):",
            "  python -m reshard_mpi inspect SOURCE                                    what it holds",
            "  python -m reshard_mpi plan SOURCE --target tp=4                         what would move",
            "  mpirun -n 4 python -m reshard_mpi reshard SOURCE OUT --target tp=4      do it",
            "  python -m reshard_mpi sample CHECKPOINT --size 1G --tp 2 --pp 2         or make one to try",
        ]
    )


def _plan(options: argparse.Namespace) -> int:
    source = load_alone(options.source)
    prepared, faults = refusals_of(
        source,
        _selection(options),
        nranks=options.ranks or source.case.world_size,
        memory_nbytes=options.memory,
        writers="owner" if options.writers == "owner" else "shared",
        hashing=options.verify != "none",
    )
    if prepared is None:
        return _refused(faults, options.json)
    warn(source.warnings)
    facts = plan_facts(source, prepared)
    _say_json(facts) if options.json else _say(plan_text(facts))
    return 0


def _refused(faults: list[ReshardError], as_json: bool) -> int:
    if as_json:
        _say_json(
            {
                "refusals": [
                    {"exit_code": fault.exit_code, "where": fault.where, "message": fault.message} for fault in faults
                ]
            }
        )
    else:
        _say(refusals_text(faults))
    told = first_to_tell(faults)
    assert told is not None
    raise told


def _inspect(options: argparse.Namespace) -> int:
    source = _sound_source(options.source)
    warn(source.warnings)
    facts = tensor_tiles(source, options.tensor) if options.tensor else case_facts(source)
    if options.json:
        _say_json(facts)
    else:
        _say(tiles_text(facts) if options.tensor else case_text(facts))
    source.raise_first()
    return 0


def _sound_source(folder: Path) -> Source:
    """A source that can be shown: it may have faults, but not of a kind that leaves nothing to show."""
    source = load_alone(folder)
    if not source.findings.is_sound:
        source.raise_first()
    return source


def _sample(options: argparse.Namespace) -> int:
    sizes = {axis: getattr(options, axis) for axis in ("tp", "pp", "dp", "fsdp", "cp") if getattr(options, axis) > 1}
    case = write_sample(options.out, options.size, Mesh.of(sizes), options.dtype, options.seed, options.overwrite)
    ntensors = len({fragment.logical_tensor_id for fragment in case.fragments})
    _say(f"{options.out}: {case.case_id}, {ntensors} tensors in {case.world_size} shards ({Mesh.of(sizes)})")
    return 0


def _verify(comm: "MPI.Comm", options: argparse.Namespace) -> int:
    from reshard_mpi.check.verify import verify
    from reshard_mpi.mpi.comm import on_root, raise_together

    verdict = verify(comm, options.source, options.progress)

    def tell() -> None:
        assert verdict is not None
        warn(verdict.warnings)
        counts = {name: getattr(verdict, name) for name in ("nfragments", "ndigests", "noracles", "nunverifiable")}
        if options.json:
            faults = [
                {"exit_code": fault.exit_code, "where": fault.where, "message": fault.message}
                for fault in verdict.faults
            ]
            _say_json({"case": str(options.source), **counts, "faults": faults})
            return
        for fault in verdict.faults:
            _say(f"fault (exit {fault.exit_code}): {fault}")
        _say(
            f"{options.source}: {verdict.nfragments} fragments, {verdict.ndigests} digests and {verdict.noracles} "
            "oracles recomputed, "
            f"{verdict.nunverifiable} fragments unverifiable, {len(verdict.faults)} faults"
        )

    on_root(comm, tell)
    raise_together(comm, first_to_tell(verdict.faults) if verdict else None)
    return 0


def _compare(comm: "MPI.Comm", options: argparse.Namespace) -> int:
    from reshard_mpi.check.compare import compare
    from reshard_mpi.mpi.comm import root_value

    found = compare(comm, options.a, options.b, options.progress)

    def tell() -> int:
        assert found is not None
        if options.json:
            _say_json(found)
        else:
            for difference in found["differences"]:
                detail = (
                    f", first at {difference['first_index']}, {difference['count']} elements"
                    if "count" in difference
                    else ""
                )
                _say(f"{difference['tensor']}: {difference['what']}{detail}")
            _say(
                f"{'equal' if found['equal'] else 'different'}: {found['ntensors']} tensors, {len(found['differences'])} differ"
            )
        return 0 if found["equal"] else 1

    return root_value(comm, tell)
