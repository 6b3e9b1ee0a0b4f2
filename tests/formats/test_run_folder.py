"""The folder of a run: every command reads the newest checkpoint in it, as its pointer file says, and names it."""

import json

import pytest

from reshard_mpi.errors import InputError, StorageError
from reshard_mpi.formats.run_folder import newest_of
from tests.formats.models import llama, write_hugging_face
from tests.jobs.outcome import CASES, assert_done, assert_refused, run_alone
from tests.mpirun import run_mpi

MEGATRON = "latest_checkpointed_iteration.txt"


@pytest.fixture
def run(tmp_path):
    """Two checkpoints of a run, the newer of which is `step_20`, and no pointer file yet."""
    folder = tmp_path / "run"
    folder.mkdir()
    for name in ("step_10", "step_20", "iter_0000020", "release"):
        write_hugging_face(folder / name, llama())
    return folder


@pytest.mark.parametrize(
    "pointer, text, found",
    [
        ("latest", "step_20", "step_20"),
        ("latest", "step_10\n", "step_10"),
        (MEGATRON, "20", "iter_0000020"),
        (MEGATRON, "release\n", "release"),
    ],
)
def test_a_pointer_file_says_which_checkpoint_is_meant(pointer, text, found, run):
    (run / pointer).write_text(text)
    assert newest_of(run) == run / found


@pytest.mark.parametrize(
    "why, pointer, content, error, words",
    [
        ("the folder was removed", "latest", b"step_30", StorageError, "names step_30, which is no folder"),
        ("the iteration was removed", MEGATRON, b"30", StorageError, "names iter_0000030, which is no folder"),
        ("a path", "latest", b"../other", InputError, "'../other', expected the name of a folder"),
        ("the parent", "latest", b"..", InputError, "'..'"),
        ("the folder itself", "latest", b".\n", InputError, "'.'"),
        ("a link out of the run", "latest", b"elsewhere", InputError, "a link out of the folder"),
        ("nothing", "latest", b"\n", InputError, "''"),
        ("two lines", "latest", b"step_10\nstep_20", InputError, "expected the name of a folder"),
        ("no text", "latest", b"\xff\xfe", InputError, "is no text"),
        ("no number", MEGATRON, b"step_20", InputError, "expected the number of an iteration"),
        ("a negative number", MEGATRON, b"-20", InputError, "'-20'"),
        ("a number without end", MEGATRON, b"9" * 4000, InputError, "expected the number of an iteration"),
        ("a checkpoint in place of a name", "latest", b"x" * 5000, InputError, "at most 4096"),
    ],
)
def test_a_pointer_that_leads_nowhere_is_refused(why, pointer, content, error, words, run, tmp_path):
    (tmp_path / "other").mkdir()
    (run / "elsewhere").symlink_to(tmp_path / "other")
    (run / pointer).write_bytes(content)
    with pytest.raises(error, match=words):
        newest_of(run)


def test_two_pointer_files_are_refused(run):
    (run / "latest").write_text("step_20")
    (run / MEGATRON).write_text("20")
    with pytest.raises(InputError, match="two pointer files"):
        newest_of(run)


def test_a_checkpoint_with_a_file_of_that_name_is_read_itself(run):
    for folder, file in ((run / "step_10", "latest"), (run / "step_20", MEGATRON)):
        (folder / file).write_text("nowhere")
        assert newest_of(folder) == folder
    assert newest_of(run) == run  # without a pointer file


def test_all_commands_read_the_newest_checkpoint_and_name_it(run, tmp_path):
    (run / "latest").write_text("step_20\n")
    told = f"{run}: its newest checkpoint is read, {run / 'step_20'}"
    done = run_mpi(2, "reshard", run, tmp_path / "out", "--report", tmp_path / "report.json")
    assert str(run / "step_20") in assert_done(done) and told in done.stderr
    assert json.loads((tmp_path / "report.json").read_text())["source"] == str(run / "step_20")
    done = run_mpi(2, "compare", run, tmp_path / "out")
    assert "equal: 30 tensors" in assert_done(done) and told in done.stderr
    pattern = ("--from", "single", "--file-pattern", "model.safetensors")
    for command, *options in (("verify",), ("inspect",), ("plan", "--ranks", 3), ("describe", *pattern)):
        done = run_alone(command, run, *options)
        assert_done(done)
        assert done.stderr.count(told) == 1, command


def test_what_is_not_read_is_named_though_a_pointer_leads_to_it(tmp_path):
    (tmp_path / "global_step5").mkdir()
    (tmp_path / "global_step5" / "mp_rank_00_model_states.pt").write_bytes(b"x")
    (tmp_path / "latest").write_text("global_step5")
    assert_refused(run_mpi(2, "reshard", tmp_path, tmp_path / "out"), 3, "global_step5", "DeepSpeed")
    (tmp_path / "latest").write_text("../x")
    for arguments in (("verify", tmp_path), ("compare", CASES / "tp2-pp2-layers-tied", tmp_path)):
        assert_refused(run_mpi(2, *arguments), 3, str(tmp_path / "latest"), "expected the name")
