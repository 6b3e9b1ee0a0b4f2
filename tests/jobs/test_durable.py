"""Before OUT has its name, every file in it, and every name, is on the storage."""

import pytest

from tests.jobs.outcome import assert_done, write_sample
from tests.mpirun import run_python_mpi

# Each rank notes what it syncs, and rank 0 when OUT gets its name.
NOTING = """
import os, sys
from reshard_mpi.__main__ import main
fsync, rename = os.fsync, os.rename
def note(line):
    with open(os.environ["NOTES"], "a") as notes:
        notes.write(line + "\\n")
def noting_fsync(fd):
    fsync(fd)
    note(os.readlink(f"/proc/self/fd/{fd}"))
def noting_rename(old, new):
    note("renamed")
    rename(old, new)
os.fsync, os.rename = noting_fsync, noting_rename
main()
"""
PADDED = '[padding]\n"lm_head.weight" = { to = 4000 }\n'


@pytest.mark.parametrize(
    "options",
    [
        ("--target", "pp=8"),  # more stages than layers: some shards have no arrays
        ("--target", "tp=2", "--layout", "layout.toml"),  # the second half of an array is padding alone
        ("--format", "hf", "--max-shard-size", "1MB", "--hf-assets", "assets"),
        ("--target", "tp=2", "--format", "hdf5"),
    ],
    ids=lambda options: " ".join(options),
)
def test_everything_is_synced_before_it_is_seen(tmp_path, options):
    sample = write_sample(tmp_path / "sample", "4M", tp=1, pp=1)
    (tmp_path / "layout.toml").write_text(PADDED)
    (tmp_path / "assets").mkdir()
    (tmp_path / "assets" / "config.json").write_text("{}")
    notes = tmp_path / "notes"
    done = run_python_mpi(
        2, "-c", NOTING, "reshard", sample, tmp_path / "out", *options, cwd=tmp_path, env={"NOTES": str(notes)}
    )
    assert_done(done)
    before, _, after = notes.read_text().partition("renamed\n")
    synced = set(before.splitlines())
    partial = f"{tmp_path}/out.partial"
    names = sorted(path.name for path in (tmp_path / "out").iterdir())
    assert [name for name in names if f"{partial}/{name}" not in synced] == []
    assert partial in synced
    assert str(tmp_path) in after.splitlines()
