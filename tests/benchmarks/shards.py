"""Safetensors shards of bfloat16 tensors, as raw bytes. For the source, the DCP peers and the check."""

import json
import struct
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.uint16]


def read_header(path: Path) -> tuple[dict, int]:
    """(header, offset of the first byte of data)."""
    with path.open("rb") as file:
        (nbytes,) = struct.unpack("<Q", file.read(8))
        return json.loads(file.read(nbytes)), 8 + nbytes


def header_bytes(header: dict) -> bytes:
    """What a file with this header begins with, padded so that the data is aligned to 8 bytes."""
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    return struct.pack("<Q", len(text)) + text


def map_shard(path: Path) -> dict[str, Array]:
    """key -> the array, mapped, its elements as unsigned integers."""
    header, begin = read_header(path)
    data = np.memmap(path, np.uint8, "r")[begin:]
    header.pop("__metadata__", None)
    arrays = {}
    for key, entry in header.items():
        assert entry["dtype"] == "BF16", entry
        first, last = entry["data_offsets"]
        # Not every writer aligns the data.
        arrays[key] = np.frombuffer(data[first:last], np.uint16).reshape(entry["shape"])
    return arrays


def sharding_metadata(boxes: dict[str, tuple[int, ...]]) -> dict[str, str]:
    """The `__metadata__` of a shard as `HuggingFaceStorageWriter(save_distributed=True)` writes it; fqn -> offset."""
    offsets = {fqn: {"saved_offsets": list(offset)} for fqn, offset in boxes.items()}
    return {"format": "pt", "DCP_VERSION": "1.0", "DCP_SHARDING_INFO": json.dumps(offsets)}
