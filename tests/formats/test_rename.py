"""--rename and --rename-file: OUT is what it would be if the source had been saved with the new names."""

import json
import re
import shutil

import pytest

from tests.formats.rewritten import rewritten
from tests.jobs.outcome import AT, CASES, assert_done, assert_refused, run_alone, write_sample
from tests.mpirun import run_mpi, run_python_mpi
from tests.reference.case import load
from tests.reference.generate import generate
from tests.reference.judge import judge, raw_tensors

CHAIN = ["--rename", r"^(.*)layers?\.(\d+)\.=>\1blocks.\2.", "--rename", r"weight$ => kernel"]


def chain(fqn: str) -> str:
    return re.sub(r"weight$", "kernel", re.sub(r"^(.*)layers?\.(\d+)\.", r"\1blocks.\2.", fqn))


@pytest.mark.parametrize("case", sorted(path.name for path in CASES.iterdir()))
def test_a_renamed_case_is_that_of_a_source_with_these_names(case, tmp_path):
    source = rewritten(CASES / case, tmp_path / "renamed", chain)
    done = run_mpi(2, "reshard", CASES / case, tmp_path / "out", "--target", "single", "--verify", "full", *CHAIN)
    assert_done(done)
    judge(source, {"world_size": 1}, tmp_path / "out")


@pytest.mark.parametrize("seed", range(6))
def test_a_generated_case_is_renamed_whatever_it_is_like(seed, tmp_path):
    generate(f"rename {seed}", tmp_path / "source", sub_byte=0)
    source = rewritten(tmp_path / "source", tmp_path / "renamed", lambda fqn: f"new.{fqn}")
    done = run_mpi(
        seed % 3 + 1,
        *("reshard", tmp_path / "source", tmp_path / "out", "--target", "dp=2", "--rename", "^=>new."),
        *("--verify", ("source", "full", "none")[seed // 2]),
    )
    assert_done(done)
    if seed // 2 < 2:
        judge(source, {"dp": 2}, tmp_path / "out")
    else:  # no digests to be judged
        assert raw_tensors(load(tmp_path / "out")) == raw_tensors(source)


def test_a_layout_that_was_read_goes_with_its_tensors(tmp_path):
    """tp is gone from `single`; only topology.layout knows what it did."""
    sample = write_sample(tmp_path / "sample", "200K")
    single, renamed = tmp_path / "single", tmp_path / "renamed"
    assert_done(run_alone("reshard", sample, single, "--target", "single"))
    assert_done(run_alone("reshard", single, renamed, "--target", "tp=2,pp=2", "--rename", "^=>model."))
    judge(rewritten(single, tmp_path / "rewritten", lambda fqn: f"model.{fqn}"), {"pp": 2, "tp": 2}, renamed)
    assert_done(run_alone("reshard", renamed, tmp_path / "back", "--rename", r"^model\.=>"))
    assert raw_tensors(load(tmp_path / "back")) == raw_tensors(load(single))


def test_rules_in_a_file_and_on_the_command_line_work_in_their_order(tmp_path):
    sample = write_sample(tmp_path / "sample", "200K", tp=1, pp=1)
    rules = tmp_path / "rules"
    rules.write_text("# first\n\nweight$ => w\n  ^ => a.\n")
    report = tmp_path / "report.json"
    command = ("--rename", "weight=>weight", "--rename-file", rules, "--rename", r"^a\.=>b.", "--report", report)
    done = run_alone("reshard", sample, tmp_path / "out", *command)
    stdout = assert_done(done)
    names = {f["fqn"] for f in json.loads((tmp_path / "out" / "case.json").read_text())["fragments"]}
    old = {f["fqn"] for f in json.loads((sample / "case.json").read_text())["fragments"]}
    assert names == {f"b.{re.sub('weight$', 'w', name)}" for name in old}
    assert "--rename: 'weight=>weight' changes no name" in done.stderr
    assert f"changed: {len(old)} tensors renamed" in stdout
    told = json.loads(report.read_text())["changes"]
    assert {(one["from"], one["to"]) for one in told["renamed"]} == {
        (name, f"b.{re.sub('weight$', 'w', name)}") for name in old
    }
    planned = run_alone("plan", sample, *command[:-2])
    assert f"changed: {len(old)} tensors renamed" in assert_done(planned)
    assert "changes no name" in planned.stderr
    planned = run_alone("plan", sample, "--json", *command[:-2])
    assert json.loads(assert_done(planned))["changes"] == told


def test_what_is_left_out_is_told_by_its_new_name(tmp_path):
    sample = write_sample(tmp_path / "sample", "200K", tp=1, pp=1)
    stdout = assert_done(
        run_alone(
            *("reshard", sample, tmp_path / "out", "--rename", "^=>m.", "--exclude", "m.*norm*"),
            *("--report", tmp_path / "report"),
        )
    )
    dropped = json.loads((tmp_path / "report").read_text())["changes"]["dropped"]
    assert dropped and all(one["fqn"].startswith("m.") and "norm" in one["fqn"] for one in dropped)
    assert f"{len(dropped)} tensors dropped" in stdout


@pytest.mark.parametrize(
    "why, rule, exit_code, words",
    [
        ("two names become one", r"layers\.\d+=>layers.0", 3, ["layers.0.", "layers.1.", "would both be called"]),
        ("nothing is left of a name", ".*=>", 3, ["empty name"]),
        ("no arrow", "a", 2, ["--rename", "PATTERN=>REPLACEMENT"]),
        ("no regular expression", "(=>b", 2, ["--rename", "regular expression"]),
        ("a group that isn't there", r"a=>\2", 2, ["--rename", "group"]),
    ],
)
def test_a_rule_that_can_not_be_followed_is_refused(why, rule, exit_code, words, tmp_path):
    sample = write_sample(tmp_path / "sample", "1M")
    out = tmp_path / "out"
    assert_refused(run_mpi(2, "reshard", sample, out, "--rename", rule), exit_code, *words, out=out)
    assert not (tmp_path / "out.partial").exists()
    planned = run_alone("plan", sample, "--rename", rule)
    assert_refused(planned, exit_code, *words)
    rules = tmp_path / "rules"
    rules.write_text(f"# a comment\n{rule}\n")
    words = [word for word in words if word != "--rename" or exit_code == 3]
    where = [f"{rules}, line 2"] if exit_code == 2 else []
    assert_refused(run_mpi(2, "reshard", sample, out, "--rename-file", rules), exit_code, *words, *where, out=out)


def test_a_file_of_rules_that_is_not_there_is_refused(tmp_path):
    sample = write_sample(tmp_path / "sample", "200K")
    done = run_mpi(2, "reshard", sample, tmp_path / "out", "--rename-file", tmp_path / "gone")
    assert_refused(done, 5, str(tmp_path / "gone"), out=tmp_path / "out")


def test_names_and_ids_that_would_meet_are_refused(tmp_path):
    """An id that is no fqn may be what a renamed one becomes."""
    shutil.copytree(CASES / "adam-moments-one-fqn", tmp_path / "source")
    case = json.loads((tmp_path / "source" / "case.json").read_text())
    ids = sorted({f["logical_tensor_id"] for f in case["fragments"]} - {f["fqn"] for f in case["fragments"]})
    model = next(f for f in case["fragments"] if f["logical_tensor_id"] == f["fqn"])
    rule = f"^{re.escape(model['fqn'])}$=>{ids[0]}"
    assert_refused(run_alone("plan", tmp_path / "source", "--rename", rule), 3, "would both have the id", ids[0])


def test_another_rename_does_not_continue_a_job(tmp_path):
    sample = write_sample(tmp_path / "sample", "200K")
    broken = f"{AT}at('reshard_mpi.run.lead:Lead.commit', 0, fail)\nmain()"
    arguments = ("reshard", sample, tmp_path / "out", "--rename")
    assert run_python_mpi(1, "-c", broken, *arguments, "^=>a.").returncode == 70
    assert_refused(run_alone(*arguments, "^=>b."), 2, "out.partial", "--restart")
    assert_done(run_alone(*arguments, "^=>a."))
