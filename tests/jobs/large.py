"""Large checkpoints for tests: room for them, jobs that are watched, and tensors read without the program that wrote them."""

import contextlib
import fcntl
import json
import math
import os
import shutil
import struct
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from tests.jobs import watched
from tests.jobs.outcome import assert_done
from tests.mpirun import run_python_mpi
from tests.reference.dtypes import bits
from tests.reference.fragments import box_of, sha256, slices
from tests.reference.shards import StoredArray, write_shard
from tests.unit.manifests import everywhere, manifest, tensor, text_of

MIB, GIB = 1 << 20, 1 << 30
MEMORY = Path("/dev/shm")


@contextlib.contextmanager
def large_folder(nbytes: int, ranks_nbytes: int, beside: Path) -> Iterator[Path]:
    """A folder with room for `nbytes` beside ranks that use `ranks_nbytes` of memory; emptied whatever happens.

    In memory where there is enough of it, else in `beside`; without room the test is skipped. There is one such folder at a
    time, or two tests would count on the same room.
    """
    with open(Path(tempfile.gettempdir()) / f"reshard-large-{os.getuid()}.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        memory_nbytes = available_memory_nbytes()
        for parent, needed_nbytes in ((MEMORY, nbytes + ranks_nbytes), (beside, ranks_nbytes)):
            is_there = parent.is_dir() and os.access(parent, os.W_OK)
            if is_there and memory_nbytes >= needed_nbytes and shutil.disk_usage(parent).free >= nbytes:
                break
        else:
            pytest.skip(
                f"needs {nbytes / GIB:.1f} GiB free in {MEMORY} and {(nbytes + ranks_nbytes) / GIB:.1f} GiB of memory, or "
                f"{nbytes / GIB:.1f} GiB free in {beside} and {ranks_nbytes / GIB:.1f} GiB of memory; "
                f"{memory_nbytes / GIB:.1f} GiB of memory are available"
            )
        folder = Path(tempfile.mkdtemp(prefix="reshard-large-", dir=parent))
        try:
            yield folder
        finally:
            shutil.rmtree(folder)


def available_memory_nbytes() -> int:
    """Of the machine, or of the container where that may use less."""
    lines = dict(line.split(":") for line in Path("/proc/meminfo").read_text().splitlines())
    found = int(lines["MemAvailable"].split()[0]) * 1024
    group = Path("/sys/fs/cgroup")
    with contextlib.suppress(OSError, ValueError):  # no such group, or "max"
        found = min(found, int((group / "memory.max").read_text()) - int((group / "memory.current").read_text()))
    return found


def write_array(
    folder: Path,
    name: str,
    shape: tuple[int, ...],
    dtype: str,
    axes: dict[str, int],
    axis: int,
    layout: dict[str, object] | None = None,
) -> Path:
    """A checkpoint of one tensor of random bytes, cut along a tensor axis into equal parts, one a rank.

    layout: what is said of mesh axes that the coordinates don't show.
    """
    rng, parts = np.random.default_rng(len(shape)), everywhere(axes)
    extent = tuple(size // len(parts) if a == axis else size for a, size in enumerate(shape))
    starts = [tuple(rank * n if a == axis else 0 for a, n in enumerate(extent)) for rank in range(len(parts))]
    held = {where: [(start, extent)] for where, start in zip(parts, starts, strict=True)}
    fragments = tensor(name, shape, held, axes, dtype=dtype)
    folder.mkdir()
    for fragment in fragments:
        array = StoredArray(dtype, list(extent), rng.bytes(math.prod(extent) * bits(dtype) // 8))
        fragment["fragment_digest"] = sha256(array.raw)
        write_shard(folder / fragment["payload_file"], {fragment["payload_key"]: array})
    topology = {"source": axes or {"world_size": 1}, "target": {"world_size": 1}, "layout": {name: layout or {}}}
    (folder / "case.json").write_bytes(text_of(manifest(axes, fragments, topology=topology)))
    return folder


def reshard_watched(
    nranks: int, source: Path, out: Path, *options: str, mpi: str = "mpich", changes: bool = False
) -> tuple[dict, list[dict]]:
    """The report of a job, and what `watched` noted of each rank. It wrote the same tensors to OUT, unless it `changes` them."""
    report = out.with_suffix(".report")
    done, notes = run_watched(
        nranks, out.with_suffix(".notes"), "reshard", source, out, *options, "--report", report, mpi=mpi
    )
    assert_done(done)
    if not changes:
        assert_same_tensors(source, out)
    return json.loads(report.read_text()), notes


def run_watched(
    nranks: int, notes: Path, *arguments: object, mpi: str = "mpich"
) -> tuple[subprocess.CompletedProcess[str], list[dict]]:
    """A command under mpirun, and what `watched` noted of each rank in the folder `notes`."""
    notes.mkdir()
    done = run_python_mpi(nranks, watched.__file__, notes, *arguments, "--progress", "off", mpi=mpi, timeout=120)
    return done, [json.loads((notes / f"{rank}.json").read_text()) for rank in range(nranks)]


def head_of(shard: Path) -> tuple[dict[str, dict], int]:
    """Key -> entry of the header of a safetensors file, and the byte at which its data starts."""
    with open(shard, "rb") as file:
        (length,) = struct.unpack("<Q", file.read(8))
        header = json.loads(file.read(length))
    return {key: entry for key, entry in header.items() if key != "__metadata__"}, 8 + length


def fragments_of(folder: Path) -> list[dict]:
    return json.loads((folder / "case.json").read_text())["fragments"]


def assert_same_tensors(a: Path, b: Path) -> None:
    """Byte by byte, by numpy; one tensor of each at a time is held in memory."""
    ours, theirs = _Tensors(a), _Tensors(b)
    assert ours.names == theirs.names
    for name in sorted(ours.names):
        one, other = ours.whole(name), theirs.whole(name)
        assert one.shape == other.shape, name
        assert one.tobytes() == other.tobytes(), (
            f"{name}: first byte that differs: {np.argmax(one.ravel() != other.ravel())}"
        )


class _Tensors:
    def __init__(self, folder: Path):
        self._fragments: dict[str, list[dict]] = {}
        for fragment in fragments_of(folder):
            self._fragments.setdefault(fragment["logical_tensor_id"], []).append(fragment)
        self._stored = {
            (shard.name, key): array for shard in folder.glob("rank-*") for key, array in _stored_arrays(shard).items()
        }
        self.names = self._fragments.keys()

    def whole(self, name: str) -> NDArray[np.uint8]:
        """The tensor, with the bytes of an element as its last axis."""
        parts = [(f, self._stored[f["payload_file"], f["payload_key"]]) for f in self._fragments[name]]
        found = np.empty((*parts[0][0]["global_shape"], parts[0][1].shape[-1]), np.uint8)
        for fragment, stored in parts:
            found[slices(*box_of(fragment))] = stored[slices(fragment["padding"]["before"], fragment["element_extent"])]
        return found


def _stored_arrays(shard: Path) -> dict[str, NDArray[np.uint8]]:
    """Key -> stored array, with the bytes of an element as its last axis."""
    entries, data_start = head_of(shard)
    data = np.memmap(shard, np.uint8, "r", offset=data_start) if entries else np.empty(0, np.uint8)
    return {key: data[slice(*entry["data_offsets"])].reshape(*entry["shape"], -1) for key, entry in entries.items()}
