"""State of single ranks in whole jobs: it stays on its rank, there and back, is dropped, or refused."""

import json

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from tests.jobs.outcome import assert_done, assert_refused
from tests.mpirun import run_mpi
from tests.reference.fragments import sha256
from tests.unit.manifests import everywhere, manifest, tensor, text_of, whole

AXES = {"pp": 2, "tp": 2}


def written(folder, role):
    """Four ranks, each with a state of its own and its half of a tensor."""
    rows = {(p, t): [((4 * t, 0), (4, 3))] for p, t in everywhere(AXES)}
    tensors = [tensor("up.weight", (8, 3), rows, AXES)]
    for rank, where in enumerate(everywhere(AXES)):
        tensors.append(tensor(f"rng_state.{rank}", (5,), {where: [whole((5,))]}, AXES, role=role))
    folder.mkdir()
    arrays = {}
    for one in (fragment for of in tensors for fragment in of):
        size = int(np.prod(one["local_shape"]))
        rank = dict(one["topology_coordinates"])["rank"]
        first = one["element_offset"][0] if one["fqn"] == "up.weight" else 100 * (rank + 1)
        array = np.arange(first, first + size, dtype=np.float32).reshape(one["local_shape"])
        arrays.setdefault(one["payload_file"], {})[one["payload_key"]] = array
        one["fragment_digest"] = sha256(array.tobytes())
    for name, of in arrays.items():
        save_file(of, folder / name)
    (folder / "case.json").write_bytes(text_of(manifest(AXES, *tensors)))
    return folder


def states(folder):
    shards = [load_file(path) for path in sorted(folder.glob("rank-*.safetensors"))]
    return [{name: array[0] for name, array in shard.items() if "rng" in name} for shard in shards]


OWN = [{f"rng_state.{rank}": 100 * (rank + 1)} for rank in range(4)]


@pytest.mark.parametrize("role", ["rng_state", "buffer"])
def test_states_stay_on_their_ranks_there_and_back(role, tmp_path):
    source, out = written(tmp_path / "case", role), tmp_path / "out"
    layout = tmp_path / "my.toml"
    layout.write_text('[opaque]\n"rng_state.*" = "copy"\n')
    options = ("--layout", layout) if role == "buffer" else ()
    assert_done(run_mpi(3, "reshard", source, out, "--target", "tp=4", *options, "--verify", "full"))
    assert states(out) == OWN
    assert_done(run_mpi(3, "compare", source, out))
    assert_done(run_mpi(2, "reshard", out, tmp_path / "back"))
    assert states(tmp_path / "back") == OWN
    # Also where nothing is said anew: OUT remembers.
    for folder in (source, out):
        done = run_mpi(3, "reshard", folder, tmp_path / "less", "--target", "tp=2", *options)
        assert_refused(done, 3, "rng_state.0", "the source has 4 and the target 2", out=tmp_path / "less")
    if role == "buffer":
        assert_refused(run_mpi(1, "reshard", out, tmp_path / "less", "--target", "tp=2"), 3, "rng_state.0")


def test_states_that_are_dropped_are_listed(tmp_path):
    source, report = written(tmp_path / "case", "rng_state"), tmp_path / "report.json"
    layout = tmp_path / "my.toml"
    layout.write_text('[opaque]\n"rng_state.*" = "drop"\n')
    options = ("--target", "tp=3", "--layout", layout, "--report", report)
    assert "4 tensors dropped" in assert_done(run_mpi(3, "reshard", source, tmp_path / "out", *options))
    listed = json.loads(report.read_text())["changes"]["dropped"]
    assert [one["fqn"] for one in listed] == [f"rng_state.{rank}" for rank in range(4)]
    assert states(tmp_path / "out") == [{}, {}, {}]
    told = json.loads(assert_done(run_mpi(1, "plan", source, "--target", "tp=3", "--layout", layout, "--json")))
    assert told["changes"]["dropped"] == listed


def test_states_are_refused_where_a_layout_says_so(tmp_path):
    source, layout = written(tmp_path / "case", "buffer"), tmp_path / "my.toml"
    layout.write_text('[opaque]\n"rng_state.*" = "refuse"\n')
    for command in (("reshard", source, tmp_path / "out"), ("plan", source)):
        done = run_mpi(2, *command, "--target", "pp=2,tp=2", "--layout", layout)
        assert_refused(done, 3, 'opaque."rng_state.*"', "rng_state.3", "--exclude", out=tmp_path / "out")
