"""Plan without any files: models of well-known shapes, on meshes of any size (`plan --simulate`)."""

import resource
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np

from reshard_mpi.boxes import Ints, equal_rows
from reshard_mpi.checkpoint.dtypes import DTYPES
from reshard_mpi.checkpoint.manifest import Rule
from reshard_mpi.checkpoint.mesh import Mesh
from reshard_mpi.errors import UsageError, plural
from reshard_mpi.layout.rules import Placement, Stacks, Tensor, boxes_of, default_rule, placement_of
from reshard_mpi.plan.plan import ArrayTable, Plan, plan_arrays, received
from reshard_mpi.plan.planner import PlannedTensor, Resources, make_plan
from reshard_mpi.plan.shares import choose_members
from reshard_mpi.plan.stored import ByteForm, byte_form_of_arrays
from reshard_mpi.report import size_text, topology_text

DTYPE = "bfloat16"


@dataclass(frozen=True)
class Model:
    """The sizes of a transformer; `experts` 0: no mixture of experts."""

    layers: int
    hidden: int
    intermediate: int
    key_value: int
    vocabulary: int
    experts: int = 0

    def tensors(self) -> Iterator[tuple[str, tuple[int, ...], dict[str, Rule]]]:
        """(fqn, shape, what tp does to it), named as transformers names them."""
        yield "model.embed_tokens.weight", (self.vocabulary, self.hidden), {"tp": 0}
        for layer in range(self.layers):
            prefix = f"model.layers.{layer}"
            for name in ("input_layernorm", "post_attention_layernorm"):
                yield f"{prefix}.{name}.weight", (self.hidden,), {"tp": "replicate"}
            for name, rows in (("q_proj", self.hidden), ("k_proj", self.key_value), ("v_proj", self.key_value)):
                yield f"{prefix}.self_attn.{name}.weight", (rows, self.hidden), {"tp": 0}
            yield f"{prefix}.self_attn.o_proj.weight", (self.hidden, self.hidden), {"tp": 1}
            if self.experts:
                yield f"{prefix}.mlp.gate.weight", (self.experts, self.hidden), {"tp": "replicate"}
            for mlp in [f"mlp.experts.{expert}" for expert in range(self.experts)] or ["mlp"]:
                for name in ("gate_proj", "up_proj"):
                    yield f"{prefix}.{mlp}.{name}.weight", (self.intermediate, self.hidden), {"tp": 0}
                yield f"{prefix}.{mlp}.down_proj.weight", (self.hidden, self.intermediate), {"tp": 1}
        yield "model.norm.weight", (self.hidden,), {"tp": "replicate"}
        yield "lm_head.weight", (self.vocabulary, self.hidden), {"tp": 0}


# The published sizes of Llama 3.1 8B and 405B, and of a mixture of experts like DeepSeek-V3.
MODELS = {
    "llama-8b": Model(32, 4096, 14336, 1024, 128256),
    "llama-405b": Model(126, 16384, 53248, 1024, 128256),
    "moe-256": Model(58, 7168, 2048, 1024, 129280, experts=256),
}
# 1024 equal matrices, cut along one axis: what planners that sweep along one axis find easy, or hard.
MATRICES = {"matrices-axis0": 0, "matrices-axis1": 1}
MATRIX_SHAPE, NMATRICES = (16384, 16384), 1024
NAMES = (*MODELS, *MATRICES)


def _tensors(name: str) -> Iterator[tuple[str, tuple[int, ...], dict[str, Rule]]]:
    if name in MATRICES:
        for number in range(NMATRICES):
            yield f"matrix.{number}", MATRIX_SHAPE, {"tp": MATRICES[name]}
    else:
        yield from MODELS[name].tensors()


def simulate(name: str, source: Mesh, target: Mesh, resources: Resources) -> dict[str, Any]:
    """The plan for a model, and what making it took, as JSON values."""
    if name not in NAMES:
        raise UsageError("--simulate", f"{name!r} is not known; expected one of {', '.join(NAMES)}")
    tensors = list(_tensors(name))
    started = time.perf_counter()
    plan = _plan(tensors, source, target, resources)
    seconds = time.perf_counter() - started
    read, written = (
        np.bincount(side.rank, side.stored.boxes.volume, resources.nranks) for side in (plan.source, plan.target)
    )
    moved = read + written
    return {
        "model": name,
        "source_topology": source.topology(),
        "target_topology": target.topology(),
        "ntensors": len(tensors),
        "nboxes": [len(plan.source.rank), len(plan.target.rank)],
        "nranks": resources.nranks,
        "nrounds": plan.nrounds,
        "nbytes": int(plan.slabs.volume.sum()),
        "ranks": {
            f"{what}_nbytes": {"mean": int(nbytes.mean()), "most": int(nbytes.max())}
            for what, nbytes in (("read", read), ("received", received(plan)), ("written", written))
        },
        "busiest_over_mean": round(float(moved.max() / moved.mean()), 3) if moved.any() else 1.0,
        "buffers_nbytes": plan.memory_nbytes,
        "plan_nbytes": sum(value.nbytes for value in plan_arrays(plan) if isinstance(value, np.ndarray)),
        "seconds": round(seconds, 3),
        "peak_rss_nbytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
    }


class _Distinct(NamedTuple):
    """The boxes of a tensor, each once: of the `ranks` the first `nholders[0]` hold the first box, and so on."""

    offset: Ints
    extent: Ints
    ranks: Ints
    nholders: Ints


def _plan(
    tensors: list[tuple[str, tuple[int, ...], dict[str, Rule]]], source: Mesh, target: Mesh, resources: Resources
) -> Plan:
    stacks = Stacks(fqn for fqn, _, _ in tensors)
    placements = [
        [_placement(Tensor(fqn, fqn, shape), rules, mesh, stacks) for mesh in (source, target)]
        for fqn, shape, rules in tensors
    ]
    read = [_distinct(placement) for placement, _ in placements]
    written = [_held(placement) for _, placement in placements]
    # As a job does: of the ranks that hold a box one is chosen, so that all shards are read about equally.
    nbytes = _nbytes([boxes.extent for boxes in read])
    holders = np.concatenate([boxes.ranks for boxes in read])
    first = np.cumsum(np.concatenate([[0], *(boxes.nholders for boxes in read)]))
    chosen = holders[choose_members(nbytes, first, holders, source.size)]
    ranks = np.concatenate([ranks for ranks, _, _ in written])
    source_table, source_arrays = _table(chosen, nbytes, [len(boxes.extent) for boxes in read], resources.hashing)
    target_table, target_arrays = _table(
        ranks, _nbytes([extent for _, _, extent in written]), [len(extent) for _, _, extent in written], False
    )
    planned = [
        PlannedTensor(_form(*pair), *arrays)
        for pair, *arrays in zip(placements, source_arrays, target_arrays, strict=True)
    ]
    return make_plan(planned, source_table, target_table, (source.size, target.size), resources)


def _placement(tensor: Tensor, rules: Mapping[str, Rule], mesh: Mesh, stacks: Stacks) -> Placement:
    return placement_of(tensor, _complete(rules, mesh, tensor, stacks), mesh, stacks)


@lru_cache(maxsize=4096)  # the layers of a model repeat each other
def _held(placement: Placement) -> tuple[Ints, Ints, Ints]:
    """The ranks that hold elements of a tensor, and their boxes: offsets and extents."""
    ranks, offset, extent = boxes_of(placement)
    kept = np.flatnonzero(np.all(extent > 0, axis=1))
    return ranks[kept], offset[kept], extent[kept]


@lru_cache(maxsize=4096)
def _distinct(placement: Placement) -> _Distinct:
    ranks, offset, extent = _held(placement)
    first, number = equal_rows(*offset.T)
    return _Distinct(offset[first], extent[first], ranks[np.argsort(number, kind="stable")], np.bincount(number))


@lru_cache(maxsize=4096)
def _form(source: Placement, target: Placement) -> ByteForm:
    boxes, (_, *written) = _distinct(source), _held(target)
    offset, extent = (np.concatenate(both) for both in zip((boxes.offset, boxes.extent), written, strict=True))
    return byte_form_of_arrays(source.shape, DTYPES[DTYPE].nbits, offset, extent, np.zeros_like(offset), extent)


def _nbytes(extents: Sequence[Ints]) -> Ints:
    nelems = [np.prod(extent, axis=1) for extent in extents]
    return np.concatenate(nelems) * DTYPES[DTYPE].nbits // 8


def _complete(rules: Mapping[str, Rule], mesh: Mesh, tensor: Tensor, stacks: Stacks) -> dict[str, Rule]:
    """The rule of every axis of the mesh: as for a source that doesn't have it (SPEC section 2)."""
    defaults = {axis: default_rule(axis, size, tensor, stacks) for axis, size in mesh.split_axes.items()}
    return {axis: "replicate" if rule is None else rule for axis, rule in defaults.items()} | dict(rules)


def _table(rank: Ints, nbytes: Ints, nboxes: Sequence[int], has_digests: bool) -> tuple[ArrayTable, list[Ints]]:
    """Arrays as if each rank stored its boxes one after the other; and of each tensor the arrays of its boxes."""
    order = np.argsort(rank, kind="stable")
    number = np.empty(len(rank), np.int64)
    number[order] = np.arange(len(rank))
    file, nbytes = rank[order], nbytes[order]
    ends = np.cumsum(nbytes)
    first = np.append(True, file[1:] != file[:-1])
    begin = ends - nbytes - (ends - nbytes)[first][np.cumsum(first) - 1]
    edges = np.cumsum([0, *nboxes]).tolist()
    digest, has_digest = np.zeros((len(rank), 4), np.int64), np.full(len(rank), int(has_digests))
    arrays = [number[a:b] for a, b in pairwise(edges)]
    return ArrayTable.of(file, begin, nbytes, digest, has_digest), arrays


def simulation_text(facts: Mapping[str, Any]) -> str:
    """The simulation for people."""
    sides = [topology_text(facts[f"{side}_topology"]) for side in ("source", "target")]
    return "\n".join(
        [
            f"{facts['model']}: {sides[0]} -> {sides[1]}, {plural(facts['ntensors'], 'tensor')}, {size_text(facts['nbytes'])}, "
            f"{facts['nboxes'][0]} boxes read, {facts['nboxes'][1]} written",
            f"  {plural(facts['nranks'], 'rank')}, {plural(facts['nrounds'], 'round')}, "
            f"busiest rank {facts['busiest_over_mean']:.2f} of the mean, buffers {size_text(facts['buffers_nbytes'])} a rank",
            f"  a rank: {_per_rank(facts['ranks'])}",
            f"  planned in {facts['seconds']:.2f} s; plan {size_text(facts['plan_nbytes'])}, "
            f"peak memory {size_text(facts['peak_rss_nbytes'])}",
        ]
    )


def _per_rank(ranks: Mapping[str, Mapping[str, int]]) -> str:
    return ", ".join(
        f"{what.removesuffix('_nbytes')} {size_text(nbytes['mean'])} (at most {size_text(nbytes['most'])})"
        for what, nbytes in ranks.items()
    )
