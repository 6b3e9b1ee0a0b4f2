"""Shards of a known topology that come with no manifest, described as a case: what a layout says of their tensors shows where
each belongs.

    rank 0: q_proj [4, 8]   rank 1: q_proj [4, 8],   tp = 2 splits axis 0   ->   q_proj [8, 8], boxes [0:4, :] and [4:8, :]

How large a tensor is follows from its parts: along a split axis they are laid end to end, whatever their sizes.
"""

import itertools
import re
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from reshard_mpi.checkpoint.checks import check_case
from reshard_mpi.checkpoint.manifest import Case, Coordinates, Fragment, Layout, ParsedCase, Rule, Topology
from reshard_mpi.checkpoint.mesh import Mesh, nesting_order, shard_name
from reshard_mpi.errors import InputError, UsageError, names, raise_first
from reshard_mpi.layout.cuts import Intervals, Misfit, cut_axis, stored_boxes
from reshard_mpi.layout.file import LayoutFile, Statement, members_of, repeats_of, split_axis
from reshard_mpi.layout.rules import Tensor
from reshard_mpi.layout.target import no_padding, padding_around, replicas_of
from reshard_mpi.storage.safetensors import StoredArray
from reshard_mpi.storage.source import read_headers

FIELD = re.compile(r"\{([A-Za-z_]\w*)(?::0?(\d{1,2})d)?\}", re.ASCII)
KV_HEADS = "num_key_value_heads"

Sizes = Mapping[tuple[int, ...], int]  # elements held at the coordinates of the mesh axes that split a tensor axis


class Described(NamedTuple):
    """The case, and what the reader should be told."""

    case: Case
    warnings: tuple[str, ...]


def describe_shards(folder: Path, pattern: str, mesh: Mesh, layout: LayoutFile | None) -> Described:
    """The shards in `folder`, one a rank of `mesh`, as a case; InputError where they don't fit together."""
    files = shard_names(pattern, mesh)
    headers, faults = read_headers(folder, files)
    raise_first(faults)
    raise_first(_more_shards(folder, pattern, mesh))
    held: defaultdict[str, dict[int, StoredArray]] = defaultdict(dict)
    for rank, file in enumerate(files):
        for fqn, array in headers[file].items():
            held[fqn][rank] = array
    said = {fqn: _said(fqn, arrays, mesh, layout) for fqn, arrays in held.items()}
    raise_first(_without_rule(said, mesh))
    fragments = [one for fqn in sorted(held) for one in _fragments(fqn, held[fqn], said[fqn], mesh, layout)]
    rules: Layout = {fqn: dict(sorted(of.rules.items())) for fqn, of in said.items() if of.rules}
    case = Case(
        case_id=folder.resolve().name,
        components=("full_model",),
        features=("described",),
        topology=Topology(mesh.topology(), {"world_size": 1}, rules),
        world_size=mesh.size,
        fragments=tuple(sorted(fragments, key=lambda f: (f.rank, f.logical_tensor_id, f.element_offset))),
        expected_manifest_digest=None,
    )
    raise_first(check_case(ParsedCase(case, "", "", ())).faults)
    return Described(case, tuple(_warnings(folder, files)))


def shard_names(pattern: str, mesh: Mesh) -> list[str]:
    """The file of every rank.

    >>> shard_names("tp{tp:02d}.safetensors", Mesh.of({"tp": 2}))
    ['tp00.safetensors', 'tp01.safetensors']
    """
    found = [_shard_name(pattern, {"rank": rank, **mesh.coordinates(rank)}) for rank in range(mesh.size)]
    if len(set(found)) < len(found):
        raise UsageError("--file-pattern", f"{pattern!r} gives two ranks one file; name them by {{rank:05d}}, say")
    return found


def _shard_name(pattern: str, values: Mapping[str, int]) -> str:
    def value(field: re.Match[str]) -> str:
        if field[1] not in values:
            raise UsageError("--file-pattern", f"{field[0]} isn't known; expected {names(values)}")
        return f"{values[field[1]]:0{int(field[2] or 1)}d}"

    name = FIELD.sub(value, pattern)
    if "/" in name or "{" in name or name in ("", ".", ".."):
        raise UsageError("--file-pattern", f"{pattern!r} names no files; write it like rank-{{rank:05d}}.safetensors")
    return name


def _more_shards(folder: Path, pattern: str, mesh: Mesh) -> Iterator[InputError]:
    further = _shard_name(pattern, {"rank": mesh.size, **mesh.coordinates(0)})
    if "{rank" in pattern and (folder / further).exists():
        yield InputError(
            str(folder / further),
            f"is there, but {mesh} has {mesh.size} ranks only; give with --from the topology that wrote all shards",
        )


def _warnings(folder: Path, files: Sequence[str]) -> Iterator[str]:
    wanted = [shard_name(rank) for rank in range(len(files))]
    if files != wanted:
        yield (
            f"{folder}: the case names its shards {names(wanted, most=2)}; link {names(files, most=2)} under these names "
            "into a folder, beside the case as case.json"
        )


class _Said(NamedTuple):
    """What each mesh axis does to a tensor, by which statement; `missing`: the mesh axes of which nothing is said."""

    rules: dict[str, Rule]
    statements: dict[str, Statement]
    missing: tuple[str, ...]


def _said(fqn: str, arrays: Mapping[int, StoredArray], mesh: Mesh, layout: LayoutFile | None) -> _Said:
    first, like = next(iter(arrays.items()))
    for rank, array in arrays.items():
        if (array.dtype, len(array.shape)) != (like.dtype, len(like.shape)):
            raise InputError(
                f"tensor {fqn}",
                f"is {array.dtype} {list(array.shape)} on rank {rank}, {like.dtype} {list(like.shape)} on rank {first}; "
                "expected one dtype, and as many axes",
            )
    tensor, found = Tensor(fqn, fqn, like.shape), _Said({}, {}, ())
    for axis in mesh.split_axes:
        statement = layout.statement(axis, fqn) if layout else None
        rule = split_axis(statement, tensor) if statement else None
        if statement is not None and rule is not None:
            found.rules[axis], found.statements[axis] = rule, statement
        elif axis in ("dp", "cp") or not like.shape:
            found.rules[axis] = "replicate"
        elif axis == "fsdp":
            found.rules[axis] = 0
        elif axis not in ("pp", "ep"):  # these place: what they do is seen from who holds the tensor
            found = found._replace(missing=(*found.missing, axis))
    return found


def _without_rule(said: Mapping[str, _Said], mesh: Mesh) -> Iterator[InputError]:
    for axis in mesh.split_axes:
        lacking = [fqn for fqn, of in said.items() if axis in of.missing]
        if lacking:
            yield InputError(
                f"mesh axis {axis}",
                f"no layout says what it does, for {len(lacking)} tensors: {names(sorted(lacking), most=20)}; say with "
                "--layout what it does",
            )


def _fragments(
    fqn: str, arrays: Mapping[int, StoredArray], said: _Said, mesh: Mesh, layout: LayoutFile | None
) -> Iterator[Fragment]:
    like = next(iter(arrays.values()))
    coordinates = {rank: mesh.coordinates(rank) for rank in arrays}
    splits = [axis for axis in nesting_order(mesh.split_axes) if isinstance(said.rules.get(axis), int)]
    _check_all_parts(fqn, coordinates, splits, mesh)
    columns: list[tuple[list[str], dict[tuple[int, ...], Intervals]]] = []
    for column in range(len(like.shape)):
        axes = [axis for axis in splits if said.rules[axis] == column]
        sizes = _sizes(fqn, column, axes, arrays, coordinates)
        columns.append((axes, _intervals(fqn, column, axes, sizes, said.statements, mesh, layout)))
    shape = tuple(max(stop for intervals in of.values() for _, stop in intervals) for _, of in columns)
    held = {
        rank: stored_boxes([of[tuple(coordinates[rank][axis] for axis in axes)] for axes, of in columns], shape)
        for rank in sorted(arrays)
    }
    replicas = replicas_of(fqn, [(rank, box) for rank, (_, boxes) in held.items() for box, _ in boxes])
    for rank, (stored, boxes) in held.items():
        for number, ((offset, extent), before) in enumerate(boxes):
            yield Fragment(
                fragment_id=f"{fqn}|r{rank}" + (f"#{number}" if len(boxes) > 1 else ""),
                logical_tensor_id=fqn,
                fqn=fqn,
                component_id="model",
                role="parameter",
                global_shape=shape,
                element_offset=offset,
                element_extent=extent,
                local_shape=stored,
                padding=no_padding(len(shape)) if extent == stored else padding_around(before, extent, stored, "view"),
                dtype=like.dtype,
                payload_file=shard_name(rank),
                payload_key=fqn,
                topology_coordinates=_coordinates(mesh, rank),
                replica=next(replicas),
                partition_axes=tuple(sorted({column for column, (axes, _) in enumerate(columns) if axes})),
                shard_file_id=shard_name(rank),
                shard_digest_ref=f"source-digest:{shard_name(rank)}",
                shared_storage_id=f"{fqn}|r{rank}" if len(boxes) > 1 else None,
            )


def _coordinates(mesh: Mesh, rank: int) -> Coordinates:
    return tuple(sorted({**mesh.coordinates(rank), "rank": rank}.items()))


def _check_all_parts(fqn: str, coordinates: Mapping[int, Mapping[str, int]], splits: Sequence[str], mesh: Mesh) -> None:
    """A tensor that mesh axes split is held along all of each of them."""
    held, sizes = {tuple(of.values()) for of in coordinates.values()}, dict(mesh.axes)
    for of in coordinates.values():
        for part in itertools.product(*(range(sizes[axis]) for axis in splits)):
            wanted = {**of, **dict(zip(splits, part, strict=True))}
            if tuple(wanted.values()) not in held:
                raise InputError(
                    f"tensor {fqn}",
                    f"is not in the shard of {wanted}, though {names(splits)} splits it; a shard is missing it, or the "
                    "layout is another one",
                )


def _sizes(
    fqn: str,
    column: int,
    axes: Sequence[str],
    arrays: Mapping[int, StoredArray],
    coordinates: Mapping[int, Mapping[str, int]],
) -> dict[tuple[int, ...], int]:
    """How many elements of a tensor axis each part of it has."""
    found: dict[tuple[int, ...], int] = {}
    for rank, array in sorted(arrays.items()):
        size = found.setdefault(tuple(coordinates[rank][axis] for axis in axes), array.shape[column])
        if size != array.shape[column]:
            raise InputError(
                f"tensor {fqn}",
                f"has {array.shape[column]} elements along axis {column} on rank {rank}, {size} on another rank that should "
                f"hold the same part ({names(axes) or 'no mesh axis'} splits it); the layout is another one",
            )
    return found


def _intervals(
    fqn: str,
    column: int,
    axes: Sequence[str],
    sizes: Sizes,
    statements: Mapping[str, Statement],
    mesh: Mesh,
    layout: LayoutFile | None,
) -> dict[tuple[int, ...], Intervals]:
    """Which elements of a tensor axis each part of it holds."""
    special = [axis for axis in axes if axis in statements and _is_special(statements[axis])]
    if not special or layout is None:
        ends = dict(zip(sorted(sizes), itertools.accumulate(sizes[part] for part in sorted(sizes)), strict=True))
        return {part: ((end - sizes[part], end),) for part, end in ends.items()}
    counts = dict(mesh.axes)
    total = _whole_size(axes.index(special[0]), sizes, statements[special[0]], layout)
    cuts = {axis: layout.cut(statements[axis], total) for axis in special}
    found = {}
    for part, size in sizes.items():
        held: Intervals = ((0, total),)
        try:
            for axis, index in zip(axes, part, strict=True):
                held = cut_axis(held, counts[axis], index, cuts.get(axis))
        except Misfit as misfit:
            raise InputError(f"tensor {fqn}", f"axis {column}: {misfit}; the layout is another one") from misfit
        if sum(stop - start for start, stop in held) != size:
            raise InputError(
                f"tensor {fqn}",
                f"axis {column}: part {list(part)} of {names(axes)} has {size} elements, the layout says "
                f"{sum(stop - start for start, stop in held)} of {total}",
            )
        found[part] = held
    return found


def _is_special(statement: Statement) -> bool:
    return members_of(statement) != 1 or any(repeats_of(statement, 1) if members_of(statement) == 1 else ())


def _whole_size(position: int, sizes: Sizes, statement: Statement, layout: LayoutFile) -> int:
    """The elements of an axis that is fused, or of which ranks may share units; `position`: of its mesh axis among those."""
    members, total = members_of(statement), sum(sizes.values())
    if not isinstance(members, int):
        return sum(layout.number(statement.where, member) for member in members)
    repeats = repeats_of(statement, members)
    unit = layout.number(statement.where, statement.says.unit)
    of_first = sum(size for part, size in sizes.items() if part[position] == 0)
    if not any(repeats) or of_first != members * unit:
        return total
    # A unit a rank: it may be the only one to hold it, or share it with neighbours.
    return members * layout.number(statement.where, KV_HEADS) * unit
