"""OUT whole or not at all: what stands in the way, what is continued, and what is left."""

import itertools
import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from reshard_mpi.checkpoint.manifest import CASE_FILE
from reshard_mpi.errors import StorageError, UsageError
from reshard_mpi.run import commit
from reshard_mpi.run.commit import JOURNAL, LOCK, PartialFolder, check_out, check_paths, finish_commit, partial_of
from reshard_mpi.run.journal import Durable

MINE, OTHER = {"target": "tp=2"}, {"target": "tp=4"}


def begin(out: Path, identity=MINE, restart: bool = False) -> PartialFolder:
    return PartialFolder(out, identity, restart)


def left_behind(out: Path, identity=MINE, failed: bool = False) -> None:
    """The folder of a job that died after it had written something."""
    partial = begin(out, identity)
    (partial.path / "rank-00000.safetensors").write_bytes(b"half")
    (partial.path / "sub").mkdir()
    (partial.path / "sub" / "file").write_bytes(b"x")
    if failed:
        partial.fail("array 'w' has another digest")
    partial.close()  # as the kernel does when a process ends, however it ends


def a_case(folder: Path, content: str = "{}") -> Path:
    folder.mkdir()
    (folder / CASE_FILE).write_text(content)
    (folder / "rank-00000.safetensors").write_bytes(b"old")
    return folder


def finish(partial: PartialFolder) -> None:
    (partial.path / CASE_FILE).write_text('{"new": 1}')
    partial.commit()


@pytest.fixture
def out(tmp_path):
    return tmp_path / "out"


# Before anything is written


def test_a_path_that_is_free_may_be_written(out):
    check_out(out, overwrite=False)
    check_out(out, overwrite=True)


def test_out_that_is_there_is_refused_and_with_overwrite_only_a_case_is_replaced(tmp_path):
    case, foreign, file, dangling = (tmp_path / name for name in ("case", "foreign", "file", "dangling"))
    a_case(case)
    foreign.mkdir()
    (foreign / "thesis.txt").write_text("years of work")
    file.write_text("x")
    dangling.symlink_to(tmp_path / "gone")
    for there in (case, foreign, file, dangling):
        with pytest.raises(UsageError, match="exists"):
            check_out(there, overwrite=False)
    check_out(case, overwrite=True)
    for there in (foreign, file, dangling):
        with pytest.raises(UsageError, match="not replaced"):
            check_out(there, overwrite=True)


@pytest.mark.parametrize("name", ["out", "out.partial"])
@pytest.mark.parametrize("overwrite", [False, True])
@pytest.mark.parametrize("to", ["case", "elsewhere", "gone"])
def test_out_or_its_partial_that_is_a_link_is_refused_wherever_it_leads(name, overwrite, to, out):
    """Renames would put the link aside, not the folder that it leads to."""
    source = a_case(out.with_name("source"))
    a_case(out.with_name("case"))
    out.with_name("elsewhere").mkdir()
    out.with_name(name).symlink_to(to)
    with pytest.raises(UsageError, match=f"{name}: is a link"):
        check_paths(source, out, overwrite)


@pytest.mark.parametrize(
    "why, source, out",
    [
        ("the same", "a", "a"),
        ("the same, by a detour", "a", "a/b/.."),
        ("inside", "a", "a/b/c"),
        ("inside, by a link", "a", "link/c"),
        ("around", "a/b", "a"),
        ("around, by a link", "link/b", "a"),
        ("where it is prepared", "c.partial", "c"),
        ("inside of where it is prepared", "c.partial/b", "c"),
    ],
)
@pytest.mark.parametrize("overwrite", [False, True])
def test_out_must_be_apart_from_the_source(why, source, out, overwrite, tmp_path):
    a_case(tmp_path / "a")
    (tmp_path / "a" / "b").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "a")
    (tmp_path / "c.partial" / "b").mkdir(parents=True)
    with pytest.raises(UsageError, match="equal to, inside or around"):
        check_paths(tmp_path / source, tmp_path / out, overwrite)


def test_a_name_that_begins_alike_is_another_folder(tmp_path):
    a_case(tmp_path / "a")
    check_paths(tmp_path / "a", tmp_path / "ab", overwrite=False)


@pytest.mark.parametrize(
    "out, partial",
    [
        ("out", "out.partial"),
        ("a/out", "a/out.partial"),
        ("a/out/", "a/out.partial"),
        ("out.d", "out.d.partial"),
        (".", "../here.partial"),
        ("sub/..", "../here.partial"),
        ("..", "../../{}.partial"),
    ],
)
def test_what_becomes_of_out_is_prepared_beside_it(out, partial, tmp_path, monkeypatch):
    (tmp_path / "here" / "sub").mkdir(parents=True)
    monkeypatch.chdir(tmp_path / "here")
    expected = os.path.abspath(partial.format(tmp_path.name))
    assert os.path.abspath(partial_of(Path(out))) == expected


def test_a_job_that_is_to_replace_the_working_folder_has_its_partial_beside_it(tmp_path, monkeypatch):
    a_case(tmp_path / "here")
    monkeypatch.chdir(tmp_path / "here")
    check_paths(a_case(tmp_path / "source"), Path("."), overwrite=True)
    assert begin(Path(".")).path == tmp_path / "here.partial"


@pytest.mark.parametrize("out", [".", "sub/.."])
def test_the_working_folder_may_be_replaced_if_it_is_a_case(out, tmp_path, monkeypatch):
    a_case(tmp_path / "here")
    (tmp_path / "here" / "sub").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    finish(begin(Path(out)))
    assert [entry.name for entry in (tmp_path / "here").iterdir()] == [CASE_FILE]


# The partial folder


def test_a_fresh_job_has_a_folder_with_journal_and_lock_also_in_folders_yet_to_be_made(tmp_path):
    partial = begin(tmp_path / "new" / "deep" / "out")
    assert partial.path == tmp_path / "new" / "deep" / "out.partial"
    assert sorted(entry.name for entry in partial.path.iterdir()) == sorted([JOURNAL, LOCK])
    assert json.loads((partial.path / JOURNAL).read_text())["says"]["identity"] == MINE
    assert f"pid {os.getpid()}" in (partial.path / LOCK).read_text()
    assert not (tmp_path / "new" / "deep" / "out").exists()


def test_a_commit_leaves_the_folder_and_nothing_beside_it(out):
    finish(begin(out))
    assert [entry.name for entry in out.iterdir()] == [CASE_FILE]
    assert [entry.name for entry in out.parent.iterdir()] == ["out"]


def test_what_the_same_job_left_is_taken_over(out):
    left_behind(out)
    partial = begin(out)
    finish(partial)
    assert sorted(entry.name for entry in out.iterdir()) == [CASE_FILE]


WRITTEN = Durable(written={"w": [(0, 4)]}, verified={"rank-00000.safetensors": ["w"]})


def test_what_is_durable_is_kept_for_the_same_job_and_nothing_else_is(out):
    partial = begin(out)
    (partial.path / "rank-00000.safetensors").write_bytes(b"half")
    (partial.path / CASE_FILE).write_text("{}")
    partial.note(WRITTEN)
    partial.close()
    partial = PartialFolder(out, MINE, restart=False, files=["rank-00000.safetensors"])
    assert partial.durable == WRITTEN
    assert sorted(entry.name for entry in partial.path.iterdir()) == sorted([JOURNAL, LOCK, "rank-00000.safetensors"])
    partial.note(Durable(written={"w": [(4, 9)]}))
    partial.close()
    assert PartialFolder(out, MINE, restart=False).durable.written == {"w": [(0, 4), (4, 9)]}


def test_restart_keeps_nothing(out):
    partial = begin(out)
    (partial.path / "rank-00000.safetensors").write_bytes(b"half")
    partial.note(WRITTEN)
    partial.close()
    partial = PartialFolder(out, MINE, restart=True, files=["rank-00000.safetensors"])
    assert partial.durable == Durable()
    assert sorted(entry.name for entry in partial.path.iterdir()) == sorted([JOURNAL, LOCK])


def test_the_order_of_options_makes_no_other_job(out):
    left_behind(out, {"a": 1, "b": [2]})
    begin(out, {"b": [2], "a": 1})


def test_what_another_job_left_is_refused_until_restart(out):
    left_behind(out, OTHER)
    with pytest.raises(UsageError, match="by a job with another target; --restart"):
        begin(out)
    assert (out.with_name("out.partial") / "rank-00000.safetensors").read_bytes() == b"half"


def test_restart_begins_anew_where_another_job_left_something(out):
    left_behind(out, OTHER)
    finish(begin(out, restart=True))
    assert [entry.name for entry in out.iterdir()] == [CASE_FILE]


def test_after_a_refusal_the_same_process_may_restart(out):
    left_behind(out, OTHER)
    with pytest.raises(UsageError, match="--restart"):
        begin(out)
    begin(out, restart=True)


def test_a_digest_that_did_not_hold_can_not_be_continued_but_begun_anew(out):
    left_behind(out, failed=True)
    check = subprocess.run([sys.executable, "-B", "-c", CLAIM, str(out)], capture_output=True, text=True, timeout=60)
    assert "can't be continued; --restart" in check.stdout
    begin(out, restart=True)


CLAIM = """
import sys
from pathlib import Path
from reshard_mpi.run.commit import PartialFolder
from reshard_mpi.errors import UsageError
try:
    PartialFolder(Path(sys.argv[1]), {"target": "tp=2"}, restart="restart" in sys.argv)
except UsageError as error:
    print(error)
"""


@pytest.mark.parametrize("options", [[], ["restart"]], ids=["again", "with --restart"])
def test_a_job_under_way_is_left_alone_by_another_process_and_named(options, out):
    partial = begin(out)
    (partial.path / "rank-00000.safetensors").write_bytes(b"half")
    other = subprocess.run(
        [sys.executable, "-B", "-c", CLAIM, str(out), *options], capture_output=True, text=True, timeout=60
    )
    assert "a job is writing it (host " in other.stdout and f"pid {os.getpid()}" in other.stdout
    assert (partial.path / "rank-00000.safetensors").read_bytes() == b"half"


def test_a_job_that_was_killed_leaves_no_lock(out):
    subprocess.run([sys.executable, "-B", "-c", CLAIM + "\nimport os; os.kill(os.getpid(), 9)", str(out)], timeout=60)
    assert out.with_name("out.partial").is_dir()
    begin(out)


@pytest.mark.parametrize(
    "why, files, is_ours",
    [
        ("nothing in it: killed before the lock", [], True),
        ("a lock alone: killed before the journal", [LOCK], True),
        ("somebody's files", ["thesis.txt"], False),
        ("somebody's files and a lock", [LOCK, "thesis.txt"], False),
        ("a checkpoint", [CASE_FILE, "rank-00000.safetensors"], False),
        ("a lock and half a journal: killed while it was written", [LOCK, f"{JOURNAL}.new"], True),
    ],
)
@pytest.mark.parametrize("restart", [False, True], ids=["again", "with --restart"])
def test_a_folder_that_is_not_of_a_job_of_ours_is_never_touched(why, files, is_ours, restart, out):
    partial = out.with_name("out.partial")
    partial.mkdir()
    for name in files:
        (partial / name).write_text("x")
    if is_ours:
        begin(out, restart=restart)
        return
    with pytest.raises(UsageError, match="not of a job of ours"):
        begin(out, restart=restart)
    assert {entry.name for entry in partial.iterdir()} >= set(files)
    assert all((partial / name).read_text() == "x" for name in files)


@pytest.mark.parametrize("kind", ["file", "link to nowhere"])
def test_what_is_no_folder_is_in_the_way(kind, out):
    partial = out.with_name("out.partial")
    if kind == "file":
        partial.write_text("x")
    else:
        partial.symlink_to("gone")
    with pytest.raises(UsageError, match="in the way|is a link"):
        begin(out, restart=True)


@pytest.mark.parametrize("journal", ["", "{", "[]", "5", "{}", '{"job": 1}', "\xff"])
def test_a_journal_that_makes_no_sense_is_refused_until_restart(journal, out):
    left_behind(out)
    (out.with_name("out.partial") / JOURNAL).write_bytes(journal.encode("latin-1"))
    with pytest.raises(UsageError, match="--restart"):
        begin(out)


def test_a_job_that_let_go_may_be_continued_and_letting_go_twice_does_no_harm(out):
    partial = begin(out)
    partial.close()
    partial.close()
    finish(begin(out))
    assert [entry.name for entry in out.iterdir()] == [CASE_FILE]


def test_links_in_what_was_left_are_removed_and_not_followed(out, tmp_path):
    (tmp_path / "precious").mkdir()
    (tmp_path / "precious" / "file").write_text("x")
    left_behind(out)
    (out.with_name("out.partial") / "link").symlink_to(tmp_path / "precious")
    begin(out)
    assert (tmp_path / "precious" / "file").read_text() == "x"


def test_a_folder_that_can_not_be_made_is_a_storage_error(tmp_path):
    (tmp_path / "file").write_text("x")
    with pytest.raises(StorageError, match="can't write to"):
        begin(tmp_path / "file" / "out")


# Space and the end


def test_space_that_is_not_there_is_a_storage_error_with_both_numbers(out, monkeypatch):
    partial = begin(out)
    free = os.statvfs(partial.path)
    partial.check_space(0)
    with pytest.raises(StorageError, match=f"needs {1 << 60} bytes, .* are free"):
        partial.check_space(1 << 60)
    monkeypatch.setattr(os, "statvfs", lambda _: free)
    (partial.path / "rank-00000.safetensors").write_bytes(bytes(1 << 20))  # there already, so it needs no room
    room = free.f_bavail * free.f_frsize + sum(entry.stat().st_blocks * 512 for entry in partial.path.iterdir())
    assert room >= free.f_bavail * free.f_frsize + (1 << 20)
    partial.check_space(room)
    with pytest.raises(StorageError):
        partial.check_space(room + 1)


@pytest.mark.parametrize("can_exchange", [True, False], ids=["in one step", "on a file system that can't exchange"])
def test_a_case_that_is_replaced_is_gone_afterwards_and_only_then(can_exchange, out, monkeypatch):
    if not can_exchange:
        monkeypatch.setattr(commit, "_RENAME_EXCHANGE", 1 << 20)
    a_case(out)
    partial = begin(out)
    assert (out / "rank-00000.safetensors").read_bytes() == b"old"
    finish(partial)
    assert [entry.name for entry in out.iterdir()] == [CASE_FILE]
    assert json.loads((out / CASE_FILE).read_text()) == {"new": 1}
    assert [entry.name for entry in out.parent.iterdir()] == ["out"]


def test_a_rename_that_fails_is_a_storage_error_and_leaves_what_was_written(out, monkeypatch):
    partial = begin(out)

    def fails(*_):
        raise OSError(5, "Input/output error")

    monkeypatch.setattr(os, "rename", fails)
    with pytest.raises(StorageError, match="put the finished folder at"):
        finish(partial)
    assert not out.exists()
    assert (partial.path / CASE_FILE).exists()


def test_an_out_that_can_not_be_replaced_is_there_as_it_was(out, monkeypatch):
    """On a file system that can't exchange two folders: the old one has been put aside already."""
    monkeypatch.setattr(commit, "_RENAME_EXCHANGE", 1 << 20)
    a_case(out)
    partial = begin(out)
    rename = os.rename

    def fails(old, new):
        if old == partial.path:
            raise OSError(5, "Input/output error")
        rename(old, new)

    monkeypatch.setattr(os, "rename", fails)
    with pytest.raises(StorageError, match="put the finished folder at"):
        finish(partial)
    assert (out / "rank-00000.safetensors").read_bytes() == b"old"
    assert {entry.name for entry in out.parent.iterdir()} == {"out", "out.partial"}


def test_a_case_that_is_replaced_and_can_not_be_removed_is_named(out, monkeypatch, capsys):
    a_case(out)
    partial = begin(out)
    monkeypatch.setattr(os, "rmdir", refused)
    finish(partial)
    assert json.loads((out / CASE_FILE).read_text()) == {"new": 1}
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"reshard_mpi: warning: {partial.path}: ") and "remove it" in line


def test_what_of_the_job_can_not_be_removed_from_out_is_named(out, monkeypatch, capsys):
    partial = begin(out)
    monkeypatch.setattr(os, "unlink", refused)
    finish(partial)
    assert (out / CASE_FILE).exists()
    lines = capsys.readouterr().err.splitlines()
    assert [line.split(": ")[2] for line in lines] == [str(out / LOCK), str(out / JOURNAL)]
    monkeypatch.undo()
    finish_commit(out)
    assert [entry.name for entry in out.iterdir()] == [CASE_FILE]


STEPS = (
    "open",
    "os.mkdir",
    "os.remove",
    "os.rename",
    "os.rmdir",
    "os.listdir",
    "os.scandir",
    "ctypes.dlsym",
    "fcntl.flock",
)


def dies_at(step: int, job: Callable[[], None]) -> bool:
    """Run the job in a process that is gone at that step; was it, before its end?"""
    child = os.fork()
    if not child:
        steps = itertools.count(1)
        sys.addaudithook(lambda event, _: os._exit(9) if event in STEPS and next(steps) == step else None)
        job()
        os._exit(0)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 9


@pytest.mark.parametrize("overwrite", [False, True])
@pytest.mark.parametrize("can_exchange", [True, False])
def test_killed_at_any_step_of_the_end_out_is_whole_or_absent_and_the_same_command_ends_well(
    tmp_path, monkeypatch, overwrite, can_exchange
):
    """Killed again and again, each time a step later."""
    if not can_exchange:
        monkeypatch.setattr(commit, "_RENAME_EXCHANGE", 1 << 30)
    for step in itertools.count(1):
        out = tmp_path / str(step) / "out"
        out.parent.mkdir()
        if overwrite:
            a_case(out)

        def job(out=out) -> None:
            finish_commit(out)
            check_out(out, overwrite)
            finish(begin(out))

        if not dies_at(step, job):
            break
        if out.exists():
            assert (out / CASE_FILE).read_text() == '{"new": 1}' or (
                out / "rank-00000.safetensors"
            ).read_bytes() == b"old"
        else:
            assert not overwrite or not can_exchange
            assert not overwrite or (out.parent / "out.replaced" / "rank-00000.safetensors").read_bytes() == b"old"
        if overwrite or not out.exists():
            job()
        else:
            finish_commit(out)
            with pytest.raises(UsageError, match="exists"):
                job()
        assert {entry.name: entry.read_text() for entry in out.iterdir()} == {CASE_FILE: '{"new": 1}'}
        assert [entry.name for entry in out.parent.iterdir()] == ["out"]
    assert step > 12


def test_what_has_the_name_of_a_journal_and_is_none_is_left_alone(out):
    a_case(out)
    for text in ("", "notes\n", "{}\n", '{"durable": {}}\n'):
        (out / JOURNAL).write_text(text)
        finish_commit(out)
        assert (out / JOURNAL).read_text() == text


def test_as_long_as_the_job_lives_its_end_is_its_own(out):
    partial = begin(out)
    (partial.path / CASE_FILE).write_text("{}")
    os.rename(partial.path, out)
    finish_commit(out)
    assert (out / JOURNAL).exists()
    partial.close()
    finish_commit(out)
    assert [entry.name for entry in out.iterdir()] == [CASE_FILE]


def test_that_a_digest_did_not_hold_is_told_also_where_it_can_not_be_noted(out, monkeypatch):
    partial = begin(out)
    monkeypatch.setattr(os, "write", refused)
    partial.fail("array 'w' has another digest")


def refused(*_arguments, **_options):
    raise OSError(28, "No space left on device")


def test_after_a_commit_another_job_may_have_the_name(out):
    finish(begin(out))
    begin(out, OTHER)
