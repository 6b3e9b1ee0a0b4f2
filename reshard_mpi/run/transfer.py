"""Between files and buffers: read the spans of a round, write the spans of a round, hash what passes. Knows no MPI.

A reader and a writer each own their buffers and one worker thread: while round k is exchanged, round k + 1 is read and round
k - 1 is written. `preadv`, `pwrite` and hashlib release Python's lock.
"""

import heapq
import time
from bisect import bisect_right
from collections import Counter, defaultdict
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np
from numpy.typing import NDArray

from reshard_mpi.boxes import Ints
from reshard_mpi.errors import IntegrityError
from reshard_mpi.plan.plan import READ_BUFFERS, WRITE_BUFFERS, ArrayTable, Side
from reshard_mpi.plan.rounds import CastParts, Copies, Runs, Spans
from reshard_mpi.storage.cast import CastArray, Caster
from reshard_mpi.storage.digests import ALGORITHMS, RunningDigest, digest_name
from reshard_mpi.storage.files import Files
from reshard_mpi.storage.reordered import OpenReordered, ReorderedArray

Bytes = NDArray[np.uint8]
Row = tuple[int, int, int, int]  # (array or file, offset, bytes, position in a buffer)
STEP_NBYTES = 1 << 18  # what is hashed is read and written in such steps: the bytes are still in the core's own cache


@dataclass
class Work:
    """What one side of a rank did: bytes through files and hashes, and the seconds that each took."""

    nbytes: int = 0
    copied_nbytes: int = 0  # from file to file
    hashed_nbytes: int = 0
    again_nbytes: int = 0  # read a second time, for a hash that could not be computed on the way
    seconds: float = 0.0
    hash_seconds: float = 0.0


class _Buffers:
    """Some buffers in turn, allocated once: the first touch of memory is slow."""

    def __init__(self, count: int, nbytes: int):
        self._buffers = [np.empty(nbytes, np.uint8) for _ in range(count)]

    def of_round(self, number: int) -> Bytes:
        return self._buffers[number % len(self._buffers)]


class Reader:
    """Reads the spans of rounds from the source, and holds every array that it has read whole against its digest.

    Arrays in `casts` and in `orders`, by number, are converted as they are read; their digests are of what is in the file.
    """

    def __init__(
        self,
        files: Files,
        names: Sequence[str],
        keys: Sequence[str],
        arrays: ArrayTable,
        buffer_nbytes: int,
        hashing: bool,
        casts: Mapping[int, CastArray] | None = None,
        orders: Mapping[int, ReorderedArray] | None = None,
    ):
        self._files, self._names, self._keys, self._arrays = files, names, keys, arrays
        self._buffers = _Buffers(READ_BUFFERS, buffer_nbytes)
        self._hashing = hashing
        self._digests: dict[int, RunningDigest] = {}
        self._casts, self._orders = casts or {}, orders or {}
        self._converted = self._casts.keys() | self._orders.keys()
        self._shown = sorted((int(arrays.file[array]), int(arrays.begin[array]), array) for array in self._converted)
        self._ordered: tuple[int, OpenReordered] | None = None
        self._caster = Caster(buffer_nbytes if self._casts else 0)
        self._infinite: defaultdict[int, Counter[int]] = defaultdict(Counter)  # elements, by round and tensor
        self.verified: list[int] = []  # arrays that hold their digests, as it turns out
        self.work = Work()

    def buffer(self, number: int) -> Bytes:
        """The buffer that is filled for round `number`."""
        return self._buffers.of_round(number)

    def read(self, number: int, spans: Spans, cast: CastParts | None = None) -> Bytes:
        """The buffer of round `number`, filled; IntegrityError for an array whose last byte has now been read.

        `cast`: what is converted of it, of which is counted what becomes infinite.
        """
        buffer = self.buffer(number)
        for (file, offset, nbytes, position), rows in _steps(spans, self._arrays.file, self._hashing):
            into, array = buffer.data[position : position + nbytes], self._shown_at(file, offset)
            started, hashed = time.perf_counter(), self.work.hash_seconds
            if array is None:
                self._files.read(self._names[file], offset, into)
                self.work.nbytes += nbytes
            else:
                self._read_converted(number, array, offset, into, position, cast)
            read = time.perf_counter()
            self.work.seconds += read - started - (self.work.hash_seconds - hashed)
            for array, begin, size, at in rows:
                if self._arrays.has_digest[array] and array not in self._converted:
                    self._feed(array, begin - int(self._arrays.begin[array]), buffer.data[at : at + size])
            self.work.hash_seconds += time.perf_counter() - read
        return buffer

    def _shown_at(self, file: int, offset: int) -> int | None:
        """The array that is converted to what is shown at `offset` of the file, if that is none of its own bytes."""
        at = bisect_right(self._shown, (file, offset, len(self._arrays.file))) - 1
        return self._shown[at][2] if at >= 0 and self._shown[at][0] == file else None

    def infinite_in(self, rounds: Iterable[int]) -> Counter[int]:
        """How many finite elements have become infinite in these rounds, by tensor."""
        return sum((self._infinite[number] for number in rounds if number in self._infinite), Counter())

    def _read_converted(
        self, number: int, array: int, offset: int, into: memoryview, position: int, parts: CastParts | None
    ) -> None:
        """Read what the array is converted to from `offset` of its file on; `into` lies at `position` of the buffer."""

        def infinite(found: NDArray[np.int64]) -> None:
            if parts is not None:
                self._infinite[number].update(_within(parts, position + found))

        read = partial(self._read_ordered if array in self._orders else self._read_stored, array)
        if array in self._casts:
            cast = self._casts[array]
            self._caster.read(cast, offset - cast.begin, into, read, infinite)
        else:
            read(offset, into)

    def _read_ordered(self, array: int, offset: int, into: memoryview) -> None:
        """The rows of the array in the order wanted, from where they are shown."""
        order = self._orders[array]
        if self._ordered is None or self._ordered[0] != array:
            self._ordered = None  # its memory goes before the next one's comes
            self._ordered = array, OpenReordered(order, partial(self._read_stored, array))
        self._ordered[1].read(offset - order.begin, into)

    def _read_stored(self, array: int, offset: int, into: memoryview) -> None:
        """What the file holds of the array that is converted: its digest is of it."""
        self._files.read(self._names[self._arrays.file[array]], offset, into)
        self.work.nbytes += len(into)
        if self._hashing and self._arrays.has_digest[array]:
            started = time.perf_counter()
            self._feed(array, offset - self._stored_begin(array), into)
            self.work.hash_seconds += time.perf_counter() - started

    def _stored_begin(self, array: int) -> int:
        if array in self._orders:
            return self._orders[array].stored_begin
        return self._casts[array].stored_begin if array in self._casts else int(self._arrays.begin[array])

    def _feed(self, array: int, within: int, data: memoryview) -> None:
        running = self.digest_of(array)
        self._catch_up(array, running, within)
        self.work.hashed_nbytes += running.feed(within, data)
        if running.is_complete:
            self._compare(array, running)

    def _catch_up(self, array: int, running: RunningDigest, offset: int) -> None:
        name = self._names[self._arrays.file[array]]
        _catch_up(self._files, name, self._stored_begin(array), running, offset, self.work)

    def digest_of(self, array: int) -> RunningDigest:
        """The hash of an array that this rank reads, as far as it has come."""
        if array not in self._digests:
            algorithm = ALGORITHMS[self._arrays.has_digest[array]]
            nbytes = int(self._arrays.converted_nbytes[array] or self._arrays.nbytes[array])
            self._digests[array] = RunningDigest(nbytes, algorithm)
        return self._digests[array]

    def finish(self, arrays: Iterable[int] = ()) -> None:
        """Hash what is left of every array, and of these `arrays`: padding, what came out of order or in no round."""
        for array in arrays:
            self.digest_of(array)
        for array, running in self._digests.items():
            if not running.is_complete:
                self._catch_up(array, running, running.nbytes)
                self._compare(array, running)

    def _compare(self, array: int, running: RunningDigest) -> None:
        algorithm = ALGORITHMS[self._arrays.has_digest[array]]
        found = digest_name(running.digest(), algorithm)
        expected = digest_name(self._arrays.digest[array].tobytes(), algorithm)
        if found != expected:
            name = self._names[self._arrays.file[array]]
            raise IntegrityError(
                str(self._files.folder / name),
                f"array {self._keys[array]!r} has digest {found}, expected {expected}; its bytes have "
                "changed since it was saved: get the shard anew",
            )
        self.verified.append(array)


class Writer:
    """Writes the spans of rounds to the target, and computes the SHA-256 of its share of the arrays.

    An array that this rank writes alone is hashed on the way; one that several write is read back by one of them. Where an array
    begins as a source array does, its hash goes on from that of the source: `source_digest` has it.
    """

    def __init__(
        self,
        files: Files,
        names: Sequence[str],
        side: Side,
        rank: int,
        buffer_nbytes: int,
        hashing: bool,
        source_digest: Callable[[int], RunningDigest],
    ):
        self._files, self._names, self._arrays = files, names, side.arrays
        self._buffers = _Buffers(WRITE_BUFFERS, buffer_nbytes)
        mine = side.arrays.hasher == rank if hashing else np.zeros(len(side.arrays.file), bool)
        arrays = side.arrays
        self._hashed = {
            array: source_digest(source).fork(begins_nbytes, nbytes) if source >= 0 else RunningDigest(nbytes)
            for array, nbytes, source, begins_nbytes in zip(
                np.flatnonzero(mine).tolist(),
                arrays.nbytes[mine].tolist(),
                arrays.begins_as[mine].tolist(),
                arrays.begins_nbytes[mine].tolist(),
                strict=True,
            )
        }
        self._on_the_way = frozenset(np.flatnonzero(mine & side.is_alone).tolist())
        self._written: set[int] = set()
        self.work = Work()

    def buffer(self, number: int) -> Bytes:
        """The buffer to fill for round `number`."""
        return self._buffers.of_round(number)

    def write(self, *pieces: tuple[Spans, Bytes]) -> None:
        """Write the spans of a round, each from the buffer where they are."""
        steps = [self._steps_of(*piece) for piece in pieces]
        for (file, offset, nbytes, position), rows, buffer in heapq.merge(*steps, key=lambda one: one[0]):
            started = time.perf_counter()
            self._files.write(self._names[file], offset, buffer.data[position : position + nbytes])
            self._written.add(file)
            self.work.nbytes += nbytes
            written = time.perf_counter()
            self.work.seconds += written - started
            for array, begin, size, at in rows:
                if array in self._on_the_way:
                    within = begin - int(self._arrays.begin[array])
                    self.work.hashed_nbytes += self._hashed[array].feed(within, buffer.data[at : at + size])
            self.work.hash_seconds += time.perf_counter() - written

    def _steps_of(self, spans: Spans, buffer: Bytes) -> Iterator[tuple[Row, list[Row], Bytes]]:
        for step, rows in _steps(spans, self._arrays.file, bool(self._on_the_way)):
            yield step, rows, buffer

    def copy(self, source: Files, source_names: Sequence[str], copies: Copies) -> None:
        """Copy from the source's files to the target's, unseen."""
        started = time.perf_counter()
        columns = (copies.source_file, copies.source_offset, copies.file, copies.offset, copies.nbytes)
        for from_file, from_offset, file, offset, nbytes in zip(*(c.tolist() for c in columns), strict=True):
            self._files.copy(source, source_names[from_file], from_offset, self._names[file], offset, nbytes)
            self.work.copied_nbytes += nbytes
        self._written.update(copies.file.tolist())
        self.work.seconds += time.perf_counter() - started

    def sync(self) -> None:
        """Return when what this rank has written is on the storage."""
        started = time.perf_counter()
        for file in sorted(self._written):
            self._files.sync(self._names[file])
        self.work.seconds += time.perf_counter() - started

    def digests_so_far(self, told: Container[int]) -> dict[int, bytes]:
        """The SHA-256 of those arrays, not `told` yet, of which all has been written and hashed on the way."""
        whole = (array for array, running in self._hashed.items() if running.is_complete and array not in told)
        return {array: self._hashed[array].digest() for array in whole}

    def digests(self) -> dict[int, bytes]:
        """The SHA-256 of this rank's share of the arrays; all ranks must have written and synced before."""
        started = time.perf_counter()
        for array, running in self._hashed.items():
            name, begin = self._names[self._arrays.file[array]], int(self._arrays.begin[array])
            _catch_up(self._files, name, begin, running, running.nbytes, self.work)
        self.work.hash_seconds += time.perf_counter() - started
        return {array: running.digest() for array, running in self._hashed.items()}


def _catch_up(files: Files, name: str, begin: int, running: RunningDigest, offset: int, work: Work) -> None:
    """Read what the digest of an array, stored from `begin` on, lacks before `offset`."""
    again = running.catch_up(offset, lambda within, into: files.read(name, begin + within, into))
    work.again_nbytes += again
    work.hashed_nbytes += again


def _steps(spans: Spans, file_of: Ints, hashing: bool) -> Iterator[tuple[Row, list[Row]]]:
    """The runs, in file order and where bytes are hashed in small steps; and the parts of spans that lie in each step."""
    rows, first = list(_rows(spans)) if hashing else [], 0
    for file, offset, nbytes, position in _rows(spans.runs):
        step = STEP_NBYTES if hashing else nbytes
        for low in range(offset, offset + nbytes, step):
            high, within = min(low + step, offset + nbytes), []
            for index in range(first, len(rows)):
                array, begin, size, at = rows[index]
                if file_of[array] != file or begin >= high:
                    break
                a, b = max(low, begin), min(high, begin + size)
                if a < b:
                    within.append((array, a, b - a, at + a - begin))
                if index == first and begin + size <= high:
                    first += 1
            yield (file, low, high - low, position + low - offset), within


def _within(cast: CastParts, positions: NDArray[np.int64]) -> Counter[int]:
    """How many of these positions of the buffer, which rise, lie in boxes of each tensor: the rest is padding."""
    counts: Counter[int] = Counter()
    for tensor, position, stride, shape in zip(
        cast.tensor.tolist(), cast.tiles.position.tolist(), cast.tiles.stride, cast.tiles.shape, strict=True
    ):
        low, high = np.searchsorted(positions, [position, position + int(((shape - 1) * stride).sum()) + 1])
        rest, inside = positions[low:high] - position, np.ones(high - low, bool)
        for step, size in zip(stride.tolist(), shape.tolist(), strict=True):
            index, rest = np.divmod(rest, step)
            inside &= index < size
        counts[tensor] += int(inside.sum())
    return +counts


def _rows(spans: Spans | Runs) -> Iterator[Row]:
    of = spans.array if isinstance(spans, Spans) else spans.file
    yield from zip(of.tolist(), spans.offset.tolist(), spans.nbytes.tolist(), spans.position.tolist(), strict=True)
