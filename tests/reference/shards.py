"""safetensors files by hand: eight bytes of header length, a JSON header, the bytes of the arrays."""

import json
import struct
from dataclasses import dataclass, field

from tests.reference import dtypes
from tests.reference.errors import Refused


@dataclass
class StoredArray:
    """One array of a shard: dtype as a manifest spells it, shape in elements, raw bytes."""

    dtype: str
    shape: list[int]
    raw: bytes


@dataclass
class Shard:
    """One file: arrays in the order of their bytes, `__metadata__`, and where the bytes start in the file."""

    arrays: dict[str, StoredArray] = field(default_factory=dict)
    metadata: dict[str, str] = field(default_factory=dict)
    data_start: int = 0
    data_offsets: dict[str, list[int]] = field(default_factory=dict)


def strict_json(text: str, where: str):
    """JSON without duplicate keys and NaN."""

    def pairs(items):
        if len({key for key, _ in items}) != len(items):
            raise Refused(3, f"{where}: a key twice")
        return dict(items)

    def constant(name):
        raise Refused(3, f"{where}: {name}")

    try:
        return json.loads(text, object_pairs_hook=pairs, parse_constant=constant)
    except (ValueError, RecursionError) as error:
        raise Refused(3, f"{where}: {error}") from None


def read_shard(path) -> Shard:
    """A file, held against its own header: no hole, no overlap, nothing beyond the last array."""
    try:
        with open(path, "rb") as file:
            content = file.read()
    except OSError as error:
        raise Refused(5, f"{path}: {error}") from None
    if len(content) < 8 or (header_nbytes := struct.unpack("<Q", content[:8])[0]) > len(content) - 8:
        raise Refused(3, f"{path}: shorter than its header")
    data_start = 8 + header_nbytes
    try:
        header = strict_json(content[8:data_start].decode(), str(path))
    except UnicodeDecodeError:
        raise Refused(3, f"{path}: header is no UTF-8") from None
    shard = Shard(metadata=header.pop("__metadata__", {}), data_start=data_start)
    end_of_last = 0
    for key, entry in sorted(header.items(), key=lambda item: item[1]["data_offsets"]):
        begin, end = entry["data_offsets"]
        dtype = dtypes.NAMES_IN_HEADERS.get(entry["dtype"])
        if (
            dtype is None
            or begin != end_of_last
            or (end - begin) * 8 != dtypes.nelems(entry["shape"]) * dtypes.bits(dtype)
        ):
            raise Refused(3, f"{path}: {key}: dtype, shape and data_offsets don't fit")
        shard.arrays[key] = StoredArray(dtype, entry["shape"], content[data_start + begin : data_start + end])
        shard.data_offsets[key] = [begin, end]
        end_of_last = end
    if data_start + end_of_last != len(content):
        raise Refused(3, f"{path}: header wants {data_start + end_of_last} bytes, file has {len(content)}")
    return shard


def offsets_of(arrays: dict[str, StoredArray]) -> dict[str, list[int]]:
    """Where each array's bytes are, arrays one after the other in the order given."""
    offsets, begin = {}, 0
    for key, array in arrays.items():
        offsets[key] = [begin, begin + len(array.raw)]
        begin += len(array.raw)
    return offsets


def write_shard(
    path, arrays: dict[str, StoredArray], metadata: dict[str, str] | None = None, aligned: bool = True
) -> None:
    """Arrays one after the other in the order given; `aligned`: data starts at a multiple of 8 bytes."""
    header = {"__metadata__": metadata} if metadata else {}
    for key, offsets in offsets_of(arrays).items():
        header_name = dtypes.DTYPES[arrays[key].dtype][0]
        header[key] = {"dtype": header_name, "shape": list(arrays[key].shape), "data_offsets": offsets}
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8 if aligned else 0)
    with open(path, "wb") as file:
        file.write(struct.pack("<Q", len(text)) + text + b"".join(array.raw for array in arrays.values()))
