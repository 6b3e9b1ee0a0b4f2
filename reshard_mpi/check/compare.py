"""Are two checkpoints equal, tensor by tensor, whatever their topologies?"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from mpi4py import MPI
from numpy.typing import NDArray

from reshard_mpi.check.across import Spread
from reshard_mpi.check.audit import Shelf, check_equal, check_memory, deal, equal_groups
from reshard_mpi.check.whole import MOST_SPAN_NBYTES, Bytes, WholeTensor, whole_tensor
from reshard_mpi.checkpoint.dtypes import DTYPES
from reshard_mpi.checkpoint.manifest import Fragment, by_tensor
from reshard_mpi.checkpoint.template import ShardTemplate
from reshard_mpi.errors import ReshardError, first_to_tell
from reshard_mpi.mpi.comm import ROOT, on_root, raise_together
from reshard_mpi.mpi.load import load_together
from reshard_mpi.storage.files import Files
from reshard_mpi.storage.source import Source

PART_NBYTES = 3 << 19  # compared at once: no element of 4 or 6 bits lies across its edge
TASK_NBYTES = 128 * PART_NBYTES  # compared by one rank in one go
BUFFERS_NBYTES = (
    2 * (PART_NBYTES + MOST_SPAN_NBYTES) + 12 * PART_NBYTES
)  # of a rank; the last: a byte a bit, and others


@dataclass(frozen=True)
class _Task:
    tensor_id: str
    a: WholeTensor
    b: WholeTensor
    first: int
    last: int


@dataclass(frozen=True)
class _Difference:
    """The first element, in row-major order, that differs, and the number of those that do."""

    first_index: int
    count: int


def compare(
    comm: MPI.Comm,
    a_folder: Path,
    b_folder: Path,
    memory_nbytes: int,
    progress: str,
    templates: tuple[ShardTemplate | None, ShardTemplate | None] = (None, None),
) -> dict[str, Any] | None:
    """Collective: what differs, on rank 0. `memory_nbytes` bounds the buffers of a rank.

    The shards of either may lie on the nodes, as its template says.

    `{"equal": bool, "ntensors": int, "differences": [{"tensor": .., "what": .., "first_index": [..], "count": int}]}`
    """
    a, b = (
        load_together(comm, folder, template=template)
        for folder, template in zip((a_folder, b_folder), templates, strict=True)
    )
    faults = [fault for source in (a, b) if source for fault in source.findings.faults]
    raise_together(comm, first_to_tell(faults))
    on_root(comm, lambda: check_memory(memory_nbytes, BUFFERS_NBYTES, [source for source in (a, b) if source]))
    shelves = []
    for source, folder in ((a, a_folder), (b, b_folder)):
        shelf = Shelf(folder, source.stamps, source.readers) if source else Shelf(folder)
        groups = equal_groups(source, by_tensor(source.case.fragments)) if source else None
        # Else one member would stand for a tensor that has no one value.
        raise_together(comm, first_to_tell(check_equal(comm, shelf, groups)))
        shelves.append(shelf)
    differences, tasks = on_root(comm, lambda: _metadata_differences(a, b) if a and b else ([], [])) or ([], [])
    found = _compare_all(comm, tasks, shelves, progress)
    raise_together(comm, first_to_tell(result for result in found if isinstance(result, ReshardError)))
    return on_root(comm, lambda: _verdict(a, tasks, found, differences))


def _metadata_differences(a: Source, b: Source) -> tuple[list[dict[str, Any]], list[_Task]]:
    in_a, in_b = by_tensor(a.case.fragments), by_tensor(b.case.fragments)
    differences: list[dict[str, Any]] = []
    tasks: list[_Task] = []
    for tensor_id in sorted(in_a.keys() | in_b.keys()):
        here, there = in_a.get(tensor_id), in_b.get(tensor_id)
        if here is None or there is None:
            differences.append({"tensor": tensor_id, "what": f"only in {b.folder if here is None else a.folder}"})
        elif _kind(here[0]) != _kind(there[0]):
            differences.append({"tensor": tensor_id, "what": f"{_kind(here[0])} and {_kind(there[0])}"})
        elif 0 not in here[0].global_shape:
            pair = whole_tensor(here, a.headers), whole_tensor(there, b.headers)
            tasks += [
                _Task(tensor_id, *pair, first, min(first + TASK_NBYTES, pair[0].nbytes))
                for first in range(0, pair[0].nbytes, TASK_NBYTES)
            ]
    return differences, tasks


def _kind(fragment: Fragment) -> str:
    return f"{fragment.dtype} {list(fragment.global_shape)}"


def _compare_all(
    comm: MPI.Comm, tasks: list[_Task], shelves: Sequence[Shelf], progress: str
) -> list[_Difference | None | ReshardError]:
    """Collective: what differs in each of rank 0's tasks, in order, on rank 0."""
    readers = [(_readers(task.a, shelves[0], comm), _readers(task.b, shelves[1], comm)) for task in tasks]
    spread = [not a & b for a, b in readers]
    seen = {id(task): a & b for task, (a, b) in zip(tasks, readers, strict=True)}
    with Files(shelves[0].folder) as a_files, Files(shelves[1].folder) as b_files:
        dealt = deal(
            comm,
            [task for task, is_spread in zip(tasks, spread, strict=True) if not is_spread],
            lambda task: task.last - task.first,
            lambda task: _compare_bytes(task, partial(task.a.read, a_files), partial(task.b.read, b_files)),
            progress,
            (lambda task: seen[id(task)]) if any(shelf.readers for shelf in shelves) else None,
        )
        across = []
        pairs = [
            (task, Spread.of(task.a, shelves[0].readers), Spread.of(task.b, shelves[1].readers))
            for task, is_spread in zip(tasks, spread, strict=True)
            if is_spread
        ]
        for task, a, b in comm.bcast(pairs, root=ROOT):
            across.append(_compare_bytes(task, partial(a.read, comm, a_files), partial(b.read, comm, b_files)))
    of_one, of_several = iter(dealt), iter(across)
    return [next(of_several if is_spread else of_one) for is_spread in spread]


def _readers(tensor: WholeTensor, shelf: Shelf, comm: MPI.Comm) -> set[int]:
    """The ranks that can read all of the tensor."""
    return shelf.readers_of(tensor) if shelf.readers else set(range(comm.size))


def _compare_bytes(
    task: _Task, read_a: Callable[[int, int], Bytes], read_b: Callable[[int, int], Bytes]
) -> _Difference | None:
    first_index, count = -1, 0
    for first in range(task.first, task.last, PART_NBYTES):
        last = min(first + PART_NBYTES, task.last)
        here, there = read_a(first, last), read_b(first, last)
        if not np.array_equal(here, there):
            nbits = DTYPES[task.a.dtype].nbits
            differs = _differing_elements(here, there, nbits)
            first_index = first_index if count else first * 8 // nbits + int(np.argmax(differs))
            count += int(np.count_nonzero(differs))
    return _Difference(first_index, count) if count else None


def _differing_elements(here: Bytes, there: Bytes, nbits: int) -> NDArray[np.bool_]:
    """Of each element, in `nbits`: does it differ?"""
    differing = here ^ there
    if nbits < 8:
        differing = np.unpackbits(differing, bitorder="little")
    return np.asarray(differing.reshape(-1, nbits // 8 if nbits >= 8 else nbits).any(axis=1))


def _verdict(
    a: Source | None,
    tasks: list[_Task],
    found: list[_Difference | None | ReshardError],
    differences: list[dict[str, Any]],
) -> dict[str, Any]:
    assert a is not None
    shapes = {fragment.logical_tensor_id: fragment.global_shape for fragment in a.case.fragments}
    bytes_differ: dict[str, _Difference] = {}
    for task, result in zip(tasks, found, strict=True):
        if isinstance(result, _Difference):
            before = bytes_differ.get(task.tensor_id)
            bytes_differ[task.tensor_id] = (
                _Difference(before.first_index, before.count + result.count) if before else result
            )
    for tensor_id, difference in bytes_differ.items():
        index = (
            [int(i) for i in np.unravel_index(difference.first_index, shapes[tensor_id])] if shapes[tensor_id] else []
        )
        differences.append(
            {"tensor": tensor_id, "what": "bytes differ", "first_index": index, "count": difference.count}
        )
    differences.sort(key=lambda difference: difference["tensor"])
    only_in_b = sum("only" in difference["what"] and difference["tensor"] not in shapes for difference in differences)
    return {"equal": not differences, "ntensors": len(shapes) + only_in_b, "differences": differences}
