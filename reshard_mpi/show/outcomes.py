"""How a command ended, in words: a job, the sample, a verification, a comparison."""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from reshard_mpi.errors import ReshardError, plural
from reshard_mpi.report import changes_text, rate_text, size_text

if TYPE_CHECKING:
    from reshard_mpi.check.verify import Verdict


def summary_text(report: Mapping[str, Any]) -> str:
    """A job, in at most ten lines."""
    counts = (
        ("ntensors", "tensor"),
        ("nfragments", "fragment"),
        ("nshards", "shard"),
        ("nranks", "rank"),
        ("nrounds", "round"),
    )
    lines = [
        f"{report['source']} ({report['source_topology']}) -> {report['out']} ({report['target_topology']})",
        "  " + ", ".join(plural(report[count], noun) for count, noun in counts),
    ]
    if report["target_template"]:
        lines.append(f"  its shards are on the nodes: {report['target_template']}")
    told = [changes_text(report["changes"])]
    if report["kept_bytes"]:
        told.append(f"kept: {plural(len(report['kept_bytes']), 'file')} of what is no tensor, in bytes/")
    lines += [f"  {'; '.join(filter(None, told))}"] if any(told) else []
    if report["continued_nbytes"]:
        lines.append(
            f"  continued: {size_text(report['continued_nbytes'])} of the tensors were there from an earlier run"
        )
    for phase, data in report["phases"].items():
        rate = rate_text(data["nbytes"], data["seconds"])
        lines.append(f"  {phase:<9}{size_text(data['nbytes']):>11}  {data['seconds']:8.2f} s  {rate:>12}")
    lines += [
        f"  busiest rank {report['busiest_over_mean']:.2f} of the mean, peak memory "
        f"{size_text(report['peak_rss_nbytes'])} a rank, {report['seconds']:.2f} s in all",
        f"  verified ({report['verify']}): {_verified_text(report)}",
    ]
    return "\n".join(lines)


def _verified_text(report: Mapping[str, Any]) -> str:
    if report["verify"] == "none":
        return "nothing was hashed"
    nread, nunverifiable = report["narrays_read"], report["narrays_unverifiable"]
    if report["verify"] == "full":
        oracles = f"{plural(report['noracles'], 'oracle')} checked"
        if not nunverifiable:
            return f"source, replicas and target hold their digests; {oracles}"
        return f"{_partly_text(nread, nunverifiable)}; the target holds its digests; {oracles}"
    held = _partly_text(nread, nunverifiable) if nunverifiable else "every fragment read holds its digest"
    unread = report["unread_replica_nbytes"]
    return held + (f"; {size_text(unread)} of replicas were compared by digest alone" if unread else "")


def _partly_text(nread: int, nunverifiable: int) -> str:
    """What holds of arrays some or all of which have no digests."""
    if nread == nunverifiable:
        return "the source has no digests, so its bytes could not be checked"
    return f"{nread - nunverifiable} of {plural(nread, 'array')} read hold their digests, the others have none"


def demo_text(report: Mapping[str, Any]) -> str:
    """The built-in sample, in at most ten lines."""
    return "\n".join(
        [
            f"Resharded the built-in sample: {report['source_topology']} (4 shards) -> single, with "
            f"{plural(report['nranks'], 'rank')}, into ./{report['out']}/",
            f"  one tensor, {size_text(report['phases']['write']['nbytes'])}; its fragments, the file written and the "
            "whole tensor hold their digests",
            "Next, on a checkpoint of your own (a folder with case.json and rank-00000.safetensors, ...):",
            "  python -m reshard_mpi inspect SOURCE                                    what it holds",
            "  python -m reshard_mpi plan SOURCE --target tp=4                         what would move",
            "  mpirun -n 4 python -m reshard_mpi reshard SOURCE OUT --target tp=4      do it",
            "  python -m reshard_mpi sample CHECKPOINT --size 1G --tp 2 --pp 2         or make one to try",
        ]
    )


def fault_facts(fault: ReshardError) -> dict[str, Any]:
    return {"exit_code": fault.exit_code, "where": fault.where, "message": fault.message}


def verdict_facts(verdict: "Verdict") -> dict[str, Any]:
    """A verification, as JSON values."""
    counts = {name: getattr(verdict, name) for name in ("nfragments", "ndigests", "noracles", "nunverifiable")}
    return {**counts, "faults": [fault_facts(fault) for fault in verdict.faults]}


def verdict_text(source: object, verdict: "Verdict") -> str:
    """A verification: a line a fault, and what was looked at."""
    lines = [f"fault (exit {fault.exit_code}): {fault}" for fault in verdict.faults]
    lines.append(
        f"{source}: {plural(verdict.nfragments, 'fragment')}, {plural(verdict.ndigests, 'digest')} and "
        f"{plural(verdict.noracles, 'oracle')} recomputed, {plural(verdict.nunverifiable, 'fragment')} unverifiable, "
        f"{plural(len(verdict.faults), 'fault')}"
    )
    return "\n".join(lines)


def comparison_text(found: Mapping[str, Any]) -> str:
    """A comparison: a line a tensor that differs, and the count."""
    lines = []
    for difference in found["differences"]:
        detail = ""
        if "count" in difference:
            detail = f", first at {difference['first_index']}, {plural(difference['count'], 'element')}"
        lines.append(f"{difference['tensor']}: {difference['what']}{detail}")
    result = "equal" if found["equal"] else "different"
    lines.append(f"{result}: {plural(found['ntensors'], 'tensor')}, {len(found['differences'])} of them differ")
    return "\n".join(lines)
