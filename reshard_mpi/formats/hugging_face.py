"""Hugging Face folders: whole tensors in `model.safetensors`, or in several files and an index; and DCP's shards like them.

    model.safetensors.index.json      {"metadata": {"total_size": 22}, "weight_map": {"a": "model-00001-of-00002.safetensors"}}

torch's HuggingFaceStorageWriter(save_distributed=True) writes `shard-*-model-*.safetensors` instead, whose header says in
`DCP_SHARDING_INFO` where each piece begins. It says nothing of how large a tensor is: that is where its last piece ends.
"""

import hashlib
import json
import os
from collections import defaultdict
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from reshard_mpi.checkpoint.manifest import sha256_name, strict_json
from reshard_mpi.errors import InputError, names, plural, raise_first
from reshard_mpi.formats.described import Described, Piece, case_of
from reshard_mpi.storage.files import open_regular, read_text
from reshard_mpi.storage.safetensors import StoredArray, read_header, read_metadata

MODEL_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"
LARGEST_INDEX = 1 << 28
SHARDING_INFO = "DCP_SHARDING_INFO"


def is_hugging_face(folder: Path) -> bool:
    return (folder / INDEX_FILE).exists() or (folder / MODEL_FILE).exists()


def is_sharded_hugging_face(folder: Path) -> bool:
    return any(folder.glob("shard-*-model-*-of-*.safetensors"))


def describe_hugging_face(folder: Path) -> Described:
    """Whole tensors: every file is read by one rank, as a shard would be."""
    where, unnamed = str(folder / INDEX_FILE), []
    if not (folder / INDEX_FILE).exists():
        files = [MODEL_FILE]
        headers = _headers(folder, files)
        held = dict.fromkeys(headers[MODEL_FILE], MODEL_FILE)
    else:
        held = _weight_map(folder, where)
        files = sorted(set(held.values()))
        if MODEL_FILE not in files and (folder / MODEL_FILE).exists():
            raise InputError(
                str(folder), f"holds two models: {MODEL_FILE}, and what {INDEX_FILE} names; move one of them elsewhere"
            )
        headers = _headers(folder, files)
        raise_first(_missing(held, headers, folder))
        unnamed = [f"{file}:{fqn}" for file in files for fqn in headers[file] if held.get(fqn) != file]
    number = {file: index for index, file in enumerate(files)}
    pieces = []
    for fqn, file in held.items():
        shape = headers[file][fqn].shape
        pieces.append(Piece(fqn, headers[file][fqn].dtype, shape, (0,) * len(shape), shape, number[file], fqn))
    warnings = [_unchecked(folder)]
    if unnamed:
        warnings.append(
            f"{where}: {plural(len(unnamed), 'tensor')} in its files that it doesn't name: {names(unnamed)}; left out"
        )
    case = case_of(folder.resolve().name, files, pieces, "hugging face")
    return Described(case, headers, _digest(headers), tuple(warnings))


def describe_sharded_hugging_face(folder: Path) -> Described:
    """Pieces of tensors, each at its saved offset. That all of them are there is seen from the boxes alone."""
    files = sorted(path.name for path in folder.glob("shard-*-model-*-of-*.safetensors"))
    raise_first(_lost_shards(folder, files))
    headers = _headers(folder, files)
    offsets = [_saved_offsets(folder, file, headers[file]) for file in files]
    ends: defaultdict[str, list[tuple[int, ...]]] = defaultdict(list)
    for file, of_file in zip(files, offsets, strict=True):
        for fqn, offset in of_file.items():
            ends[fqn].append(tuple(o + e for o, e in zip(offset, headers[file][fqn].shape, strict=True)))
    raise_first(
        InputError(str(folder), f"the pieces of tensor {fqn} have different numbers of axes; they are not of one save")
        for fqn, found in ends.items()
        if len({len(end) for end in found}) > 1
    )
    pieces = [
        Piece(
            fqn,
            headers[file][fqn].dtype,
            tuple(map(max, zip(*ends[fqn], strict=True))),
            offset,
            headers[file][fqn].shape,
            number,
            fqn,
        )
        for number, (file, of_file) in enumerate(zip(files, offsets, strict=True))
        for fqn, offset in of_file.items()
    ]
    warning = (
        f"{folder}: these shards don't say how large a tensor is: of one whose last pieces are all missing, the end is taken for "
        "its whole"
    )
    case = case_of(folder.resolve().name, files, pieces, "sharded hugging face")
    return Described(case, headers, _digest(headers), (_unchecked(folder), warning))


def _unchecked(folder: Path) -> str:
    return f"{folder}: this format has no digests: its bytes can't be checked"


def _digest(headers: Mapping[str, Mapping[str, StoredArray]]) -> str:
    """Of where everything lies: another save of other tensors has another one."""
    return sha256_name(
        hashlib.sha256(repr(sorted((file, sorted(of.items())) for file, of in headers.items())).encode())
    )


def _lost_shards(folder: Path, files: list[str]) -> Iterator[InputError]:
    """Ranks are numbered from 1 in the names of the files: a gap is a file that was lost."""
    ranks = {int(file.split("-")[1]) for file in files if file.split("-")[1].isdecimal()}
    lost = sorted(set(range(1, max(ranks, default=0) + 1)) - ranks)
    if lost:
        yield InputError(str(folder), f"the shards of ranks {names(lost)} (from 1) are missing; copy the folder anew")


def _headers(folder: Path, files: list[str]) -> dict[str, dict[str, StoredArray]]:
    return {file: _opened(folder, file, read_header) for file in files}


def _opened(folder: Path, file: str, read: Any) -> Any:
    fd = open_regular(folder, file, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    try:
        return read(fd, str(folder / file))
    finally:
        os.close(fd)


def _weight_map(folder: Path, where: str) -> dict[str, str]:
    index = strict_json(read_text(folder, INDEX_FILE, LARGEST_INDEX), where)
    found = index.get("weight_map") if isinstance(index, dict) else None
    if not isinstance(found, dict) or not found or not all(isinstance(name, str) for name in found.values()):
        raise InputError(where, "has no weight_map from tensors to files")
    paths = sorted({name for name in found.values() if "/" in name or name in ("", ".", "..") or "\0" in name})
    if paths:
        raise InputError(where, f"names files that are paths: {names(map(repr, paths))}; expected files of the folder")
    return found


def _missing(
    held: Mapping[str, str], headers: Mapping[str, Mapping[str, StoredArray]], folder: Path
) -> Iterator[InputError]:
    lost = sorted(fqn for fqn, file in held.items() if fqn not in headers[file])
    if lost:
        file = held[lost[0]]
        yield InputError(str(folder / file), f"lacks tensors that the index says it holds: {names(lost)}; copy it anew")


def _saved_offsets(folder: Path, file: str, header: Mapping[str, StoredArray]) -> dict[str, tuple[int, ...]]:
    where = str(folder / file)
    text = _opened(folder, file, read_metadata).get(SHARDING_INFO)
    info = strict_json(text.encode(), f"{where}: {SHARDING_INFO}") if text else None
    if not isinstance(info, dict):
        raise InputError(where, f"its header has no {SHARDING_INFO}, which says where each piece begins")
    found = {}
    for fqn, array in header.items():
        entry = info.get(fqn)
        offset = entry.get("saved_offsets") if isinstance(entry, dict) else None
        if not isinstance(offset, list) or len(offset) != len(array.shape) or not all(map(_is_count, offset)):
            raise InputError(
                where, f"{SHARDING_INFO} of tensor {fqn} is {json.dumps(entry)}, expected saved_offsets, one an axis"
            )
        found[fqn] = tuple(offset)
    return found


def _is_count(value: object) -> bool:
    return type(value) is int and 0 <= value < 1 << 62
