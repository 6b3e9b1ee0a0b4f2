"""Where there is little of something: space that others take while a job runs, and files that may be open."""

import shutil
import subprocess
from pathlib import Path

import pytest

from tests.jobs.outcome import AT, assert_done, error_lines, run_alone, write_sample
from tests.jobs.test_resume import assert_equal_folders
from tests.mpirun import run_python_mpi

# Rank 0 takes all the space that is left, once the files of OUT have got theirs.
FILLING = f"""{AT}
def fill():
    with open(os.environ["FILLER"], "wb", buffering=0) as filler:
        try:
            while filler.write(bytes(4096)):
                pass
        except OSError:
            pass
if "FILLER" in os.environ:
    at("reshard_mpi.run.job:move_rounds", 0, fill)
main()
"""
SMALL_DISK = """
disk=$1 size=$2
shift 2
mount -t tmpfs -o size="$size" small "$disk" || exit 99
"$@"
echo "exit $?, left: $(ls "$disk"), large: $(find "$disk/out.partial" -size +7k | wc -l)"
[ -z "$FILLER" ] && mount -o remount,size=50m small "$disk"
rm -f "$FILLER"
unset FILLER
"$@" && cp -r "$disk/out" "$disk/../copy"
"""


def on_a_small_disk(folder: Path, size: int, *command: object, filled: bool) -> subprocess.CompletedProcess[str]:
    """The command, and when it has failed for want of space the same again, with more of it."""
    disk = folder / "disk"
    disk.mkdir()
    probe = ("unshare", "-m", "mount", "-t", "tmpfs", "small", disk)
    if not shutil.which("unshare") or subprocess.run(probe, capture_output=True).returncode:
        pytest.skip("may not mount a small file system of its own")
    prefix = ("unshare", "-m", "bash", "-c", SMALL_DISK, "bash", disk, size)
    env = {"FILLER": str(disk / "filler") if filled else None}
    return run_python_mpi(3, "-c", FILLING, *command, prefix=prefix, env=env)


SPACE = [
    # what lacks it, of how much more than the shards need, taken by another, options, words, files of OUT.partial that take space
    ("the shards, before anything is written", -1, False, (), "are free; make room", 0),
    (
        "the journal",
        1 << 20,
        True,
        ("--journal-every", 0, "--memory", "100K"),
        "out.partial/journal.jsonl: can't write",
        2,
    ),
    ("case.json", 1 << 20, True, (), "out.partial/case.json: can't write", 2),
]


@pytest.mark.parametrize(
    ("what", "spare_nbytes", "filled", "options", "words", "nlarge"), SPACE, ids=[what for what, *_ in SPACE]
)
def test_space_that_lacks_is_told_and_the_same_command_goes_on_when_it_is_there(
    tmp_path, what, spare_nbytes, filled, options, words, nlarge
):
    """Shards have taken their space before the first byte is moved, so that it can't be taken from them."""
    source, whole = write_sample(tmp_path / "source", "1M"), tmp_path / "whole"
    command = ("reshard", source, tmp_path / "disk" / "out", "--target", "tp=2", "--progress", "off", *options)
    assert_done(run_alone("reshard", source, whole, "--target", "tp=2"))
    size = sum(-(-path.stat().st_size // 4096) * 4096 for path in whole.glob("rank-*")) + spare_nbytes
    done = on_a_small_disk(tmp_path, size, *command, filled=filled)
    shown = f"{done.stdout}\n{done.stderr}"
    left = "filler\nout.partial" if filled else "out.partial"
    assert f"exit 5, left: {left}, large: {nlarge}\n" in done.stdout, shown
    (line,) = error_lines(done.stderr)
    assert words in line, line
    assert done.returncode == 0, shown
    assert_equal_folders(whole, tmp_path / "copy")


FEW_FILES = """
import os, resource
nfiles = int(os.environ["NFILES"])
resource.setrlimit(resource.RLIMIT_NOFILE, (nfiles, nfiles))
from reshard_mpi.__main__ import main
main()
"""


@pytest.mark.parametrize(("mpi", "nfiles"), [("openmpi", 32), ("mpich", 40)])
def test_64_shards_are_read_and_written_where_so_few_files_may_be_open(tmp_path, mpi, nfiles):
    """Two ranks of MPICH have 29 of them open themselves, of Open MPI 17."""
    many, one, back = write_sample(tmp_path / "many", "1M", tp=1, pp=1, fsdp=64), tmp_path / "one", tmp_path / "back"
    for source, out, target in ((many, one, "single"), (one, back, "fsdp=64")):
        arguments = ("reshard", source, out, "--target", target, "--verify", "full", "--progress", "off")
        assert_done(run_python_mpi(2, "-c", FEW_FILES, *arguments, mpi=mpi, env={"NFILES": str(nfiles)}))
    assert_done(run_alone("compare", many, back, "--progress", "off"))
