"""What is fed with changed files, and the properties that hold whatever is in them.

A target reads its file as a job would, and as far as it goes: it ends with a ReshardError of the right kind, told on one line, or
with something that is sound. What was accepted is held against the independent reader of tests/reference, or against itself. The
properties are the same for hypothesis (test_hostile_files.py) and for `make fuzz` (__main__.py).

fixtures/v1/formats/dcp was saved by torch 2.13: `{"model": {w 2x3 float32, t transposed bfloat16, s 0-d, e empty}, "step": 7}`.
"""

import atexit
import functools
import math
import os
import shutil
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from reshard_mpi.check.whole import PART_NBYTES, whole_array
from reshard_mpi.checkpoint.checks import check_case
from reshard_mpi.checkpoint.manifest import Case, case_text, parse_case
from reshard_mpi.checkpoint.mesh import Mesh
from reshard_mpi.errors import InputError, IntegrityError, ReshardError, StorageError, UsageError
from reshard_mpi.layout.file import parse_layout
from reshard_mpi.layout.rules import Tensor
from reshard_mpi.plan.prepare import Selection, outgoing_of
from reshard_mpi.run.journal import JOURNAL
from reshard_mpi.run.lead import Lead
from reshard_mpi.run.move import News
from reshard_mpi.run.node_shards import Found
from reshard_mpi.run.wanted import Job
from reshard_mpi.storage.files import Files, file_stamps
from reshard_mpi.storage.safetensors import build_header
from reshard_mpi.storage.source import Source, load_alone, read_headers
from tests.fuzz.mutations import Mutate, bytes_changed, case_changed, journal_changed, json_changed
from tests.reference import checks
from tests.reference.dtypes import bits
from tests.reference.errors import Refused
from tests.reference.fragments import by_tensor
from tests.reference.shards import read_shard, strict_json
from tests.unit.journals import said, sealed

FIXTURES = Path(__file__).resolve().parents[2] / "fixtures" / "v1"
CASE = FIXTURES / "cases" / "tp3-uneven-to-tp2"
DCP = FIXTURES / "formats" / "dcp"
SHARD = "rank-00000.safetensors"
TARGETS_TRIED = [Mesh(()), Mesh.of({"tp": 2}), Mesh.of({"pp": 2, "fsdp": 3})]
EXIT_CODES = {InputError: 3, IntegrityError: 4, StorageError: 5}
LONGEST_LINE = 5000  # characters of an error
MOST_SECONDS = 5.0  # of the processor, for one small file
MOST_NELEMS = 1 << 20  # of a tensor that the independent reader lays out cell by cell


@dataclass(frozen=True)
class Target:
    """Files to begin with, how one is changed, and what reads it; `run` raises when a property doesn't hold."""

    seeds: Callable[[], list[bytes]]
    mutate: Mutate
    read: Callable[[bytes], None]

    def run(self, data: bytes) -> None:
        began = time.process_time()
        try:
            self.read(data)
        except ReshardError as fault:
            check_told(fault)
        assert time.process_time() - began < MOST_SECONDS, "it took too long"


def check_told(fault: ReshardError) -> None:
    """Of a kind that says that the input is bad, and on one line that can be written."""
    assert EXIT_CODES.get(type(fault)) == fault.exit_code, repr(fault)
    line = str(fault)
    assert line.isprintable() and len(line) < LONGEST_LINE, line[:LONGEST_LINE]
    line.encode()


@functools.cache
def scratch() -> Path:
    """A folder of this process for the files that are fed."""
    folder = Path(tempfile.mkdtemp(prefix="reshard-fuzz-", dir="/dev/shm" if os.access("/dev/shm", os.W_OK) else None))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return folder


def scratch_copy(of: Path) -> Path:
    """A copy of a fixture, into which one file is written anew again and again."""
    folder = scratch() / of.name
    if not folder.exists():
        shutil.copytree(of, folder)
    return folder


def read_all(source: Source) -> None:
    """Every byte of every array, in bounded parts."""
    with Files(source.folder) as files:
        for file, arrays in source.headers.items():
            for key, array in arrays.items():
                whole = whole_array(file, key, array)
                for first in range(0, whole.nbytes, PART_NBYTES):
                    whole.read(files, first, min(first + PART_NBYTES, whole.nbytes))


def check_source(source: Source) -> None:
    """All faults can be told; a source without any can be laid out anew, and what would be written is sound again."""
    for fault in source.findings.faults:
        check_told(fault)
    if source.findings.faults:
        return
    for target in TARGETS_TRIED:
        outgoing, faults = outgoing_of(source, Selection(target))
        for fault in faults:
            check_told(fault)
        if outgoing is not None:
            assert not check_case(parse_case(bytes(case_text(outgoing.case)))).faults
    read_all(source)


# ---- case.json


def read_case(data: bytes) -> None:
    parsed = parse_case(data)
    findings = check_case(parsed)
    if not findings.faults:
        check_independently(parsed.case, strict_json(data.decode(), "case.json"))
    folder = scratch_copy(CASE)
    (folder / "case.json").write_bytes(data)
    check_source(load_alone(folder))


def check_independently(case: Case, manifest: dict) -> None:
    """What we accept, the independent reader accepts, too. It wants axes of size 1 named, and lays out every cell."""
    fragments = manifest["fragments"]
    if any(math.prod(f.global_shape) > MOST_NELEMS for f in case.fragments):
        return
    for fragment in fragments:
        checks.check_boxes(fragment["fragment_id"], fragment)
    checks.check_ranks(fragments, manifest["world_size"])
    checks.check_shared_storage([f | {"shared_storage_id": f.get("shared_storage_id")} for f in fragments])
    for tensor in by_tensor([f | {"tie_group_id": f.get("tie_group_id")} for f in fragments]).values():
        checks.check_replica_groups(tensor)
        checks.check_coverage(tensor)


def case_seeds() -> list[bytes]:
    return [(case / "case.json").read_bytes() for case in sorted((FIXTURES / "cases").iterdir())]


# ---- shards


def read_shard_file(data: bytes) -> None:
    path = scratch() / SHARD
    path.write_bytes(data)
    headers, faults = read_headers(scratch(), [SHARD])
    for fault in faults:
        check_told(fault)
    if faults:
        return
    try:
        expected = read_shard(path).arrays
    except Refused as refused:
        raise AssertionError(f"accepted, but {refused}") from refused
    found = {
        key: (array.dtype, list(array.shape), data[array.begin :][: array.nbytes])
        for key, array in headers[SHARD].items()
    }
    assert found == {key: (array.dtype, array.shape, array.raw) for key, array in expected.items()}


def shard_seeds() -> list[bytes]:
    every = [
        ("a", "float4_e2m1fn", (2, 3)),
        ("b", "bfloat16", (0, 5)),
        ("c", "int64", ()),
        ("d", "float6_e2m3fn", (4,)),
    ]
    head, spans = build_header(every, {"format": "pt", "tied": "a"})
    return [(CASE / SHARD).read_bytes(), head + bytes(sum(span.nbytes for span in spans))]


# ---- other formats


def described(folder: Path, name: str, data: bytes) -> None:
    (folder / name).write_bytes(data)
    check_source(load_alone(folder))


def hugging_face_folder() -> Path:
    folder = scratch() / "hugging-face"
    if not folder.exists():
        folder.mkdir()
        for number, key in enumerate("ab", 1):
            head, spans = build_header([(key, "float32", (2, 3)), (key + ".bias", "bfloat16", ())], {"format": "pt"})
            (folder / f"model-{number:05d}-of-00002.safetensors").write_bytes(
                head + bytes(spans[-1].nbytes + spans[0].nbytes)
            )
    return folder


def index_seeds() -> list[bytes]:
    files = ["model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"]
    held = ", ".join(f'"{key}": "{file}", "{key}.bias": "{file}"' for key, file in zip("ab", files, strict=True))
    return [f'{{"metadata": {{"total_size": 52}}, "weight_map": {{{held}}}}}'.encode()]


def read_pieces(data: bytes) -> None:
    folder = scratch() / "pieces"
    folder.mkdir(exist_ok=True)
    (folder / "shard-00001-model-00001-of-00001.safetensors").write_bytes(pieces_of(0))
    described(folder, "shard-00002-model-00001-of-00001.safetensors", data)


def pieces_of(row: int) -> bytes:
    """A shard as torch's HuggingFaceStorageWriter writes it, with one row of a tensor."""
    info = f'{{"w": {{"saved_offsets": [{row}, 0]}}}}'
    head, _ = build_header(
        [("w", "float32", (1, 3))], {"DCP_SHARDING_INFO": info, "DCP_VERSION": "1.0", "format": "pt"}
    )
    return head + bytes(12)


def distcp() -> Path:
    return next(DCP.glob("*.distcp"))


# ---- HDF5


@functools.cache
def hdf5_seeds() -> list[bytes]:
    import h5py
    import numpy as np

    found = []
    for options in ({}, {"chunks": (2, 2)}, {"chunks": (2, 3), "compression": "gzip", "fletcher32": True}):
        path = scratch() / "seed.h5"
        with h5py.File(path, "w") as file:
            file.create_dataset("group/w", data=np.arange(15, dtype="<u2").reshape(5, 3), **options).attrs["dtype"] = (
                "bfloat16"
            )
            file.create_dataset("swapped", data=np.arange(4, dtype=">f4"))
            file.create_dataset("packed", data=np.arange(3, dtype="u1")).attrs.update(
                {"dtype": "float4_e2m1fn", "shape": [2, 3]}
            )
            file["link"] = h5py.SoftLink("/group/w")
        found.append(path.read_bytes())
    return found


def read_hdf5_file(data: bytes) -> None:
    (scratch() / "rank-00000.h5").write_bytes(data)
    headers, faults = read_headers(scratch(), ["rank-00000.h5"])
    for fault in faults:
        check_told(fault)
    with Files(scratch()) as files:
        for key, array in headers.get("rank-00000.h5", {}).items():
            whole = whole_array("rank-00000.h5", key, array)
            for first in range(0, min(whole.nbytes, 8 * PART_NBYTES), PART_NBYTES):
                whole.read(files, first, min(first + PART_NBYTES, whole.nbytes))


# ---- layout files


def read_layout(data: bytes) -> None:
    layout = parse_layout(data, "layout.toml")
    tensors = [
        Tensor(f"layers.{n}.{name}.weight", f"layers.{n}.{name}.weight", (8, 4)) for n in range(2) for name in "ab"
    ]
    for fault in layout.resolve(tensors, ["tp", "ep"]).faults:
        check_told(fault)
    again = parse_layout(layout.text().encode(), "layout.toml") if layout.axes else layout
    assert again.axes.keys() == layout.axes.keys()
    parsed = parse_case((CASE / "case.json").read_bytes())
    layout.applied(parsed.case, load_alone(CASE).headers)


def layout_seeds() -> list[bytes]:
    presets = (FIXTURES.parents[1] / "reshard_mpi" / "layouts").glob("*.toml")
    operations = b"""[model]
heads = 2
[axes.tp]
"layers.*.a" = { split = "colwise", unit = "2 * heads", repeat = true }
"**.b.weight" = { split = 1, members = ["heads", 2], repeat = [true, false] }
"*" = "replicate"
[[operations]]
rename = "**.w*"
to = "**.v*"
[[operations]]
split = "**.vcol"
into = { "**.q" = 3, "**.k" = "2 * heads" }
[[operations]]
trim = "**.q"
to = 2
"""
    return [operations, *(path.read_bytes() for path in sorted(presets))]


# ---- the journal of a job that was stopped

JOB_MEMORY = 56 << 10  # some rounds


def out_partial() -> Path:
    return scratch() / "out.partial"


def lead_of_job() -> Lead:
    """Of a job that reshards the fixture with one rank, ready to begin."""
    lead = Lead(Job(CASE, scratch() / "out", Mesh.of({"tp": 2}), JOB_MEMORY), 1)
    source = load_alone(CASE)
    source.stamps = file_stamps(CASE, source.headers)
    lead.prepare(source)
    return lead


def begin(lead: Lead) -> None:
    lead.begin([Found(True, ())])
    lead.partial.close()


@functools.cache
def job_files() -> dict[str, bytes]:
    """What a job leaves in OUT.partial that has noted two of its slabs, and then some more."""
    shutil.rmtree(out_partial(), ignore_errors=True)
    lead = lead_of_job()
    lead.begin([Found(True, ())])
    for name, nbytes, head in lead.heads()[0][0]:
        (out_partial() / name).write_bytes(head + bytes(nbytes - len(head)))
    for slabs in (slice(0, 2), slice(2, 5)):
        lead.note([News(slabs, [slabs.start], {slabs.start: bytes(range(32))}, {0: 1})])
    lead.partial.close()
    return {path.name: path.read_bytes() for path in out_partial().iterdir()}


def read_journal(data: bytes) -> None:
    for name, content in job_files().items():
        (out_partial() / name).write_bytes(data if name == JOURNAL else content)
    lead = lead_of_job()
    every, files = lead.prepared.plan.slabs.volume.sum(), lead.prepared.target_files
    try:
        begin(lead)
    except UsageError as refused:
        assert "--restart" in str(refused), refused
        assert all((out_partial() / file.name).read_bytes() == job_files()[file.name] for file in files)
        return
    written, left = lead.partial.durable.written, lead.prepared.plan.slabs.volume.sum()
    assert left + sum(end - begin for parts in written.values() for begin, end in parts) >= every
    nbytes = {f.logical_tensor_id: math.prod(f.global_shape) * bits(f.dtype) // 8 for f in lead.case.fragments}
    assert all(begin <= end <= nbytes[tensor] for tensor, parts in written.items() for begin, end in parts)
    assert all((out_partial() / file.name).exists() == bool(written) for file in files)
    if not are_sealed(data):  # what had been noted, without the lines that broke off
        assert written in noted_so_far()


def noted_so_far() -> list[dict[str, list[tuple[int, int]]]]:
    """What the journal of the job said to be written, after each of its lines."""
    found: list[dict[str, list[tuple[int, int]]]] = [{}]
    for says in said(job_files()[JOURNAL]):
        parts = says.get("durable", {}).get("written", {}).items()
        found.append(found[-1] | {tensor: found[-1].get(tensor, []) + [*map(tuple, part)] for tensor, part in parts})
    return found


def are_sealed(data: bytes) -> bool:
    """Has each whole line its seal?"""
    whole = data[: data.rfind(b"\n") + 1]
    try:
        return whole == sealed(*(line[8 : line.rindex(b',"crc32"')] for line in whole.split(b"\n")[:-1]))
    except ValueError:
        return False


TARGETS = {
    "journal": Target(lambda: [job_files()[JOURNAL]], journal_changed, read_journal),
    "case": Target(case_seeds, case_changed, read_case),
    "shard": Target(shard_seeds, bytes_changed, read_shard_file),
    "index": Target(
        index_seeds, json_changed, lambda data: described(hugging_face_folder(), "model.safetensors.index.json", data)
    ),
    "pieces": Target(lambda: [pieces_of(1)], bytes_changed, read_pieces),
    "dcp-metadata": Target(
        lambda: [(DCP / ".metadata").read_bytes()],
        bytes_changed,
        lambda data: described(scratch_copy(DCP), ".metadata", data),
    ),
    "dcp-file": Target(
        lambda: [distcp().read_bytes()], bytes_changed, lambda data: described(scratch_copy(DCP), distcp().name, data)
    ),
    "hdf5": Target(hdf5_seeds, bytes_changed, read_hdf5_file),
    "layout": Target(layout_seeds, bytes_changed, read_layout),
}
