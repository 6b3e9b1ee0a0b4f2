"""Plan without any files: models of well-known shapes, on meshes of any size (`plan --simulate`)."""

import resource
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from reshard_mpi.boxes import Ints
from reshard_mpi.checkpoint.dtypes import DTYPES
from reshard_mpi.checkpoint.manifest import Rule
from reshard_mpi.checkpoint.mesh import Mesh
from reshard_mpi.errors import UsageError, plural
from reshard_mpi.layout.rules import Stacks, Tensor, boxes_of, default_rule
from reshard_mpi.plan.plan import ArrayTable, Plan, plan_arrays
from reshard_mpi.plan.planner import PlannedTensor, Resources, make_plan
from reshard_mpi.plan.stored import byte_form_of_arrays
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
        "busiest_over_mean": round(float(moved.max() / moved.mean()), 3) if moved.any() else 1.0,
        "buffers_nbytes": plan.memory_nbytes,
        "plan_nbytes": sum(value.nbytes for value in plan_arrays(plan) if isinstance(value, np.ndarray)),
        "seconds": round(seconds, 3),
        "peak_rss_nbytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
    }


def _plan(
    tensors: list[tuple[str, tuple[int, ...], dict[str, Rule]]], source: Mesh, target: Mesh, resources: Resources
) -> Plan:
    stacks = Stacks(fqn for fqn, _, _ in tensors)
    columns: tuple[list[Ints], list[Ints]] = ([], [])  # (rank, tensor, nbytes) of the arrays of either side
    forms = []
    for number, (fqn, shape, rules) in enumerate(tensors):
        tensor = Tensor(fqn, fqn, shape)
        boxes = []
        for side, mesh in enumerate((source, target)):
            ranks, offset, extent = boxes_of(tensor, _complete(rules, mesh, tensor, stacks), mesh, stacks)
            if side == 0:  # one member of each replica group is read
                _, first = np.unique(offset, axis=0, return_index=True)
                ranks, offset, extent = ranks[first], offset[first], extent[first]
            kept = np.flatnonzero(np.all(extent > 0, axis=1))
            ranks, offset, extent = ranks[kept], offset[kept], extent[kept]
            nbytes = np.prod(extent, axis=1) * DTYPES[DTYPE].nbits // 8
            columns[side].append(np.column_stack([ranks, np.full(len(ranks), number), nbytes]))
            boxes.append((offset, extent))
        offset, extent = (np.concatenate(both) for both in zip(*boxes, strict=True))
        form = byte_form_of_arrays(shape, DTYPES[DTYPE].nbits, offset, extent, np.zeros_like(offset), extent)
        forms.append((form, len(boxes[0][0])))
    tables, numbers = zip(*(_table(np.concatenate(rows)) for rows in columns), strict=True)
    planned, used = [], [0, 0]
    for form, nsources in forms:
        counts = nsources, len(form.lead) - nsources
        mine = [numbers[side][used[side] : used[side] + counts[side]] for side in (0, 1)]
        planned.append(PlannedTensor(form, *mine))
        used = [a + b for a, b in zip(used, counts, strict=True)]
    return make_plan(planned, tables[0], tables[1], (source.size, target.size), resources)


def _complete(rules: Mapping[str, Rule], mesh: Mesh, tensor: Tensor, stacks: Stacks) -> dict[str, Rule]:
    """The rule of every axis of the mesh: as for a source that doesn't have it (SPEC section 2)."""
    defaults = {axis: default_rule(axis, size, tensor, stacks) for axis, size in mesh.split_axes.items()}
    return {axis: "replicate" if rule is None else rule for axis, rule in defaults.items()} | dict(rules)


def _table(rows: Ints) -> tuple[ArrayTable, Ints]:
    """Arrays as if each rank stored its boxes one after the other; and the number of the array of each row."""
    order = np.lexsort((rows[:, 1], rows[:, 0]))
    number = np.empty(len(rows), np.int64)
    number[order] = np.arange(len(rows))
    file, nbytes = rows[order, 0], rows[order, 2]
    ends = np.cumsum(nbytes)
    first = np.append(True, file[1:] != file[:-1])
    begin = ends - nbytes - (ends - nbytes)[first][np.cumsum(first) - 1]
    return ArrayTable.of(file, begin, nbytes), number


def simulation_text(facts: Mapping[str, Any]) -> str:
    """The simulation for people."""
    sides = [topology_text(facts[f"{side}_topology"]) for side in ("source", "target")]
    return "\n".join(
        [
            f"{facts['model']}: {sides[0]} -> {sides[1]}, {plural(facts['ntensors'], 'tensor')}, {size_text(facts['nbytes'])}, "
            f"{facts['nboxes'][0]} boxes read, {facts['nboxes'][1]} written",
            f"  {plural(facts['nranks'], 'rank')}, {plural(facts['nrounds'], 'round')}, "
            f"busiest rank {facts['busiest_over_mean']:.2f} of the mean, buffers {size_text(facts['buffers_nbytes'])} a rank",
            f"  planned in {facts['seconds']:.2f} s; plan {size_text(facts['plan_nbytes'])}, "
            f"peak memory {size_text(facts['peak_rss_nbytes'])}",
        ]
    )
