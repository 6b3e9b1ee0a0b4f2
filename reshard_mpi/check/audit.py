"""Digests of whole tensors, boxes and arrays, computed by all ranks together; and what follows from comparing them."""

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

import numpy as np
from mpi4py import MPI

from reshard_mpi import stop
from reshard_mpi.check.across import Spread, digests_across
from reshard_mpi.check.whole import WholeTensor, whole_box, whole_tensor
from reshard_mpi.errors import IntegrityError, PlanningError, ReshardError, expected_error
from reshard_mpi.mpi.comm import ROOT, agreed
from reshard_mpi.plan.shares import deal_among, deal_to_least
from reshard_mpi.report import Progress
from reshard_mpi.storage.files import Files
from reshard_mpi.storage.known import Known

if TYPE_CHECKING:
    from reshard_mpi.storage.source import Source

T = TypeVar("T")
R = TypeVar("R")


def deal(
    comm: MPI.Comm,
    tasks: Sequence[T] | None,
    nbytes: Callable[[T], int],
    do: Callable[[T], R],
    progress: str = "off",
    ranks_of: Callable[[T], Collection[int]] | None = None,
) -> list[R | ReshardError]:
    """Collective: rank 0's tasks done by all ranks, the largest first to whoever has least; results, in order, on rank 0.

    What can be expected to go wrong with a task is its result.
    `progress` is the style in which rank 0 shows how far it is with its own share. `ranks_of`: who can do a task, if not all can.
    """
    shares: list[list[tuple[int, T, int]]] = [[] for _ in range(comm.size)]
    costs = [_cost(task, nbytes) for task in tasks or ()]
    if ranks_of is None:
        dealt = deal_to_least(np.array(costs, np.int64), comm.size)
    else:
        dealt = deal_among(np.array(costs, np.int64), [ranks_of(task) for task in tasks or ()], comm.size)
    for number, rank in enumerate(dealt.tolist()):
        shares[rank].append((number, (tasks or ())[number], costs[number]))
    mine = comm.scatter(shares if comm.rank == ROOT else None, root=ROOT)
    done: list[tuple[int, R | ReshardError]] = []
    shown = Progress(sum(cost for _, _, cost in mine), progress if comm.rank == ROOT else "off")
    with agreed(comm):
        for number, task, cost in mine:
            stopped = stop.request()
            if stopped:
                raise stopped
            try:
                done.append((number, do(task)))
            except Exception as error:
                told = expected_error(error)
                if told is None:
                    raise
                done.append((number, told))
            shown.advance(cost)
    shown.close()
    gathered = comm.gather(done, root=ROOT)
    return [
        result for _, result in sorted((item for share in gathered or () for item in share), key=lambda item: item[0])
    ]


def _cost(task: T, nbytes: Callable[[T], int]) -> int:
    """A task without bytes is work too; and one that can't be done, which whoever gets it finds out."""
    try:
        return nbytes(task) + 1
    except ReshardError:
        return 1


def check_memory(memory_nbytes: int, buffers_nbytes: int, sources: "Sequence[Source]") -> None:
    """PlanningError when a rank that needs these buffers, and reads one array of each source at a time, needs more."""
    least = buffers_nbytes + sum(source.held_nbytes for source in sources)
    if memory_nbytes < least:
        folders = " and ".join(sorted({str(source.folder) for source in sources}))
        message = f"{memory_nbytes} bytes are too few for what a rank holds while it reads {folders}"
        raise PlanningError("--memory", f"{message}; give at least {-(-least // 1024)}K")


@dataclass(frozen=True)
class Shelf:
    """The folder of some files, and what rank 0 knows of them: what they are like, and which ranks see them, if not all do."""

    folder: Path
    known: Known = field(default_factory=dict)
    readers: Mapping[str, tuple[int, ...]] = field(default_factory=dict)

    def readers_of(self, tensor: WholeTensor) -> set[int]:
        """The ranks that see all files of the tensor."""
        return set.intersection(*(set(self.readers[file]) for file in tensor.files)) if tensor.files else {ROOT}

    def is_spread(self, tensor: WholeTensor) -> bool:
        """Does no rank see all files of the tensor?"""
        return bool(self.readers) and not self.readers_of(tensor)


def digests_of(
    comm: MPI.Comm, shelf: Shelf, tensors: Sequence[WholeTensor] | None, progress: str = "off"
) -> list[str | ReshardError]:
    """Collective: the SHA-256 of each of rank 0's tensors, on rank 0; where one couldn't be read, its error."""
    spread = {tensor for tensor in tensors or () if shelf.is_spread(tensor)}
    with Files(shelf.folder, known=comm.bcast(shelf.known, root=ROOT)) as files:
        digests = deal(
            comm,
            [tensor for tensor in tensors or () if tensor not in spread],
            lambda tensor: tensor.nbytes,
            lambda tensor: tensor.digest(files),
            progress,
            shelf.readers_of if shelf.readers else None,
        )
        across = digests_across(
            comm, files, [Spread.of(tensor, shelf.readers) for tensor in tensors or () if tensor in spread]
        )
    of_one, of_several = iter(digests), iter(across)
    return [next(of_several if tensor in spread else of_one) for tensor in tensors or ()]


def check_digests(comm: MPI.Comm, shelf: Shelf, expected: Mapping[WholeTensor, str] | None) -> list[ReshardError]:
    """Collective: faults of rank 0's tensors that don't have the SHA-256 expected of them, on rank 0."""
    found = digests_of(comm, shelf, list(expected or ()))
    faults: list[ReshardError] = []
    for (tensor, digest), result in zip((expected or {}).items(), found, strict=True):
        if isinstance(result, ReshardError):
            faults.append(result)
        elif result != digest:
            message = (
                f"{tensor.label} has digest {result}, expected {digest}; its bytes have changed since it was saved"
            )
            faults.append(IntegrityError(str(shelf.folder), f"{message}: get it anew"))
    return faults


def check_equal(
    comm: MPI.Comm, shelf: Shelf, groups: Sequence[tuple[str, Sequence[WholeTensor]]] | None
) -> list[ReshardError]:
    """Collective: faults of rank 0's groups of things that must be equal, on rank 0."""
    found = digests_of(comm, shelf, [member for _, members in groups or () for member in members])
    faults: list[ReshardError] = [result for result in found if isinstance(result, ReshardError)]
    results = iter(found)
    for what, members in groups or ():
        digests = [(member, next(results)) for member in members]
        known = [(member, digest) for member, digest in digests if isinstance(digest, str)]
        odd = [member for member, digest in known if digest != known[0][1]]
        if odd:
            faults.append(
                IntegrityError(what, f"{odd[0].label} and {known[0][0].label} hold different bytes; they must be equal")
            )
    return faults


def equal_groups(source: "Source", tensor_ids: Collection[str]) -> list[tuple[str, list[WholeTensor]]]:
    """Replicas and ties of the tensors that must be equal, and that digests in the manifest don't show to be."""
    from reshard_mpi.checkpoint.manifest import by_tensor  # not needed where digests are computed

    tensors, headers = by_tensor(source.case.fragments), source.headers
    groups = [
        (f"replica group {members[0].replica.group_id}", [whole_box(member, headers) for member in members])
        for members in source.findings.replicas_to_read
        if members[0].logical_tensor_id in tensor_ids
    ]
    return groups + [
        (f"tie group {tensors[a][0].tie_group_id}", [whole_tensor(tensors[tensor_id], headers) for tensor_id in (a, b)])
        for a, b in source.findings.ties_to_read
        if {a, b} <= set(tensor_ids) and 0 not in tensors[a][0].global_shape
    ]
