"""More than 2**32 elements in one tensor, more than 4 GiB from one rank to another; and how often files are read and written."""

import hashlib
import json
import math
import os
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest

from tests.jobs.large import GIB, MIB, fragments_of, head_of, large_folder, reshard_watched, write_array
from tests.jobs.outcome import assert_done, write_sample
from tests.mpirun import MPIS, run_mpi
from tests.reference.fragments import sha256, shard_name
from tests.reference.shards import StoredArray, write_shard
from tests.unit.manifests import manifest, tensor, text_of, whole

# ---- one tensor of more than 2**32 elements

NBYTES = (9 << 29) + 6  # and elements, of one byte
MARK_NBYTES = 8
STEP_NBYTES = 256 << 10
RANKS_NBYTES = 2 * GIB  # of memory: far more than the ranks should use
TP = {"tp": 2}
SMALL = bytes(range(251))
ONE_AXIS, TWO_ROWS = (NBYTES,), (2, NBYTES // 2)


def marks() -> Iterator[tuple[int, int, bytes]]:
    """(first, last, mark): the bytes [first, last) are a mark and zeros. A mark a MiB, another one each time, across its edge."""
    for k in range(-(-(NBYTES + 3) // MIB)):
        first, last = max(k * MIB - 3, 0), min((k + 1) * MIB - 3, NBYTES)
        yield first, last, (k | 1 << 63).to_bytes(MARK_NBYTES, "big")[: last - first]


@cache
def digest_of_marks() -> str:
    zeros, running = memoryview(bytes(MIB)), hashlib.sha256()
    for first, last, mark in marks():
        running.update(mark)
        running.update(zeros[: last - first - len(mark)])
    return f"sha256:{running.hexdigest()}"


def write_huge(folder: Path, shape: tuple[int, ...]) -> Path:
    """tp=2, where each rank alone holds one tensor: a huge one, in a file of holes between marks, and a small one."""
    small_shape = (len(SMALL),)
    huge = tensor("head.weight", shape, {(0,): [whole(shape)]}, TP, dtype="uint8", fragment_digest=digest_of_marks())
    small = tensor(
        "embed.weight", small_shape, {(1,): [whole(small_shape)]}, TP, dtype="uint8", fragment_digest=sha256(SMALL)
    )
    folder.mkdir()
    (folder / "case.json").write_bytes(text_of(manifest(TP, huge, small)))
    write_shard(folder / shard_name(1), {small[0]["payload_key"]: StoredArray("uint8", [*small_shape], SMALL)})
    entry = {"dtype": "U8", "shape": shape, "data_offsets": [0, NBYTES]}
    header = json.dumps({huge[0]["payload_key"]: entry}).encode()
    with open(folder / shard_name(0), "wb") as shard:
        shard.write(len(header).to_bytes(8, "little") + header)
        data_start = shard.tell()
        shard.truncate(data_start + NBYTES)
        for first, _, mark in marks():
            os.pwrite(shard.fileno(), mark, data_start + first)
    return folder


def assert_holds_the_marks(shard: Path, key: str) -> None:
    """Every byte of the array in that file is as it was made."""
    entries, data_start = head_of(shard)
    assert entries.keys() == {key} and entries[key]["data_offsets"] == [0, NBYTES]
    running, buffer = hashlib.sha256(), memoryview(bytearray(MIB))
    with open(shard, "rb", buffering=0) as file:
        file.seek(data_start)
        for first, last, mark in marks():
            assert file.readinto(buffer[: last - first]) == last - first
            assert buffer[: len(mark)] == mark, (
                f"bytes from {first} on are {buffer[: len(mark)].hex()}, not {mark.hex()}"
            )
            running.update(buffer[: last - first])
    assert f"sha256:{running.hexdigest()}" == digest_of_marks(), "the marks are there, but there is more between them"


# Neither MPI has anything to do with shapes: one each will do.
@pytest.mark.large
@pytest.mark.parametrize(("mpi", "shape"), [*zip(MPIS, (ONE_AXIS, TWO_ROWS), strict=True)], ids=MPIS)
def test_more_than_4_gib_go_from_one_rank_to_another(mpi, shape, tmp_path):
    """The stages of pp are chosen by name: what one rank holds, the other one writes."""
    assert math.prod(shape) == NBYTES > 1 << 32 and (len(shape) == 1 or shape[1] > 1 << 31)
    with large_folder(NBYTES + 64 * MIB, RANKS_NBYTES, tmp_path) as folder:
        source, out, report = write_huge(folder / "source", shape), folder / "out", folder / "report.json"
        options = ("--target", "pp=2", "--writers", "owner", "--progress", "off", "--report", report)
        assert_done(run_mpi(2, "reshard", source, out, *options, mpi=mpi, timeout=120))
        sent = [rank["sent_nbytes"] for rank in json.loads(report.read_text())["ranks"]]
        assert sent == [NBYTES, len(SMALL)]
        digests = {f["fqn"]: (f["payload_file"], f["fragment_digest"]) for f in fragments_of(out)}
        assert digests == {
            "embed.weight": (shard_name(0), sha256(SMALL)),
            "head.weight": (shard_name(1), digest_of_marks()),
        }
        assert (out / shard_name(0)).read_bytes().endswith(SMALL)
        assert_holds_the_marks(out / shard_name(1), "head.weight")
        finds_a_flipped_byte(source, out, shape, mpi)


def finds_a_flipped_byte(source: Path, out: Path, shape: tuple[int, ...], mpi: str) -> None:
    """Every other byte is seen to be equal, with the arithmetic of whole tensors."""
    flipped = (1 << 32) + 4711
    shard = out / shard_name(1)
    with open(shard, "r+b") as file:
        file.seek(head_of(shard)[1] + flipped)
        file.write(b"\1")
    done = assert_done(run_mpi(2, "compare", source, out, "--json", "--progress", "off", mpi=mpi, timeout=120), 1)
    (difference,) = json.loads(done)["differences"]
    assert (difference["tensor"], difference["count"]) == ("head.weight", 1)
    assert np.ravel_multi_index(difference["first_index"], shape) == flipped


# ---- calls of the system

ROUND_NBYTES = 4 * MIB
MEMORY = "28M"  # seven buffers of a round


@dataclass(frozen=True)
class Call:
    """Bytes [first, last) of the data of a shard, read or written by one rank in one call."""

    rank: int
    kind: str
    shard: Path
    first: int
    last: int


def reshard_counted(
    nranks: int, source: Path, out: Path, *options: str, changes: bool = False
) -> tuple[dict, list[Call]]:
    """The report of a job, and its calls for the data of shards: those for headers and other files are left out."""
    report, notes = reshard_watched(nranks, source, out, *options, "--memory", MEMORY, changes=changes)
    shards = {os.path.realpath(shard): shard for shard in source.glob("rank-*")}
    shards |= {f"{os.path.realpath(out)}.partial/{shard.name}": shard for shard in out.glob("rank-*")}
    data_starts = {shard: head_of(shard)[1] for shard in shards.values()}
    calls = [
        Call(rank, kind, shards[path], offset - data_starts[shards[path]], offset + nbytes - data_starts[shards[path]])
        for rank, noted in enumerate(notes)
        for kind, path, offset, nbytes in noted["calls"]
        if path in shards
    ]
    return report, [call for call in calls if call.last > 0]


def assert_reads_one_member_of_each_box(calls: list[Call], source: Path) -> None:
    """Whole, and no byte of it twice."""
    read = set()
    for shard in source.glob("rank-*"):
        spans = sorted((call.first, call.last) for call in calls if call.kind == "read" and call.shard == shard)
        assert all(last <= first for (_, last), (first, _) in pairwise(spans)), f"{shard.name}: a byte is read twice"
        for key, entry in head_of(shard)[0].items():
            begin, end = entry["data_offsets"]
            nbytes = sum(max(min(last, end) - max(first, begin), 0) for first, last in spans)
            assert nbytes in (0, end - begin), f"{shard.name}: {key}: {nbytes} of {end - begin} bytes are read"
            read |= {(shard.name, key)} if nbytes else set()
    nmembers = Counter()
    for fragment in fragments_of(source):
        is_read = (fragment["payload_file"], fragment["payload_key"]) in read
        nmembers[fragment["logical_tensor_id"], *fragment["element_offset"]] += is_read
    assert set(nmembers.values()) == {1}


def assert_writes_every_byte_once(calls: list[Call], out: Path) -> None:
    for shard in out.glob("rank-*"):
        spans = sorted((call.first, call.last) for call in calls if call.kind == "write" and call.shard == shard)
        ends = [0, *(last for _, last in spans)]
        assert [first for first, _ in spans] == ends[:-1], shard.name
        assert ends[-1] == shard.stat().st_size - head_of(shard)[1]


def pieces(calls: Sequence[Call], nways: int = 1) -> int:
    """In how many calls, at most, the arrays need be read or written that these calls touch.

    What is moved in several rounds is cut into equal slabs, as few as will do: each is more than half a round for the rank that
    has most of it. Of that, an array gets at least one part in `nways`.
    """
    nbytes: Counter[tuple[Path, str]] = Counter()
    for call in calls:
        for key, entry in head_of(call.shard)[0].items():
            begin, end = entry["data_offsets"]
            nbytes[call.shard, key] += max(min(call.last, end) - max(call.first, begin), 0)
    return sum(1 + 2 * nways * n // ROUND_NBYTES for n in nbytes.values() if n)


def assert_few_calls(calls: Sequence[Call], out: Path, copies: bool, nways: int) -> None:
    """Of one rank. `copies`: what goes from file to file is read in the pieces in which it is written.

    Else it is hashed on its way, in steps of 256 KiB.
    """
    reads = [call for call in calls if call.kind == "read" and call.shard.parent != out]
    again = [call for call in calls if call.kind == "read" and call.shard.parent == out]
    writes = [call for call in calls if call.kind == "write"]
    assert len(reads) <= pieces(reads) + (pieces(writes, nways) if copies else nbytes_of(reads) // STEP_NBYTES)
    assert len(writes) <= pieces(writes, nways) + (0 if copies else nbytes_of(writes) // STEP_NBYTES)
    # What is read back for a digest comes in pieces of a MiB.
    assert len(again) <= pieces(again) + nbytes_of(again) // MIB


def nbytes_of(calls: Iterable[Call]) -> int:
    return sum(call.last - call.first for call in calls)


def assert_moves_each_byte_once(
    nranks: int, source: Path, out: Path, target: str, nways: int, verify: str, writers: str
) -> None:
    """In few calls; the report says of each rank how many bytes those were. `nways`: between so many arrays is a slab divided."""
    report, calls = reshard_counted(nranks, source, out, "--target", target, "--verify", verify, "--writers", writers)
    assert report["nrounds"] > 2
    assert_reads_one_member_of_each_box(calls, source)
    assert_writes_every_byte_once(calls, out)
    for rank, measured in enumerate(report["ranks"]):
        mine = [call for call in calls if call.rank == rank]
        assert_few_calls(mine, out, copies=verify == "none", nways=nways)
        for key, kind, folder in (
            ("read_nbytes", "read", source),
            ("read_again_nbytes", "read", out),
            ("written_nbytes", "write", out),
        ):
            assert measured[key] == nbytes_of(c for c in mine if c.kind == kind and c.shard.parent == folder), key


@pytest.fixture(scope="module")
def sample(tmp_path_factory) -> Path:
    return write_sample(tmp_path_factory.mktemp("sample") / "sample", "64M")


@pytest.mark.parametrize("verify", ["none", "source"])
@pytest.mark.parametrize(
    ("nranks", "target", "nways", "writers"),
    [
        pytest.param(4, "tp=4", 2, "shared", id="nothing is sent"),
        pytest.param(4, "tp=4", 2, "owner", id="what a rank writes was read by several"),
        pytest.param(3, "single", 1, "shared", id="several write a shard"),
        pytest.param(2, "fsdp=3", 1, "owner", id="a rank reads and writes several shards"),
    ],
)
def test_a_sample_is_read_and_written_once_in_few_calls(nranks, target, nways, writers, verify, sample, tmp_path):
    assert_moves_each_byte_once(nranks, sample, tmp_path / "out", target, nways, verify, writers)


@pytest.mark.parametrize(("verify", "writers"), [("none", "shared"), ("source", "shared"), ("source", "owner")])
def test_columns_are_put_together_in_memory_and_written_in_few_calls(verify, writers, tmp_path):
    """Rows of 16 KiB become rows of 4 KiB: with a call for each, there would be 16384."""
    source = write_array(tmp_path / "source", "w", (4096, 8192), "bfloat16", {"fsdp": 4}, axis=0, layout={"tp": 1})
    assert_moves_each_byte_once(4, source, tmp_path / "out", "tp=4", 4, verify, writers)


PERMUTED = '[[operations]]\npermute = "model.embed_tokens.weight"\nunit = 16\nto = "halves"\n'


@pytest.mark.parametrize("options", [(), ("--layout", "permuted.toml"), ("--cast", "float32")], ids=" ".join)
def test_full_reads_every_byte_of_the_source_once(options, tmp_path, monkeypatch):
    """Also what the target has no need of, replicas, and what is converted as it is read."""
    monkeypatch.chdir(tmp_path)
    Path("permuted.toml").write_text(PERMUTED)
    source = write_sample(tmp_path / "source", "8M", tp=2, dp=2)
    arguments = ("--target", "tp=4", "--verify", "full", *options)
    _, calls = reshard_counted(3, source, tmp_path / "out", *arguments, changes=bool(options))
    for shard in source.glob("rank-*"):
        reads = [call for call in calls if call.kind == "read" and call.shard == shard]
        assert nbytes_of(reads) == shard.stat().st_size - head_of(shard)[1]
