"""Writes a source, a checkpoint case whose shards all contenders can read.

    python -m tests.benchmarks.sources llama|row|column|grid NBYTES FOLDER

The metadata of each shard holds what PyTorch's consolidation looks for, the offset of each tensor. So it reads the same
files as everybody else, and what is in the page cache is the same for all.
"""

import hashlib
import json
import math
import os
import subprocess
import sys
from pathlib import Path

import numpy as np

from tests.benchmarks.layouts import RANKS, case_layout
from tests.benchmarks.shards import header_bytes, read_header, sharding_metadata

FQN = "weight"
MESHES = {"row": {"tp": 4}, "column": {"tp": 4}, "grid": {"fsdp": 2, "tp": 2}}
PARTS = {"row": (4, 1), "column": (1, 4), "grid": (2, 2)}  # of axis 0, of axis 1
PIECE_NBYTES = 16 << 20


def write_llama(nbytes: int, folder: Path) -> None:
    """The package's own sample, with the metadata added."""
    sample = ("sample", folder, "--size", nbytes, "--tp", 2, "--pp", 2, "--progress", "off")
    subprocess.run([sys.executable, "-m", "reshard_mpi", *map(str, sample)], check=True, stdout=subprocess.DEVNULL)
    for rank, boxes in enumerate(case_layout(folder).ranks):
        _add_metadata(folder / _name(rank), sharding_metadata({fqn: box.offset for fqn, box in boxes.items()}))


def _add_metadata(path: Path, metadata: dict[str, str]) -> None:
    header, begin = read_header(path)
    new = path.with_suffix(".new")
    with path.open("rb") as old, new.open("wb") as out:
        out.write(header_bytes(header | {"__metadata__": metadata}))
        old.seek(begin)
        while piece := old.read(PIECE_NBYTES):
            out.write(piece)
    os.replace(new, path)


def write_matrix(cut: str, nbytes: int, folder: Path) -> None:
    """One square matrix of random finite values, cut into RANKS parts."""
    side = max(math.isqrt(nbytes // 2) // 64 * 64, 64)
    folder.mkdir()
    fragments = [_write_part(cut, side, rank, folder) for rank in range(RANKS)]
    case = {
        "schema_id": "obliteratus.checkpoint-fixture-case",
        "schema_version": "1.0.0",
        "case_id": f"{cut}-{side}",
        "components": ["full_model"],
        "features": ["synthetic"],
        "topology": {"source": MESHES[cut], "target": {"world_size": 1}},
        "world_size": RANKS,
        "fragments": fragments,
        "expected_manifest_digest": _manifest_digest(fragments),
        "oracle_file": None,
        "oracles": [],
    }
    (folder / "case.json").write_text(json.dumps(case, sort_keys=True, indent=2))


def _write_part(cut: str, side: int, rank: int, folder: Path) -> dict:
    """Write the shard of a rank; its fragment."""
    extent = [side // parts for parts in PARTS[cut]]
    offset = [size * index for size, index in zip(extent, divmod(rank, PARTS[cut][1]), strict=True)]
    nbytes = 2 * math.prod(extent)
    entry = {"dtype": "BF16", "shape": extent, "data_offsets": [0, nbytes]}
    digest, random = hashlib.sha256(), np.random.default_rng(rank)
    with (folder / _name(rank)).open("wb") as out:
        out.write(header_bytes({"__metadata__": sharding_metadata({FQN: tuple(offset)}), FQN: entry}))
        for first in range(0, nbytes, PIECE_NBYTES):
            bits = np.frombuffer(random.bytes(min(PIECE_NBYTES, nbytes - first)), np.uint16)
            piece = (bits & 0xBFFF).tobytes()  # without the highest bit of the exponent every value is finite
            out.write(piece)
            digest.update(piece)
    return _fragment(cut, side, rank, offset, extent, f"sha256:{digest.hexdigest()}")


def _fragment(cut: str, side: int, rank: int, offset: list[int], extent: list[int], digest: str) -> dict:
    mesh = MESHES[cut]
    place = (rank,) if len(mesh) == 1 else divmod(rank, 2)
    return {
        "fragment_id": f"{FQN}|r{rank}",
        "logical_tensor_id": FQN,
        "fqn": FQN,
        "component_id": "model",
        "role": "parameter",
        "dtype": "bfloat16",
        "global_shape": [side, side],
        "element_offset": offset,
        "element_extent": extent,
        "local_shape": extent,
        "padding": {"before": [0, 0], "after": [0, 0], "semantic": "none"},
        "partition_axes": [axis for axis, parts in enumerate(PARTS[cut]) if parts > 1],
        "payload_file": _name(rank),
        "payload_key": FQN,
        "topology_coordinates": sorted([*map(list, zip(mesh, place, strict=True)), ["rank", rank]]),
        "replica": {"group_id": None, "member_count": 1, "member_index": 0},
        "fragment_digest": digest,
        "shard_file_id": _name(rank),
        "shard_digest_ref": f"source-digest:{_name(rank)}",
        "shared_storage_id": None,
        "tie_group_id": None,
        "evidence_refs": ["synthetic"],
    }


def _manifest_digest(fragments: list[dict]) -> str:
    kept = [{k: v for k, v in f.items() if k not in ("payload_file", "payload_key")} for f in fragments]
    text = json.dumps(kept, sort_keys=True, separators=(",", ":"))
    return f"sha256:{hashlib.sha256(text.encode()).hexdigest()}"


def _name(rank: int) -> str:
    return f"rank-{rank:05d}.safetensors"


def main(source: str, nbytes: str, folder: str) -> None:
    if source == "llama":
        write_llama(int(nbytes), Path(folder))
    else:
        write_matrix(source, int(nbytes), Path(folder))


if __name__ == "__main__":
    main(*sys.argv[1:])
