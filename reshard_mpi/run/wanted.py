"""What the user asked for: a job, in the terms of the command line."""

from dataclasses import dataclass
from pathlib import Path

from reshard_mpi.checkpoint.mesh import Mesh
from reshard_mpi.checkpoint.template import ShardTemplate
from reshard_mpi.checkpoint.wanted import CastRule, RenameRule


@dataclass(frozen=True)
class Job:
    """What the user asked for. `memory_nbytes` bounds the buffers of a rank; `verify` is none, source or full."""

    source: Path
    out: Path
    target: Mesh | None
    memory_nbytes: int
    writers: str = "auto"
    verify: str = "source"
    include: tuple[str, ...] = ()
    exclude: tuple[str, ...] = ()
    rename: tuple[RenameRule | Path, ...] = ()  # rules, and files of rules
    cast: tuple[CastRule, ...] = ()
    cast_except: tuple[str, ...] = ()
    layout: str | None = None  # a preset, or a file
    layout_values: tuple[tuple[str, int], ...] = ()  # numbers that its rules name
    format: str = "safetensors"  # or hdf5, hf
    most_file_nbytes: int = 5 * 10**9  # of a file of hf
    assets: Path | None = None  # a folder whose configuration and tokenizer are copied into an hf folder
    keep_bytes: bool = False  # what of DCP is no tensor
    source_template: ShardTemplate | None = None  # of shards that lie on the nodes of the ranks
    target_template: ShardTemplate | None = None
    overwrite: bool = False
    restart: bool = False
    note_seconds: float = 30.0  # between two notes of what is durable
    progress: str = "off"

    @property
    def writes_case(self) -> bool:
        """Is OUT a case with a manifest of ours?"""
        return self.format != "hf"
