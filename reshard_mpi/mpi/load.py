"""Load a checkpoint case with all ranks: rank 0 reads and checks the manifest, all read the headers of the shards.

Ranks without a shard to look into import nothing that does.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from mpi4py import MPI

from reshard_mpi.errors import ReshardError
from reshard_mpi.mpi.comm import ROOT, agreed, gather_all, on_root

if TYPE_CHECKING:
    from reshard_mpi.storage.safetensors import StoredArray
    from reshard_mpi.storage.source import Source

Found = tuple[Mapping[str, Mapping[str, "StoredArray"]], list[ReshardError]]

FILES_A_READER = 4  # one rank has read that many headers about as soon as another has imported what reads one


def load_together(comm: MPI.Comm, folder: Path, despite_faults: bool = False) -> "Source | None":
    """Collective: the source, on rank 0; what is wrong with it is in its findings. None on other ranks.

    A manifest with faults is not worth opening shards for, unless all faults are asked for.
    """
    source, files = on_root(comm, lambda: _open(folder, despite_faults)) or (None, [])
    files = comm.bcast(files, root=ROOT)
    nreaders = min(comm.size, -(-len(files) // FILES_A_READER))
    read: Found = {}, []
    with agreed(comm):
        read = _read(folder, files[comm.rank :: nreaders] if comm.rank < nreaders else [])
    found = gather_all(comm, read)
    with agreed(comm):
        if source is not None and files:
            _attach(source, found)
    return source


def _open(folder: Path, despite_faults: bool) -> "tuple[Source, list[str]]":
    """The source, and the shards to look into."""
    from reshard_mpi.storage.source import open_source

    source = open_source(folder)
    return source, source.shard_files() if despite_faults or not source.findings.faults else []


def _read(folder: Path, files: Sequence[str]) -> "Found":
    if not files:
        return {}, []
    from reshard_mpi.storage.source import read_headers

    return read_headers(folder, files)


def _attach(source: "Source", found: "Sequence[Found]") -> None:
    from reshard_mpi.storage.source import attach_headers

    source.findings.faults += [fault for _, faults in found for fault in faults]
    attach_headers(source, {name: arrays for headers, _ in found for name, arrays in headers.items()})
