"""Padding that a layout file asks for: how far it goes, and what the fragments of padded arrays say."""

import pytest

from reshard_mpi.checkpoint.mesh import parse_target
from reshard_mpi.errors import InputError
from reshard_mpi.layout.file import parse_layout
from reshard_mpi.layout.rules import Tensor, target_layout
from reshard_mpi.layout.target import Exceptions, outgoing_case
from tests.unit.manifests import SINGLE, case_of, tensor, whole


def padded(line: str, target: str = "tp=4", shape: tuple[int, ...] = (10, 3), fqn: str = "model.embed_tokens.weight"):
    layout = parse_layout(f"[padding]\n{line}\n[model]\nvocab = 12".encode(), "my.toml")
    return layout.padded([Tensor("t", fqn, shape)], parse_target(target))


FAR = [
    ("to a size", '"embed_tokens.weight" = { to = 12 }', "tp=4", (12, 3)),
    ("to a size with a name", '"embed_tokens" = { to = "vocab" }', "single", (12, 3)),
    ("to a multiple", '"embed_tokens" = { multiple = 8 }', "tp=4", (16, 3)),
    ("to a multiple of the ranks", '"embed_tokens" = { multiple = "2 * tp" }', "tp=8", (16, 3)),
    ("of which there is one where no axis is said", '"embed_tokens" = { multiple = "3*tp" }', "pp=2", (12, 3)),
    ("along another axis", '"embed_tokens" = { multiple = 2, axis = 1 }', "tp=4", (10, 4)),
    ("not at all", '"embed_tokens" = { multiple = 5 }', "tp=4", None),
    ("as the first line says", '"embed_tokens" = { to = 11 }\n"*.weight" = { to = 99 }', "tp=4", (11, 3)),
]


@pytest.mark.parametrize("why, line, target, shape", FAR, ids=[row[0] for row in FAR])
def test_an_axis_is_padded(why, line, target, shape):
    found = padded(line, target)
    assert found.shapes == ({"t": shape} if shape else {})
    assert len(found.faults) == line.count("\n")  # a line after the first one pads nothing


UNFIT = [
    ("fewer than there are", '"embed_tokens" = { to = 9 }', ["9", "10", "axis 0 of tensor t"]),
    ("an axis that isn't there", '"embed_tokens" = { to = 9, axis = 2 }', ["axis 2 of tensor t", "2 axes"]),
    ("a multiple of nothing", '"embed_tokens" = { multiple = 0 }', ["0 elements"]),
    ("a number that isn't known", '"embed_tokens" = { multiple = "words" }', ["words", "--layout-set words=N"]),
    (
        "more than a file can hold",
        '"embed_tokens" = { to = 99999999999999999 }',
        ["99999999999999999, 3]", "more elements"],
    ),
    ("of no tensor", '"embed" = { to = 12 }', ["matches no tensor"]),
]


@pytest.mark.parametrize("why, line, words", UNFIT, ids=[row[0] for row in UNFIT])
def test_what_can_not_be_padded_so_is_one_fault(why, line, words):
    found = padded(line)
    (fault,) = found.faults
    assert str(fault).startswith('my.toml: padding."embed') and not found.shapes
    assert all(word in str(fault) for word in words), str(fault)


FAULTY = [
    ("nothing", '"a" = {}', ['padding."a"', "one of to and multiple"]),
    ("both", '"a" = { to = 3, multiple = 3 }', ['padding."a"', "one of to and multiple"]),
    ("an unknown key", '"a" = { size = 3 }', ['padding."a"', "size"]),
    ("a number alone", '"a" = 3', ['padding."a"', "int"]),
    ("no pattern", '"a..b" = { to = 3 }', ["pattern"]),
]


@pytest.mark.parametrize("why, line, words", FAULTY, ids=[row[0] for row in FAULTY])
def test_a_faulty_line_is_refused_with_its_pattern(why, line, words):
    with pytest.raises(InputError) as caught:
        padded(line)
    assert all(word in str(caught.value) for word in words), str(caught.value)


def test_the_tensor_keeps_its_shape_and_what_is_added_is_padding_of_its_fragments():
    case = case_of(SINGLE, tensor("w", (10, 3), {(): [whole((10, 3))]}, SINGLE))
    target = parse_target("tp=4")
    layout, faults = target_layout(case, target, {"w": {"tp": 0}})
    assert not faults
    written = outgoing_case(case, layout, target, ["w"], Exceptions({}, {"w": (16, 3)}))
    assert [array.shape for array in written.arrays] == [(4, 3)] * 4
    said = [(f.box, f.padding.before, f.padding.after, f.padding.semantic) for f in written.case.fragments]
    none = (0, 0)
    assert said == [
        (((0, 0), (4, 3)), none, none, "none"),
        (((4, 0), (4, 3)), none, none, "none"),
        (((8, 0), (2, 3)), none, (2, 0), "alignment"),
        (((10, 0), (0, 3)), none, (4, 0), "alignment"),
    ]
    assert {f.global_shape for f in written.case.fragments} == {(10, 3)}
    assert written.padded == {"w": (16, 3)}
