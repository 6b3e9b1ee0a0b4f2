"""While a round is exchanged the next one is read, and the last one written: each waits here for the other to have begun."""

from concurrent.futures import ThreadPoolExecutor
from threading import Event
from types import SimpleNamespace

import numpy as np

from reshard_mpi.run import move
from tests.mpi.together import faults_of_all

NROUNDS, LAST = 6, 5
WITHIN_S = 10.0


class Rounds:
    """Reads, exchanges and writes nothing, but notes when it begins, and what did not come while it was at it."""

    def __init__(self) -> None:
        self.read_begun = [Event() for _ in range(NROUNDS)]
        self.exchange_begun = [Event() for _ in range(NROUNDS)]
        self.nexchanged, self.nwritten, self.faults = 0, 0, list[str]()

    def expect(self, event: Event, what: str) -> None:
        if not self.faults and not event.wait(WITHIN_S):
            self.faults.append(what)

    def read(self, number: int, *_: object) -> None:
        self.read_begun[number].set()

    def exchange(self, *_: object) -> None:
        number, self.nexchanged = self.nexchanged, self.nexchanged + 1
        self.exchange_begun[number].set()
        if number < LAST:
            self.expect(self.read_begun[number + 1], f"round {number + 1} was not read while {number} was exchanged")

    def write(self, *_: object) -> None:
        number, self.nwritten = self.nwritten, self.nwritten + 1
        if number < LAST:
            self.expect(
                self.exchange_begun[number + 1], f"round {number} was not written while {number + 1} was exchanged"
            )

    def buffer(self, _number: int) -> None:
        return None


def test_the_next_round_is_read_and_the_last_one_written_while_one_is_exchanged(comm, monkeypatch):
    rounds = Rounds()
    nothing = SimpleNamespace(read=None, cast=None, copy=None, write=None, straight=None)
    monkeypatch.setattr(move, "expand_round", lambda *_: nothing)
    slabs = SimpleNamespace(take=lambda _: SimpleNamespace(volume=np.zeros(1, np.int64)))
    plan = SimpleNamespace(nrounds=NROUNDS, buffer_nbytes=1 << 20, slabs=slabs, round_slabs=lambda _: slice(0))
    progress = SimpleNamespace(advance=lambda _: None)
    recorder = SimpleNamespace(seconds=30.0, is_due=False, nrounds=0)
    with ThreadPoolExecutor(1) as reading, ThreadPoolExecutor(1) as writing:
        pipeline = move._Pipeline(plan, comm.rank, rounds, rounds, lambda _: None, reading, writing)
        move._run(comm, plan, pipeline, rounds, progress, recorder)
    assert not faults_of_all(comm, rounds.faults)
    assert (rounds.nexchanged, rounds.nwritten) == (NROUNDS, NROUNDS)
