"""The `inspect` command: what a checkpoint holds, and the tiles of one tensor."""

import difflib
from collections.abc import Mapping, Sequence
from typing import Any

from reshard_mpi.checkpoint.checks import box_text
from reshard_mpi.checkpoint.manifest import Case, by_tensor
from reshard_mpi.checkpoint.mesh import Mesh
from reshard_mpi.errors import UsageError, names, one_line, plural
from reshard_mpi.layout.rules import target_layout
from reshard_mpi.report import size_text, topology_text
from reshard_mpi.show.tensors import layout_text, tensor_facts, tensor_lines
from reshard_mpi.storage.source import Source


def case_facts(source: Source) -> dict[str, Any]:
    """What the manifest says, as JSON values."""
    case = source.case
    layout, _ = target_layout(case, Mesh(()))  # only what is known: nothing is asked of it
    tensors = [
        tensor_facts(fragments, layout[tensor_id]) for tensor_id, fragments in sorted(by_tensor(case.fragments).items())
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
    dtypes = ", ".join(f"{dtype} {size_text(nbytes)}" for dtype, nbytes in facts["dtypes"].items())
    lines = [
        f"{facts['case_id']}: {topology_text(facts['source_topology'])}, {plural(facts['world_size'], 'shard')}, "
        f"default target {topology_text(facts['target_topology'])}",
        f"{plural(facts['ntensors'], 'tensor')}, {size_text(facts['nbytes'])} ({dtypes})",
        f"{plural(facts['nfragments'], 'fragment')}: {facts['nreplicas']} replicas of others, {facts['npadded']} padded, "
        f"{facts['nwithout_digest']} without digest; {plural(len(facts['oracles']), 'oracle')}",
    ]
    lines += [f"tied as {tie}: {names(tied)}" for tie, tied in facts["ties"].items()]
    return "\n".join(lines + tensor_lines(facts["tensors"], facts["source_topology"]))


def tensor_tiles(source: Source, name: str) -> dict[str, Any]:
    """The tiles of the tensor with this id or fqn; UsageError when there is none, or more than one."""
    tensors = by_tensor(source.case.fragments)
    found = [name] if name in tensors else sorted(t for t, fragments in tensors.items() if fragments[0].fqn == name)
    if not found:
        near = difflib.get_close_matches(name, tensors, cutoff=0.3) or sorted(tensors)
        raise UsageError(name, f"names no tensor; the nearest are {names(near)}")
    if len(found) > 1:
        raise UsageError(name, f"is the fqn of {len(found)} tensors; give the id of one: {names(found)}")
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
    mesh_axes = {"source_topology": dict(source.case.topology.source)}
    return tensor_facts(tensors[found[0]], layout[found[0]]) | mesh_axes | {"tiles": tiles}


def tiles_text(facts: Mapping[str, Any]) -> str:
    """The tiles for people."""
    layout = layout_text(facts["layout"], facts["source_topology"]) or "whole"
    lines = [f"{one_line(facts['tensor'])}: {facts['dtype']} {facts['shape']}, {size_text(facts['nbytes'])}; {layout}"]
    for tile in facts["tiles"]:
        marks = [f"{axis} {index}" for axis, index in tile["coordinates"].items()]
        if tile["replica"][1] > 1:
            marks.append(f"replica {tile['replica'][0]} of {tile['replica'][1]}")
        if tile["stored_shape"] != tile["extent"]:
            marks.append(f"stored as {tile['stored_shape']} ({tile['padding']})")
        box = box_text(tile["offset"], tile["extent"])
        lines.append(f"  rank {tile['rank']:>5}  {box}  {', '.join(marks)}  {tile['file']}:{one_line(tile['key'])}")
    return "\n".join(lines)
