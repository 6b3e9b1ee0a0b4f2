"""The safetensors container: an array is a plain byte span after the header.

Format: 8 bytes little-endian header length, that many bytes of JSON `{key: {dtype, shape, data_offsets}}`, padded with
spaces, then the data, of which the arrays fill every byte once (https://github.com/huggingface/safetensors#format). Headers
are not trusted.
"""

import json
import math
import os
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from reshard_mpi.checkpoint.dtypes import BY_SAFETENSORS, DTYPES, nbytes_of
from reshard_mpi.checkpoint.manifest import Count, Shape, strict_json
from reshard_mpi.errors import InputError, StorageError
from reshard_mpi.storage.cast import CastArray
from reshard_mpi.storage.reordered import ReorderedArray
from reshard_mpi.storage.shown import ShownArray

LARGEST_HEADER = 100_000_000  # bytes; the limit of the safetensors library
ALIGNMENT = 4096  # of the first data byte: a page, so that rows of matrices begin on pages where they are as long


@dataclass(frozen=True, slots=True)
class StoredArray:
    """One array of a file: the span [begin, begin + nbytes) holds its elements in row-major order.

    `shown` says how its elements really lie, where they are no such span: then `begin` is where they are shown; so it is with
    `order`, of an array whose rows are stored in another one, and with `cast`, of an array that is stored in another dtype.
    """

    dtype: str
    shape: tuple[int, ...]
    begin: int
    nbytes: int
    shown: ShownArray | None = None
    order: ReorderedArray | None = None
    cast: CastArray | None = None

    @property
    def is_checked(self) -> bool:
        """Is it held against a checksum of its own wherever it is read, whether or not a digest is known?"""
        return self.shown is not None and self.shown.is_checked

    @property
    def converted_nbytes(self) -> int:
        """Of what the file holds in place of these bytes; 0 where it holds these."""
        if self.cast:
            return self.cast.stored_nbytes
        return self.nbytes if self.order else 0


class _Entry(msgspec.Struct):
    dtype: str
    shape: Shape
    data_offsets: tuple[Count, Count]


def read_header(fd: int, where: str) -> dict[str, StoredArray]:
    """Key -> array of the safetensors file `fd`; InputError at `where` when the header contradicts itself or the file."""
    text, size = _header_text(fd, where)
    return parse_header(text, 8 + len(text), size, where)


def read_metadata(fd: int, where: str) -> dict[str, str]:
    """`__metadata__` of the safetensors file `fd`."""
    header = strict_json(_header_text(fd, where)[0], where)
    metadata = header.get("__metadata__", {}) if isinstance(header, dict) else {}
    _check_metadata(metadata, where)
    return metadata


def _header_text(fd: int, where: str) -> tuple[bytes, int]:
    """The JSON of a safetensors file, and the length of the file."""
    size = os.fstat(fd).st_size
    start = os.pread(fd, 8, 0)
    if len(start) < 8:
        raise InputError(where, f"{size} bytes are too few for a safetensors file; the file is truncated: copy it anew")
    length = struct.unpack("<Q", start)[0]
    if length > min(LARGEST_HEADER, size - 8):
        raise InputError(
            where,
            f"the header is said to have {length} bytes, the file has {size}; it is truncated or no safetensors file",
        )
    text = os.pread(fd, length, 8)
    if len(text) < length:
        raise StorageError(where, f"{len(text)} of {length} header bytes could be read; check the file system")
    return text, size


def parse_header(text: bytes, data_start: int, file_nbytes: int, where: str) -> dict[str, StoredArray]:
    """The arrays that the header `text` describes, held against the length of the file."""
    header = strict_json(text, where)
    if not isinstance(header, dict):
        raise InputError(where, "the header is no JSON object")
    _check_metadata(header.pop("__metadata__", {}), where)
    arrays = {key: _array(key, entry, data_start, where) for key, entry in header.items()}
    position = data_start
    for key, array in sorted(arrays.items(), key=lambda item: (item[1].begin, item[1].nbytes)):
        if array.begin != position:
            raise InputError(
                where,
                f"array {key!r} begins at byte {array.begin - data_start} of the data, expected "
                f"{position - data_start}: arrays overlap or leave a gap",
            )
        position += array.nbytes
    if position != file_nbytes:
        missing = position - file_nbytes
        raise InputError(
            where,
            f"the file is {abs(missing)} bytes {'short of' if missing > 0 else 'longer than'} what its header says; copy it anew",
        )
    return arrays


def _check_metadata(metadata: Any, where: str) -> None:
    if not isinstance(metadata, dict) or not all(isinstance(value, str) for value in metadata.values()):
        raise InputError(where, "__metadata__ of the header is no map of strings")


def _array(key: str, raw: Any, data_start: int, where: str) -> StoredArray:
    try:
        entry = msgspec.convert(raw, _Entry)
    except msgspec.ValidationError as error:
        raise InputError(where, f"header entry {key!r}: {error}") from error
    dtype = BY_SAFETENSORS.get(entry.dtype)
    if dtype is None:
        raise InputError(where, f"array {key!r} has dtype {entry.dtype!r}; expected one of {', '.join(BY_SAFETENSORS)}")
    begin, end = entry.data_offsets
    nbytes = nbytes_of(math.prod(entry.shape), dtype, f"{where}: array {key!r}")
    if end - begin != nbytes:
        raise InputError(
            where,
            f"array {key!r} of {entry.dtype} {list(entry.shape)} needs {nbytes} bytes, data_offsets give {end - begin}",
        )
    return StoredArray(dtype.name, entry.shape, data_start + begin, nbytes)


def build_header(
    arrays: Sequence[tuple[str, str, tuple[int, ...]]], metadata: Mapping[str, str]
) -> tuple[bytes, list[StoredArray]]:
    """The head of a file (length and JSON) for (key, dtype, shape) in order, and where each array will lie."""
    entries: dict[str, Any] = {"__metadata__": dict(sorted(metadata.items()))}
    spans, position = [], 0
    for key, name, shape in arrays:
        nbytes = nbytes_of(math.prod(shape), DTYPES[name], key)
        entries[key] = {
            "dtype": DTYPES[name].safetensors,
            "shape": list(shape),
            "data_offsets": [position, position + nbytes],
        }
        spans.append((name, shape, position, nbytes))
        position += nbytes
    text = json.dumps(entries, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-(8 + len(text)) % ALIGNMENT)
    if len(text) > LARGEST_HEADER:
        raise InputError(
            "target shard",
            f"its header would have {len(text)} bytes, safetensors allows {LARGEST_HEADER}; use more target ranks",
        )
    data_start = 8 + len(text)
    return struct.pack("<Q", len(text)) + text, [
        StoredArray(name, shape, data_start + begin, nbytes) for name, shape, begin, nbytes in spans
    ]
