"""Every digest of a case again: fragments, manifest, replicas, ties, oracles, coverage. Names every fault."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from mpi4py import MPI

from reshard_mpi.check.audit import Shelf, check_equal, check_memory, digests_of, equal_groups
from reshard_mpi.check.oracles import oracle_file_faults
from reshard_mpi.check.whole import READER_NBYTES, WholeTensor, whole_array, whole_tensor
from reshard_mpi.checkpoint.manifest import Fragment, by_tensor
from reshard_mpi.checkpoint.template import ShardTemplate
from reshard_mpi.errors import IntegrityError, ReshardError
from reshard_mpi.mpi.comm import on_root
from reshard_mpi.mpi.load import load_together
from reshard_mpi.storage.digests import algorithm_of
from reshard_mpi.storage.source import Source


@dataclass
class Verdict:
    """What was found. `nunverifiable` fragments have neither a digest nor an oracle."""

    nfragments: int = 0
    ndigests: int = 0
    noracles: int = 0
    nunverifiable: int = 0
    faults: list[ReshardError] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)


def verify(
    comm: MPI.Comm, folder: Path, memory_nbytes: int, progress: str, template: ShardTemplate | None = None
) -> Verdict | None:
    """Collective: the verdict on the case in `folder`, on rank 0. `memory_nbytes` bounds the buffers of a rank.

    The shards may lie on the nodes, as a `template` says.
    """
    source = load_together(comm, folder, despite_faults=True, template=template)
    on_root(comm, lambda: check_memory(memory_nbytes, READER_NBYTES, [source] if source else []))
    verdict = (
        Verdict(len(source.case.fragments), warnings=source.warnings, faults=source.findings.faults)
        if source
        else Verdict()
    )
    _verify_arrays(comm, folder, source, verdict, progress)
    whole = _whole_tensors(source) if source else {}
    verdict.faults += check_equal(comm, _shelf(folder, source), equal_groups(source, whole) if source else None)
    _verify_oracles(comm, folder, source, whole, verdict)
    return on_root(comm, lambda: verdict)


def _whole_tensors(source: Source) -> dict[str, list[Fragment]]:
    """The fragments of the tensors that can be put together, whatever is wrong with others."""

    def is_stored(f: Fragment) -> bool:
        array = source.headers.get(f.payload_file, {}).get(f.payload_key)
        return array is not None and (array.dtype, array.shape) == (f.dtype, f.local_shape)

    return {
        tensor_id: fragments
        for tensor_id, fragments in by_tensor(source.case.fragments).items()
        if tensor_id not in source.findings.incomplete and all(map(is_stored, fragments))
    }


def _shelf(folder: Path, source: Source | None) -> Shelf:
    return Shelf(folder, source.stamps, source.readers) if source else Shelf(folder)


def _verify_arrays(comm: MPI.Comm, folder: Path, source: Source | None, verdict: Verdict, progress: str) -> None:
    stored: dict[WholeTensor, list[Fragment]] = {}
    for fragment in source.case.fragments if source else ():
        array = source.headers.get(fragment.payload_file, {}).get(fragment.payload_key) if source else None
        if array is not None and (fragment.fragment_digest is not None or array.is_checked):
            algorithm = algorithm_of(fragment.fragment_digest) or "crc32"
            whole = whole_array(fragment.payload_file, fragment.payload_key, array, algorithm)
            stored.setdefault(whole, []).append(fragment)
    for fragments, found in zip(
        stored.values(), digests_of(comm, _shelf(folder, source), list(stored), progress), strict=True
    ):
        if isinstance(found, ReshardError):
            verdict.faults.append(found)
            continue
        verdict.ndigests += len(fragments)
        verdict.faults += [
            IntegrityError(
                str(folder / f.payload_file),
                f"array {f.payload_key!r} of fragment {f.fragment_id} has digest {found}, expected {f.fragment_digest}",
            )
            for f in fragments
            if f.fragment_digest not in (None, found)
        ]


def _verify_oracles(
    comm: MPI.Comm, folder: Path, source: Source | None, whole: Mapping[str, list[Fragment]], verdict: Verdict
) -> None:
    oracles = [
        (oracle, whole_tensor(whole[oracle.logical_tensor_id], source.headers))
        for oracle in (source.case.oracles if source else ())
        if source and oracle.logical_tensor_id in whole
    ]
    verdict.faults += on_root(comm, lambda: oracle_file_faults(folder, source.case) if source else []) or []
    found = digests_of(comm, _shelf(folder, source), [tensor for _, tensor in oracles])
    for (oracle, _), digest in zip(oracles, found, strict=True):
        if isinstance(digest, ReshardError):
            verdict.faults.append(digest)
        elif digest != oracle.sha256:
            message = f"tensor {oracle.logical_tensor_id} has digest {digest}, its oracle says {oracle.sha256}"
            verdict.faults.append(IntegrityError(str(folder), message))
    verdict.noracles = len(oracles)
    if source:
        covered = {oracle.logical_tensor_id for oracle, _ in oracles}
        checked = {
            (file, key) for file, of_file in source.headers.items() for key in of_file if of_file[key].is_checked
        }
        verdict.nunverifiable = sum(
            f.fragment_digest is None
            and f.logical_tensor_id not in covered
            and (f.payload_file, f.payload_key) not in checked
            for f in source.case.fragments
        )
