"""A checkpoint that is larger than the memory of a rank may be: 1 GiB, in 64 MiB of buffers."""

import json
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
from safetensors import safe_open

from tests.jobs.large import GIB, MIB, large_folder
from tests.jobs.outcome import assert_done, write_sample
from tests.mpirun import run_mpi
from tests.needed import needed

MOST_RSS = (64 + 150) * MIB


@pytest.fixture
def folder(tmp_path) -> Iterator[Path]:
    """Room for SOURCE and one OUT at a time."""
    with large_folder(5 * GIB // 2, 2 * GIB, tmp_path) as folder:
        yield folder


def reshard_in_bounds(source: Path, out: Path, target: str) -> None:
    """No rank ever holds more than MOST_RSS."""
    report = out.with_suffix(".json")
    options = ("--target", target, "--memory", "64M", "--progress", "off", "--report", report)
    assert_done(run_mpi(4, "reshard", source, out, *options, timeout=120))
    measured = json.loads(report.read_text())
    assert measured["nrounds"] > 10
    peaks = [rank["peak_rss_nbytes"] / MIB for rank in measured["ranks"]]
    assert len(peaks) == 4
    assert max(peaks) < MOST_RSS / MIB, f"MiB of each rank: {peaks}"
    assert_done(run_mpi(2, "compare", source, out, "--progress", "off", timeout=120))


def assert_loads(shard: Path, source: Path, tensor: str) -> None:
    """safetensors reads the file, and rows of a tensor are what its two source shards hold."""
    torch = needed("torch")
    from safetensors.torch import load_file

    fragments = [f for f in json.loads((source / "case.json").read_text())["fragments"] if f["fqn"] == tensor]
    with safe_open(shard, "pt") as opened:
        assert opened.metadata() == {"format": "pt"}
        whole = opened.get_slice(tensor)
        for fragment in fragments:
            with safe_open(source / fragment["payload_file"], "pt") as part:
                rows = part.get_slice(fragment["payload_key"])[:3]
            first = fragment["element_offset"][0]
            assert torch.equal(whole[first : first + 3], rows)
        keys = set(opened.keys())
    loaded = load_file(shard)
    assert loaded.keys() == keys
    assert {value.dtype for value in loaded.values()} == {torch.bfloat16}
    assert sum(value.nbytes for value in loaded.values()) > 0.9 * GIB


@pytest.mark.large
def test_a_gibibyte_passes_through_64_mebibytes_and_loads_elsewhere(folder):
    source = write_sample(folder / "source", "1G", dtype="bfloat16")
    reshard_in_bounds(source, folder / "single", "single")
    assert_loads(folder / "single" / "rank-00000.safetensors", source, "model.embed_tokens.weight")
    shutil.rmtree(folder / "single")
    reshard_in_bounds(source, folder / "tp4", "tp=4")
    with safe_open(folder / "tp4" / "rank-00003.safetensors", "np") as opened:
        assert "lm_head.weight" in opened.keys()
