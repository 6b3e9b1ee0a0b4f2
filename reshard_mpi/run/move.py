"""Carry out the rounds of a plan: read round k + 1 and write round k - 1 while round k is exchanged.

thread       round 0   round 1   round 2   ...
reading      read 0    read 1    read 2
main (MPI)             move 0    move 1    move 2
writing                          write 0   write 1

Rounds in which nothing crosses from rank to rank need no communication; every so many bytes the ranks agree that all is well. Now
and then, and before they stop, they make durable what they have written, and rank 0 notes it.
"""

import os
import time
from collections.abc import Callable, Container, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import numpy as np
from mpi4py import MPI

from reshard_mpi.errors import Interrupted
from reshard_mpi.mpi.comm import Agreement, agreed, gather_all, raise_together
from reshard_mpi.mpi.exchange import Exchanger
from reshard_mpi.plan.plan import WRITE_BUFFERS, Plan
from reshard_mpi.plan.rounds import Copies, RoundWork, expand_round
from reshard_mpi.report import Progress, peak_rss_nbytes
from reshard_mpi.run.transfer import Bytes, Reader, Writer
from reshard_mpi.storage.cast import CastArray
from reshard_mpi.storage.files import Files
from reshard_mpi.storage.known import Known
from reshard_mpi.storage.reordered import ReorderedArray
from reshard_mpi.storage.shown import ShownArray

NBYTES_BETWEEN_AGREEMENTS = 1 << 26  # of a rank: a moment, even on a slow disk
MOST_ROUNDS_BETWEEN_AGREEMENTS = 256  # small rounds take longer than their bytes


@dataclass(frozen=True)
class Names:
    """What the numbers of a plan stand for: file names by file, payload keys by source array."""

    source_folder: Path
    source_files: tuple[str, ...]
    source_keys: tuple[str, ...]
    target_folder: Path
    target_files: tuple[str, ...]
    shown: Mapping[str, Sequence[ShownArray]] = field(default_factory=dict)  # of the source, by file
    casts: Mapping[int, CastArray] = field(default_factory=dict)  # by source array
    orders: Mapping[int, ReorderedArray] = field(default_factory=dict)
    source_stamps: Known = field(default_factory=dict)
    target_stamps: Known = field(default_factory=dict)
    lock_holder: str = ""  # what rank 0 has written into the lock of the target folder


@dataclass(frozen=True)
class Moved:
    """What this rank did: the SHA-256 of each target array that it wrote, and what it measured."""

    digests: dict[int, bytes]
    measured: dict[str, int | float]
    infinite: Mapping[int, int]  # finite elements that have become so, by tensor of the plan


@dataclass(frozen=True)
class News:
    """What has become durable since it was last noted.

    `slabs` of the plan, the same on all ranks; what this rank knows of arrays, by number: those of the source that hold their
    digests, and the digests of the target's; and how many elements of the slabs have become infinite, by tensor.
    """

    slabs: slice
    verified: Sequence[int]
    digests: Mapping[int, bytes]
    infinite: Mapping[int, int]


Note = Callable[[Sequence[News]], None]  # takes the news of all ranks, in their order


def move_rounds(
    comm: MPI.Comm,
    plan: Plan,
    names: Names,
    hashing: bool,
    progress: Progress,
    note: Note | None,
    note_seconds: float,
    notes_the_end: bool,
) -> Moved:
    """Collective: every round of the plan, written durably. The error of any rank is raised on all.

    `note`, on rank 0, is told about every `note_seconds`, and before the ranks stop because of a signal, what is durable; and at
    the end, if that took long, or `notes_the_end`.
    """
    with (
        Files(names.source_folder, known=names.source_stamps) as source,
        Files(names.source_folder, known=names.source_stamps) as copied,  # for the thread that writes
        Files(names.target_folder, os.O_RDWR, names.target_stamps) as target,
    ):
        for file, arrays in names.shown.items():
            source.show(file, arrays)
            copied.show(file, arrays)
        with agreed(comm):  # their buffers are most of the memory of a job
            reader = Reader(
                source,
                names.source_files,
                names.source_keys,
                plan.source.arrays,
                plan.buffer_nbytes,
                hashing,
                names.casts,
                names.orders,
            )
            writer = Writer(
                target, names.target_files, plan.target, comm.rank, plan.buffer_nbytes, hashing, reader.digest_of
            )
            exchanger = Exchanger(comm, plan.buffer_nbytes)
        with ThreadPoolExecutor(1) as reading, ThreadPoolExecutor(1) as writing:
            copy = partial(writer.copy, copied, names.source_files)
            pipeline = _Pipeline(plan, comm.rank, reader, writer, copy, reading, writing)
            recorder = _Recorder(comm, plan, pipeline, note, note_seconds)
            digests: dict[int, bytes] = {}
            try:
                _run(comm, plan, pipeline, exchanger, progress, recorder)
                with agreed(comm):
                    reader.finish(_to_verify(plan, comm.rank) if hashing else ())
                    writer.sync()
                with agreed(comm):
                    digests = writer.digests()
            except Interrupted:
                recorder.record()
                raise
            recorder.record_the_end(notes_the_end)
    return Moved(digests, _measured(reader, writer, exchanger), reader.infinite_in(range(plan.nrounds)))


class _Pipeline:
    """Reads ahead and writes behind, each on a thread of its own.

    After an expected error, which the agreement holds, nothing more is read or written; the rounds go on with the bytes that are
    there, for the other ranks wait for them.
    """

    def __init__(
        self,
        plan: Plan,
        rank: int,
        reader: Reader,
        writer: Writer,
        copy: Callable[[Copies], None],
        reading: ThreadPoolExecutor,
        writing: ThreadPoolExecutor,
    ):
        self._plan, self._rank, self._reader, self._writer = plan, rank, reader, writer
        self._copy, self._reading, self._writing = copy, reading, writing
        self._writes: list[Future[None]] = []
        self.agreement = Agreement()
        self._read_ahead(0)

    def _read_ahead(self, number: int) -> None:
        if number < self._plan.nrounds:
            self._read = self._reading.submit(self._read_round, number)

    def _read_round(self, number: int) -> RoundWork:
        work = expand_round(self._plan, number, self._rank)
        if not self.agreement.error:
            with self.agreement.held():
                self._reader.read(number, work.read, work.cast)
        return work

    def next_round(self, number: int) -> tuple[RoundWork, Bytes, Bytes]:
        """What there is to do, the read buffer, filled, and the write buffer, free. The next round begins to be read."""
        work = self._read.result()
        if len(self._writes) == WRITE_BUFFERS:
            self._writes.pop(0).result()
        self._read_ahead(number + 1)
        return work, self._reader.buffer(number), self._writer.buffer(number)

    def write_behind(self, number: int, work: RoundWork) -> None:
        self._writes.append(self._writing.submit(self._write_round, number, work))

    def _write_round(self, number: int, work: RoundWork) -> None:
        if not self.agreement.error:
            with self.agreement.held():
                self._copy(work.copy)
                self._writer.write(
                    (work.write, self._writer.buffer(number)), (work.straight, self._reader.buffer(number))
                )

    def finish(self) -> None:
        """Return when all has been written that is to be; an expected error is in the agreement."""
        while self._writes:
            self._writes.pop().result()

    def make_durable(self) -> None:
        """Return when all that is written is on the storage, too; raises an expected error."""
        self.finish()
        if self.agreement.error:
            raise self.agreement.error
        self._writer.sync()

    def news(self, rounds: range, nverified: int, told: Container[int]) -> News:
        """What these rounds have brought, without the `nverified` source arrays, and the target arrays, `told` before."""
        slabs = slice(*(int(self._plan.round_first[number]) for number in (rounds.start, rounds.stop)))
        digests = self._writer.digests_so_far(told)
        return News(slabs, self._reader.verified[nverified:], digests, self._reader.infinite_in(rounds))


class _Recorder:
    """Has noted, now and then, what is durable."""

    def __init__(self, comm: MPI.Comm, plan: Plan, pipeline: _Pipeline, note: Note | None, note_seconds: float):
        self._comm, self._plan, self._pipeline, self._note, self.seconds = comm, plan, pipeline, note, note_seconds
        self.nrounds = 0  # done, unless the next agreement says otherwise
        self._began = self._noted = time.monotonic()
        self._nrounds_noted, self._nverified = 0, 0
        self._told: set[int] = set()  # target arrays whose digests are noted

    @property
    def is_due(self) -> bool:
        """Rank 0 says when."""
        return self._note is not None and time.monotonic() - self._noted >= self.seconds

    def record(self) -> None:
        """Collective: make durable what the rounds done so far have written, and have it noted. A signal doesn't disturb it."""
        with agreed(self._comm, stoppable=False):
            self._pipeline.make_durable()
        news = self._pipeline.news(range(self._nrounds_noted, self.nrounds), self._nverified, self._told)
        all_news = gather_all(self._comm, news)
        with agreed(self._comm, stoppable=False):
            if self._note is not None:
                self._note(all_news)
        self._nrounds_noted, self._nverified = self.nrounds, self._nverified + len(news.verified)
        self._told |= news.digests.keys()
        self._noted = time.monotonic()

    def record_the_end(self, anyway: bool) -> None:
        """Collective: of a job that took long what is done is noted, too, before it is verified and made visible."""
        is_due = anyway or (self._note is not None and time.monotonic() - self._began >= self.seconds)
        if raise_together(self._comm, None, is_due, stoppable=False):
            self.record()


def _to_verify(plan: Plan, rank: int) -> list[int]:
    """The source arrays that this rank must hold against their digests, also those that an earlier run has moved."""
    arrays = plan.source.arrays
    return np.flatnonzero((arrays.hasher == rank) & (arrays.has_digest > 0)).tolist()


def _run(
    comm: MPI.Comm, plan: Plan, pipeline: _Pipeline, exchanger: Exchanger, progress: Progress, recorder: _Recorder
) -> None:
    nbytes = NBYTES_BETWEEN_AGREEMENTS if recorder.seconds else 0  # all ranks know it alike
    between = max(min(nbytes // max(plan.buffer_nbytes, 1), MOST_ROUNDS_BETWEEN_AGREEMENTS), 1)
    for number in range(plan.nrounds):
        work, read_buffer, write_buffer = pipeline.next_round(number)
        exchanger.exchange(work, read_buffer, write_buffer)
        pipeline.write_behind(number, work)
        progress.advance(int(plan.slabs.take(plan.round_slabs(number)).volume.sum()))
        if (number + 1) % between == 0:
            _agree(comm, pipeline, recorder, number + 1)
    pipeline.finish()
    _agree(comm, pipeline, recorder, plan.nrounds)


def _agree(comm: MPI.Comm, pipeline: _Pipeline, recorder: _Recorder, nrounds: int) -> None:
    """Collective: have these rounds gone well, and is anybody to stop?"""
    recorder.nrounds = nrounds
    if raise_together(comm, pipeline.agreement.error, recorder.is_due):
        recorder.record()


def _measured(reader: Reader, writer: Writer, exchanger: Exchanger) -> dict[str, int | float]:
    return {
        "read_nbytes": reader.work.nbytes + writer.work.copied_nbytes,
        "read_again_nbytes": reader.work.again_nbytes + writer.work.again_nbytes,
        "read_seconds": reader.work.seconds,
        "hashed_nbytes": reader.work.hashed_nbytes + writer.work.hashed_nbytes,
        "hash_seconds": reader.work.hash_seconds + writer.work.hash_seconds,
        "sent_nbytes": exchanger.sent_nbytes,
        "exchange_seconds": exchanger.seconds,
        "written_nbytes": writer.work.nbytes + writer.work.copied_nbytes,
        "write_seconds": writer.work.seconds,
        "peak_rss_nbytes": peak_rss_nbytes(),
    }
