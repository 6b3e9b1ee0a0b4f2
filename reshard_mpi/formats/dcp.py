"""PyTorch Distributed Checkpoint folders, read without torch: `.metadata` and `__{rank}_{number}.distcp`.

Format, read off files of torch 2.13: `.metadata` is one pickle, which says of every tensor its shape, its chunks, and in which
byte range of which file each chunk is. Such a range is a complete `torch.save` archive: a zip whose entries are stored, with the
bytes of the storage in `*/data/0`, and in `*/data.pkl` how the tensor lies in its storage. Every entry has a CRC-32, which
torch itself doesn't look at.
"""

import hashlib
import io
import math
import os
import struct
import zipfile
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import astuple, dataclass
from pathlib import Path
from typing import Any, TypeVar

from reshard_mpi.checkpoint.dtypes import DTYPES, nbytes_of
from reshard_mpi.checkpoint.manifest import MOST_AXES, sha256_name
from reshard_mpi.errors import InputError, ReshardError, names
from reshard_mpi.formats.described import Described, Piece, case_of
from reshard_mpi.formats.pickles import METADATA_NAMES, TENSOR_NAMES, Dtype, Record, Storage, Tensor, read_pickle
from reshard_mpi.storage.chunked import SpanFile, read_descriptor
from reshard_mpi.storage.digests import crc32_name
from reshard_mpi.storage.entries import Entry
from reshard_mpi.storage.files import open_regular, read_text
from reshard_mpi.storage.safetensors import StoredArray
from reshard_mpi.storage.strided import StridedArray

T = TypeVar("T")

METADATA_FILE = ".metadata"
LARGEST_METADATA = 1 << 30
LARGEST_PICKLE = 1 << 20  # of one tensor: a few hundred bytes
PACKED = {"float4_e2m1fn_x2": ("float4_e2m1fn", 2)}  # torch's name -> ours, and our elements in one of torch's


def is_dcp(folder: Path) -> bool:
    return (folder / METADATA_FILE).exists()


def describe_dcp(folder: Path) -> Described:
    """The checkpoint in `folder` as a case: a file is a rank, a chunk is a fragment."""
    where = str(folder / METADATA_FILE)
    content = read_text(folder, METADATA_FILE, LARGEST_METADATA)
    metadata = read_pickle(content, METADATA_NAMES, where)
    entries = _attribute(metadata, "state_dict_metadata", dict, where)
    if not all(isinstance(fqn, str) for fqn in entries):
        raise InputError(where, "state_dict_metadata has keys that are no names; this is no metadata of DCP 1.0")
    storage = _attribute(metadata, "storage_data", dict, where)
    stored = _stored_at(storage, where)
    prefix = _sole_top_level_key(getattr(metadata, "planner_data", None), entries)
    tensors = {fqn: entry for fqn, entry in entries.items() if type(entry).__name__ == "TensorStorageMetadata"}
    files = sorted({place.file for (fqn, _), place in stored.items() if fqn in tensors})
    number = {file: index for index, file in enumerate(files)}
    headers: dict[str, dict[str, StoredArray]] = {file: {} for file in files}
    pieces = []
    with _OpenFiles(folder) as opened:
        for fqn, entry in tensors.items():
            name = fqn.removeprefix(prefix)
            dtype, scale = _dtype(_attribute(entry, "properties", Record, where), f"{where}: tensor {fqn}")
            shape = _packed(_sizes(entry, "size", where), scale)
            for chunk in _attribute(entry, "chunks", list, where):
                offset, extent = _sizes(chunk, "offsets", where), _sizes(chunk, "sizes", where)
                place = stored.get((fqn, offset))
                if place is None:
                    raise InputError(
                        where, f"chunk {list(offset)} of tensor {fqn} is stored nowhere; save the checkpoint anew"
                    )
                key = f"{name}@{','.join(map(str, offset))}"
                headers[place.file][key], digest = opened.chunk(place, fqn, dtype, extent, scale)
                box = _packed(offset, scale), _packed(extent, scale)
                pieces.append(Piece(name, dtype, shape, *box, number[place.file], key, digest))
    return Described(
        case_of(folder.resolve().name, files, pieces, "dcp"),
        headers,
        sha256_name(hashlib.sha256(content)),
        tuple(_warnings(folder, prefix)),
        tuple(_others(storage, sorted(entries.keys() - tensors.keys()), where)),
    )


@dataclass(frozen=True)
class _Place:
    """The byte range of a file that holds an entry."""

    file: str
    offset: int
    nbytes: int


def _warnings(folder: Path, prefix: str) -> Iterator[str]:
    if prefix:
        yield f"{folder}: all names begin with {prefix!r}, the one key under which the model was saved; it is left out"


def _attribute(record: Any, name: str, kind: type, where: str) -> Any:
    value = getattr(record, name, None)
    if not isinstance(record, Record) or not isinstance(value, kind):
        raise InputError(
            where, f"{name} is {type(value).__name__}, expected {kind.__name__}; this is no metadata of DCP 1.0"
        )
    return value


def _sizes(record: Any, name: str, where: str) -> tuple[int, ...]:
    sizes = _attribute(record, name, tuple, where)
    if len(sizes) > MOST_AXES or not all(type(size) is int and 0 <= size < 1 << 62 for size in sizes):
        raise InputError(where, f"{name} are no sizes along at most {MOST_AXES} axes; this is no metadata of DCP 1.0")
    return tuple(sizes)


def _packed(sizes: tuple[int, ...], scale: int) -> tuple[int, ...]:
    """Sizes in our elements, of which the last axis holds `scale` in one of torch's."""
    return (*sizes[:-1], sizes[-1] * scale) if sizes else sizes


def _dtype(properties: Record, where: str) -> tuple[str, int]:
    state = getattr(properties, "state", None)  # (dtype, layout, requires_grad, memory format, pin_memory)
    found = state[0] if isinstance(state, tuple) and state else getattr(properties, "dtype", None)
    if not isinstance(found, Dtype):
        raise InputError(where, "its dtype is not said")
    name, scale = PACKED.get(found, (str(found), 1))
    if name not in DTYPES:
        raise InputError(
            where, f"dtype {found} is none that safetensors has; save the checkpoint in another one, or without it"
        )
    return name, scale


def _stored_at(storage: Mapping[Any, Any], where: str) -> dict[tuple[str, tuple[int, ...]], _Place]:
    """(fqn, offset of the chunk) -> where it is stored; bytes entries have no offset, and are left out."""
    found: dict[tuple[str, tuple[int, ...]], _Place] = {}
    for index, info in storage.items():
        if getattr(index, "offset", None) is None:
            continue
        offset = _sizes(index, "offset", where)
        fqn = _attribute(index, "fqn", str, where)
        place = _place(info, f"tensor {fqn}", where)
        if found.setdefault((fqn, offset), place) != place:
            raise InputError(where, f"chunk {list(offset)} of tensor {fqn} is stored twice; save the checkpoint anew")
    _check_disjoint(found, where)
    return found


def _place(info: Any, what: str, where: str) -> _Place:
    """Where something is stored, as `.metadata` says it."""
    if getattr(info, "transform_descriptors", None):
        raise InputError(where, f"{what} is stored compressed or transformed; save the checkpoint without transforms")
    place = _Place(
        *(
            _attribute(info, name, kind, where)
            for name, kind in (("relative_path", str), ("offset", int), ("length", int))
        )
    )
    if "/" in place.file or "\0" in place.file or place.file in ("", ".", ".."):
        raise InputError(where, f"{what} is said to lie in {place.file!r}; expected a file of the folder")
    if not (0 <= place.offset < 1 << 62 and 0 <= place.nbytes < 1 << 62):
        raise InputError(where, f"{what} is said to lie where no file has bytes; expected less than 2**62")
    return place


def _check_disjoint(stored: Mapping[tuple[str, tuple[int, ...]], _Place], where: str) -> None:
    """All have bytes of their own: were they in one place, that would be looked into again and again."""
    end, before = ("", 0), ""
    for place, fqn in sorted((astuple(place), fqn) for (fqn, _), place in stored.items()):
        if place[:2] < end:
            raise InputError(where, f"{names([before, fqn])} are said to lie in the same bytes of {place[0]}")
        end, before = (place[0], place[1] + place[2]), fqn


def _others(storage: Mapping[Any, Any], fqns: Sequence[str], where: str) -> Iterator[Entry]:
    """The entries that are no tensors, by name."""
    found: dict[tuple[str, tuple[int, ...]], _Place] = {}
    for index, info in storage.items():
        if getattr(index, "offset", None) is None:
            fqn = _attribute(index, "fqn", str, where)
            found[fqn, ()] = _place(info, f"entry {fqn}", where)
    _check_disjoint(found, where)
    for fqn in fqns:
        yield Entry(fqn, *astuple(found.get((fqn, ()), _Place("", 0, 0))))


def _sole_top_level_key(planner_data: Any, entries: Mapping[str, Any]) -> str:
    """`model.` where everything was saved as {"model": state_dict}, as accelerate does; else nothing."""
    if not isinstance(planner_data, dict) or not all(
        isinstance(path, tuple) and path and isinstance(path[0], str) for path in planner_data.values()
    ):
        return ""
    tops = {path[0] for path in planner_data.values()}
    top = next(iter(tops), None)
    nested = len(tops) == 1 and all(len(path) > 1 for path in planner_data.values())
    return f"{top}." if nested and all(fqn.startswith(f"{top}.") for fqn in entries) else ""


class _OpenFiles:
    """Reads archives out of the files of a folder, one file open at a time."""

    def __init__(self, folder: Path):
        self._folder = folder
        self._open: tuple[str, int, int] | None = None
        self._shown_nbytes: defaultdict[str, int] = defaultdict(int)  # of arrays behind the end of each file

    def __enter__(self) -> "_OpenFiles":
        return self

    def __exit__(self, *_: object) -> None:
        if self._open:
            os.close(self._open[1])

    def _descriptor(self, name: str) -> tuple[int, int]:
        if self._open is None or self._open[0] != name:
            self.__exit__()
            self._open = None
            fd = open_regular(self._folder, name, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
            self._open = (name, fd, os.fstat(fd).st_size)
        return self._open[1], self._open[2]

    def chunk(
        self, place: _Place, fqn: str, entry_dtype: str, extent: tuple[int, ...], scale: int
    ) -> tuple[StoredArray, str | None]:
        """The bytes of one chunk, which must be what `.metadata` says of it; and their checksum, if they are all of an entry."""
        fd, size = self._descriptor(place.file)
        where = f"{self._folder / place.file}: tensor {fqn}"
        if place.offset + place.nbytes > size:
            raise InputError(
                where, f"ends at byte {place.offset + place.nbytes}, the file at {size}; it is truncated: copy it anew"
            )
        archive = _Archive(fd, place, where)
        dtype, scale_found, first, shape, stride = archive.tensor()
        if (dtype, scale_found, shape) != (entry_dtype, scale, extent):
            raise InputError(
                where,
                f"holds {dtype} {list(shape)}, .metadata says {entry_dtype} {list(extent)}; "
                "files and .metadata must be of one save",
            )
        element = DTYPES[dtype].nbits * scale // 8
        begin, nbytes, crc = archive.storage()
        needed = nbytes_of(math.prod(_packed(shape, scale)), DTYPES[dtype], where)
        dense = all(
            size == 1 or step == math.prod(shape[axis + 1 :])
            for axis, (size, step) in enumerate(zip(shape, stride, strict=True))
        )
        last = first + sum((size - 1) * step for size, step in zip(shape, stride, strict=True)) + 1 if needed else first
        if min((first, *stride), default=0) < 0 or max(last * element, needed) > nbytes:
            raise InputError(
                where, f"reaches over the {nbytes} bytes of its storage; the file is damaged: copy it anew"
            )
        if needed and (nbytes != needed or not dense):
            strides = tuple(step * element for step in stride)
            shown_at = size + self._shown_nbytes[place.file]
            self._shown_nbytes[place.file] += needed
            strided = StridedArray(shown_at, begin, nbytes, crc, first * element, element, shape, strides)
            return StoredArray(dtype, _packed(shape, scale), shown_at, needed, strided), None
        return StoredArray(dtype, _packed(shape, scale), begin, needed), crc32_name(crc) if needed else None


class _Archive:
    """One `torch.save` archive within a file."""

    def __init__(self, fd: int, place: _Place, where: str):
        self._fd, self._place, self._where = fd, place, where
        archive = SpanFile(read_descriptor(fd, where), place.nbytes, place.offset)
        self._zip = self._unzipped(lambda: zipfile.ZipFile(io.BufferedReader(archive, 4096)))
        root = [name[: -len("data.pkl")] for name in self._zip.namelist() if name.endswith("/data.pkl")]
        if len(root) != 1:
            raise InputError(where, "the archive has no data.pkl; the file is damaged: copy it anew")
        self._root = root[0]

    def _unzipped(self, do: Callable[[], T]) -> T:
        """`do()`; what a damaged archive raises, which may be anything, as one InputError."""
        try:
            return do()
        except (ReshardError, MemoryError):
            raise
        except Exception as error:
            reason = str(error) or type(error).__name__
            raise InputError(self._where, f"no archive as torch saves it: {reason}; copy the file anew") from error

    def _entry(self, name: str) -> zipfile.ZipInfo:
        try:
            entry = self._zip.getinfo(self._root + name)
        except KeyError as error:
            raise InputError(self._where, f"the archive lacks {name}; the file is damaged: copy it anew") from error
        if entry.compress_type != zipfile.ZIP_STORED or entry.compress_size != entry.file_size:
            raise InputError(self._where, f"{name} is compressed; save the checkpoint without compression")
        return entry

    def _text(self, name: str) -> bytes:
        entry = self._entry(name)
        if entry.file_size > LARGEST_PICKLE:
            raise InputError(self._where, f"{name} has {entry.file_size} bytes; expected at most {LARGEST_PICKLE}")
        return self._unzipped(lambda: self._zip.read(entry))

    def tensor(self) -> tuple[str, int, int, tuple[int, ...], tuple[int, ...]]:
        """Its dtype, our elements in one of torch's, and in torch's elements: first element, shape, strides."""
        order = self._text("byteorder").strip()
        if order != b"little":
            raise InputError(self._where, f"byte order {order.decode(errors='replace')!r}, expected 'little'")
        found = read_pickle(self._text("data.pkl"), TENSOR_NAMES, self._where)
        try:
            storage, first, shape, stride = found.args[:4]
            kind = found.args[6] if len(found.args) > 6 and isinstance(found.args[6], Dtype) else storage[1]
            numbers = [first, *shape, *stride]
            sound = isinstance(found, Tensor) and isinstance(kind, Dtype | Storage) and storage[2] == "0"
            sound = (
                sound
                and len(shape) == len(stride) <= MOST_AXES
                and all(type(n) is int and abs(n) < 1 << 62 for n in numbers)
            )
        except (AttributeError, IndexError, TypeError, ValueError):
            sound = False
        if not sound:
            raise InputError(self._where, "holds no plain tensor; expected what torch.save writes of one")
        if any(isinstance(one, dict) and (one.get("conj") or one.get("neg")) for one in found.args[6:]):
            raise InputError(
                self._where,
                "is stored before it was conjugated or negated, which torch does on loading; save it with resolve_conj() and "
                "resolve_neg()",
            )
        name, scale = PACKED.get(kind, (str(kind), 1))
        if name not in DTYPES:
            raise InputError(self._where, f"dtype {kind} is none that safetensors has")
        return name, scale, first, tuple(shape), tuple(stride)

    def storage(self) -> tuple[int, int, int]:
        """Where in the file the bytes of its storage begin, how many there are, and their CRC-32."""
        if f"{self._root}data/0" not in self._zip.namelist():
            return self._place.offset, 0, 0  # of a tensor without elements nothing is stored
        entry = self._entry("data/0")
        local = os.pread(self._fd, 30, self._place.offset + entry.header_offset)
        if len(local) < 30 or local[:4] != b"PK\x03\x04":
            raise InputError(
                self._where, "the archive's entry for its bytes begins nowhere; the file is damaged: copy it anew"
            )
        name_nbytes, extra_nbytes = struct.unpack("<HH", local[26:30])
        begin = entry.header_offset + 30 + name_nbytes + extra_nbytes
        if begin + entry.file_size > self._place.nbytes:
            raise InputError(self._where, "the archive's bytes reach beyond its end; the file is damaged: copy it anew")
        return self._place.offset + begin, entry.file_size, entry.CRC
