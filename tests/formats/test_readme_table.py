"""The table of the README: every command in it does what it says."""

import re
import shlex
from pathlib import Path

import pytest

from tests.formats.test_dcp import written
from tests.jobs.outcome import CASES
from tests.mpirun import CHECKOUT, run_mpi, tail

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

README = (CHECKOUT / "README.md").read_text()
TABLE = README.partition("## What you have, what to type")[2].partition("\n\n**")[0]
COMMANDS = re.findall(r"\| `mpirun -n 4 python -m reshard_mpi ([^`]+)` \|", TABLE)


def test_every_row_has_a_command():
    assert len(COMMANDS) == TABLE.count("\n|") - 2 >= 8


@pytest.fixture(scope="module")
def folders(tmp_path_factory) -> dict[str, Path]:
    """What the words in capitals stand for."""
    folder = tmp_path_factory.mktemp("have")
    config = transformers.LlamaConfig(
        hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4, vocab_size=64
    )
    model = transformers.LlamaForCausalLM(config)
    model.save_pretrained(folder / "model")
    torch.distributed.checkpoint.save(model.state_dict(), checkpoint_id=folder / "dcp", no_dist=True)
    shards, _ = written(folder, "hf", "fsdp", 2)
    return {"CASE": CASES / "tp2-pp2-layers-tied", "DCP": folder / "dcp", "SHARDS": shards, "MODEL": folder / "model"}


@pytest.mark.parametrize("command", COMMANDS)
def test_a_command_of_the_table_works(command, folders, tmp_path):
    have = {**folders, "OUT": tmp_path / "out"}
    done = run_mpi(4, *(have.get(word, word) for word in shlex.split(command)), timeout=120)
    assert done.returncode == 0, tail(done.stdout) + tail(done.stderr)
    assert (tmp_path / "out").is_dir() or command.startswith("compare")
