"""No rank holds more than `--memory` and 150 MiB, whatever the checkpoint; on rank 0 also 4 KiB for each fragment."""

import hashlib
import json
import math
import shutil
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.jobs.large import GIB, MIB, fragments_of, head_of, large_folder, reshard_watched, run_watched, write_array
from tests.jobs.outcome import assert_done, assert_refused, write_sample
from tests.mpirun import run_mpi
from tests.reference.fragments import sha256, shard_name
from tests.reference.shards import StoredArray, write_shard
from tests.unit.manifests import manifest, tensor, text_of, whole

BUFFERS = "16M"  # rounds of 2.3 MiB
MOST_NBYTES = (16 + 150) * MIB
FRAGMENT_NBYTES = 4096  # of source and target, on rank 0
NTINY = 20_000  # 50,000 would take a minute


@dataclass(frozen=True)
class Peaks:
    """The most bytes that each rank has held: until the last round, as its report says, and until it left."""

    reported: list[int]
    found: list[int]


@pytest.fixture
def folder(tmp_path) -> Iterator[Path]:
    with large_folder(2 * GIB, GIB, tmp_path) as folder:
        yield folder


def peaks_of(nranks: int, source: Path, out: Path, target: str, writers: str, mpi: str = "mpich") -> Peaks:
    """Of a job that is seen to be right."""
    options = ("--target", target, "--writers", writers, "--memory", BUFFERS)
    report, notes = reshard_watched(nranks, source, out, *options, mpi=mpi)
    peaks = Peaks(*([rank["peak_rss_nbytes"] for rank in ranks] for ranks in (report["ranks"], notes)))
    assert all(0 < early <= late for early, late in zip(peaks.reported, peaks.found, strict=True))
    return peaks


def assert_within(found: Sequence[int], extra_nbytes: int = 0) -> None:
    """`extra_nbytes`: on rank 0."""
    allowed = [MOST_NBYTES + extra_nbytes, *(len(found) - 1) * [MOST_NBYTES]]
    assert all(peak <= most for peak, most in zip(found, allowed, strict=True)), (
        f"MiB: {[round(peak / MIB, 1) for peak in found]}, allowed {[round(most / MIB, 1) for most in allowed]}"
    )


@pytest.mark.large
@pytest.mark.parametrize(("writers", "mpi"), [("shared", "mpich"), ("owner", "mpich"), ("owner", "openmpi")])
def test_one_source_rank_holds_everything(writers, mpi, folder):
    """A quarter of it is more than a rank may hold."""
    source = write_sample(folder / "source", "512M", tp=1, pp=1)
    assert_within(peaks_of(4, source, folder / "out", "tp=4", writers, mpi).found)


@pytest.mark.large
@pytest.mark.parametrize(
    ("shape", "axes", "axis", "layout", "target", "writers"),
    [
        pytest.param((12800, 12288), {}, 0, {"tp": 1}, "tp=4", "shared", id="whole to columns"),
        pytest.param((12800, 12288), {"fsdp": 4}, 0, {"tp": 1}, "tp=4", "owner", id="rows to columns"),
        pytest.param((12800, 12288), {"tp": 4}, 1, {}, "single", "shared", id="columns to whole, two writers"),
        pytest.param((12800, 12288), {"tp": 4}, 1, {}, "single", "owner", id="columns to whole, one writer"),
        pytest.param((1, 64, 5 << 19), {"tp": 2}, 2, {}, "tp=4", "shared", id="axis 0 is 1, a row more than a round"),
        pytest.param((1, 64, 5 << 19), {"tp": 2}, 2, {}, "tp=4", "owner", id="axis 0 is 1, and all is sent"),
        pytest.param((1, 160, 1 << 20), {"tp": 4}, 2, {}, "tp=2", "owner", id="axis 0 is 1, a row less than a round"),
    ],
)
def test_a_tensor_is_larger_than_the_buffers(shape, axes, axis, layout, target, writers, folder):
    """By 300 MiB or more, half of which is about what a rank may hold at all."""
    source = write_array(folder / "source", "w", shape, "bfloat16", axes, axis, layout)
    assert_within(peaks_of(2, source, folder / "out", target, writers).found)


# ---- very many tensors


def write_tiny(folder: Path, ntensors: int) -> Path:
    """So many tensors of 32 bytes, on one rank."""
    arrays, fragments, shape = {}, [], (8,)
    for n in range(ntensors):
        raw = hashlib.sha256(n.to_bytes(4, "big")).digest()
        (fragment,) = tensor(f"layers.{n % 100}.t{n}", shape, {(): [whole(shape)]}, {}, fragment_digest=sha256(raw))
        arrays[fragment["payload_key"]] = StoredArray("float32", [*shape], raw)
        fragments.append(fragment)
    folder.mkdir()
    write_shard(folder / shard_name(0), arrays)
    (folder / "case.json").write_bytes(text_of(manifest({}, fragments)))
    return folder


def reshard_tiny(folder: Path, ntensors: int) -> tuple[Peaks, int]:
    """The peaks of a job with so many tensors, and its fragments of source and target."""
    source, out = write_tiny(folder / f"{ntensors}", ntensors), folder / f"{ntensors}-out"
    peaks = peaks_of(4, source, out, "fsdp=2", "shared")
    return peaks, sum(len(fragments_of(case)) for case in (source, out))


@pytest.fixture(scope="module")
def very_many(tmp_path_factory) -> tuple[Peaks, int]:
    return reshard_tiny(tmp_path_factory.mktemp("tiny"), NTINY)


@pytest.mark.thorough
def test_very_many_tiny_tensors_pass_through_the_rounds(very_many):
    peaks, nfragments = very_many
    assert nfragments == 3 * NTINY
    assert_within(peaks.reported, nfragments * FRAGMENT_NBYTES)
    assert_within([0, *peaks.found[1:]])


def test_a_fragment_costs_rank_0_no_more_than_it_may(very_many, tmp_path):
    peaks, nfragments = very_many
    fewer_peaks, nfewer = reshard_tiny(tmp_path, NTINY // 4)
    assert peaks.found[0] - fewer_peaks.found[0] <= (nfragments - nfewer) * FRAGMENT_NBYTES


# ---- what is compared


@pytest.mark.parametrize(
    ("dtype", "shape"), [("float4_e2m1fn", (2048, 6144)), ("float6_e2m3fn", (1024, 6144)), ("uint8", (6 << 20,))]
)
def test_elements_that_all_differ_are_counted_within_the_memory(dtype, shape, tmp_path):
    """6 MiB of them, or 4.5: of an element of a few bits the place was once a number of 8 bytes, and more."""
    one = write_array(tmp_path / "one", "w", shape, dtype, {"tp": 2}, axis=0)
    other = Path(shutil.copytree(one, tmp_path / "other"))
    for shard in other.glob("rank-*"):
        content, (_, data_start) = shard.read_bytes(), head_of(shard)
        shard.write_bytes(content[:data_start] + bytes(byte ^ 0xFF for byte in content[data_start:]))
    options = ("--memory", "64M", "--json")
    done, notes = run_watched(2, tmp_path / "notes", "compare", one, other, *options)
    (difference,) = json.loads(assert_done(done, 1))["differences"]
    assert (difference["first_index"], difference["count"]) == ([0] * len(shape), math.prod(shape))
    assert all(note["peak_rss_nbytes"] <= (64 + 150) * MIB for note in notes)


def test_too_little_memory_to_compare_or_verify_is_refused_with_what_would_do(tmp_path):
    source = write_array(tmp_path / "source", "w", (8, 8), "float32", {"tp": 2}, axis=0)
    for command, folders in (("verify", [source]), ("compare", [source, source])):
        line = assert_refused(run_mpi(2, command, *folders, "--memory", "1M"), 6, "--memory", "give at least")
        assert_done(run_mpi(2, command, *folders, "--memory", line.split()[-1]))
