"""A whole tensor, read in row-major order from whatever fragments hold it, in bounded memory.

For what is compared or hashed as a whole: ties, padded replicas, oracles, two checkpoints. One process, no MPI.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from reshard_mpi.boxes import Boxes
from reshard_mpi.checkpoint.dtypes import DTYPES
from reshard_mpi.plan.stored import ByteForm, Place, StoredBoxes, byte_form, range_slabs
from reshard_mpi.storage.digests import digest_name, new_hash
from reshard_mpi.storage.files import Files

if TYPE_CHECKING:
    from reshard_mpi.checkpoint.manifest import Fragment
    from reshard_mpi.storage.safetensors import StoredArray
    from reshard_mpi.storage.shown import ShownArray

Bytes = NDArray[np.uint8]
PART_NBYTES = 4 << 20  # of a tensor that are held at once
MOST_SPAN_NBYTES = 4 * PART_NBYTES  # read at once, where padding lies between
READER_NBYTES = PART_NBYTES + MOST_SPAN_NBYTES  # of memory, by one who reads


@dataclass(frozen=True)
class WholeTensor:
    """The boxes that make up a tensor (or one stored array, or one box), and where each is stored. Small, and can be sent."""

    label: str
    shape: tuple[int, ...]
    dtype: str
    places: tuple[Place, ...]
    files: tuple[str, ...]
    begins: tuple[int, ...]
    shown: "tuple[tuple[str, ShownArray], ...]" = ()  # of these files, what is no span
    algorithm: str = "sha256"

    @property
    def nbytes(self) -> int:
        return int(np.prod(self._form.shape, dtype=np.int64)) if self.places else 0

    @cached_property
    def _form(self) -> ByteForm:
        return byte_form(self.shape, DTYPES[self.dtype].nbits, self.places, self.label)

    @cached_property
    def _stored(self) -> StoredBoxes:
        return StoredBoxes(self._form.boxes, self._form.stride, self._form.lead + np.array(self.begins, np.int64))

    def read(self, files: Files, first: int, last: int) -> Bytes:
        """The bytes [first, last) of the tensor, zeros where no place holds any; at most PART_NBYTES at once."""
        assert last - first <= PART_NBYTES
        for file, array in self.shown:
            files.show(file, [array])
        found = np.zeros(last - first, np.uint8)
        position = 0
        for start, stop in range_slabs(self._form.shape, first, last):
            extent = tuple(b - a for a, b in zip(start, stop, strict=True))
            nbytes = int(np.prod(extent, dtype=np.int64))
            self._read_slab(files, start, stop, found[position : position + nbytes].reshape(extent))
            position += nbytes
        return found

    def _read_slab(self, files: Files, start: tuple[int, ...], stop: tuple[int, ...], into: Bytes) -> None:
        slab = Boxes(np.array([start], np.int64), np.array([stop], np.int64))
        rows = np.arange(len(self.places))
        parts = self._stored.parts(rows, slab)
        rows = np.flatnonzero(parts.nonempty)
        parts = parts.take(rows)
        firsts, lasts = self._stored.spans(rows, parts)
        for row, low, high, first, last in zip(
            rows.tolist(), parts.start, parts.stop, firsts.tolist(), lasts.tolist(), strict=True
        ):
            if last - first > MOST_SPAN_NBYTES:
                self._read_halves(files, low, high, start, into)
                continue
            span = np.empty(last - first, np.uint8)
            files.read(self.files[row], first, span.data)
            where = tuple(
                slice(a - base, b - base) for a, b, base in zip(low.tolist(), high.tolist(), start, strict=True)
            )
            into[where] = np.ndarray(
                tuple((high - low).tolist()), np.uint8, span, 0, tuple(self._stored.stride[row].tolist())
            )
            del span  # its memory goes before the next one's comes

    def _read_halves(
        self, files: Files, low: NDArray[np.int64], high: NDArray[np.int64], start: tuple[int, ...], into: Bytes
    ) -> None:
        axis = int(np.argmax(high - low > 1))
        middle = int(low[axis] + high[axis]) // 2
        for a, b in ((int(low[axis]), middle), (middle, int(high[axis]))):
            first, last = low.copy(), high.copy()
            first[axis], last[axis] = a, b
            where = tuple(
                slice(x - base, y - base) for x, y, base in zip(first.tolist(), last.tolist(), start, strict=True)
            )
            self._read_slab(files, tuple(first.tolist()), tuple(last.tolist()), into[where])

    def digest(self, files: Files) -> str:
        """The digest of the tensor's bytes."""
        running = new_hash(self.algorithm)
        for first in range(0, self.nbytes, PART_NBYTES):
            running.update(self.read(files, first, min(first + PART_NBYTES, self.nbytes)).data)
        return digest_name(running.digest(), self.algorithm)


Arrays = Mapping[str, Mapping[str, "StoredArray"]]  # file -> key -> array


def whole_tensor(fragments: "Sequence[Fragment]", arrays: Arrays) -> WholeTensor:
    """The logical tensor of all its `fragments`."""
    from reshard_mpi.checkpoint.checks import distinct_boxes  # not needed where tensors are read

    like, boxes = fragments[0], distinct_boxes(fragments)
    places = tuple(Place(f.element_offset, f.element_extent, f.padding.before, f.local_shape) for f in boxes)
    stored = [arrays[f.payload_file][f.payload_key] for f in boxes]
    files = tuple(f.payload_file for f in boxes)
    return _whole(like.logical_tensor_id, like.global_shape, like.dtype, places, files, stored)


def whole_box(fragment: "Fragment", arrays: Arrays) -> WholeTensor:
    """The box of one fragment, without its padding."""
    origin = (0,) * len(fragment.element_extent)
    place = Place(origin, fragment.element_extent, fragment.padding.before, fragment.local_shape)
    stored = [arrays[fragment.payload_file][fragment.payload_key]]
    files = (fragment.payload_file,)
    return _whole(fragment.fragment_id, fragment.element_extent, fragment.dtype, (place,), files, stored)


def whole_array(file: str, key: str, array: "StoredArray", algorithm: str = "sha256") -> WholeTensor:
    """One stored array, padding included; `algorithm` is that of its digest."""
    origin = (0,) * len(array.shape)
    places = (Place(origin, array.shape, origin, array.shape),) if array.nbytes else ()
    if array.order:  # its digest is of its rows as they are stored
        array = replace(array, begin=array.order.stored_begin, order=None)
    return _whole(f"{file}:{key}", array.shape, array.dtype, places, (file,), [array], algorithm)


def _whole(
    label: str,
    shape: tuple[int, ...],
    dtype: str,
    places: tuple[Place, ...],
    files: tuple[str, ...],
    stored: "Sequence[StoredArray]",
    algorithm: str = "sha256",
) -> WholeTensor:
    begins = tuple(array.begin for array in stored)
    shown = tuple(
        (file, one) for file, array in zip(files, stored, strict=True) for one in (array.shown, array.order) if one
    )
    return WholeTensor(label, shape, dtype, places, files, begins, shown, algorithm)
