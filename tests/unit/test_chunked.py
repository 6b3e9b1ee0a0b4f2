"""Datasets that are no byte span: which bands they are read in, that each chunk is read once, and how reading fails."""

import io
from pathlib import Path

import h5py
import numpy as np
import pytest

from reshard_mpi.errors import InputError, StorageError
from reshard_mpi.storage.chunked import ChunkedArray, OpenChunked, SpanFile, guarded, nchunks
from reshard_mpi.storage.files import Files
from reshard_mpi.storage.source import read_headers

# (why this row is here, shape, chunk, axis of the bands, rows of a band)
SHAPES = [
    ("rows of chunks", (8, 6), (3, 4), 0, 3),
    ("one axis", (100,), (7,), 0, 7),
    ("a chunk that is everything", (5, 4), (5, 4), 0, 5),
    ("one index of the first axis a chunk", (5, 8, 6), (1, 3, 4), 1, 3),
    ("two of them", (3, 1, 7, 2), (1, 1, 2, 2), 2, 2),
    ("an axis of one element goes before", (1, 9), (1, 4), 1, 4),
    ("chunks of one element", (3, 5), (1, 1), 1, 1),
]


def written(path: Path, shape: tuple[int, ...], chunk: tuple[int, ...], **options: object) -> np.ndarray:
    values = np.random.default_rng(len(shape)).integers(0, 1 << 30, shape, np.int32)
    with h5py.File(path, "w") as file:
        file.create_dataset("x", data=values, chunks=chunk, **options)
    return values


class Counted:
    """A file whose spans are read, and how many bytes that were."""

    def __init__(self, path: Path):
        self.content, self.nbytes = path.read_bytes(), 0

    def read(self, offset: int, into: memoryview) -> None:
        into[:] = self.content[offset : offset + len(into)]
        self.nbytes += len(into)


def opened(path: Path, shape: tuple[int, ...], chunk: tuple[int, ...]) -> tuple[ChunkedArray, OpenChunked, Counted]:
    file = Counted(path)
    array = ChunkedArray(len(file.content), "x", 4, shape, chunk, len(file.content), "x of the file")
    return array, array.open(file.read, "file"), file


@pytest.mark.parametrize(("why", "shape", "chunk", "axis", "nrows"), SHAPES)
def test_bands_are_rows_of_chunks(why, shape, chunk, axis, nrows):
    array = ChunkedArray(0, "x", 4, shape, chunk, 0, "w")
    assert (array.axis, array.band_nrows) == (axis, nrows)
    assert array.nbytes == 4 * np.prod(shape)
    assert array.held_nbytes == nrows * 4 * np.prod(shape[axis + 1 :]) + 8 * np.prod(chunk)


@pytest.mark.parametrize("options", [{}, {"compression": "gzip", "shuffle": True}], ids=["plain", "gzip"])
@pytest.mark.parametrize(("why", "shape", "chunk", "axis", "nrows"), SHAPES)
def test_any_part_is_what_h5py_wrote(why, shape, chunk, axis, nrows, options, tmp_path):
    content = written(tmp_path / "f.h5", shape, chunk, **options).tobytes()
    array, reading, _ = opened(tmp_path / "f.h5", shape, chunk)
    noise = np.random.default_rng(7)
    for _ in range(60):
        first, last = sorted(noise.integers(0, array.nbytes + 1, 2).tolist())
        into = bytearray(last - first)
        reading.read(first, memoryview(into))
        assert bytes(into) == content[first:last]
    reading.close()


@pytest.mark.parametrize("step", [1 << 10, 10_000, 100_000, 1 << 20])
def test_in_order_every_chunk_is_read_once_whatever_the_step(step, tmp_path):
    shape, chunk = (1000, 96), (32, 40)
    content = written(tmp_path / "f.h5", shape, chunk, compression="gzip").tobytes()
    array, reading, file = opened(tmp_path / "f.h5", shape, chunk)
    found = bytearray(array.nbytes)
    for first in range(0, array.nbytes, step):
        reading.read(first, memoryview(found)[first : first + step])
    reading.close()
    assert found == content
    assert file.nbytes < 1.1 * len(file.content)


def test_a_file_shows_them_behind_its_end_one_after_the_other(tmp_path):
    a = written(tmp_path / "f.h5", (8, 6), (3, 4))
    with h5py.File(tmp_path / "f.h5", "a") as file:
        file.create_dataset("y", data=a[::-1], chunks=(2, 6), compression="lzf")
        file["span"] = a[:2]
    headers, faults = read_headers(tmp_path, ["f.h5"])
    assert not faults
    arrays = headers["f.h5"]
    assert arrays["span"].shown is None
    shown = sorted((array for array in arrays.values() if array.shown), key=lambda array: array.begin)
    assert [array.begin - (tmp_path / "f.h5").stat().st_size for array in shown] == [0, a.nbytes]
    with Files(tmp_path) as files:
        files.show("f.h5", [array.shown for array in shown])
        both = bytearray(2 * a.nbytes)
        files.read("f.h5", shown[0].begin, memoryview(both))
        assert bytes(both) == a.tobytes() + a[::-1].tobytes()
        span = bytearray(48)
        files.read("f.h5", arrays["span"].begin, memoryview(span))
        assert bytes(span) == a[:2].tobytes()


def test_what_keeps_a_file_from_being_read_is_told_rather_than_what_hdf5_makes_of_it(tmp_path):
    written(tmp_path / "f.h5", (64, 64), (8, 64))
    array, reading, file = opened(tmp_path / "f.h5", (64, 64), (8, 64))

    def fail(offset: int, into: memoryview) -> None:
        raise StorageError("disk", "is on fire")

    reading._spans._read = fail
    with pytest.raises(StorageError, match="on fire"):
        reading.read(0, memoryview(bytearray(array.nbytes)))
    with pytest.raises(StorageError, match="on fire"):
        array.open(fail, "file")


def test_an_error_of_h5py_becomes_one_line_and_keeps_none_of_its_frames():
    spans = SpanFile(lambda offset, into: None, 4096)
    with pytest.raises(InputError, match="HDF5 can't read it") as caught:
        guarded(lambda: h5py.File(spans, "r"), "where", spans)
    assert caught.value.__context__ is None and caught.value.__cause__ is None


def test_a_span_file_ends_where_it_is_said_to():
    spans = SpanFile(lambda offset, into: None, 10)
    assert spans.seek(-4, io.SEEK_END) == 6
    assert spans.readinto(bytearray(8)) == 4
    assert (spans.tell(), spans.readinto(bytearray(8))) == (10, 0)


def test_the_number_of_chunks_counts_those_at_the_edge():
    assert (nchunks((8, 6), (3, 4)), nchunks((100,), (100,)), nchunks((), ())) == (6, 1, 1)
