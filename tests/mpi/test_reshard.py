"""Whole jobs, in process: every committed case to every target that it has an answer for, and every committed fault."""

import hashlib
import json
from pathlib import Path

import pytest
from mpi4py import MPI

from reshard_mpi.mpi.exchange import Exchanger
from reshard_mpi.run import move
from tests.mpi.together import copy_on_root, differing_contents, faults_of_all, flip_last_bit, run, unequal
from tests.reference.shards import read_shard
from tests.reference.targets import spelled

FIXTURES = Path(__file__).resolve().parents[2] / "fixtures" / "v1"
CASES = {path.name: json.loads((path / "expected.json").read_text()) for path in sorted((FIXTURES / "cases").iterdir())}
ANSWERS = [(case, spelled(answer["target"]), answer["shards"]) for case, answers in CASES.items() for answer in answers]
REJECTS = json.loads((FIXTURES / "rejects" / "expected.json").read_text())
LEAST_MEMORY = "56K"

# What the message has to name, where that is known better than by its exit code.
NAMED = {
    "duplicate-json-key": ["case.json", "world_size"],
    "flipped-bit": ["rank-00003.safetensors", "w"],
    "future-version": ["case.json", "2.0.0"],
    "manifest-digest": ["case.json"],
    "missing-file": ["rank-00002.safetensors"],
    "missing-key": ["rank-0000"],
    "missing-last-shard": ["w"],
    "missing-middle-shard": ["w"],
    "mixed-dtypes": ["int32", "w"],
    "overlap": ["w"],
    "path-escape": [".."],
    "truncated-shard": ["rank-00001.safetensors"],
}


def differences(out: Path, shards: dict[str, dict[str, dict]]) -> list[str]:
    """What is not in OUT as `shards` (file -> logical tensor -> box and digest) has it."""
    fragments = json.loads((out / "case.json").read_text())["fragments"]
    found = {(f["payload_file"], f["logical_tensor_id"]): f for f in fragments}
    files = {path.name: read_shard(path) for path in sorted(out.glob("rank-*"))}
    faults = list(unequal("files", list(files), sorted(shards)))
    faults += unequal("fragments", sorted(found), sorted((file, tensor) for file in shards for tensor in shards[file]))
    if faults:
        return faults
    for (file, tensor), fragment in found.items():
        answer = shards[file][tensor]
        raw = files[file].arrays[fragment["payload_key"]].raw
        digest = "sha256:" + hashlib.sha256(raw).hexdigest()
        box = fragment["element_offset"], fragment["element_extent"]
        faults += unequal(f"{file}: {tensor}", box, (answer["element_offset"], answer["element_extent"]))
        faults += unequal(f"{file}: {tensor}", digest, answer["sha256"])
        faults += unequal(f"{file}: {tensor} in case.json", fragment["fragment_digest"], answer["sha256"])
    return faults


@pytest.mark.parametrize(("case", "target", "shards"), ANSWERS, ids=[f"{case}-to-{t}" for case, t, _ in ANSWERS])
def test_a_case_becomes_its_answer_and_what_one_rank_alone_makes_of_it(comm, mpi_tmp_path, case, target, shards):
    source = FIXTURES / "cases" / case
    done = run(comm, "reshard", source, mpi_tmp_path / "out", "--target", target, "--progress", "off")
    faults = list(unequal("exit", done, (0, "")))
    if comm.rank == 0 and not faults:
        faults += differences(mpi_tmp_path / "out", shards)
        alone = run(MPI.COMM_SELF, "reshard", source, mpi_tmp_path / "alone", "--target", target, "--progress", "off")
        faults += unequal("exit alone", alone, (0, ""))
        faults += differing_contents(mpi_tmp_path / "out", mpi_tmp_path / "alone")
        faults += unequal("left over", sorted(p.name for p in mpi_tmp_path.iterdir()), ["alone", "out"])
    assert not faults_of_all(comm, faults)


@pytest.mark.parametrize("case", CASES)
def test_without_a_target_the_case_goes_where_it_says_and_comes_back(comm, mpi_tmp_path, case):
    source, out, back = FIXTURES / "cases" / case, mpi_tmp_path / "out", mpi_tmp_path / "back"
    steps = [
        ("reshard", source, out, "--verify", "full", "--progress", "off"),
        ("reshard", out, back, "--verify", "full", "--progress", "off"),
        ("compare", source, out),
        ("compare", source, back),
        ("verify", back),
    ]
    faults = []
    for step in steps:
        faults += unequal(step[0], run(comm, *step), (0, ""))
    if comm.rank == 0 and not faults:
        (default,) = [t for t in CASES[case] if t["target"] == topology(source)["target"]]
        faults += differences(out, default["shards"])
        faults += unequal("topology of BACK", topology(back)["source"], topology(source)["source"])
        faults += unequal("boxes of BACK", boxes(back), boxes(source))
    assert not faults_of_all(comm, faults)


def topology(folder: Path) -> dict[str, dict[str, int]]:
    return json.loads((folder / "case.json").read_text())["topology"]


def boxes(folder: Path) -> list[tuple]:
    """(tensor, rank, offset, extent) of all fragments with elements: the committed cases follow the rules of SPEC section 2."""
    fragments = json.loads((folder / "case.json").read_text())["fragments"]
    return sorted(
        (f["logical_tensor_id"], dict(f["topology_coordinates"])["rank"], f["element_offset"], f["element_extent"])
        for f in fragments
        if 0 not in f["element_extent"]
    )


class Noting(Exchanger):
    """Notes how many rounds there were, and what they sent to oneself."""

    nrounds = 0
    own_nbytes = 0

    def exchange(self, work, read_buffer, write_buffer):
        Noting.nrounds += 1
        Noting.own_nbytes += int(work.send_nbytes[self._comm.rank] + work.receive_nbytes[self._comm.rank])
        super().exchange(work, read_buffer, write_buffer)


@pytest.mark.parametrize("target", ["single", "fsdp=3,tp=2", "pp=4"])
def test_many_small_rounds_write_what_one_large_round_writes(comm, mpi_tmp_path, monkeypatch, target):
    monkeypatch.setattr(move, "Exchanger", Noting)
    sample, faults, nrounds = mpi_tmp_path / "sample", [], {}
    options = ("--size", "1.3M", "--tp", 2, "--pp", 2, "--dtype", "float32")
    faults += unequal("sample", run(comm, "sample", sample, *options), (0, ""))
    for memory in (LEAST_MEMORY, "256M"):
        Noting.nrounds = Noting.own_nbytes = 0
        arguments = ("--target", target, "--memory", memory, "--progress", "off")
        faults += unequal(memory, run(comm, "reshard", sample, mpi_tmp_path / memory, *arguments), (0, ""))
        nrounds[memory] = Noting.nrounds
        faults += unequal("bytes to oneself in MPI", Noting.own_nbytes, 0)
    faults += unequal("few rounds", nrounds[LEAST_MEMORY] > 10 and nrounds["256M"] == 1, True)
    if comm.rank == 0 and not faults:
        faults += differing_contents(mpi_tmp_path / LEAST_MEMORY, mpi_tmp_path / "256M")
    assert not faults_of_all(comm, faults)


@pytest.mark.parametrize("name", REJECTS)
def test_a_fault_is_refused_alike_on_all_ranks_and_leaves_no_out(comm, mpi_tmp_path, name):
    reject, source, out = REJECTS[name], FIXTURES / "rejects" / name, mpi_tmp_path / "out"
    code, message = run(comm, "reshard", source, out, *reject.get("options", ()), "--progress", "off")
    faults = list(unequal("exit", code, reject["exit"]))
    faults += unequal("message of rank 0", message, comm.bcast(message))
    faults += [f"message without {word!r}: {message}" for word in NAMED.get(name, ()) if word not in message]
    faults += [f"several lines: {message!r}"] if "\n" in message else []
    faults += ["OUT is there"] if out.exists() else []
    verified = run(comm, "verify", source)[0]
    faults += unequal("exit of verify", verified, reject["exit"])
    assert not faults_of_all(comm, faults)


def test_a_digest_that_failed_is_not_continued_until_restart(comm, mpi_tmp_path):
    source, out = mpi_tmp_path / "source", mpi_tmp_path / "out"
    copy_on_root(comm, FIXTURES / "cases" / "tp3-uneven-to-tp2", source)
    whole = (source / "rank-00001.safetensors").read_bytes()
    comm.Barrier()
    if comm.rank == 0:
        flip_last_bit(source / "rank-00001.safetensors")
    comm.Barrier()
    reshard = ("reshard", source, out, "--progress", "off")
    codes = [run(comm, *reshard)[0]]
    if comm.rank == 0:
        (source / "rank-00001.safetensors").write_bytes(whole)
    comm.Barrier()
    codes += [run(comm, *reshard)[0], run(comm, *reshard, "--restart")[0]]
    assert not faults_of_all(comm, unequal("exits", codes, [4, 2, 0]))
