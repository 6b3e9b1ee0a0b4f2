"""Names: what rules make of them, and which are refused."""

import pytest

from reshard_mpi.checkpoint.wanted import RenameRule, new_name, rename_rule, rename_rules
from reshard_mpi.errors import InputError, StorageError, UsageError
from reshard_mpi.plan.changes import renamed_source
from reshard_mpi.storage.source import Source
from tests.unit.manifests import manifest, parsed, tensor, whole


def source_of(*fqns: str, ids: dict[str, str] | None = None, **changes) -> Source:
    tensors = [tensor((ids or {}).get(fqn, fqn), (2,), {(): [whole((2,))]}, {}, fqn=fqn) for fqn in fqns]
    return Source(None, parsed(manifest({}, *tensors, **changes)), None)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "why, rules, old, new",
    [
        ("all matches of a rule", ["a=>b"], "a.a", "b.b"),
        ("rules one after the other", ["a=>b", "b=>c"], "a.b", "c.c"),
        ("a group by number", [r"layers\.(\d+)=>h.\1"], "model.layers.12.w", "model.h.12.w"),
        ("a group by name", [r"^(?P<first>\w+)\.=>\g<first>/"], "a.b", "a/b"),
        ("nothing takes its place", [r"^module\. =>"], "module.w", "w"),
        ("nothing matches", ["x=>y"], "a", "a"),
        ("only the first arrow parts", ["a=>b=>c"], "a", "b=>c"),
        ("a look behind, without an arrow in it", [r"(?<=\.)w$=>weight"], "a.w", "a.weight"),
    ],
)
def test_rules_work_as_re_sub_does(why, rules, old, new):
    assert new_name(old, [rename_rule(rule) for rule in rules]) == new


def test_a_file_stands_for_the_rules_in_it(tmp_path):
    (tmp_path / "rules").write_text("# a table\na=>b\r\n\n  # more\n  c => d  \n")
    given = [RenameRule("x", "y"), tmp_path / "rules", RenameRule("z", "")]
    assert [str(rule) for rule in rename_rules(given)] == ["x=>y", "a=>b", "c=>d", "z=>"]


def test_a_file_that_can_not_be_read_is_told(tmp_path):
    with pytest.raises(StorageError, match="gone"):
        rename_rules([tmp_path / "gone"])
    (tmp_path / "binary").write_bytes(b"a=>b\n\xff\n")
    with pytest.raises(UsageError, match=r"binary: is no text in UTF-8: .* at byte 5"):
        rename_rules([tmp_path / "binary"])


def test_ids_oracles_and_layout_go_with_the_fqn_and_the_fragments_stay_what_they_are():
    layout = {"a": {"tp": 0}, "id of b": {"tp": "replicate"}}
    oracle = {
        "logical_tensor_id": "a",
        "dtype": "float32",
        "shape": [2],
        "payload_key": "a",
        "sha256": f"sha256:{64 * '0'}",
    }
    source = source_of(
        *("a", "b", "c"),
        ids={"b": "id of b"},
        topology={"source": {"world_size": 1}, "target": {"world_size": 1}, "layout": layout},
        oracles=[oracle],
        oracle_file="oracles.safetensors",
    )
    renamed, changes = renamed_source(source, [rename_rule("^[ab]$=>new.\\g<0>")])
    assert [(f.fragment_id, f.logical_tensor_id, f.fqn, f.payload_key) for f in renamed.case.fragments] == [
        ("a|r0", "new.a", "new.a", "a|r0"),
        ("id of b|r0", "id of b", "new.b", "id of b|r0"),
        ("c|r0", "c", "c", "c|r0"),
    ]
    assert set(renamed.case.topology.layout or ()) == {"new.a", "id of b"}
    assert renamed.case.oracles[0].logical_tensor_id == "new.a"
    assert [tuple(one) for one in changes.renamed] == [("id of b", "b", "new.b"), ("new.a", "a", "new.a")]
    assert changes.source_ids == {"new.a": "a", "id of b": "id of b", "c": "c"}
    assert source.case.fragments[0].fqn == "a"


@pytest.mark.parametrize(
    "why, fqns, ids, rule, told",
    [
        ("two become one", ["w.0", "w.1"], {}, r"\.\d$=>", "'w.0' and 'w.1' would both be called 'w'"),
        ("one becomes another", ["a", "b"], {}, "a=>b", "'a' and 'b' would both be called 'b'"),
        ("nothing is left", ["a"], {}, "a=>", "'a' would have an empty name"),
        ("an id is taken", ["a", "b"], {"b": "x"}, "a=>x", "tensors 'a' and 'x' would both have the id 'x'"),
    ],
)
def test_names_that_can_not_be_are_refused(why, fqns, ids, rule, told):
    with pytest.raises(InputError, match=f"--rename: {told}"):
        renamed_source(source_of(*fqns, ids=ids), [rename_rule(rule)])


def test_names_may_be_swapped_by_way_of_a_third():
    renamed, _ = renamed_source(source_of("a", "b"), [rename_rule(rule) for rule in ("^a$=>_", "^b$=>a", "^_$=>b")])
    assert [f.fqn for f in renamed.case.fragments] == ["b", "a"]


def test_a_rule_that_changes_nothing_is_told():
    _, changes = renamed_source(source_of("a"), [rename_rule("a=>b"), rename_rule("a=>c")])
    assert changes.warnings == ("--rename: 'a=>c' changes no name of 1",)
