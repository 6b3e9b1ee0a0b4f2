"""Block-scaled tensors: which are pairs, how a scale follows its weight, and which cuts are refused."""

from pathlib import Path

import pytest

from reshard_mpi.checkpoint.checks import check_case
from reshard_mpi.checkpoint.mesh import parse_target
from reshard_mpi.checkpoint.wanted import cast_rule
from reshard_mpi.errors import InputError
from reshard_mpi.layout.cuts import Cut, Member
from reshard_mpi.layout.file import parse_layout
from reshard_mpi.layout.scales import Pair, find_pairs, in_blocks
from reshard_mpi.plan.changes import cast_source
from reshard_mpi.plan.prepare import Selection, outgoing_of
from reshard_mpi.storage.safetensors import StoredArray
from reshard_mpi.storage.source import Source
from tests.unit.manifests import SINGLE, everywhere, manifest, parsed, tensor, whole

SCALE = "m.q_proj.weight_scale_inv"


def pair(shape, scale_shape, axes=SINGLE, held=None, scale_held=None, name=SCALE, dtype="float8_e4m3fn"):
    """The fragments of a weight and its scale, whole on every rank unless it is said what they hold."""
    of = [
        {where: [box] for where, box in (boxes or dict.fromkeys(everywhere(axes), whole(shape))).items()}
        for shape, boxes in ((shape, held), (scale_shape, scale_held))
    ]
    weight = tensor("m.q_proj.weight", shape, of[0], axes, dtype=dtype)
    return weight + tensor(name, scale_shape, of[1], axes)


def source_of(fragments, axes=SINGLE) -> Source:
    read = parsed(manifest(axes, fragments))
    findings = check_case(read)
    assert not findings.faults, list(map(str, findings.faults))
    return Source(Path("case"), read, findings)


def layout(text: str):
    return parse_layout(text.encode(), "my.toml")


SAID = '[scales]\n"weight_scale" = [64, 32]\n"q_proj.weight_scale_inv" = [64, 32]\n'
PAIRS = [
    ("DeepSeek's", (512, 200), (4, 2), SCALE, "float8_e4m3fn", "", (128, 128), True),
    ("smaller than a block", (100, 128), (1, 1), SCALE, "float8_e5m2", "", (128, 128), True),
    ("of blocks of another size", (512, 200), (8, 7), SCALE, "float8_e4m3fn", "", None, True),
    ("as the layout says", (512, 200), (8, 7), SCALE, "float8_e4m3fn", SAID, (64, 32), True),
    ("of another name", (512, 200), (8, 7), "m.q_proj.weight_scale", "float8_e4m3fn", SAID, (64, 32), True),
    (
        "of another name, and nothing is said",
        (512, 200),
        (4, 2),
        "m.q_proj.weight_scale",
        "float8_e4m3fn",
        "",
        "no",
        False,
    ),
    ("no float8", (512, 200), (4, 2), SCALE, "bfloat16", "", "no", False),
    ("one scale for all", (512, 200), (1, 1), SCALE, "float8_e4m3fn", "", "no", False),
    ("another number of axes", (512, 200), (), SCALE, "float8_e4m3fn", "", "no", False),
    ("no scale of that", (512, 200), (4, 2), "m.k_proj.weight_scale_inv", "float8_e4m3fn", "", "no", False),
    ("apart", (512, 200), (4, 2), SCALE, "float8_e4m3fn", '[scales]\n"*" = "apart"', "no", True),
]


@pytest.mark.parametrize(
    "why, shape, scales, name, dtype, text, blocks, is_scale", PAIRS, ids=[row[0] for row in PAIRS]
)
def test_a_weight_and_its_scale_are_found(why, shape, scales, name, dtype, text, blocks, is_scale):
    case = source_of(pair(shape, scales, name=name, dtype=dtype)).case
    found = find_pairs(case, layout(text).scales if text else ())
    assert found.together == (() if blocks == "no" else (Pair("m.q_proj.weight", name, blocks),))
    assert found.scales == ({name} if is_scale else set()) and not found.faults


def test_blocks_that_do_not_fit_are_a_fault():
    (fault,) = find_pairs(source_of(pair((512, 200), (4, 2))).case, layout(SAID).scales).faults
    assert str(fault).startswith('my.toml: scales."q_proj.weight_scale_inv"') and "[512, 200] and [4, 2]" in str(fault)


@pytest.mark.parametrize("raw", ["128", "[]", "[0, 128]", '"together"', "{ blocks = [128] }"])
def test_a_faulty_line_is_refused(raw):
    with pytest.raises(InputError, match=r'my.toml: scales."a".*\[128, 128\]'):
        layout(f'[scales]\n"a" = {raw}')


def test_a_layout_is_written_with_what_it_says_of_scales():
    text = layout(SAID + '"k" = "apart"').text()
    assert layout(text).text() == text and '"weight_scale" = [64, 32]' in text and '"k" = "apart"' in text


def outcome(source, target, text=""):
    """(rank, tensor) -> box; or the texts of what is refused."""
    made, faults = outgoing_of(source, Selection(parse_target(target), layout=layout(text) if text else None))
    if made is None:
        return [str(fault) for fault in faults]
    return {(f.rank, "scale" if f.fqn == SCALE else "weight"): f.box for f in made.case.fragments}


ROWS, COLUMNS = ('[axes.tp]\n"q_proj" = "colwise"\n', '[axes.tp]\n"q_proj" = "rowwise"\n')
HEADS = '[axes.tp]\n"q_proj" = {{ split = "colwise", unit = {} }}\n'
FOLLOWED = [
    ("rows", (512, 200), (4, 2), "tp=2", ROWS, (1, ((256, 0), (256, 200)), ((2, 0), (2, 2)))),
    (
        "rows, the last block is smaller",
        (383, 128),
        (3, 1),
        "tp=3",
        ROWS,
        (2, ((256, 0), (127, 128)), ((2, 0), (1, 1))),
    ),
    ("columns", (128, 512), (1, 4), "tp=4", COLUMNS, (3, ((0, 384), (128, 128)), ((0, 3), (1, 1)))),
    ("more ranks than blocks", (256, 128), (2, 1), "tp=2", ROWS, (1, ((128, 0), (128, 128)), ((1, 0), (1, 1)))),
    (
        "heads of half a block",
        (512, 128),
        (4, 1),
        "tp=2",
        HEADS.format(64),
        (1, ((256, 0), (256, 128)), ((2, 0), (2, 1))),
    ),
    (
        "heads of a block and a half",
        (768, 128),
        (6, 1),
        "tp=2",
        HEADS.format(192),
        (1, ((384, 0), (384, 128)), ((3, 0), (3, 1))),
    ),
    ("in two axes", (512, 512), (4, 4), "fsdp=2,tp=2", COLUMNS, (3, ((256, 256), (256, 256)), ((2, 2), (2, 2)))),
    ("anywhere, for fsdp", (200, 128), (2, 1), "fsdp=2", ROWS, (1, ((100, 0), (100, 128)), ((1, 0), (1, 1)))),
]


@pytest.mark.parametrize("why, shape, scales, target, text, last", FOLLOWED, ids=[row[0] for row in FOLLOWED])
def test_a_scale_is_cut_where_its_weight_is(why, shape, scales, target, text, last):
    found = outcome(source_of(pair(shape, scales)), target, text)
    rank, weight, scale = last
    assert isinstance(found, dict), found
    assert (found[rank, "weight"], found[rank, "scale"]) == (weight, scale)


def test_a_shared_head_takes_the_scale_of_all_its_blocks_along():
    text = '[axes.tp]\n"q_proj" = { split = "colwise", unit = 256, repeat = true }\n'
    found = outcome(source_of(pair((512, 128), (4, 1))), "tp=4", text)
    assert [found[rank, "scale"] for rank in range(4)] == [((n, 0), (2, 1)) for n in (0, 0, 2, 2)]
    assert [found[rank, "weight"] for rank in range(4)] == [((n, 0), (256, 128)) for n in (0, 0, 256, 256)]


def test_members_of_a_fused_weight_take_their_scales_along():
    text = '[axes.tp]\n"q_proj" = { split = "colwise", members = [512, 256] }\n'
    made, _ = outgoing_of(source_of(pair((768, 128), (6, 1))), Selection(parse_target("tp=2"), layout=layout(text)))
    boxes = [f.box for f in made.case.fragments if f.fqn == SCALE and f.rank == 1]
    assert boxes == [((2, 0), (2, 1)), ((5, 0), (1, 1))]


CUT = [
    (
        "within a block of rows",
        (200, 128),
        (2, 1),
        "tp=2",
        ROWS,
        ["m.q_proj.weight", "element 100 of axis 0", "block of 128"],
    ),
    ("3 blocks, 2 ranks", (384, 128), (3, 1), "tp=2", ROWS, ["element 192 of axis 0", "block of 128"]),
    ("within a block of columns", (128, 512), (1, 4), "tp=8", COLUMNS, ["element 64 of axis 1", "block of 128"]),
    ("fewer than a block", (100, 128), (1, 1), "tp=2", ROWS, ["element 50 of axis 0", "block of 128"]),
    ("heads of half a block", (128, 128), (1, 1), "tp=2", HEADS.format(64), ["element 64 of axis 0", "block of 128"]),
    (
        "members that end in a block",
        (384, 128),
        (3, 1),
        "tp=2",
        HEADS.format("1, members = 2"),
        ["element 96", "axis 0"],
    ),
    ("blocks of unknown size", (512, 128), (8, 1), "tp=2", ROWS, ["m.q_proj.weight", "[scales]"]),
]


@pytest.mark.parametrize("why, shape, scales, target, text, words", CUT, ids=[row[0] for row in CUT])
def test_a_cut_within_a_block_is_refused(why, shape, scales, target, text, words):
    (told,) = outcome(source_of(pair(shape, scales)), target, text)
    assert all(word in told for word in words), told


def test_a_cut_within_a_block_can_be_asked_for():
    found = outcome(source_of(pair((200, 128), (2, 1))), "tp=2", ROWS + '[scales]\n"*" = "apart"')
    assert (found[1, "weight"], found[1, "scale"]) == (((100, 0), (100, 128)), ((1, 0), (1, 1)))


TP = {"tp": 2}
HALVES = {(0,): ((0, 0), (256, 128)), (1,): ((256, 0), (256, 128))}
INFERRED = [
    ("both are cut", (512, 128), (4, 1), HALVES, {(t,): ((2 * t, 0), (2, 1)) for t in (0, 1)}, "tp=4", None),
    ("the scale is whole everywhere", (512, 128), (4, 1), HALVES, None, "tp=4", None),
    (
        "only the scale is cut",
        (512, 128),
        (4, 1),
        None,
        {(t,): ((2 * t, 0), (2, 1)) for t in (0, 1)},
        "tp=2",
        "elsewhere",
    ),
    (
        "within a block",
        (512, 128),
        (4, 1),
        HALVES,
        {(t,): ((2 * t, 0), (2, 1)) for t in (0, 1)},
        "tp=8",
        "element 64 of axis 0",
    ),
]


@pytest.mark.parametrize(
    "why, shape, scales, held, scale_held, target, told", INFERRED, ids=[row[0] for row in INFERRED]
)
def test_what_is_inferred_is_not_cut_within_blocks_either(why, shape, scales, held, scale_held, target, told):
    found = outcome(source_of(pair(shape, scales, TP, held, scale_held), TP), target)
    if told is None:
        assert isinstance(found, dict), found
    else:
        assert len(found) == 1 and told in found[0], found


def test_a_scale_alone_may_be_cut_anywhere():
    source = source_of(pair((200, 128), (2, 1)))
    made, faults = outgoing_of(source, Selection(parse_target("tp=2"), exclude=("*_inv",), layout=layout(ROWS)))
    assert made is not None, list(map(str, faults))


def test_scales_are_not_cast_and_that_is_said():
    source = source_of(pair((128, 128), (1, 1)) + tensor("norm", (4,), {(): [whole((4,))]}, SINGLE))
    arrays = {f.payload_key: StoredArray(f.dtype, f.local_shape, 0, 16) for f in source.case.fragments}
    source.headers = {"rank-00000.safetensors": arrays}
    kept = ["m.q_proj.weight", SCALE, "norm"]
    _, casts, warnings = cast_source(source, kept, [cast_rule("bfloat16")], [], find_pairs(source.case, ()).scales)
    assert [cast.fqn for cast in casts] == ["norm"]
    assert any("1 scale of block-scaled tensors" in warning and SCALE in warning for warning in warnings)


def test_units_and_repeats_are_counted_in_blocks():
    cut = Cut((Member(768, 192, True), Member(256, 256), Member(128, 1)))
    assert in_blocks(cut, 128) == Cut((Member(6, 3, True), Member(2, 2), Member(1, 1)))
