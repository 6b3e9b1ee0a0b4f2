"""Load a checkpoint case with all ranks: rank 0 reads and checks the manifest, all read the headers of the shards.

Ranks without a shard to look into import nothing that does.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from mpi4py import MPI

from reshard_mpi.checkpoint.template import ShardTemplate
from reshard_mpi.errors import ReshardError, UsageError
from reshard_mpi.mpi.comm import ROOT, agreed, gather_all, on_root
from reshard_mpi.storage.known import Stamp

if TYPE_CHECKING:
    from reshard_mpi.mpi.per_node import PerNode
    from reshard_mpi.storage.safetensors import StoredArray
    from reshard_mpi.storage.source import Source

Found = tuple[Mapping[str, Mapping[str, "StoredArray"]], Mapping[str, Stamp], list[ReshardError]]

FILES_A_READER = 4  # one rank has read that many headers about as soon as another has imported what reads one


def load_together(
    comm: MPI.Comm, folder: Path, despite_faults: bool = False, template: ShardTemplate | None = None
) -> "Source | None":
    """Collective: the source, on rank 0; what is wrong with it is in its findings. None on other ranks.

    A manifest with faults is not worth opening shards for, unless all faults are asked for. The shards lie on the nodes of the
    ranks where a `template` says how.
    """
    source, files = on_root(comm, lambda: _open(folder, despite_faults, template)) or (None, [])
    files = comm.bcast(files, root=ROOT)
    if template is not None and files:
        _load_from_nodes(comm, source, [template.path(rank) for rank in range(len(files))])
        return source
    nreaders = min(comm.size, -(-len(files) // FILES_A_READER))
    read: Found = {}, {}, []
    with agreed(comm):
        read = _read(folder, files[comm.rank :: nreaders] if comm.rank < nreaders else [])
    found = gather_all(comm, read)
    with agreed(comm):
        if source is not None and files:
            _attach(source, found)
    return source


def _open(folder: Path, despite_faults: bool, template: ShardTemplate | None) -> "tuple[Source, list[str]]":
    """The source, and the shards to look into."""
    from reshard_mpi.storage.files import file_stamps
    from reshard_mpi.storage.source import open_source

    source = open_source(folder)
    if source.is_described:
        if template is not None:
            raise UsageError("--source-template", f"is for the shards of a case, and {folder} holds no case.json")
        source.stamps = file_stamps(folder, sorted({fragment.payload_file for fragment in source.case.fragments}))
    return source, source.shard_files() if despite_faults or not source.findings.faults else []


def _read(folder: Path, files: Sequence[str]) -> Found:
    if not files:
        return {}, {}, []
    from reshard_mpi.storage.files import file_stamps
    from reshard_mpi.storage.source import read_headers

    headers, faults = read_headers(folder, files)
    return headers, file_stamps(folder, headers), faults


def _attach(source: "Source", found: Sequence[Found]) -> None:
    from reshard_mpi.storage.source import attach_headers

    source.findings.faults += [fault for _, _, faults in found for fault in faults]
    source.stamps = {name: stamp for _, stamps, _ in found for name, stamp in stamps.items()}
    attach_headers(source, {name: arrays for headers, _, _ in found for name, arrays in headers.items()})


def _load_from_nodes(comm: MPI.Comm, source: "Source | None", paths: Sequence[str]) -> None:
    """Collective: give rank 0's source the headers of the shards that lie there on the nodes."""
    from reshard_mpi.mpi.per_node import look_on_nodes

    found = look_on_nodes(comm, paths)
    with agreed(comm):
        if source is not None and found is not None:
            _attach_per_node(source, paths, found)


def _attach_per_node(source: "Source", paths: Sequence[str], found: "PerNode") -> None:
    from reshard_mpi.storage.source import attach_headers, place_on_nodes

    place_on_nodes(source, paths)
    source.findings.faults += found.faults
    source.readers, source.stamps = found.readers, found.stamps
    attach_headers(source, found.headers)
