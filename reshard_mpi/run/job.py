"""One reshard job, in reading order: load, prepare, broadcast the plan, move the rounds, verify, commit."""

import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
from mpi4py import MPI

from reshard_mpi import stop
from reshard_mpi.check.audit import check_digests, check_equal, equal_groups
from reshard_mpi.check.oracles import copy_oracles, oracle_file_faults
from reshard_mpi.check.whole import WholeTensor, whole_array, whole_tensor
from reshard_mpi.checkpoint.dtypes import DTYPES
from reshard_mpi.checkpoint.manifest import CASE_FILE, Case, by_tensor, case_text
from reshard_mpi.errors import IntegrityError, ReshardError, first_to_tell, raise_first
from reshard_mpi.mpi.comm import ROOT, agreed, broadcast_arrays, gather_all, on_root, raise_together, root_value
from reshard_mpi.mpi.load import load_together
from reshard_mpi.plan.plan import plan_arrays, plan_from_arrays
from reshard_mpi.plan.planner import Resources, round_nbytes_of
from reshard_mpi.plan.prepare import Prepared, Selection, outgoing_of, prepare
from reshard_mpi.report import Progress, summary_of, topology_text, warn
from reshard_mpi.run.commit import PartialFolder, check_paths
from reshard_mpi.run.move import Names, move_rounds
from reshard_mpi.storage.digests import digest_name
from reshard_mpi.storage.files import Files, create_file, is_on_nfs
from reshard_mpi.storage.source import DIGEST_OF_NOTHING, Source, read_headers

MANIFEST_NBYTES = 2048  # of case.json, for a fragment


@dataclass(frozen=True)
class Job:
    """What the user asked for. `memory_nbytes` bounds the buffers of a rank; `verify` is none, source or full."""

    source: Path
    out: Path
    selection: Selection
    memory_nbytes: int
    writers: str
    verify: str
    overwrite: bool
    restart: bool
    progress: str


@dataclass(frozen=True)
class _Local:
    """What rank 0 alone knows of a job under way."""

    source: Source
    prepared: Prepared
    partial: PartialFolder


def reshard(comm: MPI.Comm, job: Job) -> dict[str, Any] | None:
    """Collective: carry out the job; its report, on rank 0. A ReshardError is the same on all ranks."""
    started = time.perf_counter()
    round_nbytes = round_nbytes_of(job.memory_nbytes)
    on_root(comm, lambda: check_paths(job.source, job.out, job.overwrite))
    source = load_together(comm, job.source)
    prepared = on_root(comm, lambda: _prepare(source, job, comm.size, round_nbytes))
    if job.verify != "none":
        _check_equalities(comm, job, source, prepared)
    partial = on_root(comm, lambda: _begin(job, source, prepared))
    local = _Local(source, prepared, partial) if source and prepared and partial else None
    try:
        written, measured = _write(comm, job, local)
        raise_together(comm, None)  # the last place to stop: what follows makes OUT visible
        stop.shield()
        on_root(comm, lambda: _commit(local, written, job))
    except IntegrityError as error:
        if local:
            local.partial.fail()
        message = f"{error.message}; what was written can't be continued: then use --restart"
        raise IntegrityError(error.where, message) from error
    finally:
        if local:
            local.partial.close()
    return on_root(comm, lambda: _report(job, local, measured, time.perf_counter() - started))


def _writers(job: Job) -> str:
    """Several writers of one file need a file system whose clients see each other's writes, which those of NFS don't."""
    return job.writers if job.writers != "auto" else "owner" if is_on_nfs(job.out) else "shared"


def _prepare(source: Source | None, job: Job, nranks: int, round_nbytes: int) -> Prepared:
    assert source is not None
    source.raise_first()
    outgoing, faults = outgoing_of(source, job.selection)
    raise_first(faults)
    assert outgoing is not None
    prepared = prepare(source, outgoing, Resources(nranks, round_nbytes, _writers(job), job.verify != "none"))
    warn(source.warnings)
    return prepared


def _check_equalities(comm: MPI.Comm, job: Job, source: Source | None, prepared: Prepared | None) -> None:
    """Collective: what must be equal and can't be seen to be from digests; under `full` also what would not be read otherwise."""
    groups, unread = None, None
    if source and prepared:
        groups = equal_groups(source, _kept_tensors(prepared))
        unread = _unread_arrays(source, prepared) if job.verify == "full" else {}
    faults = check_equal(comm, job.source, groups) + check_digests(comm, job.source, unread)
    raise_together(comm, first_to_tell(faults))


def _kept_tensors(prepared: Prepared) -> set[str]:
    return {fragment.logical_tensor_id for fragment in prepared.outgoing.case.fragments}


def _arrays_read(prepared: Prepared) -> set[tuple[str, str]]:
    """(file, key) of the arrays that a round reads; an alias that is stored once in the target is not read twice."""
    read = np.unique(prepared.plan.source.array).tolist()
    return {(f.payload_file, f.payload_key) for array in read for f in prepared.source_fragments[array]}


def _unread_arrays(source: Source, prepared: Prepared) -> dict[WholeTensor, str]:
    """The stored arrays of the kept tensors that the plan doesn't read, and their digests."""
    read = _arrays_read(prepared)
    kept = _kept_tensors(prepared)
    return {
        whole_array(f.payload_file, f.payload_key, source.headers[f.payload_file][f.payload_key]): f.fragment_digest
        for f in source.case.fragments
        if f.logical_tensor_id in kept and f.fragment_digest is not None and (f.payload_file, f.payload_key) not in read
    }


def _begin(job: Job, source: Source | None, prepared: Prepared | None) -> PartialFolder:
    assert source is not None and prepared is not None
    identity = {
        "source": str(job.source.resolve()),
        "manifest": source.parsed.text_digest,
        "target": prepared.outgoing.case.topology.source,
        "include": list(job.selection.include),
        "exclude": list(job.selection.exclude),
        "digests": job.verify != "none",
    }
    partial = PartialFolder(job.out, identity, job.restart)
    try:
        partial.check_space(_expected_nbytes(prepared))
    except BaseException:
        partial.close()
        raise
    return partial


def _expected_nbytes(prepared: Prepared) -> int:
    """Bytes of OUT: the shards, the manifest (about), the oracles."""
    case = prepared.outgoing.case
    shards = sum(file.nbytes for file in prepared.target_files)
    oracles = sum(math.prod(oracle.shape) * DTYPES[oracle.dtype].nbits // 8 for oracle in case.oracles)
    return shards + len(case.fragments) * MANIFEST_NBYTES + oracles


def _write(comm: MPI.Comm, job: Job, local: _Local | None) -> tuple[Case | None, list[dict[str, Any]]]:
    """Collective: every file of OUT but `case.json`. On rank 0: the case that they make up, and what each rank measured."""
    names = root_value(comm, lambda: _names(job, local))
    plan = plan_from_arrays(broadcast_arrays(comm, list(plan_arrays(local.prepared.plan)) if local else None))
    _create_files(comm, names, local)
    progress = Progress(int(plan.slabs.volume.sum()), job.progress if comm.rank == ROOT else "off")
    moved = move_rounds(comm, plan, names, job.verify != "none", progress)
    progress.close()
    digests, measured = gather_all(comm, moved.digests), gather_all(comm, moved.measured)
    written = on_root(comm, lambda: _written_case(local, digests, job))
    on_root(comm, lambda: _copy_oracles(local, written))
    if job.verify == "full":
        _verify_target(comm, names, written)
    return written, measured


def _names(job: Job, local: _Local | None) -> Names:
    assert local is not None
    prepared = local.prepared
    keys = tuple(fragments[0].payload_key for fragments in prepared.source_fragments)
    return Names(
        job.source, prepared.source_files, keys, local.partial.path, tuple(file.name for file in prepared.target_files)
    )


def _create_files(comm: MPI.Comm, names: Names, local: _Local | None) -> None:
    """Collective: every target file at its full size, with its header; each rank makes its share of them."""
    mine = comm.scatter(
        [local.prepared.target_files[rank :: comm.size] for rank in range(comm.size)] if local else None, root=ROOT
    )
    with agreed(comm):
        for file in mine:
            create_file(names.target_folder / file.name, file.nbytes, file.head)


def _written_case(local: _Local | None, digests: Sequence[Mapping[int, bytes]], job: Job) -> Case:
    """The case to write, with the digests of its arrays."""
    assert local is not None
    outgoing = local.prepared.outgoing
    known = {array: digest_name(digest) for by_rank in digests for array, digest in by_rank.items()}
    arrays = local.prepared.plan.target.arrays
    known |= {array: digest_name(arrays.digest[array].tobytes()) for array in np.flatnonzero(arrays.has_digest).tolist()}
    if job.verify == "none":
        return outgoing.case
    fragments = tuple(
        msgspec.structs.replace(fragment, fragment_digest=known[array] if fragment.has_elements else DIGEST_OF_NOTHING)
        for fragment, array in zip(outgoing.case.fragments, outgoing.array_of, strict=True)
    )
    return msgspec.structs.replace(outgoing.case, fragments=fragments)


def _copy_oracles(local: _Local | None, written: Case | None) -> None:
    assert local is not None and written is not None
    copy_oracles(local.source.folder, local.source.case, written, local.partial.path)


def _verify_target(comm: MPI.Comm, names: Names, written: Case | None) -> None:
    """Collective: read back what was written: every array against its digest, every tensor against its oracle."""
    faults: list[ReshardError] = []
    expected: dict[WholeTensor, str] = {}
    if written is not None:
        headers, faults = read_headers(names.target_folder, names.target_files)
        tensors = by_tensor(written.fragments)
        if not faults:
            for fragment in written.fragments:
                array = whole_array(
                    fragment.payload_file, fragment.payload_key, headers[fragment.payload_file][fragment.payload_key]
                )
                expected[array] = fragment.fragment_digest or ""
            for oracle in written.oracles:
                expected[whole_tensor(tensors[oracle.logical_tensor_id], headers)] = oracle.sha256
            faults += oracle_file_faults(names.target_folder, written)
    faults += check_digests(comm, names.target_folder, expected)
    raise_together(comm, first_to_tell(faults))


def _commit(local: _Local | None, written: Case | None, job: Job) -> None:
    assert local is not None and written is not None
    text = case_text(written)
    create_file(local.partial.path / CASE_FILE, len(text), text)
    with Files(local.partial.path) as files:
        files.sync(CASE_FILE)
    check_paths(job.source, job.out, job.overwrite)
    local.partial.commit()


def _report(job: Job, local: _Local | None, measured: Sequence[Mapping[str, Any]], seconds: float) -> dict[str, Any]:
    assert local is not None
    case, prepared = local.prepared.outgoing.case, local.prepared
    kept = [f for f in local.source.case.fragments if f.logical_tensor_id in _kept_tensors(prepared) and f.has_elements]
    read = _arrays_read(prepared)
    unread = sum(
        local.source.headers[f.payload_file][f.payload_key].nbytes
        for f in kept
        if f.replica.member_count > 1 and (f.payload_file, f.payload_key) not in read
    )
    return summary_of(
        measured,
        source=str(job.source),
        out=str(job.out),
        source_topology=topology_text(case.topology.target),
        target_topology=topology_text(case.topology.source),
        ntensors=len(_kept_tensors(prepared)),
        nfragments=len(case.fragments),
        nshards=prepared.outgoing.nranks,
        nrounds=prepared.plan.nrounds,
        memory_nbytes=job.memory_nbytes,
        verify=job.verify,
        unread_replica_nbytes=unread,
        noracles=len(case.oracles),
        warnings=local.source.warnings,
        seconds=round(seconds, 3),
    )
