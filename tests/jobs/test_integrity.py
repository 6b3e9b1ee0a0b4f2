"""What is wrong with the bytes of a checkpoint is told, whichever copy of them it is in."""

import json
import shutil
from dataclasses import replace
from pathlib import Path

import pytest

from tests.jobs.outcome import CASES, assert_done, assert_refused, error_lines, run_alone
from tests.mpirun import run_mpi
from tests.reference.generate import write_case
from tests.reference.handmade import case_of, tensor


def flip_last_bit(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)


def without_digests(case: Path) -> None:
    manifest = json.loads((case / "case.json").read_text())
    manifest["expected_manifest_digest"] = None
    for fragment in manifest["fragments"]:
        fragment["fragment_digest"] = None
    (case / "case.json").write_text(json.dumps(manifest))


@pytest.mark.parametrize("rank", [0, 1, 2])
def test_under_full_every_replica_is_hashed_also_of_arrays_that_two_tensors_share(tmp_path, rank):
    """Two tensors in one stored array, on three ranks: whichever is read, the other two are hashed as well."""
    source = tmp_path / "source"
    write_case(case_of(*(replace(tensor(name), stored_with="s") for name in "ab"), mesh={"dp": 3}), source)
    flip_last_bit(source / f"rank-{rank:05d}.safetensors")
    done = run_mpi(2, "reshard", source, tmp_path / "out", "--target", "single", "--verify", "full")
    assert_refused(done, 4, f"rank-{rank:05d}.safetensors", out=tmp_path / "out")


@pytest.mark.parametrize("rank", [0, 1])
def test_compare_refuses_a_checkpoint_whose_replicas_differ(tmp_path, rank):
    """No digest tells, and the tensor has no one value."""
    for name in ("good", "bad"):
        write_case(case_of(tensor("w"), mesh={"dp": 2}), tmp_path / name)
        without_digests(tmp_path / name)
    flip_last_bit(tmp_path / "bad" / f"rank-{rank:05d}.safetensors")
    assert_refused(run_mpi(2, "compare", tmp_path / "good", tmp_path / "bad"), 4, "replica")
    assert_done(run_mpi(2, "compare", tmp_path / "good", tmp_path / "good"))


def test_plan_tells_also_of_a_missing_oracle_file_and_exits_as_the_first_line_says(tmp_path):
    source = Path(shutil.copytree(CASES / "tp2-pp2-to-single", tmp_path / "source"))
    manifest = json.loads((source / "case.json").read_text())
    (source / manifest["oracle_file"]).unlink()
    manifest["expected_manifest_digest"] = "sha256:" + 64 * "0"
    (source / "case.json").write_text(json.dumps(manifest))
    done = run_alone("plan", source, "--target", "single")
    assert (done.returncode, len(error_lines(done.stderr))) == (5, 1)
    assert [line[:16] for line in done.stdout.splitlines()] == ["refused (exit 5)", "refused (exit 4)"]


@pytest.mark.parametrize("options", [["--seed", "-1"], ["--tp", "50000"]])
def test_a_sample_that_makes_no_sense_is_refused_at_once(tmp_path, options):
    assert_refused(run_alone("sample", tmp_path / "out", *options), 2, out=tmp_path / "out")
    assert not (tmp_path / "out.partial").exists()
