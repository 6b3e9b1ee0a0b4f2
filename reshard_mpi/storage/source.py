"""A checkpoint case on disk, as every command sees it: its manifest, the headers of its shards, and whether they agree."""

import gc
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path

import msgspec

from reshard_mpi.checkpoint.checks import SHARD_NAME, Findings, check_case, check_described, name_of
from reshard_mpi.checkpoint.manifest import CASE_FILE, Case, Fragment, ParsedCase, parse_case
from reshard_mpi.checkpoint.mesh import MOST_RANKS, shard_name
from reshard_mpi.checkpoint.wanted import History, Operated
from reshard_mpi.errors import (
    InputError,
    IntegrityError,
    ReshardError,
    StorageError,
    UsageError,
    names,
    raise_first,
)
from reshard_mpi.storage.entries import Entry, left_out
from reshard_mpi.storage.files import open_known, read_text
from reshard_mpi.storage.known import Known
from reshard_mpi.storage.safetensors import StoredArray, read_header
from reshard_mpi.storage.touching import touching

LARGEST_MANIFEST = 1 << 30  # bytes of case.json
DIGEST_OF_NOTHING = "sha256:e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855"

Headers = Mapping[str, Mapping[str, StoredArray]]  # file -> key -> array


@dataclass
class Source:
    """A case folder: what its manifest says and what is wrong with it.

    `headers` and `stamps` of the shards come later (`attach_headers`), and where shards lie on nodes, `readers`: the ranks that
    see each of them. `history`: what was done to its tensors since it was opened.
    """

    folder: Path
    parsed: ParsedCase
    findings: Findings
    is_described: bool = False  # of another format: the headers are known, and there is no case.json
    headers: Headers = field(default_factory=dict)
    operated: tuple[Operated, ...] = ()  # what made the description of what is stored
    others: tuple[Entry, ...] = ()  # what is there beside tensors
    stamps: Known = field(default_factory=dict)
    readers: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    warnings: list[str] = field(default_factory=list)
    history: History = field(default_factory=dict)

    @property
    def case(self) -> Case:
        return self.parsed.case

    def shard_files(self) -> list[str]:
        """The file of every rank, also of one that holds nothing; a name that is a path is a fault, and not opened.

        None of a checkpoint of another format: its files have been looked into to describe it.
        """
        if self.is_described:
            return []
        named = {f.payload_file for f in self.case.fragments if SHARD_NAME.fullmatch(f.payload_file)}
        known = {name.split(".")[0] for name in named}
        ranks = range(self.case.world_size) if self.case.world_size <= MOST_RANKS else ()
        is_hdf5 = all(name.endswith(".h5") for name in named) and (
            named or (self.folder / shard_name(0, "h5")).exists()
        )
        every = (shard_name(rank, "h5" if is_hdf5 else "safetensors") for rank in ranks)
        return sorted(named | {name for name in every if name.split(".")[0] not in known})

    @property
    def held_nbytes(self) -> int:
        """Of memory, at most, for an array that is no span of its file, by one who reads it."""
        arrays = (array for of_file in self.headers.values() for array in of_file.values())
        shown = (one for array in arrays for one in (array.shown, array.order) if one)
        return max((one.held_nbytes for one in shown), default=0)

    def raise_first(self) -> None:
        raise_first(self.findings.faults)


@contextmanager
def no_garbage_collection() -> Iterator[None]:
    """A manifest is a million objects, none of them garbage: looking through them again and again took half of the time.

    Also a decorator.
    """
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()


def open_source(folder: Path) -> Source:
    """The case in `folder`, its manifest read and checked; faults are in `findings`. Errors only when nothing can be read."""
    with touching("open", folder):
        is_there, is_folder, has_manifest = folder.exists(), folder.is_dir(), (folder / CASE_FILE).exists()
    if not is_there:
        raise StorageError(str(folder), "no such folder; give the folder that holds case.json")
    if not is_folder:
        raise UsageError(str(folder), "is no folder; give the folder that holds case.json")
    if not has_manifest:
        return _described_source(folder)
    with no_garbage_collection():
        parsed = parse_case(read_text(folder, CASE_FILE, LARGEST_MANIFEST), str(folder / CASE_FILE))
        findings = check_case(parsed)
    located(folder, findings.faults)
    source = Source(folder, parsed, findings, warnings=list(parsed.warnings))
    missing = sum(fragment.fragment_digest is None for fragment in parsed.case.fragments)
    if missing:
        source.warnings.append(
            f"{folder / CASE_FILE}: {missing} of {len(parsed.case.fragments)} fragments have no digest: their "
            "bytes can't be checked"
        )
    return source


def _described_source(folder: Path) -> Source:
    """A checkpoint of another format, described as a case."""
    from reshard_mpi.formats.recognised import describe

    with no_garbage_collection():
        described = describe(folder)
        findings = check_described(described.case)
    for fault in findings.faults:
        fault.where = fault.where.replace(CASE_FILE, str(folder), 1)
    parsed = ParsedCase(described.case, described.digest, "", described.warnings)
    warnings = [*left_out(folder, described.others), *described.warnings]
    return Source(folder, parsed, findings, True, described.headers, others=described.others, warnings=warnings)


def described_anew(
    source: Source, case: Case, headers: Headers, operated: tuple[Operated, ...], history: History
) -> Source:
    """The source with another description of the same stored arrays, which is checked as the first one was."""
    parsed = ParsedCase(case, source.parsed.text_digest, source.parsed.fragments_digest, source.parsed.warnings)
    findings = check_described(case) if source.is_described or source.readers else check_case(parsed)
    located(source.folder, findings.faults)
    lost = sum(f.fragment_digest is None for f in case.fragments)
    lost -= sum(f.fragment_digest is None for f in source.case.fragments)
    warnings = list(source.warnings)
    if lost > 0:
        warnings.append(f"{source.folder}: {lost} parts of stored arrays have no digest: their bytes can't be checked")
    return replace(
        source,
        parsed=parsed,
        findings=findings,
        headers=headers,
        operated=operated,
        warnings=warnings,
        history=history,
    )


def located(folder: Path, faults: Iterable[ReshardError]) -> None:
    """Say of faults in a manifest in which folder it lies."""
    for fault in faults:
        if fault.where.startswith(CASE_FILE):
            fault.where = str(folder / fault.where)


@no_garbage_collection()
def read_headers(
    folder: Path, files: Iterable[str], known: Known | None = None
) -> tuple[dict[str, dict[str, StoredArray]], list[ReshardError]]:
    """The headers of `files` that could be read, and the errors of those that couldn't."""
    headers: dict[str, dict[str, StoredArray]] = {}
    faults: list[ReshardError] = []
    for name in files:
        try:
            fd = open_known(folder, name, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK, known or {})
            try:
                with touching("read", folder, name):
                    headers[name] = _reader_of(name)(fd, str(folder / name))
            finally:
                os.close(fd)
        except ReshardError as fault:
            faults.append(fault)
    return headers, faults


def _reader_of(name: str) -> Callable[[int, str], dict[str, StoredArray]]:
    """What reads the header of a file of that name."""
    if not name.endswith(".h5"):
        return read_header
    from reshard_mpi.storage.hdf5 import read_hdf5

    return read_hdf5


@no_garbage_collection()
def place_on_nodes(source: Source, paths: Sequence[str]) -> None:
    """From now on the fragments of each rank lie in the file `paths[rank]` of the nodes that see it."""

    def placed(fragments: Iterable[Fragment]) -> list[Fragment]:
        return [msgspec.structs.replace(f, payload_file=paths[f.rank]) for f in fragments]

    case, findings = source.case, source.findings
    case = msgspec.structs.replace(case, fragments=tuple(placed(case.fragments)))
    source.parsed = msgspec.structs.replace(source.parsed, case=case)
    findings.replicas_to_read = [placed(members) for members in findings.replicas_to_read]


@no_garbage_collection()
def attach_headers(source: Source, headers: Headers) -> None:
    """Give the source the headers of its shards; what contradicts the manifest joins its findings."""
    source.headers = headers
    source.findings.faults += _header_faults(source)
    named = {(fragment.payload_file, fragment.payload_key) for fragment in source.case.fragments}
    stored = {(file, headers[file][key]) for file, key in named if key in headers.get(file, ())}
    unnamed = [
        f"{file}:{key}"
        for file, arrays in sorted(headers.items())
        for key, array in arrays.items()
        if (file, key) not in named and not (array.nbytes and (file, array) in stored)  # a link to one that is named
    ]
    if unnamed:
        source.warnings.append(
            f"{source.folder}: {len(unnamed)} arrays that no fragment names are left out: {names(unnamed)}"
        )


def _header_faults(source: Source) -> Iterator[ReshardError]:
    for fragment in source.case.fragments:
        arrays = source.headers.get(fragment.payload_file)
        if arrays is None:
            continue  # its own fault is known
        array = arrays.get(fragment.payload_key)
        if array is None:
            yield InputError(
                str(source.folder / fragment.payload_file),
                f"holds no array {fragment.payload_key!r}, which fragment {fragment.fragment_id} names; expected "
                f"one of {names(arrays) or 'none'}",
            )
        elif (array.dtype, array.shape) != (fragment.dtype, fragment.local_shape):
            yield InputError(
                str(source.folder / fragment.payload_file),
                f"array {fragment.payload_key!r} is {array.dtype} {list(array.shape)}, {name_of(fragment)} says "
                f"{fragment.dtype} {list(fragment.local_shape)}; "
                "shard and manifest must be of one save",
            )
        elif not array.nbytes and fragment.fragment_digest not in (None, DIGEST_OF_NOTHING):
            yield IntegrityError(
                str(source.folder / fragment.payload_file),
                f"array {fragment.payload_key!r} is empty, but {name_of(fragment)} has the digest of something else",
            )


def load_alone(folder: Path) -> Source:
    """The source with manifest and headers, read by one process; all faults are in its findings."""
    source = open_source(folder)
    if not source.is_described:
        headers, faults = read_headers(folder, source.shard_files())
        source.findings.faults += faults
        attach_headers(source, headers)
    return source
