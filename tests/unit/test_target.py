"""The case to be written: keys, aliases, replica groups, evidence, and the order of everything."""

import itertools

import pytest

from reshard_mpi.boxes import join
from reshard_mpi.checkpoint.manifest import Case
from reshard_mpi.checkpoint.mesh import parse_target
from reshard_mpi.errors import InputError
from reshard_mpi.layout import target as target_module
from reshard_mpi.layout.rules import target_layout
from reshard_mpi.layout.target import Outgoing, outgoing_case, payload_keys
from tests.unit.manifests import SINGLE, case_of, everywhere, manifest, parsed, sealed, tensor, whole


def outgoing(case: Case, target: str = "single", included=None, given=None) -> Outgoing:
    layout, faults = target_layout(case, parse_target(target), given)
    assert not faults, list(map(str, faults))
    return outgoing_case(case, layout, parse_target(target), layout if included is None else included)


def named(*tensors: tuple[str, str, str]) -> Case:
    """Unsharded vectors: (id, component, fqn)."""
    return case_of(
        SINGLE,
        *(
            tensor(tensor_id, (2,), {(): [whole((2,))]}, SINGLE, component_id=component, fqn=fqn)
            for tensor_id, component, fqn in tensors
        ),
    )


# Keys


KEYS = [
    ("one of a name keeps it", [("x", "model", "w")], {"x": "w"}),
    ("one of a name keeps it, whatever its component", [("x", "optimizer", "w")], {"x": "w"}),
    (
        "the model keeps the bare name, others are qualified",
        [("x", "model", "w"), ("m", "exp_avg", "w"), ("v", "exp_avg_sq", "w")],
        {"x": "w", "m": "exp_avg/w", "v": "exp_avg_sq/w"},
    ),
    (
        "without a model all are qualified",
        [("m", "exp_avg", "w"), ("v", "exp_avg_sq", "w")],
        {"m": "exp_avg/w", "v": "exp_avg_sq/w"},
    ),
    (
        "two of one component go by their ids",
        [("m", "optimizer", "w"), ("v", "optimizer", "w"), ("x", "model", "w")],
        {"m": "m", "v": "v", "x": "w"},
    ),
    ("two of the model go by their ids", [("a", "model", "w"), ("b", "model", "w")], {"a": "a", "b": "b"}),
    (
        "a qualified name that is the name of another is not unique",
        [("m", "o", "w"), ("x", "model", "w"), ("y", "model", "o/w")],
        {"m": "m", "x": "w", "y": "o/w"},
    ),
    (
        "a qualified name that two components spell alike is not unique",
        [("m", "a/b", "w"), ("n", "a", "b/w"), ("x", "model", "w"), ("y", "model", "b/w")],
        {"m": "m", "n": "n", "x": "w", "y": "b/w"},
    ),
]


@pytest.mark.parametrize("why, tensors, keys", KEYS, ids=[row[0] for row in KEYS])
def test_the_key_of_a_tensor_is_its_name_as_far_as_that_is_unique(why, tensors, keys):
    for order in itertools.permutations(tensors):
        assert payload_keys(named(*order)) == keys


@pytest.mark.parametrize(
    "why, tensors, told",
    [
        ("an id is the name of another", [("x", "o", "w"), ("y", "o", "w"), ("z", "model", "x")], "'x'"),
        ("a name that headers keep", [("x", "model", "__metadata__")], "__metadata__"),
        ("an id that headers keep", [("__metadata__", "o", "w"), ("y", "o", "w")], "__metadata__"),
    ],
)
def test_a_key_that_still_clashes_is_bad_input_that_names_it(why, tensors, told):
    with pytest.raises(InputError, match=told):
        payload_keys(named(*tensors))


def test_keys_are_decided_for_the_whole_case_also_when_only_a_part_is_written():
    case = named(("m", "exp_avg", "w"), ("v", "exp_avg_sq", "w"))
    (fragment,) = outgoing(case, included=["m"]).case.fragments
    assert fragment.payload_key == "exp_avg/w"


# Fragments


def example() -> Case:
    """tp 2, dp 2: columns, and a scalar on every rank."""
    axes = {"dp": 2, "tp": 2}
    columns = {(d, t): [((0, 3 * t), (4, 3))] for d, t in everywhere(axes)}
    return case_of(
        axes,
        tensor("w", (4, 6), columns, axes),
        tensor("scale", (), {where: [whole(())] for where in everywhere(axes)}, axes),
    )


def test_fragments_come_by_rank_then_tensor_then_offset_and_are_named_after_both():
    fragments = outgoing(example(), "dp=2,tp=3").case.fragments
    order = [(f.rank, f.logical_tensor_id, f.element_offset) for f in fragments]
    assert order == sorted(order)
    assert [f.fragment_id for f in fragments] == [f"{name}|r{rank}" for rank in range(6) for name in ("scale", "w")]


def test_a_fragment_says_where_it_is_and_that_nothing_pads_it():
    fragment = next(f for f in outgoing(example(), "dp=2,tp=3").case.fragments if f.fragment_id == "w|r4")
    assert fragment.box == ((0, 2), (4, 2))
    assert fragment.local_shape == fragment.element_extent
    assert (fragment.padding.before, fragment.padding.after, fragment.padding.semantic) == ((0, 0), (0, 0), "none")
    assert fragment.topology_coordinates == (("dp", 1), ("rank", 4), ("tp", 1))
    assert fragment.payload_file == fragment.shard_file_id == "rank-00004.safetensors"
    assert fragment.shard_digest_ref == "source-digest:rank-00004.safetensors"
    assert fragment.partition_axes == (1,)
    assert (fragment.fragment_digest, fragment.shared_storage_id, fragment.tie_group_id) == (None, None, None)


def test_replicas_are_numbered_among_the_ranks_that_hold_the_box():
    out = outgoing(example(), "dp=2,tp=3")
    replicas = {f.fragment_id: f.replica for f in out.case.fragments}
    for d, t in itertools.product(range(2), range(3)):
        replica = replicas[f"w|r{3 * d + t}"]
        assert (replica.group_id, replica.member_count, replica.member_index) == (f"w@0,{2 * t}", 2, d)
        scale = replicas[f"scale|r{3 * d + t}"]
        assert (scale.group_id, scale.member_count, scale.member_index) == ("scale@", 6, 3 * d + t)


def test_ranks_in_between_that_hold_other_boxes_do_not_count():
    out = outgoing(example(), "dp=3,tp=2").case.fragments
    held = {f.fragment_id: (f.replica.member_count, f.replica.member_index) for f in out if f.logical_tensor_id == "w"}
    assert held == {f"w|r{rank}": (3, rank // 2) for rank in range(6)}


def test_a_box_of_one_rank_is_in_no_group():
    fragment = next(f for f in outgoing(example()).case.fragments if f.logical_tensor_id == "w")
    assert (fragment.replica.group_id, fragment.replica.member_count, fragment.replica.member_index) == (None, 1, 0)


def test_parts_without_elements_are_written_and_in_no_group():
    case = case_of(SINGLE, tensor("w", (2, 3), {(): [whole((2, 3))]}, SINGLE))
    fragments = outgoing(case, "fsdp=4").case.fragments
    assert [f.box for f in fragments] == [((0, 0), (1, 3)), ((1, 0), (1, 3)), ((2, 0), (0, 3)), ((2, 0), (0, 3))]
    assert [(f.replica.group_id, f.replica.member_count) for f in fragments] == [(None, 1)] * 4
    assert [f.evidence_refs for f in fragments[2:]] == [(), ()]


def test_a_tensor_without_elements_is_written_on_all_ranks():
    case = case_of(SINGLE, tensor("void", (0, 3), {(): [whole((0, 3))]}, SINGLE))
    fragments = outgoing(case, "tp=2").case.fragments
    assert [(f.rank, f.box, f.replica.member_count) for f in fragments] == [(r, whole((0, 3)), 1) for r in (0, 1)]


def test_the_whole_case_says_what_it_is_and_where_it_came_from():
    raw = manifest({"tp": 2}, tensor("w", (4,), {(0,): [((0,), (2,))], (1,): [((2,), (2,))]}, {"tp": 2}))
    raw |= {"case_id": "mine", "components": ["a", "b"], "features": ["c"]}
    case = outgoing(parsed(raw).case, "dp_replicate=3").case
    assert (case.case_id, case.components, case.features) == ("mine", ("a", "b"), ("c",))
    assert (case.topology.source, case.topology.target, case.world_size) == ({"dp": 3}, {"tp": 2}, 3)
    assert case.topology.layout == {"w": {"dp": "replicate", "tp": 0}}
    assert (case.schema_id, case.schema_version) == ("obliteratus.checkpoint-fixture-case", "1.0.0")


def test_oracles_are_carried_through_for_the_tensors_included():
    oracles = [
        {
            "dtype": "float32",
            "logical_tensor_id": name,
            "payload_key": name,
            "sha256": "sha256:" + 64 * "0",
            "shape": [2],
        }
        for name in ("a", "b")
    ]
    vectors = [tensor(name, (2,), {(): [whole((2,))]}, SINGLE) for name in ("a", "b", "c")]
    case = case_of(SINGLE, *vectors, oracle_file="elsewhere.safetensors", oracles=oracles)
    assert [o.logical_tensor_id for o in outgoing(case).case.oracles] == ["a", "b"]
    assert outgoing(case).case.oracle_file == "oracles.safetensors"
    only_c = outgoing(case, included=["c"]).case
    assert (only_c.oracles, only_c.oracle_file) == ((), None)


# Evidence


@pytest.mark.parametrize(
    "why, nparts, refs",
    [
        ("64 are listed", 64, sorted(f"made#w|r{n}" for n in range(64))),
        ("65 are not", 65, ["made#*"]),
        ("one", 1, ["made#w|r0"]),
    ],
)
def test_evidence_lists_up_to_64_source_fragments(why, nparts, refs):
    axes = {"tp": nparts}
    case = case_of(axes, tensor("w", (nparts,), {(n,): [((n,), (1,))] for n in range(nparts)}, axes))
    (fragment,) = outgoing(case).case.fragments
    assert list(fragment.evidence_refs) == refs


def test_evidence_names_the_fragments_that_are_met_and_of_replicas_member_0():
    raw = manifest(
        {"dp": 2, "tp": 2},
        tensor("w", (6,), {(d, t): [((3 * t,), (3,))] for d, t in everywhere({"dp": 2, "tp": 2})}, {"dp": 2, "tp": 2}),
    )
    for one in raw["fragments"]:  # the later rank is member 0
        one["replica"]["member_index"] = 1 - one["replica"]["member_index"]
    fragments = outgoing(parsed(sealed(raw)).case, "tp=3").case.fragments
    assert [f.evidence_refs for f in fragments] == [
        ("made#w|r2",),
        ("made#w|r2", "made#w|r3"),
        ("made#w|r3",),
    ]


def test_source_fragments_without_elements_are_no_evidence():
    axes = {"fsdp": 3}
    held = {(0,): [((0,), (1,))], (1,): [((1,), (1,))], (2,): [((2,), (0,))]}
    (fragment,) = outgoing(case_of(axes, tensor("w", (2,), held, axes))).case.fragments
    assert fragment.evidence_refs == ("made#w|r0", "made#w|r1")


def test_evidence_is_found_for_many_tensors_at_once_and_is_the_same_for_one_at_a_time(monkeypatch):
    axes, calls = {"tp": 2}, []
    held = {(t,): [((0, 3 * t), (4, 3))] for t in (0, 1)}
    tensors = [tensor(f"w{n}", (4, 6), held, axes) for n in range(30)]
    case = case_of(axes, *tensors, tensor("scale", (), {where: [whole(())] for where in everywhere(axes)}, axes))
    monkeypatch.setattr(target_module, "join", lambda *sides: calls.append(sides) or join(*sides))
    together = outgoing(case, "tp=3").case.fragments
    assert len(calls) == 1
    monkeypatch.setattr(target_module, "PAIRS_AT_ONCE", 0)
    assert outgoing(case, "tp=3").case.fragments == together
    assert len(calls) == 1 + 31 + 1
    assert [f.evidence_refs for f in together[:2]] == [("made#scale|r0",), ("made#w0|r0",)]


# Arrays


def test_arrays_come_by_rank_then_item_size_then_key():
    kinds = [
        ("c", "bool"),
        ("b", "float64"),
        ("a", "bfloat16"),
        ("d", "float32"),
        ("e", "float4_e2m1fn"),
        ("f", "float64"),
        ("Z", "bool"),
    ]
    case = case_of(SINGLE, *(tensor(n, (4,), {(): [whole((4,))]}, SINGLE, dtype=dtype) for n, dtype in kinds))
    out = outgoing(case, "dp=2")
    assert [(a.rank, a.key) for a in out.arrays] == [(rank, key) for rank in (0, 1) for key in "bfdaZce"]
    for fragment, index in zip(out.case.fragments, out.array_of, strict=True):
        array = out.arrays[index]
        assert (array.rank, array.key, array.box, array.dtype) == (
            fragment.rank,
            fragment.payload_key,
            fragment.box,
            fragment.dtype,
        )


def test_a_cut_of_half_bytes_off_a_byte_boundary_is_bad_input_that_names_the_tensor():
    case = case_of(SINGLE, tensor("w", (6,), {(): [whole((6,))]}, SINGLE, dtype="float4_e2m1fn"))
    assert len(outgoing(case, "fsdp=3").arrays) == 3
    with pytest.raises(InputError, match="tensor w on target rank 0: 3 elements"):
        outgoing(case, "fsdp=2")


def sharing(axes, shape, held, *names: str, **changes) -> Case:
    """Tensors that are one and the same stored array."""
    tensors = [tensor(name, shape, held, axes, tie_group_id="t") for name in names]
    for others in zip(*tensors, strict=True):
        for one in others:
            one |= {"payload_key": others[0]["payload_key"], "shared_storage_id": others[0]["payload_key"]}
            one["fragment_digest"] = others[0]["fragment_digest"]
    raw = manifest(axes, *tensors)
    for path, value in changes.items():
        raw["fragments"][-1][path] = value
    return parsed(sealed(raw)).case


def test_tensors_that_were_one_array_are_one_array_again_with_the_others_as_aliases():
    case = sharing(SINGLE, (4, 2), {(): [whole((4, 2))]}, "z", "embed", "head")
    out = outgoing(case, "fsdp=2")
    assert [(a.rank, a.key) for a in out.arrays] == [(0, "embed"), (1, "embed")]
    assert out.aliases == {rank: {"head": "embed", "z": "embed"} for rank in (0, 1)}
    for fragment in out.case.fragments:
        assert (fragment.payload_key, fragment.shared_storage_id) == ("embed", f"embed|r{fragment.rank}")


def test_tensors_that_were_one_array_are_kept_apart_where_their_boxes_part():
    """The layout splits one and replicates the other: no rank holds the same box of both."""
    case = sharing(SINGLE, (4, 2), {(): [whole((4, 2))]}, "embed", "head")
    out = outgoing(case, "tp=2", given={"embed": {"tp": 0}, "head": {"tp": "replicate"}})
    assert [(a.rank, a.key) for a in out.arrays] == [(r, k) for r in (0, 1) for k in ("embed", "head")]
    assert dict(out.aliases) == {}
    assert {f.shared_storage_id for f in out.case.fragments} == {None}


def test_only_where_the_keeper_is_too_an_alias_stands():
    """With stages, head is on the last one alone, embed on the first alone: each has its own array."""
    axes = {"pp": 2}
    raw = manifest(
        axes,
        tensor("embed", (2,), {(0,): [whole((2,))]}, axes, tie_group_id="t"),
        tensor("head", (2,), {(1,): [whole((2,))]}, axes, tie_group_id="t"),
    )
    out = outgoing(parsed(raw).case)
    assert [a.key for a in out.arrays] == ["embed", "head"]  # they never were one array


def test_tensors_tied_but_stored_twice_are_stored_twice():
    vectors = [tensor(name, (2,), {(): [whole((2,))]}, SINGLE, tie_group_id="t") for name in ("a", "b")]
    out = outgoing(case_of(SINGLE, *vectors))
    assert [a.key for a in out.arrays] == ["a", "b"]
    assert {f.tie_group_id for f in out.case.fragments} == {"t"}


def test_parts_of_one_array_that_are_different_boxes_are_not_one_tensor():
    """gate and up side by side in one array."""
    raw = manifest(SINGLE, *(tensor(n, (2, 2), {(): [whole((2, 2))]}, SINGLE) for n in ("gate", "up")))
    for n, one in enumerate(raw["fragments"]):
        one |= {"payload_key": "gate_up", "shared_storage_id": "s", "local_shape": [4, 2], "fragment_digest": None}
        one["padding"] = {"before": [2 * n, 0], "after": [2 - 2 * n, 0], "semantic": "view"}
    out = outgoing(parsed(sealed(raw)).case)
    assert [a.key for a in out.arrays] == ["gate", "up"]


def test_a_target_rank_without_data_has_coordinates_and_no_arrays():
    axes = {"pp": 2}
    case = case_of(axes, tensor("w", (2,), {(0,): [whole((2,))]}, axes))
    out = outgoing(case, "pp=3")
    assert (out.nranks, out.case.world_size, [a.rank for a in out.arrays]) == (3, 3, [0])


def test_only_the_included_tensors_are_written_but_layers_are_counted_before():
    vectors = [tensor(f"layers.{n}.w", (2,), {(): [whole((2,))]}, SINGLE) for n in range(4)]
    out = outgoing(case_of(SINGLE, *vectors), "pp=2", included=["layers.1.w"])
    assert [(f.logical_tensor_id, f.rank) for f in out.case.fragments] == [("layers.1.w", 0)]
    assert list(out.case.topology.layout) == ["layers.1.w"]
