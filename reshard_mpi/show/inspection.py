"""The `inspect` command: what a checkpoint holds, and the tiles of one tensor."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

from reshard_mpi.checkpoint.checks import box_text
from reshard_mpi.checkpoint.dtypes import DTYPES
from reshard_mpi.checkpoint.manifest import Case, Fragment, Rule, Stages, by_tensor
from reshard_mpi.checkpoint.mesh import Mesh
from reshard_mpi.errors import UsageError, names
from reshard_mpi.layout.rules import target_layout
from reshard_mpi.report import size_text, topology_text
from reshard_mpi.storage.source import Source

MOST_LINES = 60


def rule_text(axis: str, rule: Rule) -> str:
    """`tp splits 0`, `dp replicates`, `pp at 1 of 2`."""
    if isinstance(rule, Stages):
        return f"{axis} at {','.join(map(str, rule.stages))} of {rule.of}"
    return f"{axis} replicates" if rule == "replicate" else f"{axis} splits {rule}"


def case_facts(source: Source) -> dict[str, Any]:
    """What the manifest says, as JSON values."""
    case = source.case
    layout, _ = target_layout(case, Mesh(()))  # only what is known: nothing is asked of it
    tensors = [
        _tensor_facts(fragments, layout[tensor_id])
        for tensor_id, fragments in sorted(by_tensor(case.fragments).items())
    ]
    return {
        "case_id": case.case_id,
        "components": list(case.components),
        "features": list(case.features),
        "source_topology": dict(case.topology.source),
        "target_topology": dict(case.topology.target),
        "world_size": case.world_size,
        "nfragments": len(case.fragments),
        "ntensors": len(tensors),
        "nbytes": sum(tensor["nbytes"] for tensor in tensors),
        "dtypes": _bytes_by_dtype(tensors),
        "nreplicas": sum(f.replica.member_count > 1 and f.replica.member_index > 0 for f in case.fragments),
        "npadded": sum(f.is_padded for f in case.fragments),
        "nwithout_digest": sum(f.fragment_digest is None for f in case.fragments),
        "ties": _ties(case),
        "oracles": [oracle.logical_tensor_id for oracle in case.oracles],
        "tensors": tensors,
        "warnings": source.warnings,
        "faults": [str(fault) for fault in source.findings.faults],
    }


def _tensor_facts(fragments: Sequence[Fragment], rules: Mapping[str, Rule]) -> dict[str, Any]:
    like = fragments[0]
    return {
        "tensor": like.logical_tensor_id,
        "fqn": like.fqn,
        "component": like.component_id,
        "role": like.role,
        "dtype": like.dtype,
        "shape": list(like.global_shape),
        "nbytes": math.prod(like.global_shape) * DTYPES[like.dtype].nbits // 8,
        "nfragments": len(fragments),
        "layout": [rule_text(axis, rule) for axis, rule in rules.items()],
    }


def _bytes_by_dtype(tensors: Sequence[Mapping[str, Any]]) -> dict[str, int]:
    found: dict[str, int] = {}
    for tensor in tensors:
        found[tensor["dtype"]] = found.get(tensor["dtype"], 0) + tensor["nbytes"]
    return found


def _ties(case: Case) -> dict[str, list[str]]:
    found: dict[str, list[str]] = {}
    for tensor_id, fragments in by_tensor(case.fragments).items():
        if fragments[0].tie_group_id is not None:
            found.setdefault(fragments[0].tie_group_id, []).append(tensor_id)
    return found


def case_text(facts: Mapping[str, Any]) -> str:
    """The checkpoint for people."""
    lines = [
        f"{facts['case_id']}: {topology_text(facts['source_topology'])}, {facts['world_size']} shards, default "
        f"target {topology_text(facts['target_topology'])}",
        f"{facts['ntensors']} tensors of {size_text(facts['nbytes'])} "
        f"({', '.join(f'{dtype} {size_text(n)}' for dtype, n in facts['dtypes'].items())}), "
        f"{facts['nfragments']} fragments, of which {facts['nreplicas']} replicas, {facts['npadded']} padded, "
        f"{facts['nwithout_digest']} without digest",
    ]
    lines += [f"tied as {tie}: {names(tied)}" for tie, tied in facts["ties"].items()]
    width = min(max((len(tensor["tensor"]) for tensor in facts["tensors"]), default=0), 60)
    for tensor in facts["tensors"][:MOST_LINES]:
        lines.append(
            f"  {tensor['tensor']:<{width}}  {tensor['dtype']:<9} "
            f"{'x'.join(map(str, tensor['shape'])) or 'scalar':<14} {size_text(tensor['nbytes']):>10}  "
            f"{tensor['nfragments']:>4} fragments  {'; '.join(tensor['layout'])}"
        )
    if len(facts["tensors"]) > MOST_LINES:
        lines.append(f"  ... and {len(facts['tensors']) - MOST_LINES} more (--json has all)")
    return "\n".join(lines)


def tensor_tiles(source: Source, name: str) -> dict[str, Any]:
    """The tiles of the tensor with this id or fqn; UsageError when there is none, or more than one."""
    tensors = by_tensor(source.case.fragments)
    found = [name] if name in tensors else sorted(t for t, fragments in tensors.items() if fragments[0].fqn == name)
    if len(found) != 1:
        raise UsageError(name, f"names {len(found)} tensors ({names(found or sorted(tensors))}); give the id of one")
    layout, _ = target_layout(source.case, Mesh(()))
    tiles = [
        {
            "fragment": f.fragment_id,
            "rank": f.rank,
            "coordinates": {axis: index for axis, index in f.topology_coordinates if axis != "rank"},
            "offset": list(f.element_offset),
            "extent": list(f.element_extent),
            "stored_shape": list(f.local_shape),
            "padding": f.padding.semantic,
            "replica": [f.replica.member_index, f.replica.member_count],
            "file": f.payload_file,
            "key": f.payload_key,
            "digest": f.fragment_digest,
        }
        for f in sorted(tensors[found[0]], key=lambda f: (f.rank, f.element_offset))
    ]
    return _tensor_facts(tensors[found[0]], layout[found[0]]) | {"tiles": tiles}


def tiles_text(facts: Mapping[str, Any]) -> str:
    """The tiles for people."""
    lines = [
        f"{facts['tensor']}: {facts['dtype']} {facts['shape']}, {size_text(facts['nbytes'])}; "
        f"{'; '.join(facts['layout']) or 'whole'}"
    ]
    for tile in facts["tiles"]:
        marks = [f"{axis} {index}" for axis, index in tile["coordinates"].items()]
        marks += [f"replica {tile['replica'][0]} of {tile['replica'][1]}"] if tile["replica"][1] > 1 else []
        marks += (
            [f"stored as {tile['stored_shape']} ({tile['padding']})"] if tile["stored_shape"] != tile["extent"] else []
        )
        lines.append(
            f"  rank {tile['rank']:>5}  {box_text(tile['offset'], tile['extent'])}  {', '.join(marks)}  "
            f"{tile['file']}:{tile['key']}"
        )
    return "\n".join(lines)
