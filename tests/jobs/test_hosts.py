"""Ranks on two hosts, which don't see the same files: shards on the nodes, and what is told when a host sees less or other."""

import filecmp
import json
import os
import shutil
import time
from pathlib import Path

import pytest

from tests.jobs.hosts import Hosts, two_hosts
from tests.jobs.outcome import AT, CASES, assert_done, assert_refused, run_alone, write_sample
from tests.mpirun import tail, wait_for

SHARD = "rank-{rank:05d}.safetensors"
WITHIN_S = 20.0


@pytest.fixture(scope="module")
def hosts(tmp_path_factory):
    with two_hosts(tmp_path_factory.mktemp("hosts")) as found:
        yield found


@pytest.fixture(scope="module")
def sample(tmp_path_factory) -> Path:
    """Four shards, tp2·pp2."""
    return write_sample(tmp_path_factory.mktemp("sample") / "sample", "8M")


@pytest.fixture(scope="module")
def answer(sample) -> Path:
    """What one process makes of the sample, to tp=4."""
    assert_done(run_alone("reshard", sample, sample.parent / "answer", "--target", "tp=4"))
    return sample.parent / "answer"


@pytest.fixture(autouse=True)
def empty_disks(hosts):
    for number in (0, 1):
        for entry in hosts.disk(number).iterdir():
            shutil.rmtree(entry) if entry.is_dir() else entry.unlink()


@pytest.fixture
def case(hosts, sample, tmp_path):
    """A case whose shards lie on the hosts: 0 and 1 on host-0, 2 and 3 on host-1; in the folder is its manifest alone."""
    for number in (0, 1):
        shards(hosts, number).mkdir()
        for rank in (2 * number, 2 * number + 1):
            shutil.copy2(sample / SHARD.format(rank=rank), shards(hosts, number))
    folder = tmp_path / "case"
    folder.mkdir()
    shutil.copy(sample / "case.json", folder)
    return folder


def shards(hosts: Hosts, number: int) -> Path:
    """The folder of shards on a host's own disk, as it can be reached from outside."""
    return hosts.disk(number) / "ckpt"


# What a host doesn't see won't come: not to be waited for as long as on a network file system.
HASTY = AT + "from reshard_mpi.storage import known\nknown.PATIENCE_S = 0.5\nmain()"


def per_node(hosts: Hosts, case: Path, out: Path, *options: str) -> list[object]:
    """The arguments of a job whose source lies on the hosts."""
    return ["reshard", case, out, "--target", "tp=4", "--source-template", hosts.local / "ckpt" / SHARD, *options]


def assert_equal(out: Path, answer: Path) -> None:
    names = sorted(path.name for path in answer.iterdir())
    assert sorted(path.name for path in out.iterdir()) == names
    assert filecmp.cmpfiles(out, answer, names, shallow=False)[1:] == ([], [])


def test_shards_are_read_on_the_hosts_where_they_lie(hosts, case, answer, tmp_path, mpi):
    assert_done(hosts.run(*per_node(hosts, case, tmp_path / "out"), mpi=mpi))
    assert_equal(tmp_path / "out", answer)


def test_no_rank_need_see_the_shard_of_its_own_number(hosts, case, answer, tmp_path):
    """Rank r would read shard r; here the hosts have each other's."""
    for rank in range(4):
        here, there = shards(hosts, rank // 2), shards(hosts, 1 - rank // 2)
        shutil.move(here / SHARD.format(rank=rank), there / f"moved-{rank}.safetensors")
    arguments = ["reshard", case, tmp_path / "out", "--target", "tp=4", "--verify", "full"]
    assert_done(hosts.run(*arguments, "--source-template", hosts.local / "ckpt" / "moved-{rank}.safetensors"))
    assert_equal(tmp_path / "out", answer)


def test_a_shard_that_several_hosts_see_alike_is_read_on_one(hosts, case, answer, tmp_path):
    shutil.copy(shards(hosts, 0) / SHARD.format(rank=1), shards(hosts, 1))
    assert_done(hosts.run(*per_node(hosts, case, tmp_path / "out")))
    assert_equal(tmp_path / "out", answer)


def without_a_shard(hosts: Hosts) -> None:
    (shards(hosts, 1) / SHARD.format(rank=3)).unlink()


def with_another_length_on_one_host(hosts: Hosts) -> None:
    longer = (shards(hosts, 1) / SHARD.format(rank=3)).read_bytes() + bytes(8)
    (shards(hosts, 0) / SHARD.format(rank=3)).write_bytes(longer)


def with_another_header_on_one_host(hosts: Hosts) -> None:
    content = (shards(hosts, 1) / SHARD.format(rank=3)).read_bytes()
    assert content.count(b'"lm_head.weight"') == 1
    (shards(hosts, 0) / SHARD.format(rank=3)).write_bytes(content.replace(b'"lm_head.weight"', b'"lm_tail.weight"'))


def with_a_shard_cut_short(hosts: Hosts) -> None:
    path = shards(hosts, 1) / SHARD.format(rank=3)
    os.truncate(path, path.stat().st_size - 1)


def with_a_flipped_bit(hosts: Hosts, folder: str = "ckpt") -> None:
    path = hosts.disk(1) / folder / SHARD.format(rank=3)
    content = bytearray(path.read_bytes())
    content[8 + int.from_bytes(content[:8], "little")] ^= 1  # of lm_head.weight, which no other shard holds
    path.write_bytes(content)


REFUSED = [
    ("nobody sees a shard", 5, without_a_shard, ["source rank 3", "no rank sees it", "host-0, host-1"]),
    (
        "hosts see files of other lengths",
        3,
        with_another_length_on_one_host,
        ["bytes on host host-0", "on host host-1"],
    ),
    ("hosts see files of other headers", 3, with_another_header_on_one_host, ["not the same", "host-0", "host-1"]),
    ("a shard is cut short", 3, with_a_shard_cut_short, ["on host host-1"]),
    ("a bit has flipped", 4, with_a_flipped_bit, ["on host host-1", "digest"]),
]


@pytest.mark.parametrize(("why", "exit_code", "change", "words"), REFUSED, ids=[why for why, *_ in REFUSED])
def test_what_is_wrong_on_a_host_is_told_with_its_path_and_host(hosts, case, tmp_path, why, exit_code, change, words):
    change(hosts)
    done = hosts.run(*per_node(hosts, case, tmp_path / "out"))
    path = str(hosts.local / "ckpt" / SHARD.format(rank=3))
    assert_refused(done, exit_code, path, *words, out=tmp_path / "out")


def test_a_source_that_one_host_does_not_see_is_told_with_who_sees_it(hosts, case, tmp_path):
    shutil.copy(case / "case.json", shards(hosts, 0))
    for rank in (2, 3):
        shutil.copy(shards(hosts, 1) / SHARD.format(rank=rank), shards(hosts, 0))
        (shards(hosts, 1) / SHARD.format(rank=rank)).unlink()
    done = hosts.run_python("-c", HASTY, "reshard", hosts.local / "ckpt", tmp_path / "out", "--target", "tp=4")
    words = [SHARD.format(rank=2), "rank 2 on host host-1 does not see it, which rank 0 on host host-0 does"]
    assert_refused(done, 5, *words, out=tmp_path / "out")


def test_files_that_differ_between_hosts_are_refused_also_without_digests(hosts, case, tmp_path):
    """Both hosts have a complete case at that place, with other bytes; each rank would read its own shard there."""
    shutil.copy(case / "case.json", shards(hosts, 0))
    for rank in range(4):
        here, there = shards(hosts, rank // 2), shards(hosts, 1 - rank // 2)
        shutil.copy2(here / SHARD.format(rank=rank), there)
    other = shards(hosts, 1) / SHARD.format(rank=3)
    os.utime(other, (other.stat().st_atime, other.stat().st_mtime - 60))
    done = hosts.run_python(
        "-c", HASTY, "reshard", hosts.local / "ckpt", tmp_path / "out", "--target", "tp=4", "--verify", "none"
    )
    words = [SHARD.format(rank=3), "on host host-1", "hosts see different files"]
    assert_refused(done, 5, *words, out=tmp_path / "out")


def test_an_out_that_one_host_does_not_see_is_told_with_who_sees_it(hosts, case):
    out = hosts.local / "out"
    done = hosts.run_python("-c", HASTY, *per_node(hosts, case, out))
    words = [f"{out}.partial", "rank 2 on host host-1 does not see it, which rank 0 on host host-0 does"]
    assert_refused(done, 5, *words)
    assert not (hosts.disk(0) / "out").exists()
    assert not (hosts.disk(1) / "out.partial").exists()


def test_another_folder_that_a_host_sees_in_place_of_out_is_not_written_to(hosts, case):
    """Left there by a job that had only that host, say."""
    left = hosts.disk(1) / "out.partial"
    left.mkdir()
    (left / "lock").write_text("host host-1, pid 1, job none\n")
    done = hosts.run_python("-c", HASTY, *per_node(hosts, case, hosts.local / "out"))
    assert_refused(done, 5, f"{hosts.local}/out.partial", "on host host-1", "not the folder that rank 0 has made")
    assert [path.name for path in left.iterdir()] == ["lock"]


def tied_across_hosts(hosts: Hosts, case: Path) -> None:
    """Tied tensors without digests; the parts of one are on host-0, and on host-1."""
    shutil.move(shards(hosts, 0) / SHARD.format(rank=1), shards(hosts, 1))
    manifest = json.loads((case / "case.json").read_text())
    for fragment in manifest["fragments"]:
        if fragment["fqn"] in ("lm_head.weight", "model.embed_tokens.weight"):
            fragment |= {"tie_group_id": "tied", "fragment_digest": None}
    manifest["expected_manifest_digest"] = None
    (case / "case.json").write_text(json.dumps(manifest))


def test_what_must_be_equal_is_compared_also_where_no_rank_sees_all_of_it(hosts, case, tmp_path):
    tied_across_hosts(hosts, case)
    done = hosts.run(*per_node(hosts, case, tmp_path / "out"))
    words = ["tie group tied", "model.embed_tokens.weight", "lm_head.weight", "hold different bytes"]
    assert_refused(done, 4, *words, out=tmp_path / "out")


KILLED = AT + 'at("reshard_mpi.run.move:Reader.read", 3, lambda: os.kill(os.getpid(), 9))\nmain()'


def test_a_rank_that_is_killed_on_another_host_ends_the_job_which_then_goes_on(hosts, case, answer, tmp_path, mpi):
    arguments = per_node(hosts, case, tmp_path / "out")
    began = time.monotonic()
    done = hosts.run_python("-c", KILLED, *arguments, mpi=mpi)
    assert time.monotonic() - began < WITHIN_S
    assert done.returncode != 0, tail(done.stderr)
    assert not (tmp_path / "out").exists()
    assert_done(hosts.run(*arguments, mpi=mpi))
    assert_equal(tmp_path / "out", answer)


SLOW = AT + 'at("reshard_mpi.run.move:Reader.read", 1, say_and_wait)\nmain()'


@pytest.mark.thorough
def test_a_link_that_is_down_for_seconds_is_waited_for(hosts, case, answer, tmp_path, monkeypatch):
    monkeypatch.setenv("NOTES", str(tmp_path))
    with hosts.started("-c", SLOW, *per_node(hosts, case, tmp_path / "out", "--writers", "owner")) as job:
        wait_for((tmp_path / "waiting").exists)
        hosts.set_link("down")
        time.sleep(4)
        try:
            assert job.poll() is None
            assert not (tmp_path / "out").exists()
        finally:
            hosts.set_link("up")
        stdout, stderr = job.communicate(timeout=60)
    assert job.returncode == 0, tail(stderr)
    assert_equal(tmp_path / "out", answer)


# ---- targets on the nodes


def to_nodes(hosts: Hosts, source: Path, out: Path, *options: object) -> list[object]:
    """The arguments of a job whose target lies on the hosts."""
    return ["reshard", source, out, "--target", "tp=4", "--target-template", target(hosts), *options]


def target(hosts: Hosts) -> Path:
    return hosts.local / "new" / SHARD


def on_hosts(hosts: Hosts) -> list[list[str]]:
    """The files in the target's folder, by host."""
    folders = [hosts.disk(number) / "new" for number in (0, 1)]
    return [sorted(path.name for path in folder.iterdir()) if folder.exists() else [] for folder in folders]


EVERY = [[SHARD.format(rank=rank) for rank in ranks] for ranks in ((0, 1), (2, 3))]


def assert_equal_on_hosts(hosts: Hosts, out: Path, answer: Path) -> None:
    """OUT and the shards on the hosts are what the answer has in one folder; and nothing else is there."""
    assert [path.name for path in out.iterdir()] == ["case.json"]
    assert filecmp.cmp(out / "case.json", answer / "case.json", shallow=False)
    assert on_hosts(hosts) == EVERY
    for number, names in enumerate(EVERY):
        folder = hosts.disk(number) / "new"
        assert filecmp.cmpfiles(folder, answer, names, shallow=False)[1:] == ([], [])
        assert all((folder / name).stat().st_nlink == 1 for name in names)


def test_shards_are_written_on_the_hosts_of_their_ranks(hosts, case, sample, answer, tmp_path, mpi):
    out = tmp_path / "out"
    template = ("--source-template", hosts.local / "ckpt" / SHARD)
    done = hosts.run(*to_nodes(hosts, case, out, *template, "--verify", "full"), mpi=mpi)
    assert_done(done)
    assert str(target(hosts)) in done.stdout
    assert_equal_on_hosts(hosts, out, answer)
    # And every command knows them there.
    on_nodes = ("--source-template", target(hosts))
    assert_done(hosts.run("verify", out, *on_nodes, mpi=mpi))
    planned = hosts.run("plan", out, *on_nodes, "--json", mpi=mpi)
    assert_done(planned)
    assert all(rank["read_nbytes"] for rank in json.loads(planned.stdout)["ranks"])
    assert_done(hosts.run("inspect", out, *on_nodes, mpi=mpi))
    assert_done(hosts.run("compare", case, out, "--a-template", template[1], "--b-template", target(hosts), mpi=mpi))
    assert_done(hosts.run("reshard", out, tmp_path / "back", "--target", "pp=2,tp=2", *on_nodes, mpi=mpi))
    assert filecmp.cmpfiles(tmp_path / "back", sample, [SHARD.format(rank=rank) for rank in range(4)], shallow=False)[
        1:
    ] == ([], [])


def test_compare_finds_what_differs_on_hosts_of_which_no_rank_sees_all(hosts, case, tmp_path):
    assert_done(hosts.run(*to_nodes(hosts, case, tmp_path / "out", "--source-template", hosts.local / "ckpt" / SHARD)))
    with_a_flipped_bit(hosts, "new")
    templates = ("--a-template", hosts.local / "ckpt" / SHARD, "--b-template", target(hosts))
    done = hosts.run("compare", case, tmp_path / "out", *templates, "--json")
    assert done.returncode == 1
    (difference,) = json.loads(done.stdout)["differences"]
    assert (difference["what"], difference["count"]) == ("bytes differ", 1)
    done = hosts.run("verify", tmp_path / "out", "--source-template", target(hosts))
    assert_refused(done, 4, str(target(hosts)).format(rank=3), "digest")


def test_an_array_of_padding_alone_is_hashed_on_its_host(hosts, sample, tmp_path):
    """Nobody writes it: a new file holds its zeros."""
    layout = tmp_path / "layout.toml"
    rows = json.loads((sample / "case.json").read_text())
    (nrows,) = {f["global_shape"][0] for f in rows["fragments"] if f["fqn"] == "lm_head.weight"}
    layout.write_text(f'[padding]\n"lm_head.weight" = {{ to = {4 * nrows} }}\n')
    padded = ("--target", "tp=4", "--layout", layout)
    assert_done(run_alone("reshard", sample, tmp_path / "answer", *padded))
    assert_done(hosts.run(*to_nodes(hosts, sample, tmp_path / "out", *padded)))
    for number, names in enumerate(EVERY):
        assert filecmp.cmpfiles(hosts.disk(number) / "new", tmp_path / "answer", names, shallow=False)[1:] == ([], [])
    assert filecmp.cmp(tmp_path / "out" / "case.json", tmp_path / "answer" / "case.json", shallow=False)


def test_oracles_of_tensors_that_lie_on_several_hosts_are_checked(hosts, tmp_path):
    source = CASES / "tp2-pp2-to-single"
    done = hosts.run(*to_nodes(hosts, source, tmp_path / "out", "--verify", "full"))
    assert_done(done)
    assert "0 oracles" not in done.stdout
    done = hosts.run("verify", tmp_path / "out", "--source-template", target(hosts), "--json")
    assert_done(done)
    assert json.loads(done.stdout)["noracles"]


def with_a_file_in_place_of_a_shard(hosts: Hosts) -> None:
    (hosts.disk(1) / "new").mkdir()
    (hosts.disk(1) / "new" / SHARD.format(rank=2)).write_bytes(b"another")


def with_a_file_in_place_of_the_folder(hosts: Hosts) -> None:
    (hosts.disk(1) / "new").write_bytes(b"another")


def with_too_little_room(hosts: Hosts) -> None:
    with (hosts.disk(1) / "full").open("wb") as file:
        status = os.fstatvfs(file.fileno())
        os.posix_fallocate(file.fileno(), 0, status.f_bavail * status.f_frsize - (1 << 20))


CANT_WRITE = [
    ("a file is in place of a shard", 2, with_a_file_in_place_of_a_shard, ["exists", SHARD.format(rank=2)]),
    ("a file is in place of the folder", 5, with_a_file_in_place_of_the_folder, ["/new"]),
    ("a host has no room", 5, with_too_little_room, ["No space left", SHARD.format(rank=2)]),
]


@pytest.mark.parametrize(("why", "exit_code", "change", "words"), CANT_WRITE, ids=[why for why, *_ in CANT_WRITE])
def test_what_hinders_writing_on_a_host_is_told_and_nothing_is_lost(
    hosts, sample, tmp_path, why, exit_code, change, words
):
    change(hosts)
    before = sorted(path for path in hosts.disk(1).rglob("*") if path.is_file())
    done = hosts.run(*to_nodes(hosts, sample, tmp_path / "out"))
    assert_refused(done, exit_code, "on host host-1", *words, out=tmp_path / "out")
    assert [path for path in before if not path.exists()] == []


STOPPED_AT = AT + 'at("{at}", {rank}, lambda: os.kill(os.getpid(), 9))\nmain()'
POINTS = [
    "reshard_mpi.run.move:Reader.read",
    "reshard_mpi.run.move:Writer.digests",
    "reshard_mpi.run.node_shards:NodeShards.put_in_place",
    "reshard_mpi.run.lead:Lead.commit",
    "reshard_mpi.run.commit:sync_folder",
]


@pytest.mark.parametrize("at", POINTS)
def test_a_job_that_is_killed_goes_on_with_what_is_on_the_nodes(hosts, sample, answer, tmp_path, at):
    rank = 0 if "commit" in at else 3
    arguments = to_nodes(hosts, sample, tmp_path / "out", "--journal-every", "0")
    done = hosts.run_python("-c", STOPPED_AT.format(at=at, rank=rank), *arguments)
    assert done.returncode != 0, tail(done.stderr)
    assert not (tmp_path / "out").exists()
    assert_done(hosts.run(*arguments))
    assert_equal_on_hosts(hosts, tmp_path / "out", answer)


def test_a_job_goes_on_with_other_ranks_a_host(hosts, sample, answer, tmp_path):
    arguments = to_nodes(hosts, sample, tmp_path / "out", "--journal-every", "0", "--memory", "1M")
    killed = STOPPED_AT.format(at="reshard_mpi.run.lead:Lead.commit", rank=0)
    assert hosts.run_python("-c", killed, *arguments).returncode != 0
    done = hosts.run(*arguments, ranks_a_host=3)
    assert_done(done)
    assert "continued" in done.stdout
    assert_equal_on_hosts(hosts, tmp_path / "out", answer)


def test_what_is_lost_with_a_node_is_begun_anew_and_told(hosts, sample, answer, tmp_path):
    """As when a requeued job gets another node."""
    arguments = to_nodes(hosts, sample, tmp_path / "out", "--journal-every", "0")
    killed = STOPPED_AT.format(at="reshard_mpi.run.node_shards:NodeShards.put_in_place", rank=3)
    assert hosts.run_python("-c", killed, *arguments).returncode != 0
    for path in (hosts.disk(1) / "new").iterdir():
        path.unlink()
    placed = [path for path in (hosts.disk(0) / "new").iterdir() if path.name.endswith(".safetensors")]
    for path in placed:  # rank 3 was killed when the others may have done
        path.unlink()
    done = hosts.run(*arguments)
    assert_done(done)
    assert "can't be found there; begun anew" in done.stderr
    assert_equal_on_hosts(hosts, tmp_path / "out", answer)


def test_a_shard_in_place_that_no_job_goes_on_with_is_not_written_over(hosts, sample, tmp_path):
    arguments = to_nodes(hosts, sample, tmp_path / "out", "--journal-every", "0")
    killed = STOPPED_AT.format(at="reshard_mpi.run.lead:Lead.commit", rank=0)
    assert hosts.run_python("-c", killed, *arguments).returncode != 0
    placed = hosts.disk(0) / "new" / SHARD.format(rank=0)
    before = placed.read_bytes()
    done = hosts.run(*arguments, "--restart")
    assert_refused(done, 2, str(target(hosts)).format(rank=0), "host-0", "exists", out=tmp_path / "out")
    assert placed.read_bytes() == before
