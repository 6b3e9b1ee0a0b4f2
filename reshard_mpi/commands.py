"""The commands, wired: options in, text and exit code out.

Each command imports what it needs when it runs, and what rank 0 does alone is imported by rank 0 alone: with many ranks a
node, every import is paid for many times.
"""

import argparse
import os
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from reshard_mpi.checkpoint.mesh import Mesh
from reshard_mpi.cli import DEMO
from reshard_mpi.errors import ReshardError, StorageError, UsageError, first_to_tell, plural
from reshard_mpi.report import check_file, warn, write_report
from reshard_mpi.show.outcomes import comparison_text, demo_text, fault_facts, summary_text, verdict_facts, verdict_text
from reshard_mpi.streams import say

if TYPE_CHECKING:
    from mpi4py import MPI

    from reshard_mpi.storage.source import Source

SAMPLE_CASE = "tp2-pp2-to-single"
SAMPLE_SOURCE = Path(__file__).parent / "data" / SAMPLE_CASE
SAMPLE_OUT = Path("reshard-sample")
SOURCES = ("source", "a", "b")  # options that name a checkpoint


def run_alone(options: argparse.Namespace) -> int:
    """A command that one process carries out; its exit code."""
    from reshard_mpi.storage.source import load_alone

    vars(options).update(_newest_checkpoints(options))
    if options.command in OF_A_SOURCE:
        return OF_A_SOURCE[options.command](options, lambda: load_alone(options.source))
    return {"describe": _describe, "sample": _sample}[options.command](options)


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
        vars(options).update(root_value(comm, lambda: _newest_checkpoints(options)))
        return together[options.command](comm, options)
    if getattr(options, "ranks", 0) is None and options.simulate is None:
        options.ranks = comm.size
    if options.uses_all_ranks:
        return _run_on_nodes(comm, options)
    return root_value(comm, lambda: run_alone(options))


def _run_on_nodes(comm: "MPI.Comm", options: argparse.Namespace) -> int:
    """Collective: a command of rank 0, to which all ranks say what they see of the shards on their nodes."""
    from reshard_mpi.mpi.comm import on_root, root_value
    from reshard_mpi.mpi.load import load_together

    def check() -> None:
        if options.source is None:
            raise UsageError("--source-template", "goes with a SOURCE, the folder of its case.json")
        if getattr(options, "ranks", comm.size) != comm.size:
            raise UsageError("--ranks", "can't be other ranks than those that look for the shards; leave it out")

    on_root(comm, check)
    source = load_together(comm, options.source, despite_faults=True, template=options.source_template)

    def loaded() -> "Source":
        assert source is not None
        return source

    return root_value(comm, lambda: OF_A_SOURCE[options.command](options, loaded))


def _newest_checkpoints(options: argparse.Namespace) -> dict[str, Path]:
    """The checkpoints that the options name; in place of the folder of a run its newest one, which is told."""
    from reshard_mpi.formats.run_folder import newest_of

    given = {name: folder for name in SOURCES if (folder := getattr(options, name, None)) is not None}
    found = {name: newest_of(folder) for name, folder in given.items()}
    warn(
        [f"{given[name]}: its newest checkpoint is read, {found[name]}" for name in given if found[name] != given[name]]
    )
    return found


def _say_json(facts: object) -> None:
    import json

    say(json.dumps(facts, indent=2))


def _reshard(comm: "MPI.Comm", options: argparse.Namespace) -> int:
    from reshard_mpi.mpi.comm import on_root
    from reshard_mpi.run.job import reshard
    from reshard_mpi.run.wanted import Job

    job = Job(
        source=options.source,
        out=options.out,
        target=options.target,
        memory_nbytes=options.memory,
        writers=options.writers,
        verify=options.verify,
        include=tuple(options.include),
        exclude=tuple(options.exclude),
        rename=tuple(options.rename),
        cast=tuple(options.cast),
        cast_except=tuple(options.cast_except),
        layout=options.layout,
        layout_values=tuple(options.layout_set),
        format=options.format,
        most_file_nbytes=options.max_shard_size,
        assets=options.hf_assets,
        keep_bytes=options.keep_bytes,
        source_template=options.source_template,
        target_template=options.target_template,
        overwrite=options.overwrite,
        restart=options.restart,
        progress=options.progress,
        note_seconds=options.journal_every,
    )
    if options.report:
        on_root(comm, lambda: _check_report(options))
    report = reshard(comm, job)

    def tell() -> None:
        assert report is not None
        try:
            if options.report:
                write_report(options.report, report)
            say(summary_text(report))
        except StorageError as error:
            raise StorageError(error.where, f"{error.message}; {options.out} is whole") from error

    on_root(comm, tell)
    return 0


def _check_report(options: argparse.Namespace) -> None:
    from reshard_mpi.run.commit import partial_of

    check_file(options.report, "--report", options.source, options.out, partial_of(options.out))


def _demo(comm: "MPI.Comm", _options: argparse.Namespace) -> int:
    from reshard_mpi.mpi.comm import on_root
    from reshard_mpi.run.job import reshard
    from reshard_mpi.run.wanted import Job

    def replaceable() -> None:
        if os.path.lexists(SAMPLE_OUT) and _case_id(SAMPLE_OUT) != SAMPLE_CASE:
            raise UsageError(
                str(SAMPLE_OUT),
                "is not a former run of the sample, so it is not replaced; remove it, or run in another folder",
            )

    on_root(comm, replaceable)
    job = Job(
        source=SAMPLE_SOURCE,
        out=SAMPLE_OUT,
        target=Mesh(()),
        memory_nbytes=1 << 24,
        verify="full",
        overwrite=True,
        restart=True,
    )
    report = reshard(comm, job)
    on_root(comm, lambda: say(demo_text(report or {})))
    return 0


def _case_id(folder: Path) -> str | None:
    import json

    from reshard_mpi.checkpoint.manifest import CASE_FILE

    try:
        found = json.loads((folder / CASE_FILE).read_bytes()) if (folder / CASE_FILE).is_file() else None
        return found.get("case_id") if isinstance(found, dict) else None
    except (OSError, ValueError, RecursionError):
        return None


def _simulate(options: argparse.Namespace) -> int:
    from reshard_mpi.plan.planner import Resources, round_nbytes_of
    from reshard_mpi.show.simulation import simulate, simulation_text

    if options.source is not None or options.source_mesh is None or options.target is None:
        raise UsageError("--simulate", "takes --from AXES and --target AXES, and no SOURCE")
    if options.plot:
        raise UsageError("--simulate", "makes no picture; give --plot with a SOURCE")
    nranks = options.ranks or options.source_mesh.size
    writers = "owner" if options.writers == "owner" else "shared"
    resources = Resources(nranks, round_nbytes_of(options.memory), writers, options.verify != "none")
    facts = simulate(options.simulate, options.source_mesh, options.target, resources)
    _say_json(facts) if options.json else say(simulation_text(facts))
    return 0


def _plan(options: argparse.Namespace, load: "Callable[[], Source]") -> int:
    if options.simulate is not None:
        return _simulate(options)
    if options.source is None:
        raise UsageError("plan", "SOURCE is missing; give the folder of a checkpoint case, or --simulate MODEL")
    from reshard_mpi.checkpoint.wanted import rename_rules
    from reshard_mpi.layout.file import NO_LAYOUT, layout_for
    from reshard_mpi.plan.prepare import Selection, changed_source
    from reshard_mpi.show.planning import plan_facts, plan_text, refusals_of
    from reshard_mpi.storage.source import described_anew

    if options.plot:
        _check_plot(options)
    if options.target_template is not None:
        from reshard_mpi.run.node_shards import check_target_template

        check_target_template(options.target_template, options.format)
    source = load()
    layout = layout_for(options.source, options.layout, dict(options.layout_set))
    if layout and layout.operations and source.findings.is_sound and not source.findings.faults:
        source = described_anew(source, *layout.applied(source.case, source.headers))
    selection = Selection(
        options.target,
        tuple(options.include),
        tuple(options.exclude),
        layout,
        as_is=options.layout == NO_LAYOUT,
        rename=rename_rules(options.rename),
        cast=tuple(options.cast),
        cast_except=tuple(options.cast_except),
        format=options.format,
        most_file_nbytes=options.max_shard_size,
    )
    planned, faults = refusals_of(
        source,
        selection,
        nranks=options.ranks or source.case.world_size,
        memory_nbytes=options.memory,
        writers="nodes" if options.target_template else "owner" if options.writers == "owner" else "shared",
        hashing=options.verify != "none",
    )
    if planned is None:
        return _refused(faults, options.json)
    facts = plan_facts(source, *planned)
    warn(facts["warnings"])
    if options.plot:
        from reshard_mpi.show.page import save
        from reshard_mpi.show.pictures import plan_picture

        save(plan_picture(changed_source(source, selection)[0], planned[0]), options.plot)
    _say_json(facts) if options.json else say(plan_text(facts))
    return 0


def _check_plot(options: argparse.Namespace) -> None:
    """Before anything is read: can there be a picture?"""
    from reshard_mpi.show.page import need_matplotlib

    need_matplotlib()
    check_file(options.plot, "--plot", options.source)


def _refused(faults: list[ReshardError], as_json: bool) -> int:
    from reshard_mpi.show.planning import refusals_text

    if as_json:
        _say_json({"refusals": [fault_facts(fault) for fault in faults]})
    else:
        say(refusals_text(faults))
    told = first_to_tell(faults)
    assert told is not None
    raise told


def _inspect(options: argparse.Namespace, load: "Callable[[], Source]") -> int:
    from reshard_mpi.show.inspection import case_facts, case_text, tensor_tiles, tiles_text

    if options.plot:
        _check_plot(options)
        if not options.tensor:
            raise UsageError(
                "inspect --plot", "draws the tiles of one tensor; say which: inspect SOURCE TENSOR --plot FILE"
            )
    source = load()
    if not source.findings.is_sound:  # nothing is left that could be shown
        source.raise_first()
    warn(source.warnings)
    facts = tensor_tiles(source, options.tensor) if options.tensor else case_facts(source)
    if options.plot:
        from reshard_mpi.show.page import save
        from reshard_mpi.show.pictures import tensor_picture

        save(tensor_picture(facts), options.plot)
    if options.json:
        _say_json(facts)
    else:
        say(tiles_text(facts) if options.tensor else case_text(facts))
    source.raise_first()
    return 0


def _describe(options: argparse.Namespace) -> int:
    from reshard_mpi.checkpoint.manifest import case_text
    from reshard_mpi.formats.plain_shards import describe_shards
    from reshard_mpi.layout.file import load_layout
    from reshard_mpi.storage.files import create_file

    out = options.out
    if out is not None and options.source.resolve() in out.resolve().parents:
        raise UsageError(str(out), "lies in SOURCE, which is never written to; write it elsewhere")
    if out is not None and os.path.lexists(out):
        raise UsageError(str(out), "exists; remove it, or give another name")
    layout = load_layout(options.layout, dict(options.layout_set), [options.source]) if options.layout else None
    described = describe_shards(options.source, options.file_pattern, options.source_mesh, layout)
    warn(described.warnings)
    text = case_text(described.case)
    if out is None:
        say(text.decode().rstrip("\n"))
    else:
        create_file(out, len(text), text)
        say(f"{out}: {len(described.case.fragments)} fragments of {plural(described.case.world_size, 'shard')}")
    return 0


def _sample(options: argparse.Namespace) -> int:
    from reshard_mpi.sample import write_sample

    sizes = {axis: getattr(options, axis) for axis in ("tp", "pp", "dp", "fsdp", "cp") if getattr(options, axis) > 1}
    case = write_sample(options.out, options.size, Mesh.of(sizes), options.dtype, options.seed, options.overwrite)
    ntensors = len({fragment.logical_tensor_id for fragment in case.fragments})
    say(f"{options.out}: {case.case_id}, {ntensors} tensors in {plural(case.world_size, 'shard')} ({Mesh.of(sizes)})")
    return 0


def _verify(comm: "MPI.Comm", options: argparse.Namespace) -> int:
    from reshard_mpi.check.verify import verify
    from reshard_mpi.mpi.comm import on_root, raise_together

    verdict = verify(comm, options.source, options.memory, options.progress, options.source_template)

    def tell() -> None:
        assert verdict is not None
        warn(verdict.warnings)
        if options.json:
            _say_json({"case": str(options.source)} | verdict_facts(verdict))
        else:
            say(verdict_text(options.source, verdict))

    on_root(comm, tell)
    raise_together(comm, first_to_tell(verdict.faults) if verdict else None)
    return 0


def _compare(comm: "MPI.Comm", options: argparse.Namespace) -> int:
    from reshard_mpi.check.compare import compare
    from reshard_mpi.mpi.comm import root_value

    templates = (options.a_template, options.b_template)
    found = compare(comm, options.a, options.b, options.memory, options.progress, templates)

    def tell() -> int:
        assert found is not None
        _say_json(found) if options.json else say(comparison_text(found))
        return 0 if found["equal"] else 1

    return root_value(comm, tell)


# What needs a source alone, however it is loaded.
OF_A_SOURCE: "dict[str, Callable[[argparse.Namespace, Callable[[], Source]], int]]" = {
    "plan": _plan,
    "inspect": _inspect,
}
