"""From a source and a target to all that a job needs: the case to write, the heads of its files, and the plan.

Opens no file and knows no MPI: `plan` prints what comes out of here, `reshard` carries it out.
"""

import fnmatch
import operator
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from reshard_mpi.checkpoint.checks import distinct_boxes, replica_groups
from reshard_mpi.checkpoint.dtypes import DTYPES
from reshard_mpi.checkpoint.manifest import CASE_FILE, Case, Fragment, by_tensor
from reshard_mpi.checkpoint.mesh import Mesh, mesh_from_topology
from reshard_mpi.checkpoint.wanted import CastRule, RenameRule
from reshard_mpi.errors import ReshardError, UsageError, names
from reshard_mpi.formats.hdf5_target import build_hdf5, check_names
from reshard_mpi.formats.hugging_face_target import in_files
from reshard_mpi.layout.families import unfit
from reshard_mpi.layout.file import LayoutFile, Resolved
from reshard_mpi.layout.opaque import Opaque, find_opaque, opaque_rules
from reshard_mpi.layout.rules import Tensor, target_layout
from reshard_mpi.layout.scales import Pairs, find_pairs, in_blocks, pair_faults
from reshard_mpi.layout.target import Exceptions, Outgoing, TargetArray, misfits, outgoing_case, placements
from reshard_mpi.plan.changes import Changes, cast_source, dropped_from, renamed_source
from reshard_mpi.plan.earlier import Earlier
from reshard_mpi.plan.plan import ArrayTable, Plan
from reshard_mpi.plan.planner import PlannedTensor, Resources, make_plan, round_nbytes_of
from reshard_mpi.plan.shares import choose_members
from reshard_mpi.plan.stored import Place, byte_form
from reshard_mpi.storage.digests import ALGORITHMS, algorithm_of, digest_row
from reshard_mpi.storage.safetensors import StoredArray, build_header
from reshard_mpi.storage.source import Source, located, no_garbage_collection


@dataclass(frozen=True)
class Selection:
    """What is to be made of the source."""

    target: Mesh | None
    include: tuple[str, ...] = ()
    exclude: tuple[str, ...] = ()
    layout: LayoutFile | None = None
    as_is: bool = False  # also what is recognised as nothing that Hugging Face has
    format: str = "safetensors"  # or hdf5, hf
    most_file_nbytes: int = 5 * 10**9  # of a file of hf
    rename: tuple[RenameRule, ...] = ()
    cast: tuple[CastRule, ...] = ()
    cast_except: tuple[str, ...] = ()


@dataclass(frozen=True)
class TargetFile:
    """One file to be written: its name, its first bytes, and its whole length."""

    name: str
    head: bytes
    nbytes: int


@dataclass(frozen=True)
class Prepared:
    """A job, ready to run.

    `source_fragments[i]` are the fragments stored in row i of the plan's source arrays, `tensors[i]` is the id of its tensor i.
    `target_arrays` says where each of the outgoing arrays lies.
    """

    outgoing: Outgoing
    target_files: tuple[TargetFile, ...]
    target_arrays: tuple[StoredArray, ...]
    source_files: tuple[str, ...]
    source_fragments: tuple[tuple[Fragment, ...], ...]
    plan: Plan
    tensors: tuple[str, ...]


def target_mesh(case: Case, selection: Selection) -> Mesh:
    if selection.target is None and selection.format == "hf":
        return Mesh(())
    return selection.target or mesh_from_topology(case.topology.target, f"{CASE_FILE}: topology.target")


def select_tensors(case: Case, selection: Selection) -> list[str]:
    """Ids of the tensors whose fqn a pattern includes and none excludes, and that no layout drops.

    UsageError when none is left.
    """

    def matches(fqn: str, patterns: Sequence[str]) -> bool:
        return any(fnmatch.fnmatchcase(fqn, pattern) for pattern in patterns)

    fqns = {fragment.logical_tensor_id: fragment.fqn for fragment in case.fragments}
    dropped = _opaque(case, selection).dropped
    kept = [
        t
        for t, fqn in fqns.items()
        if (not selection.include or matches(fqn, selection.include))
        and not matches(fqn, selection.exclude)
        and t not in dropped
    ]
    if not kept and (selection.include or selection.exclude or dropped):
        raise UsageError(
            "--include/--exclude" if selection.include or selection.exclude else "--layout",
            f"no tensor is left of {len(fqns)}: {names(sorted(set(fqns.values())))}; patterns are held against the fqn",
        )
    return kept


@no_garbage_collection()
def changed_source(source: Source, selection: Selection) -> tuple[Source, Changes]:
    """The source as if its tensors had the names and types that they get, and all that is changed in tensors."""
    renamed, changes = renamed_source(source, selection.rename)
    kept = select_tensors(renamed.case, selection)
    scales = _pairs(renamed.case, selection).scales
    cast, casts, warnings = cast_source(renamed, kept, selection.cast, selection.cast_except, scales)
    return cast, replace(
        changes,
        operated=source.operated,
        cast=casts,
        dropped=dropped_from(renamed.case, kept),
        warnings=(*changes.warnings, *_opaque(renamed.case, selection).warnings, *warnings),
    )


def round_nbytes_for(source: Source, changes: Changes, memory_nbytes: int) -> int:
    """Bytes of a round of this job; PlanningError when `memory_nbytes` is too little."""
    return round_nbytes_of(memory_nbytes, held_nbytes(source), bool(changes.cast))


def held_nbytes(source: Source) -> int:
    """Of memory, beside the buffers, by a rank of a job: one of its threads reads, another one copies."""
    return 2 * source.held_nbytes


@no_garbage_collection()
def outgoing_of(source: Source, selection: Selection) -> tuple[Outgoing | None, list[ReshardError]]:
    """The case to write, or why there can't be one. The source must have been changed as it was selected (`changed_source`)."""
    try:
        target = target_mesh(source.case, selection)
        kept = select_tensors(source.case, selection)
        pairs = _pairs(source.case, selection)
        given, shapes = _given(source.case, target, selection, pairs)
        states, refused = opaque_rules(source.case, target, kept, _opaque(source.case, selection))
        layout, faults = target_layout(source.case, target, given.layout | states)
        faults = [*refused, *pairs.faults, *given.faults, *faults]
        if selection.format == "hf" and not selection.as_is:
            fqns = {f.logical_tensor_id: f.fqn for f in source.case.fragments}
            faults += unfit({tensor: fqns[tensor] for tensor in kept}, source.history)
        exceptions = Exceptions(given.cuts, shapes)
        if not faults:
            together = [pair for pair in pairs.together if {pair.weight, pair.scale} <= set(kept)]
            paired = {tensor for pair in together for tensor in (pair.weight, pair.scale)}
            faults += pair_faults(together, placements(source.case, layout, target, paired, exceptions))
        faults += [] if faults else misfits(source.case, layout, target, kept, exceptions)
        if not faults:
            suffix = "h5" if selection.format == "hdf5" else "safetensors"
            outgoing = outgoing_case(source.case, layout, target, kept, exceptions, suffix)
            if selection.format == "hdf5":
                check_names(outgoing)
            return outgoing if selection.format != "hf" else in_files(outgoing, selection.most_file_nbytes), []
    except ReshardError as fault:
        faults = [fault]
    located(source.folder, faults)
    return None, faults


def _opaque(case: Case, selection: Selection) -> Opaque:
    return find_opaque(case, selection.layout.opaque if selection.layout else ())


def _pairs(case: Case, selection: Selection) -> Pairs:
    return find_pairs(case, selection.layout.scales if selection.layout else ())


def _given(case: Case, target: Mesh, selection: Selection, pairs: Pairs) -> tuple[Resolved, dict[str, tuple[int, ...]]]:
    """What the layout file says, if there is one; and the shapes to which it has tensors padded.

    What it says of a block-scaled weight counts for its scale.
    """
    if selection.layout is None:
        return Resolved({}, {}, []), {}
    tensors = {f.logical_tensor_id: Tensor(f.logical_tensor_id, f.fqn, f.global_shape) for f in case.fragments}
    shapes, faults = selection.layout.padded(tensors.values(), target)
    follows = {pair.scale for pair in pairs.together}
    cut = (replace(one, shape=shapes.get(name, one.shape)) for name, one in tensors.items() if name not in follows)
    resolved = selection.layout.resolve(cut, target.split_axes)
    for weight, scale, blocks in pairs.together:
        rules, cuts = resolved.layout.get(weight, {}), resolved.cuts.get(weight, {})
        resolved.layout[scale] = rules
        if blocks is not None:
            of_scale = {axis: in_blocks(one, blocks[int(rules[axis])]) for axis, one in cuts.items()}  # type: ignore[arg-type]
            resolved.cuts[scale] = of_scale
    return replace(resolved, faults=faults + resolved.faults), shapes


@no_garbage_collection()
def prepare(source: Source, outgoing: Outgoing, resources: Resources, earlier: Earlier | None = None) -> Prepared:
    """The job for these ranks and buffers, without what was done `earlier`. The source must be free of faults."""
    case = source.case
    files, spans = target_files(outgoing)
    kept = {fragment.logical_tensor_id for fragment in outgoing.case.fragments}
    tensors = {
        tensor_id: fragments
        for tensor_id, fragments in by_tensor(case.fragments).items()
        if tensor_id in kept and 0 not in fragments[0].global_shape
    }
    shard_of = {fragment.payload_file: fragment.rank for fragment in case.fragments}
    chosen = _choose_sources(source, tensors, shard_of)
    source_keys = sorted(
        {
            (f.rank, _array_of(source, f).begin, f.payload_file, f.payload_key)
            for fragments in chosen.values()
            for f in fragments
        }
    )
    source_index = {(file, key): index for index, (_, _, file, key) in enumerate(source_keys)}
    target_rows: defaultdict[str, list[tuple[int, Place]]] = defaultdict(list)
    for index, array in enumerate(outgoing.arrays):
        if 0 not in array.shape:
            target_rows[array.tensor_id] += [(index, place) for place in _target_places(array)]
    planned_ids = tuple(sorted(tensor_id for tensor_id in chosen if target_rows[tensor_id]))
    planned = [
        _planned(
            chosen[tensor_id],
            [source_index[f.payload_file, f.payload_key] for f in chosen[tensor_id]],
            target_rows[tensor_id],
        )
        for tensor_id in planned_ids
    ]
    stored_in: dict[int, list[Fragment]] = defaultdict(list)
    for fragment in case.fragments:
        stored_in[source_index.get((fragment.payload_file, fragment.payload_key), -1)].append(fragment)
    fragments_of = tuple(tuple(stored_in[index]) for index in range(len(source_keys)))
    source_table = _source_table(source, shard_of, fragments_of)
    nshards = (case.world_size, outgoing.nranks)
    plan = make_plan(planned, source_table, _target_table(outgoing, spans), nshards, resources, earlier)
    file_names = {rank: file for file, rank in shard_of.items()}
    return Prepared(
        outgoing,
        files,
        tuple(spans),
        tuple(file_names.get(rank, "") for rank in range(case.world_size)),
        fragments_of,
        plan,
        planned_ids,
    )


def _array_of(source: Source, fragment: Fragment) -> StoredArray:
    return source.headers[fragment.payload_file][fragment.payload_key]


def target_files(outgoing: Outgoing) -> tuple[tuple[TargetFile, ...], list[StoredArray]]:
    """The files to write, and where each of the outgoing arrays lies in its file."""
    by_rank: defaultdict[int, list[tuple[str, str, tuple[int, ...]]]] = defaultdict(list)
    for array in outgoing.arrays:
        by_rank[array.rank].append((array.key, array.dtype, array.shape))
    files, spans = [], []
    for rank, name in enumerate(outgoing.files):
        aliases = outgoing.aliases.get(rank, {})
        if name.endswith(".h5"):
            head, stored = build_hdf5(tuple(by_rank[rank]), tuple(sorted(aliases.items())))
        else:
            head, stored = build_header(by_rank[rank], {"format": "pt"} | dict(aliases))
        files.append(TargetFile(name, head, max((array.begin + array.nbytes for array in stored), default=len(head))))
        spans += stored
    return tuple(files), spans


def _choose_sources(
    source: Source, tensors: Mapping[str, list[Fragment]], shard_of: Mapping[str, int]
) -> dict[str, list[Fragment]]:
    """Of each box the fragment to be read: one member of each replica group, so that shards are read about equally."""
    groups = replica_groups([fragment for fragments in tensors.values() for fragment in fragments])
    ids, members = [], []
    for tensor_id, fragments in tensors.items():
        for fragment in distinct_boxes(fragments):
            ids.append(tensor_id)
            members.append(groups[fragment.replica.group_id or ""] if fragment.replica.member_count > 1 else [fragment])
    candidates = [fragment for group in members for fragment in group]
    nbytes = np.array([_array_of(source, group[0]).nbytes for group in members], np.int64)
    first = np.cumsum([0, *map(len, members)])
    shard = np.array([shard_of[fragment.payload_file] for fragment in candidates], np.int64)
    chosen: defaultdict[str, list[Fragment]] = defaultdict(list)
    for tensor_id, index in zip(
        ids, choose_members(nbytes, first, shard, source.case.world_size).tolist(), strict=True
    ):
        chosen[tensor_id].append(candidates[index])
    return chosen


def _target_places(array: TargetArray) -> Iterator[Place]:
    """The boxes of an array; one that isn't contiguous in it, in parts that are: what is written must not reach over others.

    A member of a fused axis 1 is a part of every index of axis 0, say.
    """
    for (offset, extent), before in array.boxes:
        if 0 in extent:  # nothing but padding is stored, which a new file holds already
            continue
        partial = [axis for axis, size in enumerate(extent) if size != array.shape[axis]]
        leading = extent[: partial[-1]] if partial else ()
        for index in np.ndindex(*leading):
            first = (*index, *(0,) * (len(extent) - len(index)))
            yield Place(
                tuple(map(operator.add, offset, first)),
                (*(1,) * len(index), *extent[len(index) :]),
                tuple(map(operator.add, before, first)),
                array.shape,
            )


def _planned(
    fragments: list[Fragment], source_arrays: list[int], target_rows: Sequence[tuple[int, Place]]
) -> PlannedTensor:
    like = fragments[0]
    places = [Place(f.element_offset, f.element_extent, f.padding.before, f.local_shape) for f in fragments]
    places += [place for _, place in target_rows]
    form = byte_form(like.global_shape, DTYPES[like.dtype].nbits, tuple(places), f"tensor {like.logical_tensor_id}")
    return PlannedTensor(form, np.array(source_arrays, np.int64), np.array([row for row, _ in target_rows], np.int64))


def _source_table(
    source: Source, shard_of: Mapping[str, int], fragments_of: Sequence[Sequence[Fragment]]
) -> ArrayTable:
    arrays = [_array_of(source, fragments[0]) for fragments in fragments_of]
    file = np.array([shard_of[fragments[0].payload_file] for fragments in fragments_of], np.int64)
    begin, nbytes = (np.array([getattr(array, name) for array in arrays], np.int64) for name in ("begin", "nbytes"))
    digests = [
        next((f.fragment_digest for f in fragments if f.fragment_digest is not None), None)
        for fragments in fragments_of
    ]
    rows = np.stack([digest_row(digest) for digest in digests]) if digests else np.empty((0, 4), np.int64)
    kinds = np.array([ALGORITHMS.index(algorithm_of(digest)) for digest in digests], np.int64)
    converted_nbytes = np.array([array.converted_nbytes for array in arrays], np.int64)
    return ArrayTable.of(file, begin, nbytes, rows, kinds, converted_nbytes)


def _target_table(outgoing: Outgoing, spans: Sequence[StoredArray]) -> ArrayTable:
    file = np.array([array.rank for array in outgoing.arrays], np.int64)
    begin, nbytes = (np.array([getattr(span, name) for span in spans], np.int64) for name in ("begin", "nbytes"))
    return ArrayTable.of(file, begin, nbytes)
