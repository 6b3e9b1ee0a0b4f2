"""What is resharded. Several works share a source, which is written once."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Work:
    """A source (a key of `SOURCES`) and the target to bring it to, as `--target` spells it."""

    name: str
    source: str
    target: str


# What each source is.
SOURCES = {
    "llama": "a Llama-like bfloat16 checkpoint, tp=2,pp=2",
    "row": "one bfloat16 matrix, cut into 4 along axis 0 (tp=4)",
    "column": "one bfloat16 matrix, cut into 4 along axis 1 (tp=4)",
    "grid": "one bfloat16 matrix, cut into 2 x 2 (fsdp=2,tp=2)",
}

# Neighbours share a source. `crossed`: each of the 4 target shards takes a part of each of the 4 source shards.
WORKS = (
    Work("single", "llama", "single"),
    Work("tp4", "llama", "tp=4"),
    Work("pp4", "llama", "pp=4"),
    Work("row", "row", "single"),
    Work("column", "column", "single"),
    Work("crossed", "column", "fsdp=4"),
    Work("grid", "grid", "single"),
)
