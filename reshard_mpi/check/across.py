"""Whole tensors whose files no rank sees all: each part is read by a rank that sees it, and rank 0 gets them together."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
from mpi4py import MPI

from reshard_mpi.check.whole import PART_NBYTES, Bytes, WholeTensor
from reshard_mpi.errors import Interrupted, ReshardError
from reshard_mpi.mpi.comm import ROOT, agreed, await_all
from reshard_mpi.storage.digests import digest_name, new_hash
from reshard_mpi.storage.files import Files


@dataclass(frozen=True)
class Spread:
    """A tensor, and of each of its places the rank that reads it."""

    tensor: WholeTensor
    readers: tuple[int, ...]

    @classmethod
    def of(cls, tensor: WholeTensor, readers: Mapping[str, tuple[int, ...]]) -> "Spread":
        """`readers`: which ranks see a file, where not all do."""
        return cls(tensor, tuple(readers.get(file, (ROOT,))[0] for file in tensor.files))

    def read(self, comm: MPI.Comm, files: Files, first: int, last: int) -> Bytes:
        """Collective: the bytes [first, last) of the tensor, on rank 0; at most PART_NBYTES at once."""
        mine = [number for number, reader in enumerate(self.readers) if reader == comm.rank]
        part = np.zeros(last - first, np.uint8)
        with agreed(comm):
            if mine:
                part = self._of_places(mine).read(files, first, last)
        whole = np.zeros_like(part)
        await_all(comm.Ireduce(part, whole, MPI.BOR, root=ROOT))  # places don't overlap, and the rest is zeros
        return whole

    def _of_places(self, numbers: Sequence[int]) -> WholeTensor:
        tensor, files = self.tensor, tuple(self.tensor.files[number] for number in numbers)
        return replace(
            tensor,
            places=tuple(tensor.places[number] for number in numbers),
            files=files,
            begins=tuple(tensor.begins[number] for number in numbers),
            shown=tuple((file, array) for file, array in tensor.shown if file in files),
        )

    def digest(self, comm: MPI.Comm, files: Files) -> str:
        """Collective: the digest of the tensor's bytes, on rank 0."""
        running, nbytes = new_hash(self.tensor.algorithm), self.tensor.nbytes
        for first in range(0, nbytes, PART_NBYTES):
            running.update(self.read(comm, files, first, min(first + PART_NBYTES, nbytes)).data)
        return digest_name(running.digest(), self.tensor.algorithm)


def digests_across(comm: MPI.Comm, files: Files, tensors: Sequence[Spread]) -> list[str | ReshardError]:
    """Collective: the digest of each of rank 0's tensors, on rank 0; where one couldn't be read, its error."""
    found: list[str | ReshardError] = []
    for tensor in comm.bcast(tensors, root=ROOT):
        try:
            found.append(tensor.digest(comm, files))
        except Interrupted:
            raise
        except ReshardError as error:  # the same on all ranks
            found.append(error)
    return found
