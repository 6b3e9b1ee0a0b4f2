"""A checkpoint that has no manifest, described as a case: files are ranks, pieces are fragments.

Formats that record boxes but no coordinates say nothing of what a mesh axis does: the topology is that of one rank, however
many files there are, and any target but `single` needs a layout.
"""

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from reshard_mpi.checkpoint.manifest import Case, Fragment, Padding, Replica, Topology
from reshard_mpi.storage.entries import Entry
from reshard_mpi.storage.safetensors import StoredArray


@dataclass(frozen=True)
class Piece:
    """One box of a tensor, in elements, and where it is stored: the array `key` of file number `file`."""

    fqn: str
    dtype: str
    global_shape: tuple[int, ...]
    offset: tuple[int, ...]
    extent: tuple[int, ...]
    file: int
    key: str
    digest: str | None = None


@dataclass(frozen=True)
class Described:
    """A checkpoint as a case, the arrays of its files, what the reader should be told, and what is there beside tensors."""

    case: Case
    headers: Mapping[str, Mapping[str, StoredArray]]
    digest: str  # of what describes it: another one is another checkpoint
    warnings: tuple[str, ...] = field(default=())
    others: tuple[Entry, ...] = ()


def case_of(name: str, files: Sequence[str], pieces: Iterable[Piece], format_name: str) -> Case:
    """The case of the pieces; fragments sorted by file, tensor and offset."""
    numbered: defaultdict[tuple[str, int], int] = defaultdict(int)
    fragments = []
    for piece in sorted(pieces, key=lambda piece: (piece.file, piece.fqn, piece.offset)):
        number = numbered[piece.fqn, piece.file]
        numbered[piece.fqn, piece.file] += 1
        none = (0,) * len(piece.extent)
        fragments.append(
            Fragment(
                fragment_id=f"{piece.fqn}|r{piece.file}" + (f"#{number}" if number else ""),
                logical_tensor_id=piece.fqn,
                fqn=piece.fqn,
                component_id="model",
                role="parameter",
                global_shape=piece.global_shape,
                element_offset=piece.offset,
                element_extent=piece.extent,
                local_shape=piece.extent,
                padding=Padding(none, none, "none"),
                dtype=piece.dtype,
                payload_file=files[piece.file],
                payload_key=piece.key,
                topology_coordinates=(("rank", piece.file),),
                replica=Replica(None, 1, 0),
                partition_axes=(),
                shard_file_id=files[piece.file],
                shard_digest_ref=f"source-digest:{files[piece.file]}",
                fragment_digest=piece.digest,
            )
        )
    return Case(
        case_id=name,
        components=("full_model",),
        features=(format_name,),
        topology=Topology({"world_size": 1}, {"world_size": 1}),
        world_size=len(files),
        fragments=tuple(fragments),
        expected_manifest_digest=None,
    )
