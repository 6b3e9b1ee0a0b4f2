"""What is refused, and how: one line, one exit code, no traceback, and nothing under the name of OUT."""

import fcntl
import json
import os
import shutil
import subprocess
import time
from pathlib import Path

import pytest

from tests.jobs.outcome import (
    AT,
    CASES,
    PYTHON,
    REJECTS,
    assert_done,
    assert_refused,
    copy_of,
    error_lines,
    run_alone,
    write_sample,
)
from tests.mpirun import job_environ, run_mpi, run_python_mpi

UNEVEN = CASES / "tp3-uneven-to-tp2"
WITHIN_S = 20.0


def with_out(folder: Path) -> Path:
    (folder / "out").mkdir()
    return UNEVEN


def with_foreign_partial(folder: Path) -> Path:
    (folder / "out.partial").mkdir()
    (folder / "out.partial" / "thesis.tex").touch()
    return UNEVEN


def with_a_file_for_partial(folder: Path) -> Path:
    (folder / "out.partial").touch()
    return UNEVEN


def with_partial_of_another_job(folder: Path) -> Path:
    """Left by a job that is refused for its digests, to another target."""
    left = run_alone("reshard", REJECTS / "flipped-bit", folder / "out", "--target", "single")
    assert left.returncode == 4, left.stderr
    assert (folder / "out.partial").is_dir()
    return UNEVEN


def with_a_link_for_parent(folder: Path) -> Path:
    """`loop` leads to itself."""
    (folder / "loop").symlink_to(folder / "loop")
    return UNEVEN


def an_empty_folder(folder: Path) -> Path:
    (folder / "empty").mkdir()
    return folder / "empty"


def without_anything(_folder: Path) -> Path:
    return UNEVEN


def reject(name: str):
    return lambda _folder: REJECTS / name


REFUSALS = [
    # why, exit code, what makes the source, options after SOURCE OUT (None: instead of them), words of the message
    ("OUT exists", 2, with_out, [], ["/out", "--overwrite"]),
    ("OUT exists and is no case", 2, with_out, ["--overwrite"], ["/out", "case.json"]),
    ("OUT.partial is somebody else's", 2, with_foreign_partial, [], ["out.partial"]),
    ("OUT.partial is somebody else's, also under --restart", 2, with_foreign_partial, ["--restart"], ["out.partial"]),
    ("OUT.partial is a file", 2, with_a_file_for_partial, [], ["out.partial"]),
    ("OUT.partial is of another job", 2, with_partial_of_another_job, [], ["out.partial", "--restart"]),
    ("no such option", 2, without_anything, ["--quickly"], ["--quickly"]),
    ("a target of no axis", 2, without_anything, ["--target", "four"], ["--target"]),
    ("a target of size 0", 2, without_anything, ["--target", "tp=0"], ["--target"]),
    ("a target that names an axis twice", 2, without_anything, ["--target", "tp=2,tp=2"], ["--target"]),
    ("a size that is none", 2, without_anything, ["--memory", "much"], ["--memory"]),
    ("nothing is included", 2, without_anything, ["--include", "nothing.*"], ["--include"]),
    ("all is excluded", 2, without_anything, ["--exclude", "*"], ["--exclude"]),
    ("no rule for an axis", 3, without_anything, ["--target", "zz=2"], ["zz"]),
    ("a header that lies", 3, reject("truncated-shard"), [], ["rank-00001.safetensors"]),
    ("boxes overlap", 3, reject("overlap"), [], ["w"]),
    ("a path that leads out", 3, reject("path-escape"), [], [".."]),
    ("a digest differs", 4, reject("flipped-bit"), [], ["rank-00003.safetensors"]),
    ("replicas differ", 4, reject("replicas-differ"), [], ["n"]),
    ("an oracle differs", 4, reject("oracle-differs"), ["--verify", "full"], []),
    ("a shard is missing", 5, reject("missing-file"), [], ["rank-00002.safetensors"]),
    ("SOURCE is missing", 5, lambda folder: folder / "nothing", [], ["/nothing"]),
    ("SOURCE holds no manifest", 5, an_empty_folder, [], ["case.json"]),
    ("SOURCE is below a file", 5, lambda folder: UNEVEN / "case.json" / "below", [], ["below"]),
    ("SOURCE has a name that is too long", 5, lambda folder: folder / ("n" * 300), [], ["nnn"]),
    ("SOURCE leads to itself", 5, lambda folder: with_a_link_for_parent(folder) and folder / "loop", [], ["loop"]),
    ("a report within SOURCE", 2, without_anything, ["--report", UNEVEN / "case.json"], ["--report"]),
    ("too little memory", 6, without_anything, ["--memory", "1K"], ["--memory"]),
]


@pytest.mark.parametrize(("why", "code", "source", "options", "words"), REFUSALS, ids=[row[0] for row in REFUSALS])
def test_reshard_refuses(tmp_path, why, code, source, options, words):
    source = source(tmp_path)
    out = tmp_path / "out"
    before = sorted(path.name for path in out.iterdir()) if out.exists() else None
    start = time.monotonic()
    done = run_mpi(3, "reshard", source, out, *options)
    assert time.monotonic() - start < WITHIN_S
    assert_refused(done, code, *words)
    assert (sorted(path.name for path in out.iterdir()) if out.exists() else None) == before


OUTS = [
    # why, OUT from SOURCE
    ("equal to SOURCE", lambda source: source),
    ("SOURCE by another name", lambda source: source.parent / "link"),
    ("inside SOURCE", lambda source: source / "deep" / "out"),
    ("around SOURCE", lambda source: source.parent),
    ("the root of all folders", lambda source: Path("/")),
    ("inside SOURCE by another name", lambda source: source.parent / "link" / "out"),
]


@pytest.mark.parametrize(("why", "out_of"), OUTS, ids=[why for why, _ in OUTS])
def test_out_in_the_way_of_source_is_refused_also_under_overwrite(tmp_path, why, out_of):
    source = copy_of(UNEVEN, tmp_path / "parent" / "source")
    (tmp_path / "parent" / "link").symlink_to(source)
    before = everything(tmp_path)
    assert_refused(run_mpi(2, "reshard", source, out_of(source), "--overwrite"), 2, str(out_of(source)))
    assert everything(tmp_path) == before


@pytest.mark.parametrize("below", [".", "old"], ids=["SOURCE is it", "SOURCE is inside"])
def test_out_partial_in_the_way_of_source_is_refused_also_under_restart(tmp_path, below):
    """A folder with a journal is cleared on `--restart`."""
    source = tmp_path / "out.partial" / below
    shutil.copytree(UNEVEN, source)
    (tmp_path / "out.partial" / "journal.json").write_text("{}")
    before = everything(tmp_path)
    done = run_mpi(2, "reshard", source, tmp_path / "out", "--restart")
    assert everything(tmp_path) == before
    assert_refused(done, 2, str(source))


def everything(folder: Path) -> dict[str, bytes | None]:
    return {str(p.relative_to(folder)): p.read_bytes() if p.is_file() else None for p in sorted(folder.rglob("*"))}


BOTH = [
    # why, exit code, source, options
    ("usage", 2, UNEVEN, ["--target", "tp"]),
    ("input", 3, REJECTS / "overlap", []),
    ("integrity", 4, REJECTS / "flipped-bit", []),
    ("files", 5, REJECTS / "missing-file", []),
    ("memory", 6, UNEVEN, ["--memory", "1"]),
]


@pytest.mark.parametrize(("why", "code", "source", "options"), BOTH, ids=[row[0] for row in BOTH])
def test_all_ranks_leave_with_the_same_code(tmp_path, mpi, why, code, source, options):
    """The launcher tells one code; here each rank notes its own."""
    noting = (
        "import os, sys\n"
        "from reshard_mpi.__main__ import main\n"
        "folder = sys.argv.pop(1)\n"
        "try:\n    main()\n"
        "except SystemExit as end:\n"
        "    rank = os.environ.get('PMI_RANK') or os.environ['OMPI_COMM_WORLD_RANK']\n"
        "    open(os.path.join(folder, rank), 'w').write(str(end.code))\n"
        "    raise\n"
    )
    notes = tmp_path / "notes"
    notes.mkdir()
    arguments = ("reshard", source, tmp_path / "out", *options)
    done = run_python_mpi(4, "-c", noting, notes, *arguments, mpi=mpi)
    assert_refused(done, code, out=tmp_path / "out")
    left_with = {path.name: path.read_text() for path in notes.iterdir()}
    if mpi == "openmpi" and why == "usage":
        # Nobody has started MPI: as rank 0 leaves, Open MPI's launcher ends those that wait for it to have its say.
        assert left_with.pop("0") == str(code) and set(left_with.values()) <= {str(code)}
    else:
        assert left_with == {str(rank): str(code) for rank in range(4)}


@pytest.mark.parametrize("command", ["verify", "compare", "inspect", "plan"])
def test_other_commands_refuse_a_missing_folder_with_one_line(tmp_path, command):
    folders = [tmp_path / "nothing"] * (2 if command == "compare" else 1)
    assert_refused(run_mpi(3, command, *folders), 5, "nothing")


def test_a_partial_folder_that_a_living_job_writes_is_refused(tmp_path):
    """The lock tells, not the file: a job that was killed holds none."""
    partial = tmp_path / "out.partial"
    partial.mkdir()
    with open(partial / "lock", "w") as lock:
        lock.write("host elsewhere, pid 1, job 7\n")
        lock.flush()
        fcntl.flock(lock, fcntl.LOCK_EX)
        assert_refused(run_mpi(2, "reshard", UNEVEN, tmp_path / "out"), 2, "host elsewhere, pid 1, job 7")
        assert_refused(run_mpi(2, "reshard", UNEVEN, tmp_path / "out", "--restart"), 2, "host elsewhere")
    assert_done(run_mpi(2, "reshard", UNEVEN, tmp_path / "out"))
    assert not partial.exists()


def test_a_failed_digest_is_refused_until_restart_even_when_the_shard_is_good_again(tmp_path):
    source = copy_of(UNEVEN, tmp_path / "source")
    shard, out = source / "rank-00001.safetensors", tmp_path / "out"
    good = shard.read_bytes()
    shard.write_bytes(good[:-1] + bytes([good[-1] ^ 1]))
    assert_refused(run_mpi(3, "reshard", source, out), 4, "rank-00001.safetensors", out=out)
    shard.write_bytes(good)
    assert_refused(run_mpi(3, "reshard", source, out), 2, "--restart", out=out)
    assert_done(run_mpi(3, "reshard", source, out, "--restart"))
    assert_done(run_mpi(3, "compare", source, out))
    assert not (tmp_path / "out.partial").exists()


# ---- what the operating system refuses


def test_a_folder_that_can_t_be_read_is_named(tmp_path):
    """As root too: without the capabilities that let root read everything."""
    source = copy_of(UNEVEN, tmp_path / "source")
    (source / "rank-00002.safetensors").chmod(0)
    prefix = ()
    if os.geteuid() == 0:
        dropped = "-dac_override,-dac_read_search"
        prefix = ("setpriv", f"--bounding-set={dropped}", f"--inh-caps={dropped}")
        if not shutil.which("setpriv"):
            pytest.skip("no setpriv to take root's capabilities away")
    out = tmp_path / "out"
    assert_refused(run_mpi(3, "reshard", source, out, prefix=prefix), 5, "rank-00002.safetensors", out=out)
    closed = tmp_path / "closed"
    closed.mkdir(mode=0)
    try:
        assert_refused(run_mpi(3, "reshard", closed / "source", out, prefix=prefix), 5, "closed", out=out)
        assert_refused(run_mpi(3, "reshard", UNEVEN, closed / "out", prefix=prefix), 5, "closed")
    finally:
        closed.chmod(0o700)


def test_a_file_that_may_not_grow_on_one_rank_is_refused_by_all(tmp_path, mpi):
    limited = (
        "import resource, signal\n"
        "from mpi4py import MPI\n"
        "if MPI.COMM_WORLD.rank == 1:\n"
        "    resource.setrlimit(resource.RLIMIT_FSIZE, (5000, 5000))\n"
        "from reshard_mpi.__main__ import main\n"
        "main()\n"
    )
    source, out = write_sample(tmp_path / "source", "1M"), tmp_path / "out"
    arguments = ("reshard", source, out, "--target", "fsdp=3")
    assert_refused(run_python_mpi(3, "-c", limited, *arguments, mpi=mpi), 5, "rank-0000", out=out)
    assert_done(run_mpi(3, *arguments, mpi=mpi))
    assert_done(run_mpi(3, "compare", source, out, mpi=mpi))


SMALL_DISK = """
disk=$1 pages=$2
shift 2
mount -t tmpfs -o size=$((pages * 4096)) small "$disk" || exit 99
"$@"
echo "exit $?, left: $(ls "$disk")"
mount -o remount,size=50m small "$disk" || exit 99
"$@" 2>&1 && ls "$disk/out"
"""


def npages(folder: Path) -> int:
    return sum(-(-path.stat().st_size // 4096) for path in folder.glob("rank-*"))


@pytest.mark.parametrize(
    "spare_pages", [-2, 4], ids=["too small for the shards", "too small for case.json beside the shards"]
)
def test_a_disk_that_is_too_small_is_refused_and_the_job_goes_on_when_there_is_room(tmp_path, spare_pages):
    source, out = write_sample(tmp_path / "source", "1M"), tmp_path / "disk" / "out"
    out.parent.mkdir()
    probe = ("unshare", "-m", "mount", "-t", "tmpfs", "small", out.parent)
    if not shutil.which("unshare") or subprocess.run(probe, capture_output=True).returncode:
        pytest.skip("may not mount a small file system of its own")
    assert_done(run_alone("reshard", source, tmp_path / "whole", "--target", "tp=2"))
    pages = npages(tmp_path / "whole") + spare_pages
    prefix = ("unshare", "-m", "bash", "-c", SMALL_DISK, "bash", out.parent, pages)
    done = run_mpi(3, "reshard", source, out, "--target", "tp=2", "--progress", "off", prefix=prefix)
    shown = f"{done.stdout}\n{done.stderr}"
    assert done.returncode == 0, shown
    assert "exit 5, left: out.partial\n" in done.stdout, shown
    (line,) = error_lines(done.stderr)
    assert "are free" in line, line
    assert done.stdout.endswith("case.json\nrank-00000.safetensors\nrank-00001.safetensors\n"), shown


# ---- launchers


@pytest.mark.parametrize("arguments", [["reshard", UNEVEN, "out"], []], ids=["reshard", "sample"])
@pytest.mark.parametrize("nranks", [0, 3], ids=["alone", "under mpirun"])
def test_without_an_mpi_library_one_line_says_so(tmp_path, arguments, nranks):
    missing = {"MPI4PY_LIBMPI": str(tmp_path / "libmpi.so")}
    if nranks:
        done = run_mpi(nranks, *arguments, cwd=tmp_path, env=missing)
    else:
        done = run_alone(*arguments, cwd=tmp_path, **missing)
    assert_refused(done, 70, "MPI library")
    assert done.stderr.strip().count("\n") == 0, done.stderr
    assert list(tmp_path.iterdir()) == []


NO_MPI_NEEDED = [["--help"], ["reshard", "--help"], ["plan", UNEVEN], ["inspect", UNEVEN], ["--version"]]


def test_what_needs_no_mpi_runs_without_one(tmp_path):
    for arguments in NO_MPI_NEEDED:
        assert assert_done(run_alone(*arguments, MPI4PY_LIBMPI=str(tmp_path / "libmpi.so")))


def test_help_and_usage_errors_are_said_once(mpi):
    done = run_mpi(4, "--help", mpi=mpi)
    assert assert_done(done).count("usage: python -m reshard_mpi") == 1
    done = run_mpi(4, "reshard", "--help", mpi=mpi, env={"MPI4PY_LIBMPI": "/nothing/libmpi.so"})
    assert assert_done(done).count("usage: python -m reshard_mpi") == 1
    for arguments in (["reshard"], ["destroy", "all"], ["reshard", UNEVEN, "out", "--verify", "hardly"]):
        done = run_mpi(4, *arguments, mpi=mpi)
        assert_refused(done, 2, "reshard_mpi")
        assert "usage:" not in done.stdout


TOLD_LATE = [
    # why, exit code, arguments, environment
    ("usage", 2, ["reshard", UNEVEN, "out", "--quickly"], {}),
    ("input", 3, ["reshard", REJECTS / "overlap", "out"], {}),
    ("no MPI", 70, ["reshard", UNEVEN, "out"], {"MPI4PY_LIBMPI": "/nothing/libmpi.so"}),
]


@pytest.mark.parametrize(("why", "code", "arguments", "env"), TOLD_LATE, ids=[row[0] for row in TOLD_LATE])
def test_rank_0_has_the_time_to_say_why(tmp_path, mpi, why, code, arguments, env):
    """The first rank to leave with an error has the launcher end the others."""
    program = f"{AT}\nat('reshard_mpi.__main__:tell', None, wait)\nmain()"
    done = run_python_mpi(3, "-c", program, *arguments, cwd=tmp_path, mpi=mpi, env=env)
    assert_refused(done, code)


ENDED_LATE = """
import os, signal
from reshard_mpi.__main__ import main
class Last:
    def __del__(self, kill=os.kill, pid=os.getpid(), number=signal.SIGTERM):
        kill(pid, number)
last = Last()
main()
"""


@pytest.mark.parametrize(("code", "arguments"), [(2, ["verify"]), (5, ["inspect", "nothing"])], ids=["usage", "files"])
def test_a_signal_to_a_rank_that_leaves_is_not_its_exit_code(code, arguments):
    """While Python ends it has no handlers any more; srun ends all ranks as soon as one has left with an error."""
    done = subprocess.run([PYTHON, "-c", ENDED_LATE, *map(str, arguments)], env=job_environ(PYTHON, {}), timeout=60)
    assert done.returncode == code


SINGLETONS = [
    # launcher, variables of process n
    ("torchrun", lambda n: {"TORCHELASTIC_RUN_ID": "none", "RANK": n, "LOCAL_RANK": n, "WORLD_SIZE": 3}),
    ("srun", lambda n: {"SLURM_PROCID": n, "SLURM_STEP_NUM_TASKS": 3, "SLURM_NTASKS": 3, "SLURM_JOB_ID": 7}),
]


@pytest.mark.parametrize("command", ["reshard", "verify", "sample", "plan"])
@pytest.mark.parametrize(("launcher", "variables"), SINGLETONS, ids=[name for name, _ in SINGLETONS])
def test_copies_started_by_a_launcher_that_isn_t_mpi_s_are_refused_once(tmp_path, launcher, variables, command):
    arguments = {"reshard": [UNEVEN, "out"], "verify": [UNEVEN], "sample": ["out"], "plan": [UNEVEN]}[command]
    copies = [
        subprocess.Popen(
            [PYTHON, "-m", "reshard_mpi", command, *map(str, arguments)],
            cwd=tmp_path,
            env=job_environ(PYTHON, {name: str(value) for name, value in variables(n).items()}),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for n in range(3)
    ]
    ends = [copy.communicate(timeout=60) for copy in copies]
    shown = json.dumps(ends)
    assert [copy.returncode for copy in copies] == [2, 2, 2], shown
    assert [len(error_lines(stderr)) for _, stderr in ends] == [1, 0, 0], shown
    assert launcher in ends[0][1] and "3" in ends[0][1], shown
    assert "".join(stdout for stdout, _ in ends) == ""
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("where", ["reshard_mpi.run.lead:Lead.begin", "reshard_mpi.run.job:_create_files"])
def test_a_shard_that_is_removed_once_it_was_planned_for_ends_the_job_and_goes_on_when_it_is_back(tmp_path, where):
    source = copy_of(UNEVEN, tmp_path / "source")
    shard = source / "rank-00001.safetensors"
    program = f"{AT}\nat({where!r}, 0, lambda: os.rename({str(shard)!r}, {str(tmp_path / 'away')!r}))\nmain()"
    arguments = ("reshard", source, tmp_path / "out", "--progress", "off")
    done = run_python_mpi(3, "-c", program, *arguments, timeout=WITHIN_S)
    assert_refused(done, 5, str(shard), "No such file", out=tmp_path / "out")
    shutil.move(tmp_path / "away", shard)
    assert_done(run_mpi(2, *arguments))
