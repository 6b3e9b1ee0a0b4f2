"""Pickles, read but not run: only the classes that PyTorch's checkpoints are made of, each as an inert record.

Python's unpickler runs nothing by itself: it calls what the pickle names. Here a name is looked up in a short list of stand-ins
that hold what they are given; any other name is refused, and said. And only what Python's own pickler writes is read: a few bytes
could ask the one written in C for 64 GiB (an index of its memo), or have it hash for ever (tuples of twice the same tuple).
"""

import io
import pickle
from collections import OrderedDict
from collections.abc import Callable
from typing import Any, ClassVar

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


def _ordered_dict() -> OrderedDict[Any, Any]:
    """Its items are set one by one, like those of any dict."""
    return OrderedDict()


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
    ("pathlib", "PosixPath"): Record,
    ("pathlib._local", "PosixPath"): Record,
    ("collections", "OrderedDict"): _ordered_dict,
}
TENSOR_NAMES: dict[tuple[str, str], Any] = {
    **{("torch", name): Storage(dtype) for name, dtype in STORAGES.items()},
    **{("torch", name): Dtype(name) for name in DTYPES},
    ("torch.storage", "UntypedStorage"): Storage(""),
    ("torch._utils", "_rebuild_tensor_v2"): Tensor,
    ("torch._utils", "_rebuild_tensor_v3"): Tensor,
    ("collections", "OrderedDict"): _ordered_dict,
}
# What the picklers of Python 3 write of such objects, in protocols 2 to 5.
OPCODES = (
    "PROTO FRAME STOP MARK NONE NEWTRUE NEWFALSE BININT BININT1 BININT2 LONG1 LONG4 BINFLOAT SHORT_BINUNICODE BINUNICODE "
    "BINUNICODE8 SHORT_BINBYTES BINBYTES BINBYTES8 EMPTY_TUPLE TUPLE1 TUPLE2 TUPLE3 TUPLE EMPTY_LIST APPEND APPENDS EMPTY_DICT "
    "SETITEM SETITEMS GLOBAL STACK_GLOBAL REDUCE NEWOBJ BUILD BINPUT LONG_BINPUT MEMOIZE BINGET LONG_BINGET BINPERSID"
).split()


class _Reader(pickle._Unpickler):
    """The unpickler that is written in Python, with fewer opcodes: those, and each only for what it is there for."""

    dispatch: ClassVar[dict[int, Callable[[Any], None]]] = {
        code: pickle._Unpickler.dispatch[code] for code in (getattr(pickle, name)[0] for name in OPCODES)
    }
    stack: list[Any]
    pop_mark: Callable[[], list[Any]]

    def __init__(self, data: bytes, names: dict[tuple[str, str], Any], where: str):
        super().__init__(io.BytesIO(data))
        self._names, self._where = names, where
        self._stand_ins = {id(value) for value in names.values()}

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

    def load_made(self) -> None:
        """REDUCE and NEWOBJ: of a stand-in, with arguments."""
        arguments, stand_in = self.stack.pop(), self.stack[-1]
        if id(stand_in) not in self._stand_ins:
            raise pickle.UnpicklingError("calls what it has made itself")
        self.stack[-1] = stand_in(*arguments)

    def load_state(self) -> None:
        """BUILD: of a record."""
        state, record = self.stack.pop(), self.stack[-1]
        if not isinstance(record, Record):
            raise pickle.UnpicklingError(f"gives a state to a {type(record).__name__}")
        record.__setstate__(state)

    def load_items(self) -> None:
        """SETITEMS"""
        self._set_items(self.pop_mark())

    def load_item(self) -> None:
        """SETITEM"""
        items = self.stack[-2:]
        del self.stack[-2:]
        self._set_items(items)

    def _set_items(self, items: list[Any]) -> None:
        """Keys are names, or records: the hash of a tuple of tuples may take for ever."""
        keys = items[::2]
        if not isinstance(self.stack[-1], dict) or not all(isinstance(key, str | int | Record) for key in keys):
            raise pickle.UnpicklingError("has keys that are no names")
        self.stack[-1].update(zip(keys, items[1::2], strict=True))


def _as_text(read: Callable[[Any], None]) -> Callable[[_Reader], None]:
    def as_text(reader: _Reader) -> None:
        read(reader)
        reader.stack[-1].encode()  # half a character can't be written

    return as_text


_Reader.dispatch |= {
    **{
        code[0]: _as_text(_Reader.dispatch[code[0]])
        for code in (pickle.SHORT_BINUNICODE, pickle.BINUNICODE, pickle.BINUNICODE8)
    },
    **dict.fromkeys((pickle.REDUCE[0], pickle.NEWOBJ[0]), _Reader.load_made),
    pickle.BUILD[0]: _Reader.load_state,
    pickle.SETITEM[0]: _Reader.load_item,
    pickle.SETITEMS[0]: _Reader.load_items,
}


def read_pickle(data: bytes, names: dict[tuple[str, str], Any], where: str) -> Any:
    """What the pickle holds, made of stand-ins; InputError at `where` for anything else."""
    try:
        return _Reader(data, names, where).load()
    except (InputError, MemoryError):
        raise
    except Exception as error:  # a damaged pickle raises anything
        raise InputError(where, f"no pickle that can be read: {type(error).__name__}: {error}; copy it anew") from error
