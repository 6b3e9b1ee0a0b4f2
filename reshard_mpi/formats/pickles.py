"""Pickles, read but not run: only the classes that PyTorch's checkpoints are made of, each as an inert record.

Python's unpickler runs nothing by itself: it calls what the pickle names. Here a name is looked up in a short list of stand-ins
that hold what they are given; any other name is refused, and said.
"""

import io
import pickle
from collections import OrderedDict
from typing import Any

from reshard_mpi.errors import InputError


class Record:
    """A stand-in: keeps the arguments and the state that a pickle gives to an object of some class."""

    def __init__(self, *args: Any, **_: Any):
        self.args = args

    def __setstate__(self, state: Any) -> None:
        if isinstance(state, tuple) and len(state) == 2 and isinstance(state[1], dict):
            state = {**(state[0] or {}), **state[1]}  # with __slots__
        self.__dict__.update(state if isinstance(state, dict) else {"state": state})


class Size(tuple[int, ...]):
    """torch.Size"""

    __slots__ = ()


class Dtype(str):
    """A torch dtype, by name."""

    __slots__ = ()


class Storage(str):
    """A typed storage class, by the name of its element type."""

    __slots__ = ()


class Tensor(Record):
    """The arguments of torch._utils._rebuild_tensor_v2 or _v3."""


def _layout(name: str) -> str:
    return name


def _path(*parts: str) -> str:
    return "/".join(parts)


DTYPES = (
    "bool uint8 int8 uint16 int16 uint32 int32 uint64 int64 float16 bfloat16 float32 float64 complex32 complex64 complex128 "
    "float8_e4m3fn float8_e5m2 float8_e4m3fnuz float8_e5m2fnuz float8_e8m0fnu float4_e2m1fn_x2"
).split()
STORAGES = {
    "DoubleStorage": "float64",
    "FloatStorage": "float32",
    "HalfStorage": "float16",
    "BFloat16Storage": "bfloat16",
    "LongStorage": "int64",
    "IntStorage": "int32",
    "ShortStorage": "int16",
    "CharStorage": "int8",
    "ByteStorage": "uint8",
    "BoolStorage": "bool",
    "ComplexFloatStorage": "complex64",
    "ComplexDoubleStorage": "complex128",
}
_DCP = "torch.distributed.checkpoint"
_RECORDS = {
    f"{_DCP}.metadata": "Metadata TensorStorageMetadata TensorProperties ChunkStorageMetadata BytesStorageMetadata "
    "MetadataIndex StorageMeta _MEM_FORMAT_ENCODING",
    f"{_DCP}.filesystem": "_StorageInfo",
    f"{_DCP}.planner": "SavePlan WriteItem WriteItemType TensorWriteData BytesIOWriteData",
    "megatron.core.dist_checkpointing.strategies.torch": "MCoreSavePlan MCoreMetadata",
}
METADATA_NAMES: dict[tuple[str, str], Any] = {
    **{(module, name): type(name, (Record,), {}) for module, listed in _RECORDS.items() for name in listed.split()},
    **{("torch", name): Dtype(name) for name in DTYPES},
    ("torch", "Size"): Size,
    ("torch.serialization", "_get_layout"): _layout,
    ("pathlib", "PosixPath"): _path,
    ("pathlib._local", "PosixPath"): _path,
    ("collections", "OrderedDict"): OrderedDict,
}
TENSOR_NAMES: dict[tuple[str, str], Any] = {
    **{("torch", name): Storage(dtype) for name, dtype in STORAGES.items()},
    **{("torch", name): Dtype(name) for name in DTYPES},
    ("torch.storage", "UntypedStorage"): Storage(""),
    ("torch._utils", "_rebuild_tensor_v2"): Tensor,
    ("torch._utils", "_rebuild_tensor_v3"): Tensor,
    ("collections", "OrderedDict"): OrderedDict,
}


class _Reader(pickle.Unpickler):
    def __init__(self, data: bytes, names: dict[tuple[str, str], Any], where: str):
        super().__init__(io.BytesIO(data))
        self._names, self._where = names, where

    def find_class(self, module: str, name: str) -> Any:
        found = self._names.get((module, name))
        if found is None:
            raise InputError(
                self._where,
                f"the pickle names {module}.{name}, which is not among the classes that a checkpoint is made of; nothing of "
                "it was run: save the checkpoint anew without it",
            )
        return found

    def persistent_load(self, pid: Any) -> Any:
        return pid


def read_pickle(data: bytes, names: dict[tuple[str, str], Any], where: str) -> Any:
    """What the pickle holds, made of stand-ins; InputError at `where` for anything else."""
    try:
        return _Reader(data, names, where).load()
    except InputError:
        raise
    except MemoryError as error:
        raise InputError(where, "the pickle asks for more memory than it can need; it is damaged") from error
    except Exception as error:  # a damaged pickle raises anything
        raise InputError(where, f"no pickle that can be read: {type(error).__name__}: {error}; copy it anew") from error
