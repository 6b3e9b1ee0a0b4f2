"""State of single ranks: copied where the ranks are as many, dropped, or refused; never dealt anew."""

import pytest

from reshard_mpi.checkpoint.manifest import Case
from reshard_mpi.checkpoint.mesh import parse_target
from reshard_mpi.errors import InputError
from reshard_mpi.layout.file import parse_layout
from reshard_mpi.layout.opaque import find_opaque, opaque_rules
from reshard_mpi.layout.rules import target_layout
from reshard_mpi.layout.target import outgoing_case
from tests.unit.manifests import case_of, everywhere, tensor, whole

AXES = {"pp": 2, "tp": 2}


def states(role: str = "rng_state", name: str = "rng.{}") -> Case:
    """A state of each of four ranks, and a tensor that all of them hold."""
    each = [
        tensor(name.format(rank), (3,), {where: [whole((3,))]}, AXES, role=role)
        for rank, where in enumerate(everywhere(AXES))
    ]
    return case_of(AXES, *each, tensor("w", (4,), dict.fromkeys(everywhere(AXES), [whole((4,))]), AXES))


def lines(text: str):
    return parse_layout(f"[opaque]\n{text}".encode(), "my.toml").opaque


def holders(case: Case, target: str, text: str = "", kept=None):
    """Of each tensor the target ranks that hold it; or the texts of what is refused."""
    mesh, opaque = parse_target(target), find_opaque(case, lines(text) if text else ())
    kept = {f.logical_tensor_id for f in case.fragments} - opaque.dropped if kept is None else kept
    rules, faults = opaque_rules(case, mesh, kept, opaque)
    if faults:
        return list(map(str, faults))
    layout, faults = target_layout(case, mesh, rules | {"w": dict.fromkeys(mesh.split_axes, "replicate")})
    assert not faults, list(map(str, faults))
    found: dict[str, list[int]] = {}
    for fragment in outgoing_case(case, layout, mesh, kept).case.fragments:
        found.setdefault(fragment.fqn, []).append(fragment.rank)
    return found


OWN = {f"rng.{rank}": [rank] for rank in range(4)} | {"w": [0, 1, 2, 3]}


@pytest.mark.parametrize("target", ["pp=2,tp=2", "tp=4", "dp=2,fsdp=2"])
@pytest.mark.parametrize("role, text", [("rng_state", ""), ("opaque", ""), ("buffer", '"rng.*" = "copy"')])
def test_a_state_stays_on_its_rank_where_there_are_as_many(role, text, target):
    assert holders(states(role), target, text) == OWN


@pytest.mark.parametrize("target", ["single", "tp=2", "tp=8"])
@pytest.mark.parametrize("role, text", [("rng_state", ""), ("buffer", '"rng.*" = "copy"')])
def test_a_state_is_refused_where_there_are_more_ranks_or_fewer(role, text, target):
    (told,) = holders(states(role), target, text)
    assert all(word in told for word in ("rng.0", "the source has 4", '"drop"', "--exclude")), told


def test_a_state_that_is_dropped_or_left_out_is_in_nobodys_way():
    assert holders(states(), "single", '"rng.*" = "drop"') == {"w": [0]}
    assert holders(states(), "single", kept={"w"}) == {"w": [0]}
    left = {tensor: ranks for tensor, ranks in OWN.items() if tensor != "rng.0"}
    assert holders(states(), "tp=4", '"rng.0" = "drop"\n"rng.*" = "copy"') == left


def test_a_state_can_be_refused_always():
    (told,) = holders(states("buffer"), "pp=2,tp=2", '"rng.*" = "refuse"')
    assert told.startswith('my.toml: opaque."rng.*"') and "rng.3" in told
    assert holders(states("buffer"), "tp=4", '"rng.*" = "refuse"', kept={"w"}) == {"w": [0, 1, 2, 3]}


def test_what_several_ranks_hold_is_the_state_of_none():
    (told,) = holders(states(), "tp=4", '"w" = "copy"\n"rng.*" = "copy"')
    assert told.startswith('my.toml: opaque."w"') and "several ranks" in told


def test_a_line_without_effect_is_told_and_a_faulty_one_refused():
    assert find_opaque(states(), lines('"r" = "drop"')).warnings == ('my.toml: opaque."r": matches no tensor',)
    with pytest.raises(InputError, match=r"my.toml: opaque.\"a\".*copy, drop, refuse"):
        lines('"a" = "keep"')


def test_a_layout_is_written_without_what_was_dropped():
    text = parse_layout(b'[opaque]\n"a" = "copy"\n"b" = "drop"\n"c" = "refuse"', "my.toml").text()
    assert [line.treatment for line in parse_layout(text.encode(), "again").opaque] == ["copy", "refuse"]
