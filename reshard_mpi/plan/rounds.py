"""What one rank does in one round: which spans it reads, which tiles it copies, sends and receives, which spans it writes.

    file ----copy, where nothing is hashed--------------------------------------------------------> file
        \\--read--> read buffer --straight, what stays as it was read------------------write-------/
                        \\--tiles to oneself--------------------------> write buffer --write-----/
                         \\--pack--> send buffer ~~> receive buffer --unpack--/

What is cast or put in another order is converted as it is read, and so never copied. Pure: a round is expanded from the plan by
index arithmetic alone, without opening a file or talking to anyone.
"""

from dataclasses import dataclass, replace

import numpy as np

from reshard_mpi.boxes import Boxes, Ints, join, meet
from reshard_mpi.plan.plan import Plan, Side
from reshard_mpi.plan.stored import StoredBoxes


@dataclass(frozen=True)
class Spans:
    """Byte spans of files and their positions in a buffer, in file order.

    Span i is of stored array `array[i]`, at `offset[i]` of its file, `nbytes[i]` long, at `position[i]` of the buffer. Spans
    that touch or overlap in a file do so in the buffer: each run of them, `runs`, is one read or write.
    """

    array: Ints
    offset: Ints
    nbytes: Ints
    position: Ints
    runs: "Runs"
    buffer_nbytes: int


@dataclass(frozen=True)
class Runs:
    """Contiguous ranges of files: `nbytes[k]` bytes at `offset[k]` of file `file[k]`, at `position[k]` of a buffer."""

    file: Ints
    offset: Ints
    nbytes: Ints
    position: Ints


@dataclass(frozen=True)
class Tiles:
    """Boxes of bytes in a buffer: n positions of the first byte, strides (n, naxes) and shapes (n, naxes)."""

    position: Ints
    stride: Ints
    shape: Ints

    @property
    def nbytes(self) -> Ints:
        return np.prod(self.shape, axis=1, dtype=np.int64)

    @property
    def is_contiguous(self) -> np.ndarray:
        """Of each tile, whether its bytes follow each other, in order."""
        later = np.cumprod(self.shape[:, ::-1], axis=1)[:, ::-1] // np.maximum(self.shape, 1)
        return np.all((self.shape == 1) | (self.stride == later), axis=1)

    def take(self, index: np.ndarray) -> "Tiles":
        return Tiles(self.position[index], self.stride[index], self.shape[index])


@dataclass(frozen=True)
class CastParts:
    """Of what is converted as it is read: where in the read buffer each box lies, and of which tensor it is a part."""

    tiles: Tiles
    tensor: Ints


@dataclass(frozen=True)
class Copies:
    """Byte ranges of source files that become byte ranges of target files, in the order of the target."""

    source_file: Ints
    source_offset: Ints
    file: Ints
    offset: Ints
    nbytes: Ints


@dataclass(frozen=True)
class RoundWork:
    """One rank's part of one round.

    `local_from[i]` (in the read buffer) is copied to `local_to[i]` (in the write buffer). `send` lies in the read buffer,
    `receive` in the write buffer; in the messages tiles follow each other without gaps, by rank,
    `send_nbytes[rank]` bytes to each. `write` lies in the write buffer, `straight` in the read buffer: it is written from there.
    `copy` goes from file to file. `cast` is what of `read` is converted. `crosses` is equal on all ranks: does any of them send
    anything?
    """

    crosses: bool
    read: Spans
    local_from: Tiles
    local_to: Tiles
    send: Tiles
    send_nbytes: Ints
    receive: Tiles
    receive_nbytes: Ints
    write: Spans
    straight: Spans
    copy: Copies
    cast: CastParts


@dataclass(frozen=True)
class _Parts:
    """The parts of stored boxes that lie in the slabs of a round."""

    row: Ints
    slab: Ints
    boxes: Boxes

    def take(self, index: Ints) -> "_Parts":
        return _Parts(self.row[index], self.slab[index], self.boxes.take(index))


def expand_round(plan: Plan, number: int, rank: int) -> RoundWork:
    """What `rank` does in round `number`."""
    slabs = plan.round_slabs(number)
    sources, targets = (_parts(plan, side, slabs) for side in (plan.source, plan.target))
    once = targets.take(plan.target.is_own[targets.row])
    reads = sources.take(plan.source.rank[sources.row] == rank)
    lands = once.take(plan.target.rank[once.row] == rank)
    mine = targets.take(plan.target.rank[targets.row] == rank)
    read_first, read_last = plan.source.stored.spans(reads.row, reads.boxes)
    place_source = _Placed(plan.source.stored, reads, read_first)

    landed, source_of, come_from = _tiles(lands, sources, plan.source.rank)
    here = np.flatnonzero(come_from == rank)
    read_of = _index_of(reads.row, sources.row[source_of[here]], reads.slab, sources.slab[source_of[here]])
    in_source = place_source.tiles(read_of, landed.boxes.take(here))
    # Of a part that one tile makes up, in the order in which it is read, no copy is needed.
    as_read = (landed.boxes.take(here).volume == lands.boxes.take(landed.index[here]).volume) & in_source.is_contiguous
    tiles_read, target_of, to = _tiles(reads, once, plan.target.rank)
    sends = np.flatnonzero(to != rank)

    twin = _index_of(lands.row, plan.target.twin[mine.row], lands.slab, mine.slab)
    is_read = np.full(len(reads.row), bool(plan.hashing))
    is_converted = plan.source.arrays.converted_nbytes[plan.source.array[reads.row]] > 0
    is_read |= is_converted
    is_read[read_of[~as_read]] = is_read[tiles_read.index[sends]] = True
    # What is wanted in several places is read once, too.
    wanted = np.bincount(twin, minlength=len(lands.row))[landed.index[here]] * landed.boxes.take(here).volume
    is_read |= np.bincount(read_of, weights=wanted, minlength=len(reads.row)) > reads.boxes.volume
    read, read_position = _spans(plan.source, reads.take(is_read))
    shift = np.zeros(len(reads.row), np.int64)  # from the place in the file to the place in the read buffer
    shift[is_read] = read_position - read_first[is_read]

    # Where the first byte of each part that lands is: in the write buffer, in the read buffer, or in the source file.
    position = np.empty(len(lands.row), np.int64)
    way = np.full(len(lands.row), _ASSEMBLED)
    way[landed.index[here[as_read]]] = np.where(is_read[read_of[as_read]], _STRAIGHT, _COPIED)
    position[landed.index[here[as_read]]] = in_source.position[as_read] + shift[read_of[as_read]]
    landing, land_position = _spans(plan.target, lands.take(way == _ASSEMBLED))
    position[way == _ASSEMBLED] = land_position
    source_file = np.zeros(len(lands.row), np.int64)
    source_file[landed.index[here]] = plan.source.arrays.file[plan.source.array[reads.row[read_of]]]

    place_read = _Placed(plan.source.stored, reads, read_first + shift)
    place_land = _Placed(plan.target.stored, lands, position)
    # Both ends sort a message alike: by slab, then source row, then target row.
    receives = _message_order(
        np.flatnonzero(come_from != rank),
        come_from,
        lands.slab[landed.index],
        sources.row[source_of],
        lands.row[landed.index],
    )
    sends = _message_order(sends, to, reads.slab[tiles_read.index], reads.row[tiles_read.index], once.row[target_of])
    way, position = way[twin], position[twin]
    return RoundWork(
        crosses=bool(plan.round_crosses[number]),
        read=read,
        local_from=place_read.tiles(read_of[~as_read], landed.boxes.take(here[~as_read])),
        local_to=place_land.tiles(landed.index[here[~as_read]], landed.boxes.take(here[~as_read])),
        send=place_read.tiles(tiles_read.index[sends], tiles_read.boxes.take(sends)),
        send_nbytes=_nbytes_by_rank(tiles_read.boxes.take(sends), to[sends], plan.nranks),
        receive=place_land.tiles(landed.index[receives], landed.boxes.take(receives)),
        receive_nbytes=_nbytes_by_rank(landed.boxes.take(receives), come_from[receives], plan.nranks),
        write=_written(plan.target, mine, position, way == _ASSEMBLED, landing.buffer_nbytes),
        straight=_written(plan.target, mine, position, way == _STRAIGHT, read.buffer_nbytes),
        cast=CastParts(
            place_read.tiles(np.flatnonzero(is_converted), reads.boxes.take(is_converted)),
            plan.slab_tensor[slabs][reads.slab[is_converted]],
        ),
        copy=_copies(plan.target, mine, source_file[twin], position, way == _COPIED),
    )


_ASSEMBLED, _STRAIGHT, _COPIED = range(3)


def _parts(plan: Plan, side: Side, slabs: slice) -> _Parts:
    """The boxes of every slab's tensor, cut to the slab; slabs are numbered within the round."""
    tensor = plan.slab_tensor[slabs]
    first, count = side.first[tensor], side.first[tensor + 1] - side.first[tensor]
    slab = np.repeat(np.arange(len(tensor)), count)
    row = np.arange(len(slab)) - np.repeat(np.cumsum(count) - count, count) + np.repeat(first, count)
    boxes = side.stored.parts(row, plan.slabs.take(slabs).take(slab))
    parts = _Parts(row, slab, boxes)
    return parts.take(np.flatnonzero(boxes.nonempty))


def _spans(side: Side, parts: _Parts) -> tuple[Spans, Ints]:
    """The spans of the parts, in file order, and the buffer position of each part's first byte."""
    first, last = side.stored.spans(parts.row, parts.boxes)
    array = side.array[parts.row]
    order = np.lexsort((last, first, side.arrays.file[array]))
    array, first, last = array[order], first[order], last[order]
    runs, run = _runs(side.arrays.file[array], first, last)
    # A run takes its length, the bytes that align it, and the bytes that bring the next one back to a multiple of 8.
    room = (runs.nbytes + runs.offset % 8 + 7) // 8 * 8
    runs = replace(runs, position=np.cumsum(room) - room + runs.offset % 8)
    placed = runs.position[run] + first - runs.offset[run]
    position = np.empty(len(order), np.int64)
    position[order] = placed
    return Spans(array, first, last - first, placed, runs, int(room.sum())), position


def _runs(file: Ints, first: Ints, last: Ints, position: Ints | None = None) -> tuple[Runs, Ints]:
    """Spans, in file order, that touch or overlap, as one run each; and the run of each span.

    With `position`, spans must also lie in the buffer as they lie in the file.
    """
    if not len(file):
        return Runs(file, first, last, first), file
    reached = np.maximum.accumulate(file * (1 + int(last.max())) + last) - file * (1 + int(last.max()))
    joined = (file[1:] == file[:-1]) & (first[1:] <= reached[:-1])
    if position is not None:
        joined &= first[1:] - first[:-1] == position[1:] - position[:-1]
    begins = np.append(True, ~joined)
    run = np.cumsum(begins) - 1
    ends = np.append(~joined, True)
    offset = first[begins]
    at = np.zeros(len(offset), np.int64) if position is None else position[begins]
    return Runs(file[begins], offset, reached[ends] - offset, at), run


@dataclass(frozen=True)
class _Met:
    index: Ints
    boxes: Boxes


def _tiles(mine: _Parts, others: _Parts, rank_of_other: Ints) -> tuple[_Met, Ints, Ints]:
    """Where my parts meet others of the same slab: index into `mine` with the tile, index into `others`, the other's rank."""
    i, j = join(mine.boxes, others.boxes, mine.slab, others.slab)
    return _Met(i, meet(mine.boxes.take(i), others.boxes.take(j))), j, rank_of_other[others.row[j]]


def _message_order(chosen: Ints, rank: Ints, slab: Ints, source_row: Ints, target_row: Ints) -> Ints:
    return chosen[np.lexsort((target_row[chosen], source_row[chosen], slab[chosen], rank[chosen]))]


def _index_of(rows: Ints, wanted_rows: Ints, slabs: Ints, wanted_slabs: Ints) -> Ints:
    """Where the pairs (row, slab) stand in the list of pairs that holds each of them once."""
    nslabs = int(slabs.max(initial=0)) + 1
    keys = rows * nslabs + slabs
    order = np.argsort(keys)
    return order[np.searchsorted(keys[order], wanted_rows * nslabs + wanted_slabs)]


@dataclass(frozen=True)
class _Placed:
    """Parts and where their spans begin in a buffer."""

    stored: StoredBoxes
    parts: _Parts
    position: Ints

    def tiles(self, index: Ints, boxes: Boxes) -> Tiles:
        stride = self.stored.stride[self.parts.row[index]]
        within = ((boxes.start - self.parts.boxes.start[index]) * stride).sum(axis=1)
        return Tiles(self.position[index] + within, stride, boxes.stop - boxes.start)


def _nbytes_by_rank(boxes: Boxes, rank: Ints, nranks: int) -> Ints:
    nbytes = np.zeros(nranks, np.int64)
    np.add.at(nbytes, rank, boxes.volume)
    return nbytes


def _written(side: Side, mine: _Parts, position: Ints, chosen: np.ndarray, buffer_nbytes: int) -> Spans:
    """The spans to write of the chosen parts, each from its position in the buffer."""
    mine, position = mine.take(chosen), position[chosen]
    first, last = side.stored.spans(mine.row, mine.boxes)
    array = side.array[mine.row]
    order = np.lexsort((first, side.arrays.file[array]))
    array, first, last, position = array[order], first[order], last[order], position[order]
    runs, _ = _runs(side.arrays.file[array], first, last, position)
    return Spans(array, first, last - first, position, runs, buffer_nbytes)


def _copies(side: Side, mine: _Parts, source_file: Ints, source_offset: Ints, chosen: np.ndarray) -> Copies:
    """The chosen parts, each from its place in a source file; what follows on in both files is one copy."""
    mine, source_file, source_offset = mine.take(chosen), source_file[chosen], source_offset[chosen]
    first, last = side.stored.spans(mine.row, mine.boxes)
    file = side.arrays.file[side.array[mine.row]]
    order = np.lexsort((first, file))
    source_file, source_offset, file, first, last = (c[order] for c in (source_file, source_offset, file, first, last))
    goes_on = (file[1:] == file[:-1]) & (source_file[1:] == source_file[:-1]) & (first[1:] == last[:-1])
    goes_on &= source_offset[1:] - source_offset[:-1] == first[1:] - first[:-1]
    begins, ends = np.append(True, ~goes_on)[: len(file)], np.append(~goes_on, True)[: len(file)]
    return Copies(source_file[begins], source_offset[begins], file[begins], first[begins], last[ends] - first[begins])
