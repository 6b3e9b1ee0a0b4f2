"""Load a checkpoint case with all ranks: rank 0 reads and checks the manifest, all read the headers of the shards."""

from pathlib import Path

from mpi4py import MPI

from reshard_mpi.mpi.comm import gather_all, on_root, root_value
from reshard_mpi.storage.source import Source, attach_headers, open_source, read_headers


def load_together(comm: MPI.Comm, folder: Path, despite_faults: bool = False) -> Source | None:
    """Collective: the source, on rank 0; what is wrong with it is in its findings. None on other ranks.

    A manifest with faults is not worth opening shards for, unless all faults are asked for.
    """
    source = on_root(comm, lambda: open_source(folder))
    opens = root_value(comm, lambda: source is not None and (despite_faults or not source.findings.faults))
    files = root_value(comm, lambda: source.shard_files() if source and opens else [])
    found = gather_all(comm, read_headers(folder, files[comm.rank :: comm.size]))
    if source is not None and opens:
        source.findings.faults += [fault for _, faults in found for fault in faults]
        attach_headers(source, {name: arrays for headers, _ in found for name, arrays in headers.items()})
    return source
