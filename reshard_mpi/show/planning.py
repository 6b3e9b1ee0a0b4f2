"""The `plan` command: what `reshard` would do, from headers alone, and every reason why it would refuse."""

from collections import defaultdict
from collections.abc import Mapping
from typing import Any

import numpy as np

from reshard_mpi.boxes import Ints
from reshard_mpi.check.oracles import oracle_arrays
from reshard_mpi.checkpoint.manifest import by_tensor
from reshard_mpi.errors import ReshardError, names, plural, telling_order
from reshard_mpi.plan.changes import Changes, with_padding
from reshard_mpi.plan.plan import Plan, plan_arrays, traffic
from reshard_mpi.plan.planner import Resources, round_nbytes_of
from reshard_mpi.plan.prepare import (
    Prepared,
    Selection,
    changed_source,
    held_nbytes,
    outgoing_of,
    prepare,
    round_nbytes_for,
)
from reshard_mpi.report import changes_text, size_text, topology_text
from reshard_mpi.show.tensors import tensor_facts, tensor_lines
from reshard_mpi.storage.source import Source

MOST_LINES = 40
RUNNING_NBYTES = 60 << 20  # of a rank that does nothing: Python, numpy, MPI
FRAGMENT_NBYTES = 4096  # of rank 0, for a fragment of source or target


def refusals_of(
    source: Source, selection: Selection, *, nranks: int, memory_nbytes: int, writers: str, hashing: bool
) -> tuple[tuple[Prepared, Changes] | None, list[ReshardError]]:
    """The prepared job and what it changes in tensors, or every reason to refuse it."""
    faults = list(source.findings.faults)
    outgoing = None
    try:
        if source.findings.is_sound:
            changed, changes = changed_source(source, selection)
            outgoing, refused = outgoing_of(changed, selection)
            faults += refused
    except ReshardError as fault:
        faults.append(fault)
    faults += oracle_arrays(source.folder, source.case)[1] if source.findings.is_sound else []
    try:
        round_nbytes_of(memory_nbytes, held_nbytes(source))
        if outgoing is not None and not faults:
            changes = with_padding(changes, outgoing)
            resources = Resources(
                nranks,
                round_nbytes_for(changed, changes, memory_nbytes),
                writers,
                hashing,
                tuple(source.readers.values()),
            )
            return (prepare(changed, outgoing, resources), changes), []
    except ReshardError as fault:
        faults.append(fault)
    return None, sorted(faults, key=telling_order)


def plan_facts(source: Source, prepared: Prepared, changes: Changes) -> dict[str, Any]:
    """What the plan says, as JSON values; bytes and ranks are of MPI ranks unless `shard` is in the name.

    `traffic_nbytes` has [from rank, to rank, bytes] of every pair that shares any.
    """
    plan, case = prepared.plan, prepared.outgoing.case
    tensors = by_tensor(case.fragments)
    moved = traffic(plan)
    sent = moved.sent
    read, written = _read_nbytes(plan), np.bincount(plan.target.rank, plan.target.stored.boxes.volume, plan.nranks)
    ranks = [
        {
            "rank": rank,
            "read_nbytes": int(read[rank]),
            "sent_nbytes": int(sent[rank]),
            "written_nbytes": int(written[rank]),
        }
        for rank in range(plan.nranks)
    ]
    return {
        "source": str(source.folder),
        "source_topology": dict(case.topology.target),
        "target_topology": dict(case.topology.source),
        "nranks": plan.nranks,
        "nrounds": plan.nrounds,
        "buffers_nbytes": plan.memory_nbytes + held_nbytes(source),
        "read_nbytes": sum(rank["read_nbytes"] for rank in ranks),
        "sent_nbytes": sum(rank["sent_nbytes"] for rank in ranks),
        "written_nbytes": sum(rank["written_nbytes"] for rank in ranks),
        "ranks": ranks,
        "traffic_nbytes": np.stack([moved.giver, moved.taker, moved.nbytes], axis=1).tolist(),
        "shards": _shards(prepared),
        "tensors": [tensor_facts(tensors[t], rules) for t, rules in sorted((case.topology.layout or {}).items())],
        "changes": changes.facts(),
        "peak_nbytes": _peak_nbytes(source, prepared),
        "warnings": [*source.warnings, *changes.warnings],
        "refusals": [],
    }


def _read_nbytes(plan: Plan) -> Ints:
    """What each rank reads of the source: from the first to the last byte of every box, padding between its rows included.

    Where bytes are hashed, all of an array that has a digest.
    """
    side = plan.source
    rows = np.arange(len(side.rank))
    first, last = side.stored.spans(rows, side.stored.boxes)
    begin = side.arrays.begin[side.array]
    whole = (side.arrays.has_digest[side.array] > 0) & bool(plan.hashing)
    first, last = np.where(whole, begin, first), np.where(whole, begin + side.arrays.nbytes[side.array], last)
    file = side.arrays.file[side.array]
    order = np.lexsort((last, first, file, side.rank))
    rank, file, first, last = side.rank[order], file[order], first[order], last[order]
    # What overlaps on a rank is read once: boxes of one array with padding between them, or two that are one array.
    place = (rank * (1 + int(file.max(initial=0))) + file) * (1 + int(last.max(initial=0)))
    reached = np.maximum.accumulate(np.append(0, place + last))[:-1]
    nbytes = np.maximum(place + last - np.maximum(reached, place + first), 0)
    # What is converted is read as it is stored.
    array = side.array[order]
    converted, shown = side.arrays.converted_nbytes[array], np.maximum(side.arrays.nbytes[array], 1)
    return np.bincount(rank, np.where(converted > 0, nbytes * converted // shown, nbytes), plan.nranks).astype(np.int64)


def _shards(prepared: Prepared) -> list[dict[str, Any]]:
    source_ranks = {
        f"{prepared.outgoing.case.case_id}#{fragment.fragment_id}": fragment.rank
        for f in prepared.source_fragments
        for fragment in f
    }
    comes_from: defaultdict[str, set[int]] = defaultdict(set)
    nfragments: defaultdict[str, int] = defaultdict(int)
    for fragment in prepared.outgoing.case.fragments:
        nfragments[fragment.payload_file] += 1
        comes_from[fragment.payload_file] |= {
            source_ranks[ref] for ref in fragment.evidence_refs if ref in source_ranks
        }
    return [
        {
            "file": file.name,
            "nbytes": file.nbytes,
            "nfragments": nfragments[file.name],
            "source_shards": sorted(comes_from[file.name]),
        }
        for file in prepared.target_files
    ]


def _peak_nbytes(source: Source, prepared: Prepared) -> int:
    """The memory of rank 0, about: Python and MPI, buffers, what is held, the plan twice (as made, as sent), the manifests."""
    plan_nbytes = sum(value.nbytes for value in plan_arrays(prepared.plan) if isinstance(value, np.ndarray))
    nfragments = len(source.case.fragments) + len(prepared.outgoing.case.fragments)
    buffers_nbytes = prepared.plan.memory_nbytes + held_nbytes(source)
    return RUNNING_NBYTES + buffers_nbytes + 2 * plan_nbytes + nfragments * FRAGMENT_NBYTES


def plan_text(facts: Mapping[str, Any]) -> str:
    """The plan for people."""
    topologies = [topology_text(facts[f"{side}_topology"]) for side in ("source", "target")]
    lines = [
        f"{facts['source']}: {topologies[0]} -> {topologies[1]}, {plural(facts['nranks'], 'rank')}, "
        f"{plural(facts['nrounds'], 'round')}",
        f"read {size_text(facts['read_nbytes'])}, sent {size_text(facts['sent_nbytes'])}, "
        f"written {size_text(facts['written_nbytes'])}; "
        f"a rank needs about {size_text(facts['peak_nbytes'])}, of which {size_text(facts['buffers_nbytes'])} buffers",
        "",
        f"{'rank':>6}{'reads':>12}{'sends':>12}{'writes':>12}   (a part for several ranks is sent to each)",
    ]
    for rank in facts["ranks"][:MOST_LINES]:
        sizes = (size_text(rank[f"{what}_nbytes"]) for what in ("read", "sent", "written"))
        lines.append(f"{rank['rank']:>6}" + "".join(f"{size:>12}" for size in sizes))
    lines += ["", f"{'target shard':<26}{'fragments':>10}{'bytes':>12}  from source shards"]
    for shard in facts["shards"][:MOST_LINES]:
        lines.append(
            f"{shard['file']:<26}{shard['nfragments']:>10}{size_text(shard['nbytes']):>12}  "
            f"{names(shard['source_shards'], most=8) or '-'}"
        )
    left = max(len(facts["ranks"]), len(facts["shards"])) - MOST_LINES
    lines += [f"... and {left} more (--json has all)"] if left > 0 else []
    changed = changes_text(facts["changes"])
    lines += ["", changed] if changed else []
    lines += ["", "in the target:", *tensor_lines(facts["tensors"], facts["target_topology"])]
    return "\n".join([*lines, "", "Headers were read, bytes were not: `verify` checks them."])


def refusals_text(faults: list[ReshardError]) -> str:
    return "\n".join(f"refused (exit {fault.exit_code}): {fault}" for fault in faults)
