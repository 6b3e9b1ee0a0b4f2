"""One reshard job, in reading order: load, prepare, broadcast the plan, move the rounds, verify, commit."""

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Any, TypeVar

from mpi4py import MPI

from reshard_mpi import stop
from reshard_mpi.errors import IntegrityError, UsageError, first_to_tell
from reshard_mpi.mpi.comm import ROOT, agreed, broadcast_arrays, gather_all, on_root, raise_together
from reshard_mpi.mpi.load import load_together
from reshard_mpi.plan.plan import plan_arrays, plan_from_arrays
from reshard_mpi.report import Progress
from reshard_mpi.run.lock import SharedLock
from reshard_mpi.run.move import Names, move_rounds
from reshard_mpi.run.node_shards import Found, NodeShards
from reshard_mpi.run.wanted import Job
from reshard_mpi.storage.files import create_file, is_as_created, is_on_nfs, sync_folder

if TYPE_CHECKING:
    from reshard_mpi.checkpoint.manifest import Case
    from reshard_mpi.run.lead import Lead

T = TypeVar("T")


def reshard(comm: MPI.Comm, job: Job) -> dict[str, Any] | None:
    """Collective: carry out the job; its report, on rank 0. A ReshardError is the same on all ranks."""
    started = time.perf_counter()
    job = replace(job, writers=_writers(comm, job))
    lead = on_root(comm, lambda: _lead(job, comm.size))
    source = load_together(comm, job.source, template=job.source_template)
    _on_lead(comm, lead, lambda lead: lead.prepare(source))
    if job.verify != "none":
        _check_equalities(comm, job, lead)
    shards = comm.bcast(lead.node_shards if lead else None, root=ROOT)
    found = _find_on_nodes(comm, shards)
    names = comm.bcast(_on_lead(comm, lead, lambda lead: lead.begin(found)), root=ROOT)
    try:
        with _locked(comm, names):
            written, measured = _write(comm, job, names, lead, shards)
        stop.shield()  # it ended with an agreement, which was the last place to stop: what follows makes OUT visible
        if shards:
            with agreed(comm):
                shards.put_in_place(comm.rank)
        _on_lead(comm, lead, lambda lead: lead.commit(written))
    except IntegrityError as error:
        if lead:
            lead.partial.fail(str(error))
        message = f"{error.message}; what was written can't be continued: then use --restart"
        raise IntegrityError(error.where, message) from error
    finally:
        if lead:
            lead.partial.close()
    if shards:
        shards.tidy(comm.rank)
    return lead.report(measured, time.perf_counter() - started) if lead else None


def _writers(comm: MPI.Comm, job: Job) -> str:
    """Collective: who writes. Several writers of one file need a file system whose clients see each other's writes.

    Those of NFS don't; and OUT may be on NFS for one host, and on a disk for the one that serves it.
    """
    if job.target_template is not None:
        return "nodes"
    if job.writers != "auto":
        return job.writers
    return "owner" if raise_together(comm, None, is_on_nfs(job.out)) else "shared"


def _lead(job: Job, nranks: int) -> "Lead":
    """Rank 0 alone needs what reads manifests, lays out and plans: its import takes as long as all the rest of a start."""
    from reshard_mpi.run.lead import Lead

    return Lead(job, nranks)


def _on_lead(comm: MPI.Comm, lead: "Lead | None", step: "Callable[[Lead], T]") -> T | None:
    """Collective: a step that rank 0 takes alone; its expected error is raised on all ranks. Other ranks get None."""

    def take() -> T:
        assert lead is not None
        return step(lead)

    return on_root(comm, take)


def _check_equalities(comm: MPI.Comm, job: Job, lead: "Lead | None") -> None:
    """Collective: what must be equal and can't be seen to be from digests; under `full` also what would not be read otherwise."""
    groups = lead.equal_groups() if lead else []
    unread = lead.unread_arrays() if lead and job.verify == "full" else {}
    if not comm.bcast(bool(groups or unread), root=ROOT):
        return
    from reshard_mpi.check.audit import Shelf, check_digests, check_equal

    shelf = Shelf(job.source, *(lead.seen() if lead else ()))
    faults = check_equal(comm, shelf, groups) + check_digests(comm, shelf, unread)
    raise_together(comm, first_to_tell(faults))


def _find_on_nodes(comm: MPI.Comm, shards: NodeShards | None) -> list[Found]:
    """Collective: what an earlier run has left of the target's shards on the nodes, by rank, on rank 0."""
    found = Found(True, ())
    with agreed(comm):
        if shards:
            found = shards.find(comm.rank)
    return gather_all(comm, found)


def _write(
    comm: MPI.Comm, job: Job, names: Names, lead: "Lead | None", shards: NodeShards | None
) -> "tuple[Case | None, list[Mapping[str, int | float]]]":
    """Collective: every file of OUT but `case.json`. On rank 0: the case that they make up, and what each rank measured."""
    plan = plan_from_arrays(broadcast_arrays(comm, list(plan_arrays(lead.prepared.plan)) if lead else None))
    _create_files(comm, names, lead, shards)
    progress = Progress(int(plan.slabs.volume.sum()), job.progress if comm.rank == ROOT else "off")
    note = lead.note if lead else None
    moved = move_rounds(comm, plan, names, job.verify != "none", progress, note, job.note_seconds, bool(shards))
    progress.close()
    all_moved = gather_all(comm, moved)
    written = _on_lead(comm, lead, lambda lead: lead.written(moved.digests for moved in all_moved))
    if lead:
        lead.tell_infinite(moved.infinite for moved in all_moved)
    if job.verify == "full":
        _verify_target(comm, names, lead, written)
    return written, [moved.measured for moved in all_moved]


@contextmanager
def _locked(comm: MPI.Comm, names: Names) -> Iterator[None]:
    """Collective: every rank holds the lock of OUT.partial as long as it may write there; rank 0 does anyway."""
    with ExitStack() as held:
        with agreed(comm):
            if comm.rank != ROOT:
                held.enter_context(SharedLock(names.target_folder)).check_holder(names.lock_holder)
        yield


def _create_files(comm: MPI.Comm, names: Names, lead: "Lead | None", shards: NodeShards | None) -> None:
    """Collective: every target file at its full size, with its header; each rank makes its share of them.

    Those that an earlier run has left are held against what they should be.
    """
    mine, are_there = comm.scatter(lead.heads() if lead else None, root=ROOT)
    with agreed(comm):
        if shards and not are_there:
            shards.make_room(comm.rank)
        for name, nbytes, head in mine:
            if not are_there:
                create_file(names.target_folder / name, nbytes, head)
            elif not is_as_created(names.target_folder, name, nbytes, head):
                path = names.target_folder / name
                raise UsageError(str(path), "isn't as the job before left it; --restart begins anew")
        if mine and not are_there:  # who has made a file sees to its name: a client's sync may be of its own alone
            for folder in {(names.target_folder / name).parent for name, _, _ in mine}:
                sync_folder(folder)


def _verify_target(comm: MPI.Comm, names: Names, lead: "Lead | None", written: "Case | None") -> None:
    """Collective: read back what was written: every array against its digest, every tensor against its oracle."""
    from reshard_mpi.check.audit import Shelf, check_digests

    mine, _ = comm.scatter(lead.heads() if lead else None, root=ROOT)
    with agreed(comm):
        for name, nbytes, head in mine:
            if not is_as_created(names.target_folder, name, nbytes, head, names.target_stamps):
                raise IntegrityError(str(names.target_folder / name), "doesn't begin with the header that was written")
    expected, faults = lead.expected_digests(written) if lead else ({}, [])
    shelf = Shelf(names.target_folder, names.target_stamps, lead.target_readers() if lead else {})
    faults += check_digests(comm, shelf, expected)
    raise_together(comm, first_to_tell(faults))
