"""Carry out the rounds of a plan: read round k + 1 and write round k - 1 while round k is exchanged.

thread       round 0   round 1   round 2   ...
reading      read 0    read 1    read 2
main (MPI)             move 0    move 1    move 2
writing                          write 0   write 1
"""

import os
import resource
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from mpi4py import MPI

from reshard_mpi.mpi.comm import Agreement, agreed, raise_together
from reshard_mpi.mpi.exchange import Exchanger
from reshard_mpi.plan.plan import Plan
from reshard_mpi.plan.rounds import RoundWork, expand_round
from reshard_mpi.report import Progress
from reshard_mpi.run.transfer import Bytes, Reader, Writer
from reshard_mpi.storage.files import Files


@dataclass(frozen=True)
class Names:
    """What the numbers of a plan stand for: file names by file, payload keys by source array."""

    source_folder: Path
    source_files: tuple[str, ...]
    source_keys: tuple[str, ...]
    target_folder: Path
    target_files: tuple[str, ...]


@dataclass(frozen=True)
class Moved:
    """What this rank did: the SHA-256 of each target array that it wrote, and what it measured."""

    digests: dict[int, bytes]
    measured: dict[str, int | float]


def move_rounds(comm: MPI.Comm, plan: Plan, names: Names, hashing: bool, progress: Progress) -> Moved:
    """Collective: every round of the plan, written durably. The error of any rank is raised on all."""
    with Files(names.source_folder) as source, Files(names.target_folder, os.O_RDWR) as target:
        reader = Reader(source, names.source_files, names.source_keys, plan.source.arrays, plan.buffer_nbytes, hashing)
        writer = Writer(target, names.target_files, plan.target, comm.rank, plan.buffer_nbytes, hashing)
        exchanger = Exchanger(comm, plan.buffer_nbytes)
        with ThreadPoolExecutor(1) as reading, ThreadPoolExecutor(1) as writing:
            _run(comm, plan, _Pipeline(plan, comm.rank, reader, writer, reading, writing), exchanger, progress)
        digests: dict[int, bytes] = {}
        with agreed(comm):
            reader.finish()
            writer.sync()
        with agreed(comm):
            digests = writer.digests()
    return Moved(digests, _measured(reader, writer, exchanger))


class _Pipeline:
    """Reads ahead and writes behind, each on a thread of its own."""

    def __init__(
        self,
        plan: Plan,
        rank: int,
        reader: Reader,
        writer: Writer,
        reading: ThreadPoolExecutor,
        writing: ThreadPoolExecutor,
    ):
        self._plan, self._rank, self._reader, self._writer = plan, rank, reader, writer
        self._reading, self._writing = reading, writing
        self._read: Future[tuple[RoundWork, Bytes]] | None = None
        self._writes: list[Future[None]] = []
        self.read_ahead(0)

    def read_ahead(self, number: int) -> None:
        def read() -> tuple[RoundWork, Bytes]:
            work = expand_round(self._plan, number, self._rank)
            return work, self._reader.read(number, work.read)

        self._read = self._reading.submit(read) if number < self._plan.nrounds else None

    def round_read(self) -> tuple[RoundWork, Bytes]:
        assert self._read is not None
        return self._read.result()

    def free_buffer(self, number: int) -> Bytes:
        """The write buffer of round `number`, once the round before last has been written from it."""
        if len(self._writes) > 1:
            self._writes.pop(0).result()
        return self._writer.buffer(number)

    def write_behind(self, number: int, work: RoundWork) -> None:
        self._writes.append(self._writing.submit(self._writer.write, number, work.write))

    def finish(self) -> None:
        for write in self._writes:
            write.result()


def _run(comm: MPI.Comm, plan: Plan, pipeline: _Pipeline, exchanger: Exchanger, progress: Progress) -> None:
    for number in range(plan.nrounds):
        agreement = Agreement()
        with agreement.held():
            work, read_buffer = pipeline.round_read()
            pipeline.read_ahead(number + 1)
            write_buffer = pipeline.free_buffer(number)
        raise_together(comm, agreement.error)
        exchanger.exchange(work, read_buffer, write_buffer)
        pipeline.write_behind(number, work)
        progress.advance(int(plan.slabs.take(plan.round_slabs(number)).volume.sum()))
    with agreed(comm):
        pipeline.finish()


def _measured(reader: Reader, writer: Writer, exchanger: Exchanger) -> dict[str, int | float]:
    return {
        "read_nbytes": reader.work.nbytes,
        "read_again_nbytes": reader.work.again_nbytes + writer.work.again_nbytes,
        "read_seconds": reader.work.seconds,
        "hashed_nbytes": reader.work.hashed_nbytes + writer.work.hashed_nbytes,
        "hash_seconds": reader.work.hash_seconds + writer.work.hash_seconds,
        "sent_nbytes": exchanger.sent_nbytes,
        "exchange_seconds": exchanger.seconds,
        "written_nbytes": writer.work.nbytes,
        "write_seconds": writer.work.seconds,
        "peak_rss_nbytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
    }
