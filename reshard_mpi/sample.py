"""A synthetic Llama-like checkpoint of any size and topology, for trying out and for benchmarks.

Values are random bits without infinities and NaN; they depend on the seed and the tensor alone, not on the topology.
"""

import hashlib
import os
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import msgspec
import numpy as np
from numpy.typing import NDArray

from reshard_mpi.checkpoint.dtypes import DTYPES
from reshard_mpi.checkpoint.manifest import CASE_FILE, Case, Fragment, Layout, Padding, Replica, Topology, case_text
from reshard_mpi.checkpoint.mesh import Mesh, shard_name
from reshard_mpi.errors import UsageError, raise_first
from reshard_mpi.layout.rules import target_layout
from reshard_mpi.layout.target import Outgoing, outgoing_case
from reshard_mpi.plan.prepare import target_files
from reshard_mpi.run.commit import PartialFolder, check_out, finish_commit
from reshard_mpi.storage.digests import digest_name
from reshard_mpi.storage.files import Files, create_file

MOST_SHARDS = 4096
ROWS_NBYTES = 16 << 20  # of a tensor that are made at once
# What tensor parallelism does, by the last part of a module's name (as Megatron-LM cuts a Llama).
TP_RULES = dict.fromkeys(("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj", "embed_tokens", "lm_head"), 0) | {
    "o_proj": 1,
    "down_proj": 1,
}


@dataclass(frozen=True)
class Llama:
    """The sizes of a Llama: hidden, intermediate, key-value width, layers, vocabulary."""

    hidden: int
    layers: int

    @property
    def vocabulary(self) -> int:
        return min(32000, 16 * self.hidden)

    @property
    def nelems(self) -> int:
        return sum(int(np.prod(shape)) for _, shape in self.tensors())

    def tensors(self) -> Iterator[tuple[str, tuple[int, ...]]]:
        """(fqn, shape) in the order of the model, named as transformers names them."""
        hidden, wide, narrow = self.hidden, self.hidden * 7 // 2, max(self.hidden // 4, 1)
        yield "model.embed_tokens.weight", (self.vocabulary, hidden)
        for layer in range(self.layers):
            prefix = f"model.layers.{layer}"
            yield f"{prefix}.input_layernorm.weight", (hidden,)
            for name, rows in (("q_proj", hidden), ("k_proj", narrow), ("v_proj", narrow), ("o_proj", hidden)):
                yield f"{prefix}.self_attn.{name}.weight", (rows, hidden)
            yield f"{prefix}.post_attention_layernorm.weight", (hidden,)
            yield f"{prefix}.mlp.gate_proj.weight", (wide, hidden)
            yield f"{prefix}.mlp.up_proj.weight", (wide, hidden)
            yield f"{prefix}.mlp.down_proj.weight", (hidden, wide)
        yield "model.norm.weight", (hidden,)
        yield "lm_head.weight", (self.vocabulary, hidden)

    @classmethod
    def of_size(cls, nelems: int) -> "Llama":
        """The largest hidden size whose usual depth (a layer for 128 of it) fits, and as many layers as fill `nelems`."""
        hidden = 64
        while cls(hidden + 64, max((hidden + 64) // 128, 1)).nelems <= nelems:
            hidden += 64
        a_layer = cls(hidden, 2).nelems - cls(hidden, 1).nelems
        return cls(hidden, max((nelems - cls(hidden, 0).nelems + a_layer // 2) // a_layer, 1))


def write_sample(out: Path, nbytes: int, target: Mesh, dtype: str, seed: int, overwrite: bool) -> Case:
    """Write the checkpoint of about `nbytes` of `dtype` in the topology `target`; the case that was written."""
    finish_commit(out)
    check_out(out, overwrite)
    if target.size > MOST_SHARDS:
        raise UsageError("sample", f"{target} has {target.size} ranks; a sample has at most {MOST_SHARDS} shards")
    model = Llama.of_size(nbytes * 8 // DTYPES[dtype].nbits)
    outgoing = _outgoing(model, target, dtype, seed)
    partial = PartialFolder(out, {"sample": [nbytes, str(target), dtype, seed]}, restart=True)
    files, spans = target_files(outgoing)
    partial.check_space(sum(file.nbytes for file in files))
    for file in files:
        create_file(partial.path / file.name, file.nbytes, file.head)
    digests = [hashlib.sha256() for _ in outgoing.arrays]
    arrays_of: dict[str, list[int]] = {}
    for index, array in enumerate(outgoing.arrays):
        arrays_of.setdefault(array.tensor_id, []).append(index)
    with Files(partial.path, os.O_RDWR) as writer:
        for fqn, shape in model.tensors():
            written = {index: spans[index].begin for index in arrays_of[fqn]}
            for first, rows in _values(fqn, shape, dtype, seed):
                for index in arrays_of[fqn]:
                    part = _part(rows, first, *outgoing.arrays[index].box)
                    writer.write(files[outgoing.arrays[index].rank].name, written[index], memoryview(part))
                    written[index] += len(part)
                    digests[index].update(part)
    case = msgspec.structs.replace(
        outgoing.case,
        fragments=tuple(
            msgspec.structs.replace(
                fragment,
                fragment_digest=digest_name(digests[array].digest()),
                evidence_refs=(f"synthetic:seed={seed}",),
            )
            for fragment, array in zip(outgoing.case.fragments, outgoing.array_of, strict=True)
        ),
    )
    text = case_text(case)
    create_file(partial.path / CASE_FILE, len(text), text)
    check_out(out, overwrite)
    partial.commit()
    return case


def _outgoing(model: Llama, target: Mesh, dtype: str, seed: int) -> Outgoing:
    """The case to write: as if the whole model, on one rank, were resharded."""
    fragments = tuple(_whole(fqn, shape, dtype) for fqn, shape in model.tensors())
    topology = Topology({"world_size": 1}, {"world_size": 1})
    case = Case(
        f"sample-llama-{model.hidden}x{model.layers}-seed{seed}",
        ("full_model",),
        ("synthetic",),
        topology,
        1,
        fragments,
        None,
    )
    rules: Layout = {fqn: {"tp": TP_RULES.get(fqn.split(".")[-2], "replicate")} for fqn, _ in model.tensors()}
    layout, faults = target_layout(case, target, rules)
    raise_first(faults)
    return outgoing_case(case, layout, target, rules)


def _whole(fqn: str, shape: tuple[int, ...], dtype: str) -> Fragment:
    none = (0,) * len(shape)
    file = shard_name(0)
    return Fragment(
        fragment_id=fqn,
        logical_tensor_id=fqn,
        fqn=fqn,
        component_id="model",
        role="parameter",
        global_shape=shape,
        element_offset=none,
        element_extent=shape,
        local_shape=shape,
        padding=Padding(none, none, "none"),
        dtype=dtype,
        payload_file=file,
        payload_key=fqn,
        topology_coordinates=(("rank", 0),),
        replica=Replica(None, 1, 0),
        partition_axes=(),
        shard_file_id=file,
        shard_digest_ref=f"source-digest:{file}",
    )


def _values(
    fqn: str, shape: tuple[int, ...], dtype: str, seed: int
) -> Iterator[tuple[int, NDArray[np.unsignedinteger]]]:
    """(first row, rows) of the tensor, as unsigned integers of the width of its elements."""
    nbits = DTYPES[dtype].nbits
    random = np.random.default_rng([seed, zlib.crc32(fqn.encode())])
    row_nbytes = int(np.prod(shape[1:], dtype=np.int64)) * nbits // 8
    step = max(ROWS_NBYTES // row_nbytes, 1)
    for first in range(0, shape[0], step):
        nrows = min(step, shape[0] - first)
        bits = np.frombuffer(random.bytes(nrows * row_nbytes), f"u{nbits // 8}")
        # Without the highest bit of the exponent every value is finite, and below 2.
        yield first, (bits & ~bits.dtype.type(1 << (nbits - 2))).reshape(nrows, *shape[1:])


def _part(rows: NDArray[np.unsignedinteger], first: int, offset: tuple[int, ...], extent: tuple[int, ...]) -> bytes:
    """The bytes of a box that lie in these rows."""
    start, stop = (min(max(edge - first, 0), len(rows)) for edge in (offset[0], offset[0] + extent[0]))
    where = (slice(start, stop), *(slice(a, a + n) for a, n in zip(offset[1:], extent[1:], strict=True)))
    return rows[where].tobytes()
