"""The HDF5 container: an array is a dataset, named by its path from the root, `/` left out; its dtype is an attribute.

HDF5 has no type for bfloat16, float8 and others: they are unsigned integers of the same width, and the attribute `dtype` has the
name of the type. Types narrower than a byte are packed in uint8, and the attribute `shape` has the shape in elements. Links that
lead out of the file are refused, as is what HDF5 would make up: datasets that were never written read as zeros.
"""

import math
import os
from collections.abc import Iterator
from typing import TYPE_CHECKING

from reshard_mpi.checkpoint import manifest
from reshard_mpi.checkpoint.dtypes import DTYPES, nbytes_of
from reshard_mpi.errors import InputError, names
from reshard_mpi.storage.chunked import ChunkedArray, SpanFile, guarded, memory_type, nchunks, read_descriptor
from reshard_mpi.storage.safetensors import StoredArray
from reshard_mpi.storage.shown import ReadSpan

if TYPE_CHECKING:
    import h5py

MOST_AXES = 32  # of a dataset
MOST_BYTES = 1 << 62


def stored_types() -> "dict[str, h5py.h5t.TypeID]":
    """Our dtypes that HDF5 has, and how each is stored; complex64 as h5py has it."""
    import h5py

    h5t = h5py.h5t
    pair = h5t.create(h5t.COMPOUND, 8)
    pair.insert(b"r", 0, h5t.IEEE_F32LE)
    pair.insert(b"i", 4, h5t.IEEE_F32LE)
    integers = {
        f"{kind}int{nbits}".removeprefix("s"): getattr(h5t, f"STD_{'U' if kind == 'u' else 'I'}{nbits}LE")
        for kind in "us"
        for nbits in (8, 16, 32, 64)
    }
    floats = {f"float{nbits}": getattr(h5t, f"IEEE_F{nbits}LE") for nbits in (16, 32, 64)}
    return integers | floats | {"complex64": pair}


def carrier_of(dtype: str) -> str:
    """The dtype as which elements of `dtype` are stored.

    >>> carrier_of("float32"), carrier_of("bfloat16"), carrier_of("float4_e2m1fn")
    ('float32', 'uint16', 'uint8')
    """
    if dtype in ("float16", "float32", "float64", "complex64") or dtype.removeprefix("u").startswith("int"):
        return dtype
    return f"uint{max(DTYPES[dtype].nbits, 8)}"


def read_hdf5(fd: int, where: str) -> dict[str, StoredArray]:
    """Key -> array of the HDF5 file `fd`; InputError at `where` for what can't be an array of ours."""
    nbytes = os.fstat(fd).st_size
    spans = SpanFile(_without_endless_heaps(read_descriptor(fd, where), where), nbytes)
    found = guarded(lambda: _read(spans, nbytes, where), where, spans)
    _check_disjoint(found, where)
    return found


def _without_endless_heaps(read: ReadSpan, where: str) -> ReadSpan:
    """Reads spans, of which those that are a heap of strings are followed to their end: HDF5 2.0 itself may never get there.

    A heap is "GCOL", version, its length at byte 8, and from byte 16 on objects: number (2 bytes), count of references, and at
    byte 8 the length of what follows, in steps of 8 bytes. Number 0 is free space, and its length that of all of it (HDF5 File
    Format Specification, III.E).
    """

    def read_checked(offset: int, into: memoryview) -> None:
        read(offset, into)
        if bytes(into[:4]) != b"GCOL" or len(into) < 16:
            return
        position, end = 16, min(int.from_bytes(into[8:16], "little"), len(into))
        while position + 16 <= end:
            number, size = (
                int.from_bytes(into[position : position + 2], "little"),
                int.from_bytes(into[position + 8 : position + 16], "little"),
            )
            step = size if number == 0 else 16 + size + -size % 8
            if not step or position + step > int.from_bytes(into[8:16], "little"):
                raise InputError(where, f"its heap at byte {offset} has no end; the file is damaged: copy it anew")
            position += step

    return read_checked


def _read(spans: SpanFile, nbytes: int, where: str) -> dict[str, StoredArray]:
    import h5py

    with h5py.File(spans, "r") as file:
        arrays = _Arrays(nbytes, where)
        datasets, links = _walk(file, where)
        found = {key: arrays.of(key, file, address) for key, address in datasets.items()}
        return found | {key: found[target] for key, target in links.items() if target in found}


def _walk(file: "h5py.File", where: str) -> tuple[dict[str, int], dict[str, str]]:
    """The datasets, key -> address, and the soft links, key -> key. A group is looked into once, whatever leads there."""
    import h5py

    datasets: dict[str, int] = {}
    groups: dict[str, int] = {"": h5py.h5o.get_info(file.id).addr}
    links: dict[str, str] = {}
    seen, left = set(groups.values()), [""]
    while left:
        prefix = left.pop()
        group = h5py.h5g.open(file.id, b"/" + prefix.encode())
        for name in group:
            key = prefix + name.decode()
            kind = group.links.get_info(name).type
            if kind == h5py.h5l.TYPE_SOFT:
                target = group.links.get_val(name).decode()
                links[key] = target[1:] if target.startswith("/") else prefix + target
                continue
            if kind != h5py.h5l.TYPE_HARD:
                raise InputError(where, f"{key!r} is a link out of the file; expected the array itself")
            info = h5py.h5o.get_info(group, name)
            if info.type == h5py.h5o.TYPE_DATASET:
                datasets[key] = info.addr
            elif info.type == h5py.h5o.TYPE_GROUP:
                groups[key] = info.addr
                if info.addr not in seen:
                    seen.add(info.addr)
                    left.append(key + "/")
    for key, target in links.items():
        if target.strip("/") not in datasets.keys() | groups.keys() | links.keys():
            raise InputError(where, f"{key!r} is a link to {target!r}, which is nothing in the file; expected an array")
    return datasets, links


class _Arrays:
    """The datasets of a file as arrays; an object that has several names is one array."""

    def __init__(self, file_nbytes: int, where: str):
        self._types = stored_types()
        self._file_nbytes, self._where = file_nbytes, where
        self._shown_nbytes = 0  # of arrays behind the end of the file
        self._known: dict[int, StoredArray] = {}  # by address

    def of(self, key: str, file: "h5py.File", address: int) -> StoredArray:
        if address not in self._known:
            self._known[address] = guarded(lambda: self._array(key, file), f"{self._where}: array {key!r}")
        return self._known[address]

    def _array(self, key: str, file: "h5py.File") -> StoredArray:
        import h5py

        where = f"{self._where}: array {key!r}"
        dataset = h5py.h5d.open(file.id, key.encode())
        space = dataset.get_space()
        if space.get_simple_extent_type() == h5py.h5s.NULL:
            raise InputError(where, "is a null dataset, which has no shape; expected elements")
        kind = dataset.get_type()
        said, sizes = (
            _attribute(dataset, "dtype", h5py.h5t.TypeStringID),
            _attribute(dataset, "shape", h5py.h5t.TypeIntegerID),
        )
        dtype, is_swapped = self._dtype(kind, said, where)
        stored_nbytes = math.prod(space.shape) * kind.get_size()
        shape = _shape(dtype, space.shape, sizes, where)
        nbytes = nbytes_of(math.prod(shape), DTYPES[dtype], where)
        if max(nbytes, stored_nbytes) >= MOST_BYTES:
            raise InputError(where, f"shape {list(shape)} has more bytes than any file; expected less than 2**62")
        if nbytes != stored_nbytes:
            raise InputError(where, f"{dtype} {list(shape)} needs {nbytes} bytes, {stored_nbytes} are stored")
        if not nbytes:
            return StoredArray(dtype, shape, 0, 0)
        created = dataset.get_create_plist()
        layout = created.get_layout()
        if layout == h5py.h5d.VIRTUAL or created.get_external_count():
            raise InputError(where, "lies in other files; expected the array itself")
        if layout == h5py.h5d.CONTIGUOUS:
            begin = dataset.get_offset()
            if begin is None:
                raise InputError(where, "has no bytes: it was never written; nothing is filled in")
            if begin + nbytes > self._file_nbytes:
                raise InputError(
                    where,
                    f"ends at byte {begin + nbytes}, the file at {self._file_nbytes}; it is truncated: copy it anew",
                )
            if not is_swapped:
                return StoredArray(dtype, shape, begin, nbytes)
        chunk = self._chunk(dataset, created, space.shape, where) if layout == h5py.h5d.CHUNKED else None
        shown = ChunkedArray(
            self._file_nbytes + self._shown_nbytes, key, kind.get_size(), space.shape, chunk, self._file_nbytes, where
        )
        self._shown_nbytes += nbytes
        return StoredArray(dtype, shape, shown.begin, nbytes, shown)

    def _dtype(self, kind: "h5py.h5t.TypeID", attribute: object, where: str) -> tuple[str, bool]:
        """The dtype, and whether its bytes are stored in the other order."""
        import h5py

        is_bool = isinstance(kind, h5py.h5t.TypeEnumID) and kind.dtype == bool and kind.get_size() == 1
        little = memory_type(kind)
        carrier = "bool" if is_bool else next((name for name, t in self._types.items() if t.equal(little)), None)
        said = carrier if attribute is None else attribute
        said = said.decode(errors="replace") if isinstance(said, bytes) else said
        if carrier is None or not isinstance(said, str) or said not in DTYPES:
            shown = str(kind.dtype)
            raise InputError(
                where,
                f"is stored as {shown}, its attribute dtype is {attribute!r}; expected an attribute with one of "
                f"{', '.join(DTYPES)}, stored as such or as unsigned integers of the same width",
            )
        if carrier not in (said, carrier_of(said), f"uint{max(DTYPES[said].nbits, 8)}"):
            raise InputError(
                where, f"is stored as {carrier}, its attribute dtype says {said}; expected {carrier_of(said)}"
            )
        return said, not little.equal(kind)

    def _chunk(
        self, dataset: "h5py.h5d.DatasetID", created: "h5py.h5p.PropDCID", shape: tuple[int, ...], where: str
    ) -> tuple[int, ...]:
        import h5py

        for number in range(created.get_nfilters()):
            code, _, _, name = created.get_filter(number)
            if not h5py.h5z.filter_avail(code):
                known = name.decode(errors="replace") or str(code)
                raise InputError(where, f"is compressed with {known}, which this h5py can't read; install its plugin")
        chunk: tuple[int, ...] = created.get_chunk()
        expected, stored = nchunks(shape, chunk), dataset.get_num_chunks()
        if stored < expected:
            raise InputError(
                where,
                f"{stored} of its {expected} chunks are there, the others were never written; nothing is filled in",
            )
        return chunk


def _attribute(dataset: "h5py.h5d.DatasetID", name: str, kind: type) -> object:
    """An attribute, None where there is none; one of another kind isn't read: HDF5 is not safe against types that lie."""
    import h5py

    if not h5py.h5a.exists(dataset, name.encode()):
        return None
    attribute = h5py.h5a.open(dataset, name.encode())
    if (
        not isinstance(attribute.get_type(), kind)
        or attribute.get_space().get_simple_extent_npoints() > manifest.MOST_AXES
    ):
        return f"of another kind than {kind.__name__}"
    found: object = h5py.AttributeManager(h5py.Dataset(dataset))[name]
    return found


def _shape(dtype: str, stored: tuple[int, ...], found: object, where: str) -> tuple[int, ...]:
    """The shape in elements, which only types narrower than a byte have apart."""
    if DTYPES[dtype].nbits >= 8:
        return stored
    sizes = [] if found is None else found.tolist() if hasattr(found, "tolist") else None
    if (
        found is None
        or not isinstance(sizes, list)
        or len(sizes) > manifest.MOST_AXES
        or not all(type(n) is int and 0 <= n < MOST_BYTES for n in sizes)
    ):
        raise InputError(where, f"is {dtype}, its attribute shape is {found!r}; expected the shape in elements")
    return tuple(sizes)


def _check_disjoint(arrays: dict[str, StoredArray], where: str) -> None:
    spans: Iterator[tuple[int, int, str]] = (
        (array.begin, array.begin + array.nbytes, key) for key, array in arrays.items() if array.nbytes
    )
    last = (0, 0, "")
    for span in sorted(spans):
        if span[0] < last[1] and span[:2] != last[:2]:
            raise InputError(where, f"arrays {names([last[2], span[2]])} overlap; the file is damaged: copy it anew")
        last = span
