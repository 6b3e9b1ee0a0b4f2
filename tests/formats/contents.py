"""What a safetensors file holds, by its header alone."""

import json
from pathlib import Path
from typing import NamedTuple


class Array(NamedTuple):
    dtype: str
    shape: tuple[int, ...]
    data: bytes


def arrays_of(path: Path) -> dict[str, Array]:
    content = path.read_bytes()
    start = 8 + int.from_bytes(content[:8], "little")
    header = json.loads(content[8:start])
    header.pop("__metadata__", None)
    return {
        key: Array(entry["dtype"], tuple(entry["shape"]), content[start:][slice(*entry["data_offsets"])])
        for key, entry in header.items()
    }
