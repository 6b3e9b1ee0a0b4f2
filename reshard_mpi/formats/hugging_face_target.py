"""A Hugging Face folder as target: whole tensors, in files of bounded size, and the index that says which is where.

transformers names the files `model-00001-of-00002.safetensors`, or `model.safetensors` where there is one, which needs no index.
"""

import json
import re
from pathlib import Path
from typing import Any

import msgspec

from reshard_mpi.checkpoint.dtypes import DTYPES
from reshard_mpi.errors import StorageError, UsageError, storage_error
from reshard_mpi.formats.hugging_face import INDEX_FILE, MODEL_FILE
from reshard_mpi.layout.target import Outgoing, TargetArray
from reshard_mpi.storage.files import create_file
from reshard_mpi.storage.touching import touching

# Of the assets, what would stand beside the model as if it were one.
NO_ASSETS = re.compile(r".*\.(safetensors|bin|pt|pth|h5|msgpack|gguf|index\.json)|\..*")


def in_files(outgoing: Outgoing, most_nbytes: int) -> Outgoing:
    """The arrays of a single target rank, dealt to files of at most `most_nbytes`, in the order of their names.

    An array that is larger has a file of its own.
    """
    if outgoing.nranks != 1:
        raise UsageError("--format hf", "holds whole tensors; give --target single, or leave it out")
    file_of, nbytes, number = {}, 0, 0
    for index in sorted(range(len(outgoing.arrays)), key=lambda index: _natural(outgoing.arrays[index].key)):
        size = _nbytes(outgoing.arrays[index])
        if nbytes and nbytes + size > most_nbytes:
            number, nbytes = number + 1, 0
        file_of[index] = number
        nbytes += size
    names = file_names(number + 1)
    order = sorted(file_of, key=lambda index: (file_of[index], index))  # within a file by item size and key, as before
    position = {index: new for new, index in enumerate(order)}
    return Outgoing(
        case=msgspec.structs.replace(
            outgoing.case,
            fragments=tuple(
                msgspec.structs.replace(fragment, payload_file=names[file_of[array]])
                for fragment, array in zip(outgoing.case.fragments, outgoing.array_of, strict=True)
            ),
        ),
        arrays=tuple(outgoing.arrays[index]._replace(rank=file_of[index]) for index in order),
        array_of=tuple(position[array] for array in outgoing.array_of),
        aliases={},
        files=names,
        keys=outgoing.keys,
        padded=outgoing.padded,
    )


def file_names(count: int) -> tuple[str, ...]:
    """
    >>> file_names(1), file_names(2)[1]
    (('model.safetensors',), 'model-00002-of-00002.safetensors')
    """
    if count == 1:
        return (MODEL_FILE,)
    return tuple(f"model-{number:05d}-of-{count:05d}.safetensors" for number in range(1, count + 1))


def write_index(outgoing: Outgoing, out: Path) -> None:
    """`model.safetensors.index.json`, as transformers writes it, where there are several files."""
    if len(outgoing.files) == 1:
        return
    total = sum(map(_nbytes, outgoing.arrays))
    weight_map = {array.key: outgoing.files[array.rank] for array in outgoing.arrays}
    text = json.dumps({"metadata": {"total_size": total}, "weight_map": weight_map}, indent=2, sort_keys=True) + "\n"
    create_file(out / INDEX_FILE, len(text.encode()), text.encode())


def assets_of(folder: Path) -> list[Path]:
    """Configuration and tokenizer: whatever lies in the folder and is no weights; StorageError when there is nothing."""
    try:
        found = [path for path in sorted(folder.iterdir()) if path.is_file() and not NO_ASSETS.fullmatch(path.name)]
    except OSError as error:
        raise storage_error(folder, error, "read") from error
    if not found:
        raise StorageError(str(folder), "holds no config or tokenizer; give the folder of the model that this is")
    return found


def copy_assets(folder: Path, out: Path) -> None:
    """Copy the assets to `out`."""
    for path in assets_of(folder):
        with touching("read", path):
            content = path.read_bytes()
        create_file(out / path.name, len(content), content)


def _natural(key: str) -> tuple[Any, ...]:
    """Layer 2 comes before layer 10."""
    return tuple((int(part), "") if part.isdecimal() else (-1, part) for part in re.split(r"(\d+)", key))


def _nbytes(array: TargetArray) -> int:
    nelems = 1
    for size in array.shape:
        nelems *= size
    return nelems * DTYPES[array.dtype].nbits // 8
