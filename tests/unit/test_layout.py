"""What mesh axes do to tensors: inferred, read, or by default; and which boxes follow in the target."""

import numpy as np
import pytest

from reshard_mpi.checkpoint.manifest import Case, Layout, Stages
from reshard_mpi.checkpoint.mesh import Mesh, parse_target
from reshard_mpi.errors import first_to_tell
from reshard_mpi.layout.rules import (
    Stacks,
    Tensor,
    Undetermined,
    infer_rules,
    partition_axes,
    placement_of,
    target_boxes,
    target_layout,
)
from reshard_mpi.layout.target import outgoing_case
from tests.reference.handmade import COORDINATES, HIGH, LOW, WHOLE
from tests.unit.manifests import SINGLE, case_of, everywhere, tensor, whole

Held = dict[int, tuple[tuple[int, ...], tuple[int, ...]]]  # rank -> box


def rules_of(case: Case, target: str = "single", given: Layout | None = None) -> Layout:
    layout, faults = target_layout(case, parse_target(target), given)
    assert not faults, list(map(str, faults))
    return layout


def refusals(case: Case, target: str, given: Layout | None = None) -> list[str]:
    _, faults = target_layout(case, parse_target(target), given)
    assert first_to_tell(faults) is None or first_to_tell(faults).exit_code == 3
    return list(map(str, faults))


def boxes_in(case: Case, target: str, given: Layout | None = None) -> dict[str, Held]:
    """tensor -> rank -> box."""
    layout, mesh = rules_of(case, target, given), parse_target(target)
    stacks = Stacks(fragment.fqn for fragment in case.fragments)
    shapes = {fragment.logical_tensor_id: (fragment.fqn, fragment.global_shape) for fragment in case.fragments}
    return {
        name: dict(target_boxes(placement_of(Tensor(name, fqn, shape), layout[name], mesh, stacks)))
        for name, (fqn, shape) in shapes.items()
    }


def unsharded(*named: tuple[str, tuple[int, ...]]) -> Case:
    return case_of(SINGLE, *(tensor(name, shape, {(): [whole(shape)]}, SINGLE) for name, shape in named))


def as_rule(answer: object) -> object:
    return Stages(tuple(answer["stages"]), answer["of"]) if isinstance(answer, dict) else answer


# Inferred from the coordinates


@pytest.mark.parametrize("why, boxes, pp, tp", COORDINATES, ids=[row[0] for row in COORDINATES])
def test_what_the_coordinates_show(why, boxes, pp, tp):
    axes = {"pp": 2, "tp": 2}
    case = case_of(axes, tensor("w", (4, 4), boxes, axes))
    expected = {axis: as_rule(answer) for axis, answer in (("pp", pp), ("tp", tp)) if answer is not None}
    assert rules_of(case)["w"] == expected
    for axis, answer in (("pp", pp), ("tp", tp)):
        told = refusals(case, f"{axis}=3")
        assert len(told) == (answer is None)
        assert all(
            f"mesh axis {axis}: " in line and "1 tensors: w" in line and "in topology.layout what it does" in line
            for line in told
        )


def lines(size: int, axis: str, held: dict[int, list]) -> dict:
    return {"axes": {axis: size}, "held": {(index,): boxes for index, boxes in held.items()}}


INFERRED = [
    ("rows", (5, 4), lines(2, "tp", {0: [((0, 0), (3, 4))], 1: [((3, 0), (2, 4))]}), 0),
    ("columns", (5, 4), lines(2, "tp", {0: [((0, 0), (5, 2))], 1: [((0, 2), (5, 2))]}), 1),
    (
        "rows, cut as nobody else would",
        (5, 4),
        lines(3, "tp", {0: [((0, 0), (1, 4))], 1: [((1, 0), (1, 4))], 2: [((2, 0), (3, 4))]}),
        0,
    ),
    (
        "the last parts are empty",
        (2,),
        lines(4, "fsdp", {0: [((0,), (1,))], 1: [((1,), (1,))], 2: [((2,), (0,))], 3: [((2,), (0,))]}),
        0,
    ),
    ("the empty parts were not written", (2,), lines(4, "fsdp", {0: [((0,), (1,))], 1: [((1,), (1,))]}), 0),
    ("only the extent tells", (3, 4), lines(2, "fsdp", {0: [((0, 0), (3, 4))], 1: [((3, 0), (0, 4))]}), 0),
    ("all hold it", (5, 4), lines(2, "tp", {0: [whole((5, 4))], 1: [whole((5, 4))]}), "replicate"),
    ("0-d, on all", (), lines(2, "tp", {0: [whole(())], 1: [whole(())]}), "replicate"),
    ("0-d, on one stage", (), lines(2, "pp", {1: [whole(())]}), Stages((1,), 2)),
    ("one stage of three", (5,), lines(3, "pp", {1: [whole((5,))]}), Stages((1,), 3)),
    ("two stages of three", (5,), lines(3, "pp", {0: [whole((5,))], 2: [whole((5,))]}), Stages((0, 2), 3)),
    ("all stages", (5,), lines(3, "pp", {n: [whole((5,))] for n in range(3)}), "replicate"),
    ("one expert rank", (5,), lines(3, "ep", {2: [whole((5,))]}), Stages((2,), 3)),
    ("saved once by tp", (5,), lines(3, "tp", {2: [whole((5,))]}), "replicate"),
    ("saved once by dp", (5,), lines(2, "dp", {0: [whole((5,))]}), "replicate"),
    ("saved once by an axis of another name", (5,), lines(2, "zz", {1: [whole((5,))]}), "replicate"),
    ("pp may split like any other", (4,), lines(2, "pp", {0: [((0,), (2,))], 1: [((2,), (2,))]}), 0),
    ("dp may split like any other", (4,), lines(2, "dp", {0: [((0,), (2,))], 1: [((2,), (2,))]}), 0),
    ("no elements, on all", (0, 4), lines(2, "tp", {0: [whole((0, 4))], 1: [whole((0, 4))]}), "replicate"),
    (
        "no elements, but its boxes show a split",
        (0, 4),
        lines(2, "tp", {0: [((0, 0), (0, 2))], 1: [((0, 2), (0, 2))]}),
        1,
    ),
    (
        "fused: two boxes a rank",
        (4, 3),
        lines(2, "tp", {0: [((0, 0), (1, 3)), ((2, 0), (1, 3))], 1: [((1, 0), (1, 3)), ((3, 0), (1, 3))]}),
        0,
    ),
]


@pytest.mark.parametrize("why, shape, held, rule", INFERRED, ids=[row[0] for row in INFERRED])
def test_what_one_mesh_axis_does_is_read_from_who_holds_what(why, shape, held, rule):
    (axis,) = held["axes"]
    case = case_of(held["axes"], tensor("w", shape, held["held"], held["axes"]))
    assert rules_of(case)["w"] == {axis: rule}


@pytest.mark.parametrize(
    "why, axis, held, told",
    [
        (
            "held on other coordinates, other boxes",
            "zz",
            {(0, 0): LOW, (0, 1): LOW, (1, 0): HIGH},
            "hold a box depends",
        ),
        ("the same for an axis that places", "pp", {(0, 0): LOW, (0, 1): LOW, (1, 0): HIGH}, "hold a box depends"),
        ("the same box, placed otherwise", "pp", {(0, 0): WHOLE, (1, 1): WHOLE}, "where it places the tensor depends"),
        ("two tensor axes at once", "zz", {(0, 0): LOW, (0, 1): ((2, 2), (2, 2))}, "along tensor axes 0, 1 at once"),
    ],
)
def test_what_the_coordinates_do_not_show_is_undetermined_with_its_reason(why, axis, held, told):
    """The axis in question is the second, of three coordinates; the first is tp."""
    rules = infer_rules((("tp", 2), (axis, 3)), tuple((where, (box,)) for where, box in held.items()))
    assert isinstance(rules[axis], Undetermined) and told in rules[axis].reason


@pytest.mark.parametrize("axis", ["tp", "dp", "zz"])
def test_one_box_on_whatever_coordinates_is_no_riddle_for_an_axis_that_does_not_place(axis):
    held = {(0, 0): WHOLE, (1, 1): WHOLE}
    rules = infer_rules((("fsdp", 2), (axis, 3)), tuple((where, (box,)) for where, box in held.items()))
    assert rules == {"fsdp": "replicate", axis: "replicate"}


def test_an_axis_is_inferred_whatever_the_others_do():
    """pp places, dp replicates, tp splits columns, fsdp rows; ranks hold nothing on the other stage."""
    axes = {"pp": 2, "dp": 2, "fsdp": 2, "tp": 2}
    held = {(1, d, f, t): [((2 * f, 3 * t), (2, 3))] for _, d, f, t in everywhere(axes) if _}
    case = case_of(axes, tensor("w", (4, 6), held, axes))
    assert rules_of(case)["w"] == {"pp": Stages((1,), 2), "dp": "replicate", "fsdp": 0, "tp": 1}


def test_axes_go_by_their_one_name():
    axes = {"dp_replicate": 2, "dp_shard": 2}
    held = {(d, s): [((2 * s,), (2,))] for d, s in everywhere(axes)}
    case = case_of(
        axes,
        tensor("w", (4,), held, axes),
        topology={"source": axes, "target": {"world_size": 1}, "layout": {"w": {"dp_shard": 0}}},
    )
    assert rules_of(case)["w"] == {"dp": "replicate", "fsdp": 0}


def test_an_axis_of_size_1_is_an_axis_that_the_source_does_not_have():
    axes = {"fsdp": 1, "tp": 1}
    case = case_of(axes, tensor("w", (4, 6), {(0, 0): [whole((4, 6))]}, axes))
    assert rules_of(case)["w"] == {}
    assert rules_of(case, "fsdp=2")["w"] == {"fsdp": 0}
    assert rules_of(case, "tp=1")["w"] == {}
    assert refusals(case, "tp=2")


# By default


@pytest.mark.parametrize(
    "why, name, shape, target, rule",
    [
        ("dp replicates", "w", (4, 4), "dp=2", "replicate"),
        ("cp replicates", "w", (4, 4), "cp=2", "replicate"),
        ("fsdp splits axis 0", "w", (4, 4), "fsdp=2", 0),
        ("fsdp replicates 0-d tensors", "w", (), "fsdp=2", "replicate"),
        ("ep places experts", "mlp.experts.3.w", (4,), "ep=2", Stages((1,), 2)),
        ("ep replicates others", "mlp.router.w", (4,), "ep=2", "replicate"),
        ("experts must be numbered between dots", "experts.3", (4,), "ep=2", "replicate"),
        ("pp places layers", "layers.0.w", (4,), "pp=2", Stages((0,), 2)),
        ("pp places 0-d tensors too", "layers.0.scale", (), "pp=2", Stages((0,), 2)),
        ("embeddings go first", "model.embed_tokens.weight", (4,), "pp=3", Stages((0,), 3)),
        ("wte goes first", "transformer.wte.weight", (4,), "pp=3", Stages((0,), 3)),
        ("wpe goes first", "transformer.wpe.weight", (4,), "pp=3", Stages((0,), 3)),
        ("the rest goes last", "model.norm.weight", (4,), "pp=3", Stages((2,), 3)),
        ("a layer's number goes before its name", "layers.1.embed", (4,), "pp=3", Stages((1,), 3)),
        ("tp does nothing to 0-d tensors", "w", (), "tp=2", "replicate"),
        ("tp does nothing to no elements", "w", (0, 4), "tp=2", "replicate"),
        ("fsdp does nothing to no elements", "w", (0, 4), "fsdp=2", "replicate"),
        ("pp does nothing to no elements", "layers.0.w", (4, 0), "pp=2", "replicate"),
    ],
)
def test_an_axis_that_the_source_does_not_have(why, name, shape, target, rule):
    others = [("mlp.experts.0.w", (4,)), ("layers.2.w", (4,))]
    case = unsharded((name, shape), *others)
    assert rules_of(case, target, {other: {"tp": 0} for other, _ in others})[name] == {target.split("=")[0]: rule}


def test_an_axis_that_only_a_layout_can_explain_is_refused_with_the_tensors():
    case = unsharded(*((f"w{n}", (4, 4)) for n in range(30)), ("scale", ()), ("void", (0, 2)))
    (told,) = refusals(case, "tp=2")
    assert told.startswith("mesh axis tp: ")
    assert (
        "30 tensors" in told and "w0, w1, " in told and "10 more" in told and "in topology.layout what it does" in told
    )
    assert "scale" not in told and "void" not in told
    assert len(refusals(case, "tp=2,zz=3")) == 2


def test_of_tensors_of_which_some_have_a_rule_only_the_others_are_listed():
    case = unsharded(("a", (4,)), ("b", (4,)))
    (told,) = refusals(case, "tp=2", {"a": {"tp": 0}})
    assert "1 tensors: b;" in told


# Read from a layout


def test_a_given_layout_goes_before_that_of_the_case_and_that_before_inference():
    axes = {"tp": 2}
    columns = {(0,): [((0, 0), (4, 2))], (1,): [((0, 2), (4, 2))]}
    topology = {"source": axes, "target": {"world_size": 1}}
    case = case_of(axes, tensor("w", (4, 4), columns, axes), topology=topology)
    assert rules_of(case)["w"] == {"tp": 1}
    case = case_of(axes, tensor("w", (4, 4), columns, axes), topology=topology | {"layout": {"w": {"tp": 0, "ep": 1}}})
    assert rules_of(case)["w"] == {"tp": 0, "ep": 1}
    assert rules_of(case, given={"w": {"tp": "replicate"}})["w"] == {"tp": "replicate", "ep": 1}


def test_a_layout_of_tensors_that_are_not_there_is_read_over():
    case = unsharded(("a", (4,)))
    assert rules_of(case, "tp=2", {"a": {"tp": 0}, "gone": {"tp": 7}})["a"] == {"tp": 0}


@pytest.mark.parametrize(
    "why, rule, told",
    [
        ("a tensor axis that isn't", 2, "tp splits axis 2 of a tensor with 2 axes"),
        ("no stage", Stages((), 2), "stages [] of 2"),
        ("a stage beyond", Stages((0, 2), 2), "stages [0, 2] of 2"),
    ],
)
def test_a_rule_that_can_not_be_followed_is_refused_with_its_tensor(why, rule, told):
    (text,) = refusals(unsharded(("w", (4, 4))), "single", {"w": {"tp": rule}})
    assert "topology.layout of w" in text and told in text


# Splits


def test_a_split_is_that_of_torch_chunk_with_empty_parts_where_there_are_too_few_elements():
    case = unsharded(("w", (5, 3)))
    assert boxes_in(case, "fsdp=4")["w"] == {
        0: ((0, 0), (2, 3)),
        1: ((2, 0), (2, 3)),
        2: ((4, 0), (1, 3)),
        3: ((5, 0), (0, 3)),
    }


def test_what_fsdp_splits_is_what_tp_left():
    """Rows 0 to 6 by tp 2: 4 and 3. Each by fsdp 2: 2, 2 and 2, 1. Ranks run over tp first."""
    boxes = boxes_in(unsharded(("w", (7,))), "fsdp=2,tp=2", {"w": {"tp": 0}})["w"]
    assert boxes == {0: ((0,), (2,)), 1: ((4,), (2,)), 2: ((2,), (2,)), 3: ((6,), (1,))}


@pytest.mark.parametrize(
    "outer, inner", [("zz", "pp"), ("pp", "ep"), ("ep", "cp"), ("cp", "tp"), ("tp", "dp"), ("dp", "fsdp"), ("aa", "zz")]
)
def test_splits_of_one_tensor_axis_nest_in_their_order(outer, inner):
    """10 elements by 2: 5 and 5; each by 3: 2, 2, 1. The other way round it would be 4, 4, 2, and then halves."""
    target = f"{inner}=3,{outer}=2"
    boxes = boxes_in(unsharded(("w", (10,))), target, {"w": {outer: 0, inner: 0}})["w"]
    mesh = parse_target(target)
    at = {tuple(mesh.coordinates(rank)[axis] for axis in (outer, inner)): box for rank, box in boxes.items()}
    assert [at[o, i] for o in range(2) for i in range(3)] == [
        ((0,), (2,)),
        ((2,), (2,)),
        ((4,), (1,)),
        ((5,), (2,)),
        ((7,), (2,)),
        ((9,), (1,)),
    ]


def test_axes_that_split_two_tensor_axes_make_a_grid_and_replicas_hold_the_same():
    boxes = boxes_in(unsharded(("w", (4, 6))), "dp=2,fsdp=2,tp=3", {"w": {"tp": 1}})["w"]
    for rank, box in boxes.items():
        _, fsdp, tp = np.unravel_index(rank, (2, 2, 3))
        assert box == ((2 * fsdp, 2 * tp), (2, 2))


def test_the_tensor_axes_that_are_split_are_listed_once_each():
    rules = {"tp": 1, "fsdp": 0, "dp": "replicate", "pp": Stages((0,), 2), "ep": 0, "cp": 2}
    assert partition_axes(rules, parse_target("pp=2,dp=2,fsdp=2,ep=2,tp=2,cp=1")) == (0, 1)
    assert partition_axes({}, Mesh(())) == ()


# Placing


def layers(count: int, prefix: str = "model.layers") -> list[tuple[str, tuple[int, ...]]]:
    return [(f"{prefix}.{n}.w", (2,)) for n in range(count)]


def stage_of(boxes: dict[str, Held], name: str) -> list[int]:
    return sorted(boxes[name])


@pytest.mark.parametrize(
    "why, nlayers, nstages, sizes",
    [
        ("30 layers over 4", 30, 4, [8, 8, 7, 7]),
        ("it divides", 6, 3, [2, 2, 2]),
        ("fewer layers than stages", 2, 3, [1, 1, 0]),
        ("one layer", 1, 4, [1, 0, 0, 0]),
        ("one stage more than divides", 7, 3, [3, 2, 2]),
    ],
)
def test_layers_are_cut_as_numpy_array_split_cuts(why, nlayers, nstages, sizes):
    boxes = boxes_in(unsharded(*layers(nlayers)), f"pp={nstages}")
    stages = [stage_of(boxes, f"model.layers.{n}.w") for n in range(nlayers)]
    assert stages == [[stage] for stage, size in enumerate(sizes) for _ in range(size)]


@pytest.mark.parametrize("word", ["layers", "layer", "h", "blocks", "block"])
def test_a_layer_number_follows_one_of_five_words_between_dots(word):
    names = [f"{word}.0.w", f"{word}.1.w"]
    boxes = boxes_in(unsharded(*((name, (2,)) for name in names)), "pp=2")
    assert [stage_of(boxes, name) for name in names] == [[0], [1]]


@pytest.mark.parametrize(
    "why, name",
    [
        ("the word is longer", "mylayers.0.w"),
        ("the word is another", "stages.0.w"),
        ("no number", "layers.x.w"),
        ("nothing after the number", "layers.0"),
        ("a number of another alphabet", "layers.٣.w"),
    ],
)
def test_what_looks_like_a_layer_and_is_none_goes_last(why, name):
    assert stage_of(boxes_in(unsharded((name, (2,)), *layers(4)), "pp=4"), name) == [3]


def test_the_first_match_of_a_name_counts():
    """Blocks within layers: the layer decides, and the blocks are no stack."""
    names = [f"layers.{n}.blocks.{m}.w" for n in range(2) for m in range(5)]
    boxes = boxes_in(unsharded(*((name, (2,)) for name in names)), "pp=2")
    assert [stage_of(boxes, name) for name in names] == [[0]] * 5 + [[1]] * 5


def test_stacks_of_different_prefixes_are_cut_each_for_itself_and_gaps_count():
    """encoder: layers 0 and 3 (so 4 of them); decoder: 2."""
    names = ["encoder.layers.0.w", "encoder.layers.3.w", "decoder.layers.0.w", "decoder.layers.1.w"]
    boxes = boxes_in(unsharded(*((name, (2,)) for name in names)), "pp=4")
    assert [stage_of(boxes, name) for name in names] == [[0], [3], [0], [1]]


def staged(axis: str, size: int, stages: dict[str, list[int]]) -> Case:
    axes = {axis: size}
    return case_of(axes, *(tensor(name, (2,), {(s,): [whole((2,))] for s in at}, axes) for name, at in stages.items()))


@pytest.mark.parametrize(
    "why, of, to, stages",
    [
        ("nothing moves when there are as many", 3, 3, [[0], [1], [2]]),
        ("to fewer: the last goes to the last", 4, 2, [[0], [0], [1], [1]]),
        ("3 to 2: the middle rounds down", 3, 2, [[0], [0], [1]]),
        ("to more: the last goes to the last, others by their share", 2, 4, [[0], [3]]),
        ("3 to 5", 3, 5, [[0], [1], [4]]),
        ("4 to 3", 4, 3, [[0], [0], [1], [2]]),
    ],
)
def test_tensors_without_a_number_go_where_their_stage_went(why, of, to, stages):
    case = staged("pp", of, {f"part{s}": [s] for s in range(of)})
    boxes = boxes_in(case, f"pp={to}")
    assert [stage_of(boxes, f"part{s}") for s in range(of)] == stages


def test_layers_are_cut_anew_when_the_number_of_stages_changes_and_stay_where_they_are_otherwise():
    """An uneven source: four layers on stage 0, two on stage 1."""
    at = {f"layers.{n}.w": [0 if n < 4 else 1] for n in range(6)}
    case = staged("pp", 2, at)
    assert [stage_of(boxes_in(case, "pp=2"), name) for name in at] == list(at.values())
    assert [stage_of(boxes_in(case, "pp=3"), name) for name in at] == [[0], [0], [1], [1], [2], [2]]


def test_embeddings_of_a_source_with_stages_stay_with_their_stage_whatever_their_name():
    boxes = boxes_in(staged("pp", 2, {"embed": [1], "norm": [0]}), "pp=4")
    assert (stage_of(boxes, "embed"), stage_of(boxes, "norm")) == ([3], [0])


def test_a_tensor_on_several_stages_goes_to_the_corresponding_ones():
    case = staged("pp", 4, {"ends": [0, 3], "front": [0, 1], "all": [0, 1, 2, 3]})
    boxes = boxes_in(case, "pp=2")
    assert [stage_of(boxes, name) for name in ("ends", "front", "all")] == [[0, 1], [0], [0, 1]]
    boxes = boxes_in(case, "pp=8")
    assert [stage_of(boxes, name) for name in ("ends", "front")] == [[0, 7], [0, 2]]
    assert stage_of(boxes, "all") == list(range(8))


def test_experts_are_placed_by_their_number_and_others_replicated():
    case = unsharded(*((f"layers.0.mlp.experts.{e}.w", (2,)) for e in range(5)), ("layers.0.mlp.router.w", (2,)))
    boxes = boxes_in(case, "ep=2")
    assert [stage_of(boxes, f"layers.0.mlp.experts.{e}.w") for e in range(5)] == [[0], [0], [0], [1], [1]]
    assert stage_of(boxes, "layers.0.mlp.router.w") == [0, 1]


def test_experts_of_each_layer_are_a_stack_of_their_own():
    case = unsharded(("layers.0.experts.0.w", (2,)), ("layers.0.experts.1.w", (2,)), ("layers.1.experts.0.w", (2,)))
    boxes = boxes_in(case, "ep=2")
    assert [stage_of(boxes, name) for name in boxes] == [[0], [1], [0]]


def test_experts_in_layers_are_placed_by_both():
    names = [f"layers.{n}.experts.{e}.w" for n in range(2) for e in range(2)]
    boxes = boxes_in(unsharded(*((name, (2,)) for name in names)), "pp=2,ep=2")
    assert [stage_of(boxes, name) for name in names] == [[0], [1], [2], [3]]


def test_a_fused_tensor_of_experts_that_ep_splits_is_split_anew():
    axes = {"ep": 2}
    case = case_of(axes, tensor("experts.w", (5, 2), {(0,): [((0, 0), (3, 2))], (1,): [((3, 0), (2, 2))]}, axes))
    assert boxes_in(case, "ep=3")["experts.w"] == {0: ((0, 0), (2, 2)), 1: ((2, 0), (2, 2)), 2: ((4, 0), (1, 2))}


# Chains


def hop(case: Case, target: str) -> Case:
    layout = rules_of(case, target)
    return outgoing_case(case, layout, parse_target(target), list(layout)).case


def held_in(case: Case) -> dict[str, list]:
    found: dict[str, list] = {}
    for f in case.fragments:
        found.setdefault(f.logical_tensor_id, []).append((f.rank, f.box))
    return {name: sorted(boxes) for name, boxes in found.items()}


CHAINS = [
    ("pp3 -> pp2 -> pp3", ["pp=2", "pp=3"]),
    ("by way of single", ["single", "pp=3"]),
    ("a long way", ["pp=2", "single", "dp=2", "pp=7", "fsdp=3", "pp=3"]),
]


@pytest.mark.parametrize("why, targets", CHAINS, ids=[row[0] for row in CHAINS])
def test_stages_come_back_at_the_end_of_any_chain(why, targets):
    """Among them a tensor without a number in the middle, one on two stages, one on all, and layers cut unevenly."""
    at = {"embed": [0], "middle": [1], "head": [2], "ends": [0, 2], "all": [0, 1, 2]}
    at |= {f"layers.{n}.w": [0 if n < 4 else n - 3] for n in range(6)}
    source = staged("pp", 3, at)
    case = source
    for target in targets:
        case = hop(case, target)
    assert held_in(case) == held_in(source)


@pytest.mark.parametrize("targets", [["single"], ["tp=3"], ["fsdp=5", "tp=2,pp=2"], ["single", "dp=3", "single"]])
def test_splits_come_back_at_the_end_of_any_chain(targets):
    axes = {"fsdp": 2, "tp": 2}
    rows = {(f, t): [((4 * t + (2 if f else 0), 0), (2, 3))] for f, t in everywhere(axes)}
    columns = {(f, t): [((3 * f, 2 * t), (3 if f == 0 else 2, 2))] for f, t in everywhere(axes)}
    source = case_of(
        axes,
        tensor("rows", (8, 3), rows, axes),
        tensor("columns", (5, 4), columns, axes),
        tensor("scale", (), {where: [whole(())] for where in everywhere(axes)}, axes),
        tensor("void", (0, 4), {where: [whole((0, 4))] for where in everywhere(axes)}, axes),
    )
    case = source
    for target in [*targets, "fsdp=2,tp=2"]:
        case = hop(case, target)
    assert held_in(case) == held_in(source)


def test_a_layout_says_what_every_axis_does_that_was_met_on_the_way():
    axes = {"tp": 2}
    case = case_of(axes, tensor("w", (4, 4), {(0,): [((0, 0), (4, 2))], (1,): [((0, 2), (4, 2))]}, axes))
    case = hop(hop(hop(case, "pp=2"), "fsdp=2"), "single")
    assert case.topology.layout == {"w": {"fsdp": 0, "pp": Stages((1,), 2), "tp": 1}}
    assert (dict(case.topology.source), dict(case.topology.target)) == ({"world_size": 1}, {"fsdp": 2})
