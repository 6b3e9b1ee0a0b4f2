"""`compare` and `verify`, in process, on all ranks: what they print, and their exit codes."""

import json
from pathlib import Path

import numpy as np
import pytest

from tests.mpi.together import copy_on_root, faults_of_all, flip_last_bit, run, unequal
from tests.reference.shards import read_shard

CASES = Path(__file__).resolve().parents[2] / "fixtures" / "v1" / "cases"
ALL_CASES = sorted(path.name for path in CASES.iterdir())
UNEVEN = CASES / "tp3-uneven-to-tp2"


def printed(comm, capsys, *arguments: object) -> tuple[int, object, list[str]]:
    """Collective: exit code; on rank 0 the JSON that it printed; what another rank printed is a fault."""
    capsys.readouterr()
    code, _ = run(comm, *arguments, "--json")
    text = capsys.readouterr().out
    if comm.rank == 0:
        return code, json.loads(text), []
    return code, None, [f"printed {text!r}"] if text else []


@pytest.mark.parametrize("case", ALL_CASES)
def test_a_sound_case_is_verified_and_equal_to_itself(comm, capsys, case):
    code, verdict, faults = printed(comm, capsys, "verify", CASES / case)
    faults += unequal("verify", code, 0)
    same, found, said = printed(comm, capsys, "compare", CASES / case, CASES / case)
    faults += [*said, *unequal("compare", same, 0)]
    if comm.rank == 0:
        manifest = json.loads((CASES / case / "case.json").read_text())
        faults += unequal("faults", verdict["faults"], [])
        faults += unequal("nfragments", verdict["nfragments"], len(manifest["fragments"]))
        faults += unequal("ndigests", verdict["ndigests"], len(manifest["fragments"]))
        faults += unequal("noracles", verdict["noracles"], len(manifest["oracles"]))
        faults += unequal("equal", (found["equal"], found["differences"]), (True, []))
        faults += unequal("ntensors", found["ntensors"], len({f["logical_tensor_id"] for f in manifest["fragments"]}))
    assert not faults_of_all(comm, faults)


def write_elements(folder: Path, tensor: str, indices: list[tuple[int, ...]]) -> None:
    """Change these elements of the tensor, in whatever shards hold them."""
    for f in json.loads((folder / "case.json").read_text())["fragments"]:
        if f["logical_tensor_id"] != tensor:
            continue
        path = folder / f["payload_file"]
        shard = read_shard(path)
        content = bytearray(path.read_bytes())
        array = shard.arrays[f["payload_key"]]
        itemsize = len(array.raw) // max(int(np.prod(array.shape)), 1)
        for index in indices:
            within = [i - o for i, o in zip(index, f["element_offset"], strict=True)]
            if all(0 <= i < n for i, n in zip(within, f["element_extent"], strict=True)):
                stored = [i + b for i, b in zip(within, f["padding"]["before"], strict=True)]
                flat = int(np.ravel_multi_index(stored, array.shape)) if stored else 0
                content[shard.data_start + shard.data_offsets[f["payload_key"]][0] + flat * itemsize] ^= 1
        path.write_bytes(content)


CHANGES = [
    # why, changed elements of w.col and of step
    ("the first element", [(0, 0)], []),
    ("the last element, in the last shard", [(6, 4)], []),
    ("one in each shard; the first in row-major order is told", [(5, 1), (3, 2), (0, 4)], []),
    ("a row", [(2, column) for column in range(5)], []),
    ("a tensor without axes", [], [()]),
    ("two tensors", [(1, 1)], [()]),
]


@pytest.mark.parametrize(("why", "columns", "step"), CHANGES, ids=[why for why, _, _ in CHANGES])
def test_compare_names_tensor_first_index_and_count(comm, mpi_tmp_path, capsys, why, columns, step):
    """Not told by digests: those of the manifest stay as they were."""
    changed = mpi_tmp_path / "changed"
    copy_on_root(comm, UNEVEN, changed)
    ids = {f["fqn"]: f["logical_tensor_id"] for f in json.loads((UNEVEN / "case.json").read_text())["fragments"]}
    elements = {ids["w.col"]: columns, ids["step"]: step}
    if comm.rank == 0:
        for tensor, indices in elements.items():
            write_elements(changed, tensor, indices)
    comm.Barrier()
    code, found, faults = printed(comm, capsys, "compare", UNEVEN, changed)
    faults += unequal("exit", code, 1)
    if comm.rank == 0:
        told = {d["tensor"]: (d["first_index"], d["count"]) for d in found["differences"]}
        expected = {t: (list(min(indices)), len(indices)) for t, indices in elements.items() if indices}
        faults += [*unequal("equal", found["equal"], False), *unequal("differences", told, expected)]
    assert not faults_of_all(comm, faults)


def test_compare_names_tensors_that_only_one_side_has(comm, mpi_tmp_path, capsys):
    part = mpi_tmp_path / "part"
    faults = list(unequal("reshard", run(comm, "reshard", UNEVEN, part, "--exclude", "w.*", "--progress", "off")[0], 0))
    for a, b in ((UNEVEN, part), (part, UNEVEN)):
        code, found, said = printed(comm, capsys, "compare", a, b)
        faults += [*said, *unequal("exit", code, 1)]
        if comm.rank == 0:
            told = [(d["tensor"], str(UNEVEN) in d["what"]) for d in found["differences"]]
            faults += unequal("only in", told, [(t, True) for t in sorted(t for t in tensor_ids(UNEVEN) if "w." in t)])
    assert not faults_of_all(comm, faults)


def tensor_ids(folder: Path) -> set[str]:
    return {f["logical_tensor_id"] for f in json.loads((folder / "case.json").read_text())["fragments"]}


def test_compare_with_something_that_is_no_case_is_refused_alike_on_all_ranks(comm, mpi_tmp_path):
    faults = []
    for pair in ((UNEVEN, mpi_tmp_path / "nothing"), (mpi_tmp_path / "nothing", UNEVEN)):
        code, message = run(comm, "compare", *pair)
        faults += unequal("exit", code, 5)
        faults += [f"the folder is not named: {message}"] if "nothing" not in message else []
    assert not faults_of_all(comm, faults)


def test_verify_names_every_fault(comm, mpi_tmp_path, capsys):
    """A flipped bit in two shards, in two tensors: what is wrong with one hides nothing of the other."""
    case = mpi_tmp_path / "case"
    copy_on_root(comm, UNEVEN, case)
    if comm.rank == 0:
        flip_last_bit(case / "rank-00000.safetensors")
        flip_last_bit(case / "rank-00002.safetensors")
    comm.Barrier()
    code, verdict, faults = printed(comm, capsys, "verify", case)
    faults += unequal("exit", code, 4)
    if comm.rank == 0:
        told = " ".join(fault["where"] + fault["message"] for fault in verdict["faults"])
        for name in ("rank-00000.safetensors", "rank-00002.safetensors"):
            faults += [f"{name} is not named: {told}"] if name not in told else []
        faults += ["rank-00001.safetensors is named"] if "rank-00001.safetensors" in told else []
    assert not faults_of_all(comm, faults)


def test_verify_names_faults_of_every_kind_at_once(comm, mpi_tmp_path, capsys):
    """A flipped bit, a shard that isn't there, a hole, and an oracle that is wrong, each of tensors of its own."""
    case = mpi_tmp_path / "case"
    copy_on_root(comm, CASES / "tp2-pp2-layers-tied", case)
    expected: list[str] = []
    if comm.rank == 0:
        expected = damage_in_every_way(case)
    comm.Barrier()
    code, verdict, faults = printed(comm, capsys, "verify", case)
    faults += unequal("exit", code, 3)
    if comm.rank == 0:
        told = [f"{fault['where']}: {fault['message']}" for fault in verdict["faults"]]
        faults += [f"{word} is not named: {told}" for word in expected if not any(word in one for one in told)]
        faults += unequal("exit codes", {fault["exit_code"] for fault in verdict["faults"]}, {3, 4, 5})
    assert not faults_of_all(comm, faults)


def damage_in_every_way(case: Path) -> list[str]:
    """Words that must be told. Layers 0 to 2 and the embedding are of ranks 0 and 1, all else of ranks 2 and 3."""
    manifest = json.loads((case / "case.json").read_text())
    (case / "rank-00003.safetensors").unlink()
    flip_last_bit(case / "rank-00000.safetensors")
    for oracle in manifest["oracles"]:
        if oracle["logical_tensor_id"] == "layers.0.mlp.weight":
            oracle["sha256"] = "sha256:" + 64 * "0"
    manifest["fragments"] = [f for f in manifest["fragments"] if f["fragment_id"] != "layers.1.mlp.weight|r1"]
    manifest["expected_manifest_digest"] = None
    (case / "case.json").write_text(json.dumps(manifest))
    return [
        "rank-00003.safetensors: can't open",
        "rank-00000.safetensors: array",
        "tensor layers.1.mlp.weight: box",
        "tensor layers.0.mlp.weight has digest",
        "oracle of layers.0.mlp.weight",
    ]
