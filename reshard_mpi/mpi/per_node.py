"""Shards that lie on the nodes: every rank looks for all of them, and those that see one say so.

Nothing is assumed of which rank runs where. Where several hosts see a shard, it must be the same one.
"""

import hashlib
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from mpi4py import MPI

from reshard_mpi.errors import InputError, ReshardError, StorageError, names
from reshard_mpi.mpi.comm import ROOT, agreed, gather_all
from reshard_mpi.storage.known import Stamp

if TYPE_CHECKING:
    from reshard_mpi.storage.safetensors import StoredArray

    Headers = Mapping[str, Mapping[str, StoredArray]]  # path -> key -> array


class Sight(NamedTuple):
    """The files that a rank sees from its host."""

    host: str
    stamps: Mapping[str, Stamp]


class _Read(NamedTuple):
    """What a rank has read on its host: the headers that it is to tell, the digests of all, and what went wrong."""

    headers: "Headers"
    digests: Mapping[str, str]
    faults: Sequence[ReshardError]


@dataclass
class PerNode:
    """By path: the header, the ranks that see the file, and what it was like."""

    headers: "dict[str, Mapping[str, StoredArray]]" = field(default_factory=dict)
    readers: dict[str, tuple[int, ...]] = field(default_factory=dict)
    stamps: dict[str, Stamp] = field(default_factory=dict)
    faults: list[ReshardError] = field(default_factory=list)


def look_on_nodes(comm: MPI.Comm, paths: Sequence[str]) -> PerNode | None:
    """Collective: what the ranks see under these paths, on rank 0. One rank of each host reads the header of what it sees."""
    sights = gather_all(comm, _look(paths))
    tasks = comm.scatter(_header_readers(paths, sights) if comm.rank == ROOT else None, root=ROOT)
    read = _Read({}, {}, ())
    with agreed(comm):
        read = _read(*tasks)
    all_read = gather_all(comm, read)
    return _put_together(paths, sights, all_read) if comm.rank == ROOT else None


def _look(paths: Sequence[str]) -> Sight:
    stamps = {}
    for path in paths:
        try:
            stamps[path] = Stamp.of(os.stat(path))
        except OSError:
            continue  # for this rank it isn't there
    return Sight(os.uname().nodename, stamps)


def _header_readers(paths: Sequence[str], sights: Sequence[Sight]) -> list[tuple[list[str], list[str]]]:
    """For each rank the headers that it reads: those that it tells, and those that another host tells, to be compared."""
    tasks: list[tuple[list[str], list[str]]] = [([], []) for _ in sights]
    for path in paths:
        hosts: dict[str, list[int]] = {}
        for rank, sight in enumerate(sights):
            if path in sight.stamps:
                hosts.setdefault(sight.host, []).append(rank)
        for number, ranks in enumerate(hosts.values()):
            least = min(ranks, key=lambda rank: len(tasks[rank][0]) + len(tasks[rank][1]))
            tasks[least][min(number, 1)].append(path)
    return tasks


def _read(told: Sequence[str], compared: Sequence[str]) -> _Read:
    if not told and not compared:
        return _Read({}, {}, ())
    from reshard_mpi.storage.source import read_headers

    headers, faults = read_headers(Path("/"), [*told, *compared])
    for fault in faults:
        fault.host = os.uname().nodename
    digests = {
        path: hashlib.sha256(repr(sorted(arrays.items())).encode()).hexdigest() for path, arrays in headers.items()
    }
    return _Read({path: headers[path] for path in told if path in headers}, digests, faults)


def _put_together(paths: Sequence[str], sights: Sequence[Sight], all_read: Sequence[_Read]) -> PerNode:
    found = PerNode()
    hosts = names(sorted({sight.host for sight in sights}))
    for number, path in enumerate(paths):
        readers = tuple(rank for rank, sight in enumerate(sights) if path in sight.stamps)
        if not readers:
            message = f"is the shard of source rank {number}, and no rank sees it; looked for on host {hosts}"
            found.faults.append(StorageError(path, message))
            continue
        found.readers[path] = readers
        stamps = [sights[rank].stamps[path] for rank in readers]
        are_alike = all(stamp.fits(stamps[0]) for stamp in stamps)  # else these are copies
        found.stamps[path] = stamps[0] if are_alike else Stamp(stamps[0].nbytes)
        sizes = {sights[rank].host: f"{sights[rank].stamps[path].nbytes} bytes" for rank in readers}
        headers = {sights[rank].host: read.digests[path] for rank, read in enumerate(all_read) if path in read.digests}
        found.faults += [fault for fault in (_unlike(path, sizes) or _unlike(path, headers),) if fault]
        found.headers |= [(path, read.headers[path]) for read in all_read if path in read.headers]
    found.faults += [fault for read in all_read for fault in read.faults]
    return found


def _unlike(path: str, of_hosts: Mapping[str, str]) -> InputError | None:
    """The fault of a file of which not all hosts see the same."""
    (first, like), *others = of_hosts.items() or [("", "")]
    for host, other in others:
        if other != like:
            told = (
                f"{like} on host {first}, {other} on host {host}"
                if other.endswith("bytes")
                else f"host {first}, host {host}"
            )
            return InputError(
                path, f"is not the same file on all hosts that see it ({told}); leave one of them, or copies of one"
            )
    return None
