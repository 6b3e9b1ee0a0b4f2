"""The commands from outside, with few starts: what they print, what they write, and their exit codes."""

import hashlib
import json
import os
import shutil
import subprocess
from pathlib import Path

import pytest

from tests.jobs.outcome import CASES, FIXTURES, PYTHON, REJECTS, assert_done, assert_refused, run_alone, write_sample
from tests.mpirun import job_environ, run_mpi, run_python_mpi
from tests.reference.shards import read_shard

UNEVEN = CASES / "tp3-uneven-to-tp2"
REFERENCE = CASES / "tp2-pp2-to-single"
REFERENCE_DIGEST = "58dda328598e2f7fe472621bfc54935aaa354d1a6ebcaf9562cd743fd575eb19"


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in sorted(folder.iterdir())}


def manifest(folder: Path) -> dict:
    return json.loads((folder / "case.json").read_text())


def fqns(folder: Path) -> set[str]:
    return {fragment["fqn"] for fragment in manifest(folder)["fragments"]}


# ---- the built-in sample


def test_without_arguments_the_sample_is_resharded_twice_alike(tmp_path, mpi):
    for _ in range(2):
        done = run_mpi(4, cwd=tmp_path, mpi=mpi)
        lines = assert_done(done).strip().splitlines()
        assert 1 < len(lines) <= 10
        assert any("mpirun -n 4 python -m reshard_mpi reshard" in line for line in lines)
        assert done.stderr == ""
        assert [path.name for path in tmp_path.iterdir()] == ["reshard-sample"]
        array = read_shard(tmp_path / "reshard-sample" / "rank-00000.safetensors").arrays["model.weight"]
        digest = manifest(tmp_path / "reshard-sample")["fragments"][0]["fragment_digest"]
        assert digest == f"sha256:{REFERENCE_DIGEST}"
        assert hashlib.sha256(array.raw).hexdigest() == REFERENCE_DIGEST


@pytest.mark.parametrize("nranks", [0, 2], ids=["alone", "under mpirun"])
def test_the_sample_replaces_nothing_that_is_something_else(tmp_path, nranks):
    def run():
        return run_mpi(nranks, cwd=tmp_path) if nranks else run_alone(cwd=tmp_path)

    there = tmp_path / "reshard-sample"
    there.mkdir()
    (there / "thesis.tex").write_text("precious")
    assert_refused(run(), 2, "reshard-sample")
    assert contents(there) == {"thesis.tex": b"precious"}
    shutil.rmtree(there)
    shutil.copytree(UNEVEN, there)  # a checkpoint, but not ours
    assert_refused(run(), 2, "reshard-sample")
    assert contents(there) == contents(UNEVEN)


# ---- what a start costs

NOTED = """
import atexit, os, sys
from reshard_mpi.__main__ import main
def note():
    with open(os.path.join(os.environ["NOTES"], os.environ["PMI_RANK"]), "w") as file:
        file.write("\\n".join(sys.modules))
atexit.register(note)
main()
"""
# Of rank 0 alone: each is paid for as many times as there are ranks on a node.
FOR_RANK_0 = (
    "msgspec",
    "json",
    "reshard_mpi.checkpoint.manifest",
    "reshard_mpi.layout.rules",
    "reshard_mpi.plan.planner",
)


@pytest.mark.parametrize("arguments", [(), ("reshard", UNEVEN, "out")], ids=["the sample", "reshard"])
def test_the_ranks_other_than_0_import_nothing_that_reads_manifests_or_plans(tmp_path, arguments):
    assert_done(run_python_mpi(4, "-c", NOTED, *arguments, cwd=tmp_path, env={"NOTES": str(tmp_path)}))
    noted = [set((tmp_path / str(rank)).read_text().splitlines()) for rank in range(4)]
    assert noted[0] >= set(FOR_RANK_0)
    for others in noted[1:]:
        assert "reshard_mpi.run.move" in others
        assert not others & {*FOR_RANK_0}
        assert {name for name in others if name.startswith("reshard_mpi.show.")} <= {"reshard_mpi.show.outcomes"}


def test_numpy_starts_no_threads():
    """OpenBLAS would start one a core, in every rank."""
    program = "import atexit, os; from reshard_mpi.__main__ import main\n"
    program += "atexit.register(lambda: print('threads:', len(os.listdir('/proc/self/task'))))\nmain()"
    environ = {name: value for name, value in os.environ.items() if name != "OPENBLAS_NUM_THREADS"}
    done = subprocess.run(
        [PYTHON, "-c", program, "inspect", UNEVEN], env=environ, capture_output=True, text=True, timeout=60, check=True
    )
    assert done.stdout.endswith("threads: 1\n")


# ---- reshard


def test_overwrite_replaces_a_case_and_nothing_is_left_of_it(tmp_path):
    out = Path(shutil.copytree(REFERENCE, tmp_path / "out"))
    (out / "notes.txt").touch()
    assert_refused(run_mpi(2, "reshard", UNEVEN, out, "--target", "single"), 2, "--overwrite")
    assert_done(run_mpi(2, "reshard", UNEVEN, out, "--target", "single", "--overwrite"))
    assert sorted(contents(out)) == ["case.json", "oracles.safetensors", "rank-00000.safetensors"]
    assert fqns(out) == fqns(UNEVEN)
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


def test_a_refused_job_leaves_what_overwrite_would_have_replaced(tmp_path):
    out = Path(shutil.copytree(REFERENCE, tmp_path / "out"))
    assert_refused(run_mpi(3, "reshard", REJECTS / "flipped-bit", out, "--overwrite"), 4)
    assert contents(out) == contents(REFERENCE)


def test_restart_takes_over_what_another_job_left(tmp_path):
    out = tmp_path / "out"
    assert_refused(run_mpi(2, "reshard", REJECTS / "flipped-bit", out), 4, out=out)
    (tmp_path / "out.partial" / "rank-00009.safetensors").touch()
    assert_refused(run_mpi(2, "reshard", UNEVEN, out), 2, "--restart", out=out)
    assert_done(run_mpi(2, "reshard", UNEVEN, out, "--restart"))
    assert not (tmp_path / "out.partial").exists()
    assert sorted(contents(out)) == [
        "case.json", "oracles.safetensors", "rank-00000.safetensors", "rank-00001.safetensors"
    ]  # fmt: skip


CHANGED_OPTIONS = [
    # why, options of the job that failed, of the one that follows, whether it goes on
    ("another target", ["--target", "single"], ["--target", "tp=2"], False),
    ("other tensors", ["--exclude", "step"], [], False),
    ("without digests", [], ["--verify", "none"], False),
    ("another budget and number of ranks", ["--memory", "1M"], ["--memory", "2M"], True),
    ("the default target by its name", [], ["--target", "tp=2"], True),
    ("a target by other names", ["--target", "dp=2,tp=2"], ["--target", "tp=2,dp_replicate=2"], True),
]


@pytest.mark.parametrize(
    ("why", "first", "second", "goes_on"), CHANGED_OPTIONS, ids=[row[0] for row in CHANGED_OPTIONS]
)
def test_a_job_goes_on_where_the_options_that_decide_bytes_are_the_same(tmp_path, why, first, second, goes_on):
    """The first one is stopped at its first round."""
    source, out = Path(shutil.copytree(UNEVEN, tmp_path / "source")), tmp_path / "out"
    stopping = (
        "import os, signal, sys\n"
        "from mpi4py import MPI\n"
        "from reshard_mpi.mpi.exchange import Exchanger\n"
        "from reshard_mpi.errors import Interrupted\n"
        "def stop(*_):\n    raise Interrupted('job', 'stopped')\n"
        "Exchanger.exchange = stop\n"
        "from reshard_mpi.__main__ import main\n"
        "main()\n"
    )
    assert_refused(run_python_mpi(2, "-c", stopping, "reshard", source, out, *first), 75, out=out)
    assert (tmp_path / "out.partial").is_dir()
    done = run_mpi(3, "reshard", source, out, *second)
    if goes_on:
        assert_done(done)
    else:
        assert_refused(done, 2, "out.partial", "--restart", out=out)


def test_the_report_says_what_was_done_and_the_plan_said_it_before(tmp_path):
    """Bytes of SOURCE that are needed are read once; those of OUT are written once."""
    source = write_sample(tmp_path / "source", "3M", dp=2)
    arguments = (source, "--target", "fsdp=3", "--memory", "500K")
    plan = json.loads(assert_done(run_alone("plan", *arguments, "--ranks", 4, "--json")))
    out, file = tmp_path / "out", tmp_path / "report.json"
    summary = assert_done(run_mpi(4, "reshard", source, out, *arguments[1:], "--report", file)).strip().splitlines()
    report = json.loads(file.read_text())
    assert len(summary) <= 10
    assert [report[name] for name in ("nranks", "nshards", "verify")] == [4, 3, "source"]
    assert (report["source"], report["out"]) == (str(source), str(out))
    assert sorted(report["source_topology"].split(",")) == ["dp=2", "pp=2", "tp=2"]
    assert report["target_topology"] == "fsdp=3"
    assert report["nrounds"] == plan["nrounds"] > 1
    stored = sum(len(a.raw) for path in out.glob("rank-*") for a in read_shard(path).arrays.values())
    assert report["phases"]["read"]["nbytes"] == report["phases"]["write"]["nbytes"] == stored
    for phase, planned in (("read", "read_nbytes"), ("exchange", "sent_nbytes"), ("write", "written_nbytes")):
        assert report["phases"][phase]["nbytes"] == plan[planned]
    assert len(report["ranks"]) == 4
    for rank, planned in zip(report["ranks"], plan["ranks"], strict=True):
        for name in ("read_nbytes", "sent_nbytes", "written_nbytes"):
            assert rank[name] == planned[name], f"rank {planned['rank']}, {name}"
        assert rank["peak_rss_nbytes"] > 1 << 20
    assert report["peak_rss_nbytes"] == max(rank["peak_rss_nbytes"] for rank in report["ranks"])
    # Half of what both dp ranks hold is not read.
    everything = sum(len(a.raw) for path in source.glob("rank-*") for a in read_shard(path).arrays.values())
    assert report["unread_replica_nbytes"] == everything - stored


def test_a_report_that_can_t_be_written_is_refused_before_anything_is(tmp_path):
    """Else the job fails, and OUT is there."""
    report = tmp_path / "no" / "such" / "report.json"
    assert_refused(run_mpi(2, "reshard", UNEVEN, tmp_path / "out", "--report", report), 5, out=tmp_path / "out")


FILTERS = [
    # why, options, fqns of what is left
    ("one pattern", ["--include", "w.*"], {"w.row", "w.col"}),
    ("several patterns", ["--include", "w.r*", "--include", "s[it]?p*"], {"w.row", "step"}),
    ("all but", ["--exclude", "w.*", "--exclude", "norm"], {"six", "step"}),
    ("both: what is excluded is not included", ["--include", "w.*", "--exclude", "*.col"], {"w.row"}),
]


@pytest.mark.parametrize(("why", "options", "left"), FILTERS, ids=[why for why, _, _ in FILTERS])
def test_filters_leave_the_tensors_that_match_and_their_oracles(tmp_path, why, options, left):
    out = tmp_path / "out"
    assert_done(run_mpi(2, "reshard", UNEVEN, out, *options, "--verify", "full"))
    assert fqns(out) == left
    ids = {f["logical_tensor_id"] for f in manifest(out)["fragments"]}
    assert {oracle["logical_tensor_id"] for oracle in manifest(out)["oracles"]} == ids
    assert set(manifest(out)["topology"]["layout"]) == ids


def test_underscores_in_flags_progress_in_plain_and_verify_none(tmp_path):
    """`--progress plain` writes nothing that a log can't hold; nothing goes to stdout but the summary."""
    source, out = write_sample(tmp_path / "with_underscore", "2M"), tmp_path / "out_put"
    options = ("--progress", "plain", "--verify=none", "--memory=96K", "--target=dp_replicate=2,dp_shard=2")
    done = run_mpi(3, "reshard", source, out, *options)
    assert str(out) in assert_done(done)
    assert "\r" not in done.stderr and "\x1b" not in done.stdout + done.stderr
    assert {f["fragment_digest"] for f in manifest(out)["fragments"] if 0 not in f["element_extent"]} == {None}
    assert manifest(out)["topology"]["source"] == {"dp": 2, "fsdp": 2}
    assert_refused(run_alone("reshard", source, out, "--dry_run"), 2, "--dry-run")
    # A source without digests: what can't be compared isn't, and that is said once.
    again = run_mpi(3, "reshard", out, tmp_path / "again")
    assert_done(again)
    assert again.stderr.count("reshard_mpi: warning:") == 1
    assert "no digest" in again.stderr
    assert_done(run_mpi(3, "compare", source, tmp_path / "again", "--progress", "off"))


def test_source_is_never_written_to(tmp_path):
    source = Path(shutil.copytree(UNEVEN, tmp_path / "source"))
    before = {path.name: (path.stat().st_mtime_ns, path.read_bytes()) for path in source.iterdir()}
    for path in source.iterdir():
        path.chmod(0o444)
    source.chmod(0o555)
    try:
        assert_done(run_mpi(2, "reshard", source, tmp_path / "out", "--verify", "full"))
    finally:
        source.chmod(0o755)
    assert {path.name: (path.stat().st_mtime_ns, path.read_bytes()) for path in source.iterdir()} == before


def test_relative_paths_and_a_parent_that_is_not_there_yet(tmp_path):
    shutil.copytree(UNEVEN, tmp_path / "source")
    assert_done(run_mpi(2, "reshard", "source/", "a/b/out/", cwd=tmp_path))
    assert_done(run_mpi(2, "compare", "source", "./a/b/out", cwd=tmp_path))
    assert sorted(path.name for path in (tmp_path / "a" / "b").iterdir()) == ["out"]


# ---- plan


def test_plan_says_in_text_what_goes_where(tmp_path):
    text = assert_done(run_alone("plan", UNEVEN, "--target", "tp=4", "--ranks", "2"))
    assert "tp=3" in text and "tp=4" in text and "2 ranks" in text
    for rank in range(4):
        assert f"rank-0000{rank}.safetensors" in text


def test_plan_under_mpirun_plans_for_its_ranks_and_prints_once(tmp_path, mpi):
    plan = json.loads(assert_done(run_mpi(3, "plan", UNEVEN, "--json", mpi=mpi)))
    assert (plan["nranks"], plan["refusals"]) == (3, [])
    assert sum(nbytes for giver, taker, nbytes in plan["traffic_nbytes"] if giver != taker) == plan["sent_nbytes"] > 0


def test_a_plan_for_very_many_ranks_is_as_large_as_its_tiles():
    """A matrix of all ranks would have 80 GB."""
    plan = json.loads(assert_done(run_alone("plan", UNEVEN, "--target", "tp=4", "--ranks", 100_000, "--json")))
    assert len(plan["ranks"]) == 100_000 and len(plan["traffic_nbytes"]) < 1000


def refuse_thrice(folder: Path) -> Path:
    """A hole, a replica that is missing, and a shard that is cut short."""
    case = Path(shutil.copytree(CASES / "tp2-pp2-layers-tied", folder))
    found = manifest(case)
    w = [f for f in found["fragments"] if f["fqn"] == "layers.0.mlp.weight"]
    norm = [f for f in found["fragments"] if f["fqn"] == "norm.weight"]
    found["fragments"] = [f for f in found["fragments"] if f not in (w[0], norm[0])]
    (case / "case.json").write_text(json.dumps(found, indent=2, sort_keys=True))
    return case


def test_plan_names_every_reason_to_refuse_at_once(tmp_path):
    case = refuse_thrice(tmp_path / "case")
    done = run_alone("plan", case, "--memory", "1K")
    assert_refused(done, 3)
    assert "layers.0.mlp.weight" in done.stdout
    assert "norm.weight" in done.stdout
    assert "--memory" in done.stdout
    assert "digest" in done.stdout
    as_json = run_alone("plan", case, "--memory", "1K", "--json")
    refusals = json.loads(as_json.stdout)["refusals"]
    assert {3, 4, 6} <= {refusal["exit_code"] for refusal in refusals}
    assert len(done.stdout.strip().splitlines()) >= len(refusals) >= 4
    assert as_json.returncode == 3


def test_plan_and_reshard_refuse_alike(tmp_path):
    reject = ("missing-middle-shard", "mixed-dtypes", "missing-file", "truncated-shard", "replica-count")
    for name in reject:
        planned = run_alone("plan", REJECTS / name)
        done = run_mpi(2, "reshard", REJECTS / name, tmp_path / "out")
        assert assert_refused(planned, done.returncode) == assert_refused(done, planned.returncode), name


# ---- inspect


def test_inspect_shows_a_checkpoint_and_a_tensor_as_text_and_as_json(tmp_path):
    text = assert_done(run_alone("inspect", UNEVEN))
    facts = json.loads(assert_done(run_alone("inspect", UNEVEN, "--json")))
    for fqn in fqns(UNEVEN):
        assert fqn in text
    assert facts["source_topology"] == {"tp": 3}
    assert facts["nfragments"] == len(manifest(UNEVEN)["fragments"])
    assert {tensor["fqn"] for tensor in facts["tensors"]} == fqns(UNEVEN)
    tiles = json.loads(assert_done(run_alone("inspect", UNEVEN, "w.col", "--json")))
    expected = [f for f in manifest(UNEVEN)["fragments"] if f["fqn"] == "w.col"]
    assert [(t["rank"], t["offset"], t["extent"]) for t in tiles["tiles"]] == [
        (dict(f["topology_coordinates"])["rank"], f["element_offset"], f["element_extent"]) for f in expected
    ]
    assert assert_done(run_alone("inspect", UNEVEN, "w.col")).count("rank-0000") == len(expected)
    assert_refused(run_alone("inspect", UNEVEN, "w.colt"), 2, "w.colt")


def test_inspect_shows_padding_ties_and_replicas():
    assert "replica" in assert_done(run_alone("inspect", UNEVEN, "norm"))
    assert "tied" in assert_done(run_alone("inspect", CASES / "tp2-pp2-layers-tied"))
    assert json.loads(assert_done(run_alone("inspect", CASES / "vocab-padding", "--json")))["npadded"] > 0


def test_a_reader_that_has_seen_enough_is_no_bug(tmp_path):
    """As in `inspect SOURCE | head -1`."""
    read, write = os.pipe()
    os.close(read)
    with open(write, "w") as closed:
        command = [PYTHON, "-m", "reshard_mpi", "inspect", UNEVEN]
        done = subprocess.run(command, stdout=closed, stderr=subprocess.PIPE, text=True, timeout=60)
    assert "Traceback" not in done.stderr
    assert done.returncode != 70


STREAMS = [
    # what is wrong, command, as a shell redirects it, exit code
    ("no stdout", ("inspect", UNEVEN), ">&-", 0),
    ("no stderr, and there is a warning", ("verify", FIXTURES / "formats" / "dcp"), "2>&-", 0),
    ("a full stderr, and there is a warning", ("verify", FIXTURES / "formats" / "dcp"), "2>/dev/full", 0),
    ("a full stderr, and no verdict", ("compare", UNEVEN, "nowhere"), "2>/dev/full", 5),
    ("a full stderr, and a mistake", ("compare", UNEVEN), "2>/dev/full", 2),
    ("a full stdout", ("compare", UNEVEN, UNEVEN), ">/dev/full", 5),
]


def run_redirected(redirections: str, *command: object) -> subprocess.CompletedProcess[str]:
    shell = ("bash", "-c", f'"$@" {redirections}', "bash")
    arguments = [*shell, PYTHON, "-m", "reshard_mpi", *map(str, command)]
    return subprocess.run(arguments, env=job_environ(PYTHON, {}), capture_output=True, text=True, timeout=60)


@pytest.mark.parametrize(("why", "command", "redirections", "code"), STREAMS, ids=[why for why, *_ in STREAMS])
def test_what_can_not_be_said_changes_no_verdict(why, command, redirections, code):
    """1 would mean: different."""
    done = run_redirected(redirections, *command)
    assert done.returncode == code, done.stderr
    assert "Traceback" not in done.stderr
    assert ("error: standard output: can't write to: No space left on device" in done.stderr) == (
        why == "a full stdout"
    )


@pytest.mark.parametrize("style", ["plain", "bar"])
def test_a_job_goes_on_without_anybody_to_tell(tmp_path, style):
    """Where they are closed, files that it opens would get their numbers, and what is printed would go there."""
    for number, redirections in enumerate(("<&- >&- 2>&-", "2>/dev/full")):
        out = tmp_path / f"out-{number}"
        assert run_redirected(redirections, "reshard", UNEVEN, out, "--progress", style).returncode == 0
        assert "equal: " in assert_done(run_alone("compare", UNEVEN, out))


def test_a_summary_that_can_not_be_said_says_that_out_is_whole(tmp_path):
    out, report = tmp_path / "out", tmp_path / "report.json"
    done = run_redirected(">/dev/full", "reshard", UNEVEN, out, "--report", report)
    assert_refused(done, 5, "standard output", "No space left", f"{out} is whole")
    assert json.loads(report.read_text())["nshards"] == len(list(out.glob("rank-*")))


# ---- verify and compare


def flip(path: Path, position: int) -> None:
    content = bytearray(path.read_bytes())
    content[position] ^= 1
    path.write_bytes(content)


def test_verify_names_every_planted_fault_on_stdout(tmp_path):
    """A digest in two shards, one in the oracles, the manifest's own, and all of them in one run."""
    case = Path(shutil.copytree(UNEVEN, tmp_path / "case"))
    flip(case / "rank-00000.safetensors", -1)
    flip(case / "rank-00002.safetensors", -1)
    flip(case / "oracles.safetensors", -1)
    found = manifest(case)
    found["expected_manifest_digest"] = "sha256:" + "0" * 64
    (case / "case.json").write_text(json.dumps(found, indent=2, sort_keys=True))
    done = run_mpi(3, "verify", case)
    assert_refused(done, 4)
    for name in ("rank-00000.safetensors", "rank-00002.safetensors", "oracles.safetensors", "manifest"):
        assert name in done.stdout, f"{name} not in {done.stdout}"
    assert "rank-00001.safetensors" not in done.stdout
    as_json = run_mpi(2, "verify", case, "--json")
    assert len(json.loads(as_json.stdout)["faults"]) >= 4
    assert as_json.returncode == 4


def test_verify_goes_on_where_files_and_boxes_are_missing(tmp_path):
    case = refuse_thrice(tmp_path / "case")
    os.remove(case / "rank-00003.safetensors")
    done = run_mpi(2, "verify", case)
    assert_refused(done, 3)
    for name in ("layers.0.mlp.weight", "norm.weight", "rank-00003.safetensors"):
        assert name in done.stdout, f"{name} not in {done.stdout}"


def test_compare_says_which_tensor_where_first_and_how_many(tmp_path, mpi):
    case = Path(shutil.copytree(UNEVEN, tmp_path / "case"))
    (w,) = [
        f for f in manifest(case)["fragments"] if f["fqn"] == "w.row" and f["payload_file"].startswith("rank-00001")
    ]
    shard = read_shard(case / w["payload_file"])
    begin = shard.data_start + shard.data_offsets[w["payload_key"]][0]
    itemsize = len(shard.arrays[w["payload_key"]].raw) // (w["element_extent"][0] * w["element_extent"][1])
    for row, column in ((1, 1), (3, 0)):
        flip(case / w["payload_file"], begin + (row * w["element_extent"][1] + column) * itemsize)
    first = [w["element_offset"][0] + 1, w["element_offset"][1] + 1]
    done = run_mpi(3, "compare", UNEVEN, case, mpi=mpi)
    lines = assert_done(done, 1).strip().splitlines()
    (line,) = [line for line in lines if "w.row" in line]
    assert str(first) in line and "2 elements" in line
    assert len(lines) == 2 and lines[-1].startswith("different")
    found = json.loads(assert_done(run_mpi(2, "compare", case, UNEVEN, "--json", mpi=mpi), 1))
    assert not found["equal"]
    (difference,) = found["differences"]
    assert (difference["first_index"], difference["count"]) == (first, 2)


# ---- sample


def test_sample_writes_the_same_bytes_again_and_the_same_tensors_in_any_topology(tmp_path):
    one, two = (write_sample(tmp_path / name, "2M") for name in ("one", "two"))
    assert contents(one) == contents(two)
    other = write_sample(tmp_path / "other", "2M", tp=1, pp=3, fsdp=2, dtype="bfloat16")
    assert_done(run_mpi(2, "compare", one, other))
    assert_done(run_mpi(2, "verify", other))
    assert_refused(run_alone("sample", one, "--size", "2M"), 2, "--overwrite")
    assert_done(run_alone("sample", one, "--size", "1M", "--seed", 1, "--overwrite"))
    assert_done(run_mpi(2, "compare", one, two), 1)


def test_sample_under_mpirun_is_written_once(tmp_path):
    assert assert_done(run_mpi(3, "sample", tmp_path / "many", "--size", "1M", "--tp", 2)).count("tensors") == 1
    assert_done(run_alone("sample", tmp_path / "one", "--size", "1M", "--tp", 2))
    assert contents(tmp_path / "many") == contents(tmp_path / "one")
