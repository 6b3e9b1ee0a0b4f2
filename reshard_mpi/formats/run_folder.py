"""The folder of a training run: checkpoints side by side, and a pointer file that says which of them is the newest.

latest                                  global_step10         DeepSpeed and others: a folder's name
latest_checkpointed_iteration.txt       10                    Megatron: iter_0000010/, or `release`
"""

import os
from pathlib import Path

from reshard_mpi.checkpoint.manifest import CASE_FILE
from reshard_mpi.errors import InputError, StorageError, names
from reshard_mpi.storage.files import read_text

NAME_FILE = "latest"
ITERATION_FILE = "latest_checkpointed_iteration.txt"
LARGEST_POINTER = 4096


def newest_of(folder: Path) -> Path:
    """The checkpoint to which the pointer file of `folder` points; `folder` where it is one itself, or has no such file.

    InputError for a pointer that names no folder within `folder`, StorageError for one that isn't there.
    """
    pointers = [name for name in (NAME_FILE, ITERATION_FILE) if os.path.isfile(folder / name)]
    if not pointers or _is_checkpoint(folder):
        return folder
    if len(pointers) > 1:
        raise InputError(str(folder), f"has two pointer files, {names(pointers)}; give the folder of one checkpoint")
    where = str(folder / pointers[0])
    name = _named(read_text(folder, pointers[0], LARGEST_POINTER), pointers[0], where)
    found = folder / name
    if not found.is_dir():
        raise StorageError(where, f"names {name}, which is no folder beside it; give the folder of a checkpoint")
    if os.path.dirname(os.path.realpath(found)) != os.path.realpath(folder):
        raise InputError(where, f"names {name}, a link out of the folder; give the folder of a checkpoint")
    return found


def _is_checkpoint(folder: Path) -> bool:
    from reshard_mpi.formats.recognised import FORMATS

    return (folder / CASE_FILE).exists() or any(one.is_it(folder) for one in FORMATS)


def _named(content: bytes, pointer: str, where: str) -> str:
    """The folder's name that a pointer file holds."""
    try:
        text = content.decode().strip()
    except UnicodeDecodeError as error:
        raise InputError(where, f"is no text: {error}; give the folder of a checkpoint") from error
    if pointer == ITERATION_FILE and text != "release":
        if not (text.isascii() and text.isdecimal() and len(text) < 19):
            raise InputError(where, f"holds {text[:80]!r}, expected the number of an iteration, or release")
        return f"iter_{int(text):07d}"
    if "/" in text or "\0" in text or text in ("", ".", "..") or not text.isprintable():
        raise InputError(where, f"holds {text[:80]!r}, expected the name of a folder beside it")
    return text
