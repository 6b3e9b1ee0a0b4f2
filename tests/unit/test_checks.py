"""One planted fault for each rule of the manifest: found, with its exit code, and told with the names that lead to it."""

import contextlib
import copy
from dataclasses import dataclass
from typing import Any

import pytest

from reshard_mpi.checkpoint.checks import Findings, check_case, distinct_boxes, replica_groups
from reshard_mpi.checkpoint.manifest import case_text, parse_case
from reshard_mpi.checkpoint.mesh import parse_target
from reshard_mpi.errors import InputError, first_to_tell
from reshard_mpi.layout.rules import target_layout
from reshard_mpi.layout.target import outgoing_case
from tests.reference.dice import Dice
from tests.reference.fragments import sha256
from tests.unit.manifests import SINGLE, everywhere, manifest, parsed, sealed, tensor, whole

AXES = {"dp": 2, "tp": 2}
LEFT, RIGHT = ((0, 0), (4, 3)), ((0, 3), (4, 3))


def good() -> dict[str, Any]:
    """Four ranks, dp 2 and tp 2: split, replicated, tied, 0-d, empty, padded, fused, sub-byte and kept once. The second
    rank of tp holds little, the last rank nothing but replicas."""
    split = {(dp, tp): [(LEFT, RIGHT)[tp]] for dp, tp in everywhere(AXES)}
    alone = {(0, 0): [whole((4, 2))]}
    fused = tensor("fused", (4, 2), {(0, 0): [((0, 0), (2, 2)), ((2, 0), (2, 2))]}, AXES, local_shape=[4, 2])
    for one, rows in zip(fused, (0, 2), strict=True):
        one["padding"] = {"before": [rows, 0], "after": [2 - rows, 0], "semantic": "view"}
        one |= {"payload_key": "fused", "shared_storage_id": "fused@0", "fragment_digest": sha256(b"fused")}
    tied = [tensor(name, (4, 2), alone, AXES, tie_group_id="embedding") for name in ("embed", "head")]
    tied[1][0]["fragment_digest"] = tied[0][0]["fragment_digest"]
    padded = tensor("padded", (3,), {(0, 0): [whole((3,))]}, AXES, local_shape=[8])
    padded[0]["padding"] = {"before": [1], "after": [4], "semantic": "alignment"}
    return manifest(
        AXES,
        tensor("w", (4, 6), split, AXES, partition_axes=[1]),
        *tied,
        tensor("scale", (), {(0, 0): [whole(())]}, AXES),
        tensor("void", (0, 3), {(0, 0): [whole((0, 3))], (1, 0): [whole((0, 3))]}, AXES),
        padded,
        fused,
        tensor("half", (2, 4), {(0, 0): [((0, 0), (2, 2))], (0, 1): [((0, 2), (2, 2))]}, AXES, dtype="float4_e2m1fn"),
        oracle_file="oracles.safetensors",
        oracles=[
            {"dtype": "float32", "logical_tensor_id": "w", "payload_key": "t0", "sha256": sha256(b"w"), "shape": [4, 6]}
        ],
    )


DROP = object()


@dataclass(frozen=True)
class Plant:
    """`set` values at paths: `w|r1 padding before` of a fragment, `topology source` of the case; DROP removes."""

    why: str
    changes: dict[str, Any]
    exit_code: int
    told: tuple[str, ...]

    def into(self, raw: dict[str, Any]) -> None:
        by_name = {one["fragment_id"]: one for one in raw["fragments"]}
        for path, value in self.changes.items():
            first, *steps = path.split(" ")
            here: Any = by_name[first] if first in by_name else raw
            steps = steps if first in by_name else [first, *steps]
            if not steps:
                assert value is DROP
                raw["fragments"].remove(here)
                continue
            for step in steps[:-1]:
                here = here[int(step) if step.isdecimal() else step]
            here[steps[-1]] = value


def found_in(*plants: Plant, seal: bool = True) -> Findings:
    raw = copy.deepcopy(good())
    for plant in plants:
        plant.into(raw)
    return check_case(parsed(sealed(raw) if seal else raw))


FIELD_FAULTS = [
    Plant("axes of offset", {"w|r0 element_offset": [0]}, 3, ("w|r0", "2 axes")),
    Plant("axes of extent", {"w|r0 element_extent": [4, 3, 1]}, 3, ("w|r0", "2 axes")),
    Plant("axes of the stored array", {"w|r0 local_shape": []}, 3, ("w|r0", "2 axes")),
    Plant("axes of padding", {"w|r0 padding before": [0]}, 3, ("w|r0", "2 axes")),
    Plant("an axis for a 0-d tensor", {"scale|r0 element_offset": [0]}, 3, ("scale|r0", "0 axes")),
    Plant("a box beyond the tensor", {"w|r1 element_offset": [0, 4]}, 3, ("w|r1", "[0:4, 4:7]", "[4, 6]")),
    Plant("a box that begins beyond it", {"w|r1 element_offset": [5, 3]}, 3, ("w|r1", "[5:9, 3:6]")),
    Plant("stored smaller than the box", {"w|r0 local_shape": [4, 2]}, 3, ("w|r0", "local_shape [4, 2]", "[4, 3]")),
    Plant("stored larger than box and padding", {"padded|r0 local_shape": [9]}, 3, ("padded|r0", "local_shape [9]")),
    Plant(
        "padding of semantic none",
        {"padded|r0 padding semantic": "none"},
        3,
        ("padded|r0", "semantic none", "[1]", "[4]"),
    ),
    Plant("a tensor axis that isn't", {"w|r0 partition_axes": [2]}, 3, ("w|r0", "partition_axes [2]")),
    Plant("a dtype that isn't", {"w|r0 dtype": "float31"}, 3, ("w|r0", "'float31'", "float32")),
    Plant("a dtype as safetensors spells it", {"w|r0 dtype": "F32"}, 3, ("w|r0", "'F32'")),
    Plant(
        "half a byte",
        {"half|r0 element_extent": [1, 1], "half|r0 local_shape": [1, 1]},
        3,
        ("half|r0", "float4_e2m1fn", "4 bits"),
    ),
    Plant(
        "more bytes than any file",
        {
            "scale|r0 global_shape": [1 << 61],
            "scale|r0 element_offset": [0],
            "scale|r0 element_extent": [1],
            "scale|r0 local_shape": [1],
            "scale|r0 padding": {"before": [0], "after": [0], "semantic": "none"},
        },
        3,
        ("scale|r0", "2**62"),
    ),
    Plant(
        "a product far beyond int64",
        {"w|r0 global_shape": [1 << 61, 1 << 61]},
        3,
        ("w|r0", "2**62"),
    ),
    Plant(
        "coordinates out of order",
        {"w|r0 topology_coordinates": [["rank", 0], ["dp", 0], ["tp", 0]]},
        3,
        ("w|r0", "sorted"),
    ),
    Plant("no rank", {"w|r0 topology_coordinates": [["dp", 0], ["tp", 0]]}, 3, ("w|r0", "rank among them")),
    Plant(
        "an axis twice",
        {"w|r0 topology_coordinates": [["dp", 0], ["dp", 1], ["rank", 0], ["tp", 0]]},
        3,
        ("w|r0", "each axis once"),
    ),
    Plant(
        "an axis twice, under its other name",
        {"w|r0 topology_coordinates": [["dp", 0], ["dp_replicate", 0], ["rank", 0], ["tp", 0]]},
        3,
        ("w|r0", "each axis once"),
    ),
    Plant(
        "an axis less", {"w|r0 topology_coordinates": [["dp", 0], ["rank", 0]]}, 3, ("w|r0", "['dp']", "['dp', 'tp']")
    ),
    Plant(
        "an axis more",
        {"w|r0 topology_coordinates": [["dp", 0], ["pp", 0], ["rank", 0], ["tp", 0]]},
        3,
        ("w|r0", "'pp'"),
    ),
    Plant(
        "an index beyond",
        {"w|r0 topology_coordinates": [["dp", 0], ["rank", 0], ["tp", 2]]},
        3,
        ("w|r0", "outside the mesh"),
    ),
    Plant(
        "a rank beyond", {"w|r0 topology_coordinates": [["dp", 0], ["rank", 4], ["tp", 0]]}, 3, ("w|r0", "rank 4 of 4")
    ),
    Plant(
        "another rank's file", {"w|r0 payload_file": "rank-00001.safetensors"}, 3, ("w|r0", "rank-00001", "rank-00000")
    ),
    Plant(
        "a file that is no shard",
        {"w|r0 payload_file": "model.safetensors"},
        3,
        ("w|r0", "model.safetensors", "rank-00000"),
    ),
    Plant("too few digits", {"w|r0 payload_file": "rank-0000.safetensors"}, 3, ("w|r0", "rank-0000.safetensors")),
    Plant("too many digits", {"w|r0 payload_file": "rank-000000.safetensors"}, 3, ("w|r0", "rank-000000.safetensors")),
    Plant("digits of another alphabet", {"w|r0 payload_file": "rank-٠٠٠٠٠.safetensors"}, 3, ("w|r0",)),
    Plant("a line end in the name", {"w|r0 payload_file": "rank-00000.safetensors\n"}, 3, ("w|r0", r"\n")),
    Plant("a folder in the name", {"w|r0 payload_file": "a/rank-00000.safetensors"}, 3, ("w|r0", "is a path")),
    Plant("a way up", {"w|r0 payload_file": "../rank-00000.safetensors"}, 3, ("w|r0", "is a path")),
    Plant("the folder above", {"w|r0 payload_file": ".."}, 3, ("w|r0", "is a path")),
    Plant("from the root", {"w|r0 payload_file": "/etc/passwd"}, 3, ("w|r0", "is a path")),
    Plant("as elsewhere", {"w|r0 payload_file": "a\\rank-00000.safetensors"}, 3, ("w|r0", "is a path")),
    Plant("a NUL", {"w|r0 payload_file": "rank-00000.safetensors\0.h5"}, 3, ("w|r0", "is a path")),
]

CASE_FAULTS = [
    Plant("a fragment_id twice", {"w|r0 fragment_id": "scale|r0"}, 3, ("'scale|r0'", "2 times")),
    Plant(
        "one rank at two places",
        {"scale|r0 topology_coordinates": [["dp", 1], ["rank", 0], ["tp", 1]]},
        3,
        ("rank 0", "one coordinate tuple a rank"),
    ),
    Plant(
        "two ranks at one place",
        {
            "half|r1 topology_coordinates": [["dp", 0], ["rank", 1], ["tp", 0]],
            "w|r1 topology_coordinates": [["dp", 0], ["rank", 1], ["tp", 0]],
        },
        3,
        ("one coordinate tuple a rank",),
    ),
    Plant(
        "one array, nothing said of sharing",
        {"scale|r0 payload_key": "padded|r0"},
        3,
        ("padded|r0", "scale|r0", "rank-00000", "shared_storage_id"),
    ),
    Plant(
        "one array, two storages", {"fused|r0#1 shared_storage_id": "other"}, 3, ("fused|r0", "fused|r0#1", "'fused'")
    ),
    Plant("one array, one storage said once", {"fused|r0 shared_storage_id": None}, 3, ("fused|r0", "fused|r0#1")),
    Plant(
        "one array, two shapes",
        {"fused|r0#1 local_shape": [5, 2], "fused|r0#1 padding after": [1, 0]},
        3,
        ("fused|r0", "fused|r0#1", "local_shape"),
    ),
    Plant(
        "one array, two digests", {"fused|r0#1 fragment_digest": sha256(b"?")}, 4, ("fused|r0", "fused|r0#1", "digest")
    ),
    Plant("two dtypes", {"w|r2 dtype": "int32"}, 3, ("w|r2", "dtype", "'int32'", "tensor w")),
    Plant("two shapes", {"w|r2 global_shape": [5, 6]}, 3, ("w|r2", "global_shape", "(5, 6)", "(4, 6)", "tensor w")),
    Plant("two names", {"w|r2 fqn": "v"}, 3, ("w|r2", "fqn", "'v'", "tensor w")),
    Plant("two components", {"w|r2 component_id": "other"}, 3, ("w|r2", "component_id", "tensor w")),
    Plant("two roles", {"w|r2 role": "buffer"}, 3, ("w|r2", "role", "tensor w")),
    Plant("two tie groups", {"w|r2 tie_group_id": "t"}, 3, ("w|r2", "tie_group_id", "tensor w")),
    Plant("a hole", {"half|r1": DROP}, 3, ("tensor half", "[0:2, 2:4]", "half|r0 [0:2, 0:2]")),
    Plant("a box shifted", {"half|r1 element_offset": [0, 0]}, 3, ("tensor half", "half|r0", "half|r1", "overlap")),
    Plant(
        "a tensor with elements of which nobody holds any",
        {"padded|r0 element_extent": [0], "padded|r0 padding after": [7]},
        3,
        ("tensor padded", "[0:3]", "none"),
    ),
    Plant(
        "an overlap of replicas that are not declared",
        {f"w|r{rank} replica": {"group_id": None, "member_count": 1, "member_index": 0} for rank in (0, 2)},
        3,
        ("tensor w", "[0:4, 0:3]", "w|r0", "w|r2", "no declared replicas"),
    ),
    Plant("a replica less than said", {"w|r2": DROP}, 3, ("w@0,0", "1 members", "w|r0", "says 2")),
    Plant("a replica more than said", {"w|r2 replica group_id": "w@0,3"}, 3, ("w@0,3", "3 members", "w|r2")),
    Plant("members that count differently", {"w|r2 replica member_count": 3}, 3, ("w@0,0", "w|r0", "w|r2", "2, 3")),
    Plant("a member twice", {"w|r2 replica member_index": 0}, 3, ("w@0,0", "[0, 0]")),
    Plant(
        "replicas without a group",
        {"w|r0 replica group_id": None, "w|r2 replica group_id": None},
        3,
        ("w|r0", "group_id"),
    ),
    Plant(
        "replicas of two boxes",
        {"w|r2 element_extent": [4, 2], "w|r2 local_shape": [4, 2]},
        3,
        ("w@0,0", "w|r0", "w|r2", "different boxes"),
    ),
    Plant(
        "replicas of two tensors", {"w|r2 logical_tensor_id": "v", "w|r3 logical_tensor_id": "v"}, 3, ("w@0,0", "w|r2")
    ),
    Plant(
        "replicas that differ",
        {"w|r2 fragment_digest": sha256(b"?")},
        4,
        ("w@0,0", "w|r0", "w|r2", "different digests"),
    ),
    Plant(
        "tied, two dtypes", {"head|r0 dtype": "int32"}, 3, ("tie group embedding", "embed", "head", "int32", "float32")
    ),
    Plant(
        "tied, two shapes",
        {
            "head|r0 global_shape": [8],
            "head|r0 element_offset": [0],
            "head|r0 element_extent": [8],
            "head|r0 local_shape": [8],
            "head|r0 padding": {"before": [0], "after": [0], "semantic": "none"},
        },
        3,
        ("tie group embedding", "embed", "head", "[8]", "[4, 2]"),
    ),
    Plant(
        "tied, two digests",
        {"head|r0 fragment_digest": sha256(b"?")},
        4,
        ("tie group embedding", "embed", "head", "[0:4, 0:2]"),
    ),
    Plant("oracles without a file", {"oracle_file": None}, 3, ("oracle_file",)),
    Plant("the oracles elsewhere", {"oracle_file": "../oracles.safetensors"}, 3, ("oracle_file", "is a path")),
    Plant("the oracles nowhere", {"oracle_file": ".."}, 3, ("oracle_file", "is a path")),
    Plant("an oracle of nothing", {"oracles 0 logical_tensor_id": "nobody"}, 3, ("oracle of nobody",)),
    Plant("an oracle of another shape", {"oracles 0 shape": [6, 4]}, 3, ("oracle of w", "[6, 4]", "[4, 6]")),
    Plant("an oracle of another dtype", {"oracles 0 dtype": "int32"}, 3, ("oracle of w", "int32")),
]
TOPOLOGY_FAULTS = [
    Plant("another number of ranks", {"world_size": 5}, 3, ("world_size is 5", "dp=2,tp=2", "4 ranks")),
    Plant("ranks without axes", {"topology source": {"world_size": 4}}, 3, ("topology.source", "tp=4, say")),
    Plant("an axis twice", {"topology source": {"dp": 2, "dp_replicate": 2}}, 3, ("topology.source", "twice")),
    Plant("an axis of nobody", {"topology source": {"dp": 0, "tp": 2}}, 3, ("topology.source", "size 0")),
]


def test_the_manifest_to_be_broken_is_sound():
    found = found_in()
    assert (found.is_sound, found.faults, found.replicas_to_read, found.ties_to_read) == (True, [], [], [])


@pytest.mark.parametrize("plant", FIELD_FAULTS + CASE_FAULTS + TOPOLOGY_FAULTS, ids=lambda plant: plant.why)
def test_a_planted_fault_is_found_with_its_exit_code_and_its_names(plant):
    faults = found_in(plant).faults
    assert first_to_tell(faults).exit_code == plant.exit_code, list(map(str, faults))
    assert any(all(word in str(fault) for word in plant.told) for fault in faults), list(map(str, faults))
    assert all(len(str(fault).splitlines()) == 1 for fault in faults)


def test_a_box_outside_its_tensor_is_told_with_the_tensor():
    (fault, *_) = found_in(*named("a box beyond the tensor")).faults
    assert "tensor w" in str(fault)


def test_a_manifest_that_was_changed_after_it_was_written_is_an_integrity_error():
    (fault,) = found_in(Plant("role", {"scale|r0 role": "buffer"}, 4, ()), seal=False).faults
    assert fault.exit_code == 4
    assert "expected_manifest_digest" in str(fault)


def test_a_manifest_without_a_digest_is_taken_as_it_is():
    assert check_case(parsed(good() | {"expected_manifest_digest": None})).faults == []


# Several at once


def find_all(plants: list[Plant]) -> list[str]:
    """The plants that no fault tells."""
    faults = found_in(*plants).faults
    return [p.why for p in plants if not any(all(word in str(fault) for word in p.told) for fault in faults)]


def named(*reasons: str) -> list[Plant]:
    return [plant for plant in FIELD_FAULTS + CASE_FAULTS + TOPOLOGY_FAULTS if plant.why in reasons]


def test_faults_of_several_fragments_are_found_at_once():
    plants = named(
        "a box beyond the tensor",
        "padding of semantic none",
        "half a byte",
        "an axis for a 0-d tensor",
        "another rank's file",
    )
    assert len(plants) == 5 and find_all(plants) == []


def test_faults_of_several_tensors_are_found_at_once():
    plants = named(
        "a hole", "replicas that differ", "tied, two digests", "an oracle of another shape", "one array, two digests"
    )
    assert len(plants) == 5 and find_all(plants) == []


def test_holes_of_several_tensors_are_found_at_once():
    plants = named("a hole", "a tensor with elements of which nobody holds any")
    assert len(plants) == 2 and find_all(plants) == []


def test_an_overlap_does_not_hide_a_hole_of_another_tensor():
    overlap = named("an overlap of replicas that are not declared")
    assert find_all(overlap + named("a hole")) == []


def test_overlaps_of_two_tensors_are_both_found():
    assert find_all(named("an overlap of replicas that are not declared", "a box shifted")) == []


def test_a_fault_of_one_fragment_does_not_hide_a_hole_of_another_tensor():
    assert find_all(named("another rank's file", "a hole")) == []


def test_a_disagreement_within_one_tensor_does_not_hide_a_hole_of_another():
    assert find_all(named("two names", "a hole")) == []


def test_a_wrong_world_size_does_not_hide_a_hole():
    assert find_all(named("another number of ranks", "a hole")) == []


# Whatever a manifest says, it is judged


def test_a_case_of_which_nobody_holds_an_element_is_bad_input():
    raw = manifest(SINGLE, tensor("w", (4,), {(): [((0,), (0,))]}, SINGLE))
    assert first_to_tell(check_case(parsed(raw)).faults).exit_code == 3


def test_a_matrix_of_which_nobody_holds_an_element_is_bad_input_also_beside_vectors():
    raw = manifest(
        SINGLE,
        tensor("matrix", (4, 2), {(): [((0, 0), (0, 2))]}, SINGLE),
        tensor("vector", (4,), {(): [whole((4,))]}, SINGLE),
    )
    assert first_to_tell(check_case(parsed(raw)).faults).exit_code == 3


def spoil(dice: Dice, raw: dict[str, Any]) -> None:
    """Something else somewhere: what a careless writer, or a hostile one, might have put there."""
    sizes = [0, 1, 2, 3, 4, 6, 8, 1 << 61, (1 << 62) - 1]
    one = dice.pick(raw["fragments"])
    naxes = len(one["global_shape"]) if dice.chance(85) else dice.integer(0, 3)
    numbers = [dice.pick(sizes[:7] if dice.chance(90) else sizes) for _ in range(naxes)]
    match dice.integer(0, 7):
        case 0 | 1 | 2:
            one[dice.pick(["global_shape", "element_offset", "element_extent", "local_shape"])] = numbers
            if dice.chance(70):  # then let the rest fit
                none = [0] * len(one["element_extent"])
                one["local_shape"] = one["element_extent"]
                one["padding"] = {"before": none, "after": none, "semantic": "none"}
        case 3:
            one["padding"][dice.pick(["before", "after"])] = numbers
            one["padding"]["semantic"] = dice.pick(["none", "alignment"])
        case 4:
            group_id = dice.pick([None, "", "g", "w@0,0"])
            one["replica"] = {
                "group_id": group_id,
                "member_count": dice.integer(1, 3),
                "member_index": dice.integer(0, 2),
            }
        case 5:
            raw["fragments"].remove(one)
        case 6:
            one[dice.pick(["logical_tensor_id", "tie_group_id", "shared_storage_id", "payload_key"])] = dice.pick(
                ["w", "t"]
            )
        case 7:
            one["dtype"] = dice.pick(["int32", "float4_e2m1fn", "complex64", "void"])


def test_no_manifest_makes_the_judge_fail_and_what_passes_can_be_resharded_into_what_passes():
    passed = 0
    for seed in range(300):
        dice, raw = Dice(seed), copy.deepcopy(good())
        for _ in range(dice.integer(1, 3)):
            spoil(dice, raw)
        read = parsed(sealed(raw))
        if check_case(read).faults:
            continue
        passed += 1
        target = parse_target(dice.pick(["single", "dp=2", "fsdp=3", "pp=2,dp=2", "tp=3"]))
        layout, faults = target_layout(read.case, target)
        if not faults:
            with contextlib.suppress(InputError):  # half bytes, cut within a byte
                out = outgoing_case(read.case, layout, target, list(layout)).case
                assert check_case(parse_case(case_text(out))).faults == []
    assert passed > 30


# What digests can't settle is left to be read


@pytest.mark.parametrize(
    "why, changes",
    [
        ("no digests", {"w|r0 fragment_digest": None, "w|r2 fragment_digest": None}),
        ("one without digest", {"w|r2 fragment_digest": None}),
        (
            "padded: digests count the padding too",
            {"w|r2 local_shape": [4, 4], "w|r2 padding": {"before": [0, 1], "after": [0, 0], "semantic": "alignment"}},
        ),
    ],
)
def test_replicas_whose_digests_say_nothing_are_to_be_read(why, changes):
    found = found_in(Plant(why, changes, 0, ()))
    assert found.faults == []
    assert [[f.fragment_id for f in members] for members in found.replicas_to_read] == [["w|r0", "w|r2"]]


@pytest.mark.parametrize(
    "why, changes",
    [
        ("no digest", {"head|r0 fragment_digest": None}),
        (
            "padded",
            {
                "head|r0 local_shape": [4, 3],
                "head|r0 padding": {"before": [0, 0], "after": [0, 1], "semantic": "alignment"},
            },
        ),
    ],
)
def test_ties_whose_digests_say_nothing_are_to_be_read(why, changes):
    found = found_in(Plant(why, changes, 0, ()))
    assert (found.faults, found.ties_to_read) == ([], [("embed", "head")])


def test_ties_that_are_cut_differently_are_to_be_read():
    axes = {"tp": 2}
    rows = {(0,): [((0, 0), (2, 2))], (1,): [((2, 0), (2, 2))]}
    columns = {(0,): [((0, 0), (4, 1))], (1,): [((0, 1), (4, 1))]}
    raw = manifest(
        axes, *(tensor(name, (4, 2), held, axes, tie_group_id="t") for name, held in (("a", rows), ("b", columns)))
    )
    found = check_case(parsed(raw))
    assert (found.faults, found.ties_to_read) == ([], [("a", "b")])


def test_boxes_without_elements_take_part_in_no_check_of_coverage_or_replicas():
    axes = {"fsdp": 4}
    held = {(0,): [((0,), (2,))], (1,): [((2,), (1,))], (2,): [((3,), (0,))], (3,): [((3,), (0,))]}
    raw = manifest(axes, tensor("w", (3,), held, axes))
    raw["fragments"][3]["replica"] = {"group_id": "odd", "member_count": 7, "member_index": 5}
    assert check_case(parsed(sealed(raw))).faults == []


@pytest.mark.parametrize("offset", [0, 3, 4, 1 << 60])
def test_a_box_without_elements_may_stand_anywhere(offset):
    axes = {"fsdp": 2}
    raw = manifest(axes, tensor("w", (3,), {(0,): [whole((3,))], (1,): [((offset,), (0,))]}, axes))
    assert check_case(parsed(raw)).faults == []


def test_axes_go_by_either_name():
    axes = {"dp_shard": 2}
    raw = manifest(axes, tensor("w", (4,), {(0,): [((0,), (2,))], (1,): [((2,), (2,))]}, axes))
    assert check_case(parsed(raw)).faults == []
    raw["topology"]["source"] = {"fsdp": 2}
    assert check_case(parsed(raw)).faults == []


def test_an_axis_of_one_coordinate_need_not_be_named():
    raw = manifest({"pp": 1, "tp": 1}, tensor("w", (4,), {(): [whole((4,))]}, SINGLE))
    assert check_case(parsed(raw)).faults == []


def test_a_case_without_fragments_is_sound():
    found = check_case(parsed(manifest(AXES)))
    assert (found.is_sound, found.faults) == (True, [])


@pytest.mark.parametrize("indices", [(0, 1), (1, 2), (7, 1 << 40)])
def test_of_each_replica_group_the_member_of_the_lowest_index_stands_for_all(indices):
    raw = good()
    for one in raw["fragments"]:
        if one["logical_tensor_id"] == "w":
            one["replica"]["member_index"] = indices[one["replica"]["member_index"]]
    read = parsed(sealed(raw))
    assert check_case(read).faults == []
    mine = [f for f in read.case.fragments if f.logical_tensor_id == "w"]
    assert [f.fragment_id for f in distinct_boxes(mine[::-1])] == ["w|r1", "w|r0"]
    assert {g: [f.fragment_id for f in m] for g, m in replica_groups(mine[::-1]).items()} == {
        "w@0,3": ["w|r1", "w|r3"],
        "w@0,0": ["w|r0", "w|r2"],
    }
