"""`case.json` as typed records, and back: the manifest of a checkpoint case (SPEC section 1).

Text is parsed once, by the standard library, whose hooks see duplicate keys and NaN; msgspec then checks every type and bound.
"""

import hashlib
import json
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta, Struct

from reshard_mpi.errors import InputError, names

SCHEMA_ID = "obliteratus.checkpoint-fixture-case"
SCHEMA_VERSION = "1.0.0"
CASE_FILE = "case.json"
ORACLE_FILE = "oracles.safetensors"

Count = Annotated[int, Meta(ge=0, lt=1 << 62)]
Name = Annotated[str, Meta(min_length=1)]
Digest = Annotated[str, Meta(pattern=r"^sha256:[0-9a-f]{64}\Z")]
MOST_AXES = 63  # of a tensor: those of numpy, one of them left for the bytes of an element
Shape = Annotated[tuple[Count, ...], Meta(max_length=MOST_AXES)]
Coordinates = tuple[tuple[Name, Count], ...]


class Padding(Struct, frozen=True, gc=False):
    """Elements stored before and after the box, per axis."""

    before: Shape
    after: Shape
    semantic: str


class Replica(Struct, frozen=True, gc=False):
    """Which of `member_count` fragments with the same box this one is."""

    group_id: str | None
    member_count: Annotated[int, Meta(ge=1, lt=1 << 62)]
    member_index: Count


class Fragment(Struct, frozen=True, gc=False):
    """One box of one logical tensor, stored in one array of one shard. Shapes and offsets count elements."""

    fragment_id: Name
    logical_tensor_id: Name
    fqn: Name
    component_id: Name
    role: str
    global_shape: Shape
    element_offset: Shape
    element_extent: Shape
    local_shape: Shape
    padding: Padding
    dtype: str
    payload_file: Name
    payload_key: Name
    topology_coordinates: Coordinates
    replica: Replica
    partition_axes: Shape
    shard_file_id: str
    shard_digest_ref: str
    fragment_digest: Digest | None = None
    shared_storage_id: str | None = None
    tie_group_id: str | None = None
    evidence_refs: tuple[str, ...] = ()

    @property
    def rank(self) -> int:
        return dict(self.topology_coordinates)["rank"]

    @property
    def has_elements(self) -> bool:
        return 0 not in self.element_extent

    @property
    def is_padded(self) -> bool:
        return self.local_shape != self.element_extent

    @property
    def box(self) -> tuple[Shape, Shape]:
        return self.element_offset, self.element_extent


class Stages(Struct, frozen=True, gc=False):
    """The coordinates, out of `of`, at which a mesh axis places a tensor."""

    stages: tuple[Count, ...]
    of: Annotated[int, Meta(ge=1, lt=1 << 31)]


# What a mesh axis does to a tensor: the tensor axis that it splits, nothing, or the stages that hold it.
Rule = Count | Literal["replicate"] | Stages
Layout = dict[str, dict[str, Rule]]


class Topology(Struct, frozen=True):
    """Mesh axis -> size, of the shards here and of the default target; per logical tensor what each mesh axis does."""

    source: dict[str, Count]
    target: dict[str, Count]
    layout: Layout | None = None


class Oracle(Struct, frozen=True):
    """What a whole tensor must be: the SHA-256 of its raw bytes, and the array of the oracle file that holds them."""

    logical_tensor_id: Name
    dtype: str
    shape: Shape
    payload_key: Name
    sha256: Digest


class Case(Struct, frozen=True):
    """A whole `case.json`."""

    case_id: str
    components: tuple[str, ...]
    features: tuple[str, ...]
    topology: Topology
    world_size: Annotated[int, Meta(ge=1, lt=1 << 31)]
    fragments: tuple[Fragment, ...]
    expected_manifest_digest: Digest | None
    oracle_file: Name | None = None
    oracles: tuple[Oracle, ...] = ()
    schema_id: str = SCHEMA_ID
    schema_version: str = SCHEMA_VERSION


class ParsedCase(Struct, frozen=True):
    """A case, the digests of its text and of its fragments as they were written, and what the reader should be told."""

    case: Case
    text_digest: str
    fragments_digest: str
    warnings: tuple[str, ...]


def sha256_name(digest: "hashlib._Hash") -> str:
    return f"sha256:{digest.hexdigest()}"


def fragments_digest(fragments: Iterable[dict[str, Any]], only_known_keys: bool = False) -> str:
    """`expected_manifest_digest` of fragments as plain JSON objects."""
    digest = _FragmentsDigest()
    for fragment in fragments:
        digest.add(fragment, only_known_keys)
    return digest.name()


class _FragmentsDigest:
    """The digest of fragments, one after the other: all of their texts at once would be a large part of a rank's memory."""

    def __init__(self) -> None:
        self._sha256, self._between = hashlib.sha256(), b"["

    def add(self, fragment: dict[str, Any], only_known_keys: bool) -> None:
        bare = {key: value for key, value in fragment.items() if key not in ("payload_file", "payload_key")}
        text = _compact_json(bare) if only_known_keys else _standard_json(bare)
        self._sha256.update(self._between + text)
        self._between = b","

    def name(self) -> str:
        closed = self._sha256.copy()
        closed.update(b"]" if self._between == b"," else b"[]")
        return sha256_name(closed)


def _standard_json(value: Any) -> bytes:
    return json.dumps(value, sort_keys=True, separators=(",", ":")).encode()


def _compact_json(value: Any) -> bytes:
    """The text that the standard library writes for a value without floats: keys sorted, no spaces, ASCII.

    msgspec writes it in a fifth of the time, and differs only in what it doesn't escape.
    """
    text = msgspec.json.encode(value, order="sorted")
    if text.isascii() and b"\x7f" not in text:
        return text
    return _standard_json(value)


def strict_json(text: bytes, where: str) -> Any:
    """The value of a JSON text; InputError for anything that JSON forbids or that could be read in two ways."""

    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        found = dict(pairs)
        if len(found) < len(pairs):
            twice = Counter(key for key, _ in pairs).most_common(1)[0][0]
            raise InputError(
                where,
                f"key {twice!r} is given twice in one object; expected each key once, so that no reader sees another value",
            )
        return found

    def no_constant(name: str) -> None:
        raise InputError(where, f"{name} is no JSON number; expected finite numbers")

    try:
        value = json.loads(text.decode("utf-8"), object_pairs_hook=unique, parse_constant=no_constant)
        if b"\\ud" in text or b"\\uD" in text:  # only an escape can smuggle half a character in
            json.dumps(value, ensure_ascii=False).encode("utf-8")
        return value
    except (ValueError, RecursionError) as error:
        reason = "nested too deep" if isinstance(error, RecursionError) else str(error)
        raise InputError(where, f"no valid JSON: {reason}; expected one JSON object in UTF-8") from error


def parse_case(text: bytes, where: str = CASE_FILE) -> ParsedCase:
    """The case that `text` holds; InputError at `where` when it isn't one that this version reads."""
    raw = strict_json(text, where)
    if not isinstance(raw, dict):
        raise InputError(where, f"a JSON {type(raw).__name__}, expected an object with schema_id {SCHEMA_ID}")
    _check_schema(raw, where)
    try:
        case = msgspec.convert(raw, Case)
    except msgspec.ValidationError as error:
        raise InputError(where, f"{error}; expected what schema {SCHEMA_VERSION} says") from error
    unknown = _unknown_keys(raw)
    warnings = (f"{where}: unknown keys ignored: {names(sorted(unknown), most=20)}",) if unknown else ()
    digest = fragments_digest(raw["fragments"], only_known_keys=not unknown)
    return ParsedCase(case, sha256_name(hashlib.sha256(text)), digest, warnings)


def _check_schema(raw: dict[str, Any], where: str) -> None:
    if raw.get("schema_id") != SCHEMA_ID:
        raise InputError(
            where,
            f"schema_id is {raw.get('schema_id')!r}, expected {SCHEMA_ID!r}; give the folder of a checkpoint case",
        )
    version = raw.get("schema_version")
    parts = version.split(".") if isinstance(version, str) else []
    if len(parts) != 3 or not all(part.isdecimal() and part.isascii() for part in parts):
        raise InputError(where, f"schema_version is {version!r}, expected {SCHEMA_VERSION}")
    if int(parts[0][:9]) != 1:
        raise InputError(
            where, f"schema_version is {version}, expected 1.x; use a version of reshard_mpi that reads it"
        )


def _unknown_keys(raw: dict[str, Any]) -> set[str]:
    unknown = raw.keys() - set(Case.__struct_fields__)
    unknown |= {f"topology.{key}" for key in raw["topology"].keys() - set(Topology.__struct_fields__)}
    fragment_keys, padding_keys, replica_keys = (
        set(record.__struct_fields__) for record in (Fragment, Padding, Replica)
    )
    for fragment in raw["fragments"]:
        unknown |= {f"fragments[].{key}" for key in fragment.keys() - fragment_keys}
        unknown |= {f"fragments[].padding.{key}" for key in fragment["padding"].keys() - padding_keys}
        unknown |= {f"fragments[].replica.{key}" for key in fragment["replica"].keys() - replica_keys}
    for oracle in raw.get("oracles") or ():
        unknown |= {f"oracles[].{key}" for key in oracle.keys() - set(Oracle.__struct_fields__)}
    return unknown


def case_text(case: Case) -> bytearray:
    """`case.json` of a case, with the digest of its fragments filled in. One fragment at a time: there may be a million."""
    raw = msgspec.to_builtins(msgspec.structs.replace(case, fragments=()))
    raw["expected_manifest_digest"] = unknown = "sha256:" + 64 * "0"
    if raw["topology"]["layout"] is None:
        del raw["topology"]["layout"]
    before, key, after = _indented_json(raw).partition(b'\n  "fragments": [')
    text = bytearray(before + key)
    digest, between = _FragmentsDigest(), b"\n    "
    for fragment in case.fragments:
        raw = msgspec.to_builtins(fragment)
        digest.add(raw, only_known_keys=True)
        text += between
        text += _indented_json(raw).replace(b"\n", b"\n    ")
        between = b",\n    "
    text += (b"\n  " if case.fragments else b"") + after + b"\n"
    at = before.index(b'\n  "expected_manifest_digest": "' + unknown.encode()) + len(
        b'\n  "expected_manifest_digest": "'
    )
    text[at : at + len(unknown)] = digest.name().encode()
    return text


def _indented_json(value: Any) -> bytes:
    return msgspec.json.format(_compact_json(value), indent=2)


def by_tensor(fragments: Sequence[Fragment]) -> dict[str, list[Fragment]]:
    """Fragments of each logical tensor, in the order in which they come."""
    found: dict[str, list[Fragment]] = {}
    for fragment in fragments:
        found.setdefault(fragment.logical_tensor_id, []).append(fragment)
    return found
