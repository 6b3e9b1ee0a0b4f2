"""Which format a folder holds that has no case.json, and who reads it."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

from reshard_mpi.errors import InputError, StorageError, names
from reshard_mpi.formats.dcp import describe_dcp, is_dcp
from reshard_mpi.formats.described import Described
from reshard_mpi.formats.hugging_face import (
    describe_hugging_face,
    describe_sharded_hugging_face,
    is_hugging_face,
    is_sharded_hugging_face,
)


class Format(NamedTuple):
    """What we read: its name, whether a folder holds it, and the folder as a case."""

    name: str
    is_it: Callable[[Path], bool]
    described: Callable[[Path], Described]


FORMATS = (
    Format("PyTorch DCP", is_dcp, describe_dcp),
    Format("a Hugging Face model", is_hugging_face, describe_hugging_face),
    Format("shards of HuggingFaceStorageWriter", is_sharded_hugging_face, describe_sharded_hugging_face),
)

# What we don't read: a pattern of its files, its name, and what reads it.
UNREAD = (
    ("mp_rank_*_model_states.pt", "DeepSpeed ZeRO", "DeepSpeed's zero_to_fp32.py"),
    ("zero_pp_rank_*_model_states.pt", "DeepSpeed ZeRO", "DeepSpeed's zero_to_fp32.py"),
    ("*/mp_rank_*_model_states.pt", "DeepSpeed ZeRO", "DeepSpeed's zero_to_fp32.py"),
    ("*/zero_pp_rank_*_model_states.pt", "DeepSpeed ZeRO", "DeepSpeed's zero_to_fp32.py"),
    ("zero/*/fp32.pt", "a DeepSpeed universal checkpoint", "DeepSpeed"),
    ("mp_rank_*/model_optim_rng.pt", "a legacy Megatron checkpoint", "Megatron-LM's tools/checkpoint/convert.py"),
    ("*/mp_rank_*/model_optim_rng.pt", "a legacy Megatron checkpoint", "Megatron-LM's tools/checkpoint/convert.py"),
    ("model_world_size_*_rank_*.pt", "verl's shards of FSDP", "verl's model_merger"),
    ("manifest.ocdbt", "an Orbax checkpoint", "orbax.checkpoint"),
    ("_CHECKPOINT_METADATA", "an Orbax checkpoint", "orbax.checkpoint"),
    ("pytorch_model*.bin", "a pickled Hugging Face model", "transformers, which saves it as safetensors"),
)


def describe(folder: Path) -> Described:
    """The checkpoint in `folder` as a case; an error that says what the folder seems to hold instead.

    Of several the first one is read, and the others are told.
    """
    found = [one for one in FORMATS if one.is_it(folder)]
    if found:
        described = found[0].described(folder)
        others = names(one.name for one in found[1:])
        told = [f"{folder}: is read as {found[0].name}; it holds {others} too, left out"] if others else []
        return replace(described, warnings=(*described.warnings, *told))
    for pattern, name, reader in UNREAD:
        if next(folder.glob(pattern), None) is not None:
            raise InputError(
                str(folder),
                f"holds {name}, which we don't read: it is made of pickles or of a store of its own; use {reader}",
            )
    raise StorageError(
        str(folder / "case.json"),
        "is not there, nor .metadata (DCP) or model.safetensors (Hugging Face); give the folder of a checkpoint",
    )
