"""HDF5 as target: a file for each rank, whose arrays are plain byte spans, and a view in which every tensor is whole.

Files are put together in memory, without their arrays: HDF5 says where each will lie, and what it writes around them. So a plan
knows the offsets before there is a file, and arrays are then written as those of any other format.

rank-00000.h5   |--metadata--|--array--|--array--|-- ...
"""

import io
import math
import re
from collections.abc import Sequence
from functools import lru_cache
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from reshard_mpi.checkpoint.checks import distinct_boxes
from reshard_mpi.checkpoint.dtypes import DTYPES, nbytes_of
from reshard_mpi.checkpoint.manifest import CASE_FILE, Fragment, by_tensor
from reshard_mpi.errors import InputError
from reshard_mpi.layout.target import Outgoing
from reshard_mpi.plan.stored import ByteForm, Place, byte_form
from reshard_mpi.storage.files import create_file
from reshard_mpi.storage.hdf5 import MOST_AXES, carrier_of, stored_types
from reshard_mpi.storage.safetensors import StoredArray

if TYPE_CHECKING:
    import h5py

GLOBAL_FILE = "global.h5"
ALIGNMENT = 8  # of arrays within a file
# One version of the format, 1.8 and for virtual datasets 1.10: bytes don't depend on the library. Of what begins at 1.10, HDF5
# 1.10 and 2.0 write different versions.
VERSION = ("v108", "v110")


def check_names(outgoing: Outgoing) -> None:
    """InputError for a tensor that no dataset can be: its key is its path."""
    keys = set(outgoing.keys.values())
    axes = {fragment.logical_tensor_id: len(fragment.global_shape) for fragment in outgoing.case.fragments}
    for tensor_id, key in outgoing.keys.items():
        parts = key.split("/")
        where = f"{CASE_FILE}: tensor {tensor_id}"
        if any(part in ("", ".") or re.search("[\0\ud800-\udfff]", part) for part in parts):
            raise InputError(where, f"would be stored as {key!r}, which is no path of an HDF5 dataset; rename it")
        group = next((group for n in range(1, len(parts)) if (group := "/".join(parts[:n])) in keys), None)
        if group is not None:
            raise InputError(where, f"would be stored as {key!r}, but {group!r} is a tensor too; rename one")
        if axes.get(tensor_id, 0) > MOST_AXES:
            raise InputError(where, f"has {axes[tensor_id]} axes, HDF5 allows {MOST_AXES}; leave it out with --exclude")


class _Head(io.RawIOBase):
    """A file that is being put together, of which only the first `most_nbytes` are kept."""

    def __init__(self) -> None:
        self.content, self.nbytes, self.most_nbytes, self._position = bytearray(), 0, 1 << 62, 0

    def readable(self) -> bool:
        return True

    def writable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._position

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        self._position = offset + {io.SEEK_SET: 0, io.SEEK_CUR: self._position, io.SEEK_END: self.nbytes}[whence]
        return self._position

    def readinto(self, buffer: Any) -> int:
        into = memoryview(buffer).cast("B")
        found = self.content[self._position : self._position + len(into)]
        into[:] = found.ljust(len(into), b"\0")
        self._position += len(into)
        return len(into)

    def write(self, data: Any) -> int:
        """Past `most_nbytes` nothing is kept: there HDF5 writes what the arrays will write over."""
        content = memoryview(data).cast("B")
        last = self._position + len(content)
        kept = content[: max(self.most_nbytes - self._position, 0)]
        if kept:
            self.content.extend(bytes(max(self._position + len(kept) - len(self.content), 0)))
            self.content[self._position : self._position + len(kept)] = kept
        self._position, self.nbytes = last, max(self.nbytes, last)
        return len(content)

    def truncate(self, size: int | None = None) -> int:
        self.nbytes = self._position if size is None else size
        del self.content[self.nbytes :]
        return self.nbytes

    def flush(self) -> None:
        """There is nothing behind it."""


def _new_file(head: _Head) -> "h5py.File":
    import h5py

    return h5py.File(head, "w", libver=VERSION, alignment_threshold=1, alignment_interval=ALIGNMENT)


@lru_cache(maxsize=16)  # the ranks of a mesh often hold arrays of the same names and shapes
def build_hdf5(
    arrays: tuple[tuple[str, str, tuple[int, ...]], ...], aliases: tuple[tuple[str, str], ...]
) -> tuple[bytes, list[StoredArray]]:
    """What a file of (key, dtype, shape) begins with, and where each array will lie; `aliases` become links, key to key.

    The space of an array is taken when it is first written to: that is done last, so that all arrays lie behind all metadata.
    """
    import h5py

    head, types = _Head(), stored_types()
    with _new_file(head) as file:
        _make_groups(file, [*(key for key, _, _ in arrays), *(alias for alias, _ in aliases)])
        created = _properties()
        created.set_layout(h5py.h5d.CONTIGUOUS)
        created.set_fill_time(h5py.h5d.FILL_TIME_NEVER)
        datasets = []
        for key, dtype, shape in arrays:
            nbytes = nbytes_of(math.prod(shape), DTYPES[dtype], key)
            stored = shape if DTYPES[dtype].nbits >= 8 else (nbytes,)
            dataset = _dataset(file, key, types[carrier_of(dtype)], stored, created)
            _describe(dataset, dtype, shape)
            datasets.append(dataset)
        root = h5py.h5g.open(file.id, b"/")  # kept: its links are nothing without it
        for alias, key in aliases:
            root.links.create_soft(alias.encode(), b"/" + key.encode(), _links())
        file.flush()
        head.most_nbytes = -(-head.nbytes // ALIGNMENT) * ALIGNMENT
        spans = []
        for (_, dtype, shape), dataset in zip(arrays, datasets, strict=True):
            nbytes = nbytes_of(math.prod(shape), DTYPES[dtype], "")
            begin = _take_space(dataset) if nbytes else head.most_nbytes
            assert begin >= head.most_nbytes, "an array lies among the metadata"
            spans.append(StoredArray(dtype, shape, begin, nbytes))
    return bytes(head.content), spans


def _take_space(dataset: "h5py.h5d.DatasetID") -> int:
    """Write one element, for which HDF5 takes the space of all; where it begins."""
    import h5py

    space, kind = dataset.get_space(), dataset.get_type()
    if space.shape:
        space.select_elements(np.zeros((1, len(space.shape)), np.uint64))
    dataset.write(h5py.h5s.create_simple((1,)), space, np.zeros(kind.get_size(), np.uint8), kind)
    begin: int = dataset.get_offset()
    return begin


def _make_groups(file: "h5py.File", keys: Sequence[str]) -> None:
    """The groups in which datasets of these keys lie; made on the way by HDF5 before 2.0, they would hold the time."""
    import h5py

    created = h5py.h5p.create(h5py.h5p.GROUP_CREATE)
    created.set_obj_track_times(False)
    paths = ("/".join(parts[:n]) for key in keys for parts in [key.split("/")] for n in range(1, len(parts)))
    for path in dict.fromkeys(paths):
        h5py.h5g.create(file.id, path.encode(), _links(), created)


def _properties() -> "h5py.h5p.PropDCID":
    import h5py

    created = h5py.h5p.create(h5py.h5p.DATASET_CREATE)
    created.set_obj_track_times(False)
    return created


def _links() -> "h5py.h5p.PropLCID":
    import h5py

    links = h5py.h5p.create(h5py.h5p.LINK_CREATE)
    links.set_char_encoding(h5py.h5t.CSET_UTF8)
    return links


def _dataset(
    file: "h5py.File", key: str, kind: "h5py.h5t.TypeID", shape: tuple[int, ...], created: "h5py.h5p.PropDCID"
) -> "h5py.h5d.DatasetID":
    import h5py

    return h5py.h5d.create(file.id, key.encode(), kind, _space(shape), created, lcpl=_links())


def _space(shape: tuple[int, ...]) -> "h5py.h5s.SpaceID":
    import h5py

    return h5py.h5s.create_simple(shape) if shape else h5py.h5s.create(h5py.h5s.SCALAR)


def _describe(dataset: "h5py.h5d.DatasetID", dtype: str, shape: tuple[int, ...], **more: str) -> None:
    """The attributes of a dataset."""
    import h5py

    attributes = h5py.AttributeManager(h5py.Dataset(dataset))
    attributes["dtype"] = dtype
    if DTYPES[dtype].nbits < 8:
        attributes["shape"] = np.array(shape, "<i8")
    for name, value in more.items():
        attributes[name] = value


# ---- the view


def write_global_view(outgoing: Outgoing, out: Path) -> None:
    """`global.h5`, in which every logical tensor is whole, made of the shards beside it."""
    content = global_view(outgoing)
    create_file(out / GLOBAL_FILE, len(content), content)


def global_view(outgoing: Outgoing) -> bytes:
    """The bytes of `global.h5`: of each tensor a virtual dataset, of replicas their first holder."""
    head, types = _Head(), stored_types()
    with _new_file(head) as file:
        tensors = by_tensor(outgoing.case.fragments)
        _make_groups(file, [outgoing.keys[tensor_id] for tensor_id in sorted(tensors)])
        for tensor_id, fragments in sorted(tensors.items()):
            like = fragments[0]
            created, shape = _virtual(fragments)
            dataset = _dataset(file, outgoing.keys[tensor_id], types[carrier_of(like.dtype)], shape, created)
            _describe(dataset, like.dtype, like.global_shape, logical_tensor_id=tensor_id)
    return bytes(head.content)


def _virtual(fragments: Sequence[Fragment]) -> tuple["h5py.h5p.PropDCID", tuple[int, ...]]:
    """How a whole tensor is made of its fragments, and the shape of its dataset: in bytes, for types narrower than a byte."""
    like, boxes = fragments[0], distinct_boxes(fragments)
    created, is_packed = _properties(), DTYPES[like.dtype].nbits < 8
    if not boxes:
        return created, (0,) if is_packed else like.global_shape
    form = _packed_form(like, boxes) if is_packed else None
    shape = form.shape if form else like.global_shape
    for row, fragment in enumerate(boxes):
        if form:
            start, stop = (side[row].tolist() for side in (form.boxes.start, form.boxes.stop))
            whole = _selected(shape, start, [b - a for a, b in zip(start, stop, strict=True)])
            stored = _packed_selection(form, row, fragment)
        else:
            whole = _selected(shape, fragment.element_offset, fragment.element_extent)
            stored = _selected(fragment.local_shape, fragment.padding.before, fragment.element_extent)
        created.set_virtual(whole, fragment.payload_file.encode(), b"/" + fragment.payload_key.encode(), stored)
    return created, shape


def _selected(shape: tuple[int, ...], start: Sequence[int], count: Sequence[int]) -> "h5py.h5s.SpaceID":
    space = _space(shape)
    if shape:
        space.select_hyperslab(tuple(start), tuple(count))
    return space


def _packed_form(like: Fragment, boxes: Sequence[Fragment]) -> ByteForm:
    places = tuple(Place(f.element_offset, f.element_extent, f.padding.before, f.local_shape) for f in boxes)
    return byte_form(like.global_shape, DTYPES[like.dtype].nbits, places, f"tensor {like.logical_tensor_id}")


def _packed_selection(form: ByteForm, row: int, fragment: Fragment) -> "h5py.h5s.SpaceID":
    """The bytes of a box within its stored array, which is one axis of bytes."""
    import h5py

    nbytes = nbytes_of(math.prod(fragment.local_shape), DTYPES[fragment.dtype], fragment.fragment_id)
    space, extent = _space((nbytes,)), (form.boxes.stop[row] - form.boxes.start[row]).tolist()
    if math.prod(extent) == nbytes:
        return space
    space.select_none()
    stride, run = form.stride[row].tolist(), extent[-1]
    for index in product(*map(range, extent[:-1])):
        first = int(form.lead[row]) + sum(i * step for i, step in zip(index, stride, strict=False))
        space.select_hyperslab((first,), (run,), op=h5py.h5s.SELECT_OR)
    return space
