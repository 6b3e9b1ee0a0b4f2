"""Layout files: what they say, word by word, and what is wrong with them, each named with its key."""

import itertools

import pytest

from reshard_mpi.errors import InputError
from reshard_mpi.layout.cuts import Cut, Member, Misfit, cut_axis, stored_boxes
from reshard_mpi.layout.file import LayoutFile, load_layout, parse_layout, preset_names
from reshard_mpi.layout.rules import Tensor
from reshard_mpi.layout.words import HOOKS, is_word, tensor_axis

WORDS = [
    ("colwise", "q_proj.weight", 2, 0),
    ("colwise", "q_proj.bias", 1, 0),
    ("colwise_rep", "lm_head.weight", 2, 0),
    ("colwise_gather_output", "lm_head.weight", 2, 0),
    ("local_colwise", "gate_proj.weight", 2, 0),
    ("packed_colwise", "gate_up_proj.weight", 2, 0),
    ("packed_colwise", "experts.gate_up_proj", 3, 1),
    ("rowwise", "o_proj.weight", 2, 1),
    ("rowwise", "o_proj.bias", 1, "replicate"),
    ("rowwise", "experts.down_proj", 3, 2),
    ("rowwise_rep", "o_proj.weight", 2, 1),
    ("rowwise_split_input", "o_proj.weight", 2, 1),
    ("local_packed_rowwise", "experts.gate_up_proj", 3, 2),
    ("rowwise", "model.embed_tokens.weight", 2, 0),
    ("rowwise_rep", "transformer.wte.weight", 2, 0),
    ("colwise", "model.embed_tokens.weight", 2, 1),
    ("colwise", "embed_out.weight", 2, 0),
    ("embedding_rowwise", "embed_in.weight", 2, 0),
    ("embedding_colwise", "embed_in.weight", 2, 1),
    ("grouped_gemm", "experts.down_proj", 3, 0),
    ("sequence_parallel", "norm.weight", 1, "replicate"),
    ("replicated_with_grad_allreduce", "q_norm.weight", 1, "replicate"),
    ("colwise", "scale", 0, "replicate"),
]


@pytest.mark.parametrize("word, fqn, naxes, axis", WORDS)
def test_a_word_of_tp_plan_names_a_tensor_axis(word, fqn, naxes, axis):
    assert is_word(word)
    assert tensor_axis(word, fqn, naxes) == axis


def layout(*lines: str, axis: str = "tp") -> LayoutFile:
    return parse_layout("\n".join((f"[axes.{axis}]", *lines)).encode(), "my.toml")


def rules(file: LayoutFile, fqn: str, shape: tuple[int, ...], axis: str = "tp"):
    found = file.resolve([Tensor("t", fqn, shape)], [axis])
    assert not found.faults, list(map(str, found.faults))
    return found.layout.get("t", {}).get(axis), found.cuts.get("t", {}).get(axis)


PATTERNS = [
    ("layers.*.mlp.up", "layers.3.mlp.up.weight", True, "a module path, * is one word"),
    ("layers.*.mlp.up", "model.layers.3.mlp.up.bias", True, "with something before it"),
    ("layers.*.mlp.up", "layers.3.mlp.up", True, "a parameter with that name itself"),
    ("layers.*.mlp.up", "layers.3.x.mlp.up.weight", False, "* is not two words"),
    ("layers.*.mlp.up", "my_layers.3.mlp.up.weight", False, "whole words"),
    ("layers.*.mlp.up", "layers.3.mlp.up.lora.weight", False, "a module within it is another one"),
    ("up.weight", "layers.3.mlp.up.weight", True, "an fqn"),
    ("up.weight", "layers.3.mlp.up.bias", False, "an fqn"),
    ("layers.**.weight", "layers.3.mlp.up.weight", True, "any number of words"),
    ("layers.**.up", "layers.up.weight", True, "none, too"),
    ("layers.**", "layers.3.mlp.up.weight", True, "at the end"),
    ("*_proj", "mlp.up_proj.weight", True, "a part of a word"),
    ("*_proj", "mlp.up.weight", False, "a part of a word"),
    ("*", "anything.at.all", True, "every tensor"),
    ("mlp.up", "optim.state.mlp.up.weight.exp_avg", True, "the state of an optimizer is as its parameter"),
    ("m.p", "mxp.weight", False, "a dot is a dot"),
]


@pytest.mark.parametrize("pattern, fqn, matches, why", PATTERNS)
def test_a_pattern_is_held_against_the_end_of_a_name(pattern, fqn, matches, why):
    assert (rules(layout(f'"{pattern}" = 0'), fqn, (4, 4))[0] == 0) is matches


def test_the_first_pattern_that_matches_counts():
    file = layout('"a.b" = 1', '"*" = "replicate"', '"a.c" = 0')
    assert [rules(file, fqn, (4, 4))[0] for fqn in ("a.b.weight", "a.c.weight", "z")] == [1, "replicate", "replicate"]


def test_hooks_say_nothing_of_parameters():
    for word in HOOKS:
        assert rules(layout(f'"experts" = "{word}"', '"*" = 1'), "experts.down_proj", (4, 4)) == (1, None)


def test_a_unit_may_be_a_number_a_name_or_a_product():
    for unit in ("6", '"6"', '"three_heads"', '"3 * two"', '"two*3"'):
        file = layout(f'"w" = {{ split = 0, unit = {unit} }}', "[model]", "two = 2", "three_heads = 6")
        assert rules(file, "w", (12, 4)) == (0, Cut((Member(12, 6),)))
    assert file.with_values({"two": 4}).resolve([Tensor("t", "w", (12,))], ["tp"]).cuts == {
        "t": {"tp": Cut((Member(12, 12),))}
    }


def test_members_are_equal_or_given():
    assert rules(layout('"w" = "packed_colwise"'), "w", (12, 4)) == (0, Cut((Member(6), Member(6))))
    assert rules(layout('"w" = { split = -1, members = 3 }'), "w", (5, 12)) == (1, Cut((Member(4),) * 3))
    file = layout(
        '"w" = { split = 0, unit = 2, members = [8, "kv", "kv"], repeat = [false, true, true] }', "[model]", "kv = 2"
    )
    assert rules(file, "w", (12,)) == (0, Cut((Member(8, 2), Member(2, 2, True), Member(2, 2, True))))


def test_what_no_mesh_axis_of_the_target_cuts_needs_no_numbers():
    found = layout('"w" = { split = 0, unit = "head_dim" }').resolve([Tensor("t", "w", (12,))], ["pp"])
    assert (found.layout, found.cuts, found.faults) == ({"t": {"tp": 0}}, {}, [])


FAULTS = [
    ("no TOML", "axes = [", ["my.toml", "TOML"]),
    ("no text", b"\xff", ["my.toml", "TOML"]),
    ("a key twice", '[axes.tp]\n"a" = 0\n"a" = 1', ["my.toml", "TOML"]),
    ("nothing", "", ["my.toml", "[axes.NAME]"]),
    ("an unknown table", "[axis.tp]\n", ["my.toml", "axis"]),
    ("no table of axes", "axes = 3", ["my.toml: axes", "3"]),
    ("no table of patterns", "[axes]\ntp = 3", ["my.toml: axes.tp", "3"]),
    ("axes of no preset", 'axes_of = "lama"', ["my.toml: axes_of", "'lama'", "llama"]),
    ("axes of two", 'axes_of = ["llama"]', ["my.toml: axes_of", "llama"]),
    ("no mesh axis", "[axes.rank]\na = 0", ["axes.rank"]),
    ("one mesh axis under two names", "[axes.fsdp]\na = 0\n[axes.dp_shard]\na = 0", ["axes.dp_shard", "twice"]),
    ("an unknown word", '[axes.tp]\n"a.*" = "colwize"', ['axes.tp."a.*"', "'colwize'", "rowwise"]),
    ("an unknown key", '[axes.tp]\n"a" = { split = 0, units = 3 }', ['axes.tp."a"', "units"]),
    ("no axis", '[axes.tp]\n"a" = { unit = 3 }', ['axes.tp."a"', "split"]),
    ("a fraction", '[axes.tp]\n"a" = 1.5', ['axes.tp."a"', "float"]),
    ("a unit of nothing", '[axes.tp]\n"a" = { split = 0, unit = 0 }', ['axes.tp."a".unit', "0"]),
    ("a sum", '[axes.tp]\n"a" = { split = 0, unit = "b + c" }', ['axes.tp."a".unit', "b + c"]),
    ("no members", '[axes.tp]\n"a" = { split = 0, members = [] }', ['axes.tp."a".members']),
    ("fewer than no members", '[axes.tp]\n"a" = { split = 0, members = -2 }', ['axes.tp."a".members']),
    (
        "repeats of other members",
        '[axes.tp]\n"a" = { split = 0, members = 3, repeat = [true] }',
        ['axes.tp."a"', "repeat"],
    ),
    ("an empty pattern", '[axes.tp]\n"" = 0', ['axes.tp.""', "pattern"]),
    ("two dots", '[axes.tp]\n"a..b" = 0', ['axes.tp."a..b"', "pattern"]),
    ("a number that is none", '[model]\nhead_dim = "8"\n[axes.tp]\n"a" = 0', ["model.head_dim", "'8'"]),
    ("a number below 1", '[model]\nhead_dim = 0\n[axes.tp]\n"a" = 0', ["model.head_dim", "0"]),
]


@pytest.mark.parametrize("why, text, words", FAULTS, ids=[row[0] for row in FAULTS])
def test_a_faulty_file_is_refused_with_its_name_and_key(why, text, words):
    with pytest.raises(InputError) as caught:
        parse_layout(text if isinstance(text, bytes) else text.encode(), "my.toml")
    assert str(caught.value).startswith("my.toml")
    assert all(word in str(caught.value) for word in words), str(caught.value)


UNFIT = [
    ("an axis that isn't there", '"w" = 2', ["splits axis 2 of tensor t", "2 axes"]),
    ("before the first axis", '"w" = -3', ["splits axis -3 of tensor t"]),
    ("a number that isn't known", '"w" = { split = 0, unit = "head_dim" }', ["head_dim", "--layout-set head_dim=N"]),
    ("members of another size", '"w" = { split = 0, members = [4, 4] }', ["4 + 4 = 8", "axis 0 of tensor t has 12"]),
    ("members that aren't equal", '"w" = { split = 0, members = 5 }', ["12", "5 equal members"]),
]


@pytest.mark.parametrize("why, line, words", UNFIT, ids=[row[0] for row in UNFIT])
def test_a_rule_that_does_not_fit_a_tensor_is_one_fault(why, line, words):
    tensors = [Tensor("t", "w", (12, 4))]
    (fault,) = layout(line).resolve(tensors, ["tp"]).faults
    assert str(fault).startswith('my.toml: axes.tp."w"')
    assert all(word in str(fault) for word in words), str(fault)


@pytest.mark.parametrize("name", preset_names())
def test_a_preset_is_written_as_it_was_read(name):
    preset = load_layout(name, {"head_dim": 8, "num_attention_heads": 4, "num_key_value_heads": 2})
    assert parse_layout(preset.text().encode(), "again").text() == preset.text()
    assert "head_dim = 8" in preset.text()


def test_a_file_may_say_what_a_preset_says_of_mesh_axes_after_what_it_says_itself():
    file = parse_layout(b'axes_of = "mixtral"\n[axes.tp]\n"mlp.gate" = 0', "my.toml")
    assert rules(file, "layers.0.mlp.gate.weight", (4, 4)) == (0, None)
    assert rules(file, "model.norm.weight", (4,)) == ("replicate", None)
    assert rules(file, "layers.0.mlp.experts.down_proj", (4, 4, 4), "ep") == (0, None)


def test_the_presets_are_those_that_are_documented():
    assert preset_names() == [
        "gpt-neox",
        "llama",
        "megatron-llama",
        "mixtral",
        "qwen2",
        "qwen3_moe",
        "torchtitan-llama",
    ]


def test_numbers_come_from_the_command_line_then_the_file_then_config_json(tmp_path):
    (tmp_path / "config.json").write_text(
        '{"num_attention_heads": 4, "hidden_size": 32, "a": 1, "b": 1, "text_config": {"d": 5}}'
    )
    path = tmp_path / "my.toml"
    path.write_text('[model]\na = 2\nc = 2\n[axes.tp]\n"w" = 0')
    values = load_layout(str(path), {"c": 3}, [tmp_path]).values
    assert {name: values[name] for name in "abcd"} == {"a": 2, "b": 1, "c": 3, "d": 5}
    assert (values["head_dim"], values["num_key_value_heads"]) == (8, 4)


# How an axis is cut


@pytest.mark.parametrize(
    "why, member, nparts, told",
    [
        ("a head is cut", Member(768, 128), 4, "cut at element 192, within a unit of 128"),
        ("no whole heads", Member(100, 8), 2, "no whole number of units"),
        ("fewer heads than ranks", Member(4, 2), 4, "within a unit of 2"),
        ("heads that can't be shared", Member(6, 2, True), 4, "can't share 3 units"),
    ],
)
def test_units_that_would_be_cut_are_refused(why, member, nparts, told):
    with pytest.raises(Misfit, match=told):
        for index in range(nparts):
            member.part(nparts, index)


def test_neighbouring_ranks_share_a_head_where_there_are_fewer():
    assert [Member(4, 1, True).part(8, rank) for rank in range(8)] == [(n, n + 1) for n in (0, 0, 1, 1, 2, 2, 3, 3)]
    assert [Member(4, 1, True).part(2, rank) for rank in range(2)] == [(0, 2), (2, 4)]


@pytest.mark.parametrize("sizes", [(4, 4), (5, 3, 0), (1, 7), (0, 0), (6,)])
@pytest.mark.parametrize("outer, inner", [(1, 1), (2, 1), (3, 2), (2, 5)])
def test_parts_of_parts_hold_every_element_once(sizes, outer, inner):
    whole = ((0, sum(sizes)),)
    cut = Cut(tuple(map(Member, sizes)))
    held = [
        element
        for i, j in itertools.product(range(outer), range(inner))
        for start, stop in cut_axis(cut_axis(whole, outer, i, cut), inner, j, None)
        for element in range(start, stop)
    ]
    assert sorted(held) == list(range(sum(sizes)))


def test_boxes_of_an_array_fill_it():
    stored, boxes = stored_boxes([((0, 2), (4, 5)), ((1, 3),), ((0, 1), (2, 3))], (5, 3, 3))
    assert stored == (3, 2, 2) and len(boxes) == 4
    assert sum(extent[0] * extent[1] * extent[2] for (_, extent), _ in boxes) == 12
    assert {before for _, before in boxes} == {(0, 0, 0), (0, 0, 1), (2, 0, 0), (2, 0, 1)}
