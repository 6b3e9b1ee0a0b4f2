"""`case.json` read and written: what JSON allows and we don't, versions, unknown keys, digests."""

import json
from pathlib import Path

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from reshard_mpi.checkpoint.manifest import case_text, fragments_digest, parse_case, strict_json
from reshard_mpi.errors import InputError
from tests.reference.case import load
from tests.unit.manifests import SINGLE, case_of, manifest, parsed, sealed, tensor, text_of, whole

CASES = Path(__file__).parents[2] / "fixtures" / "v1" / "cases"
EXAMPLE = CASES / "tp2-pp2-to-single"
AXES = {"tp": 2}


def good() -> dict:
    held = {(0,): [((0, 0), (4, 3))], (1,): [((0, 3), (4, 3))]}
    return manifest(AXES, tensor("w", (4, 6), held, AXES), tensor("s", (), {(0,): [whole(())]}, AXES))


def changed(raw: dict, path: str, value: object) -> dict:
    """`raw` with another value at a path like `fragments.0.dtype`."""
    here = raw
    *parents, last = path.split(".")
    for step in parents:
        here = here[int(step) if step.isdecimal() else step]
    here[int(last) if last.isdecimal() else last] = value
    return raw


# JSON


@pytest.mark.parametrize(
    "why, text, told",
    [
        ("nothing", b"", "no valid JSON"),
        ("cut short", b'{"a": [1, 2', "no valid JSON"),
        ("two values", b"{} {}", "no valid JSON"),
        ("a key twice", b'{"a": 1, "a": 1}', "key 'a' is given twice"),
        ("a key twice, deep inside", b'{"a": [{"b": {"c": 1, "d": 2, "c": 3}}]}', "key 'c' is given twice"),
        ("a key twice, once escaped", b'{"a": 1, "\\u0061": 1}', "key 'a' is given twice"),
        ("NaN", b'{"a": NaN}', "NaN is no JSON number"),
        ("infinity", b'{"a": Infinity}', "Infinity is no JSON number"),
        ("negative infinity", b'{"a": -Infinity}', "-Infinity is no JSON number"),
        ("nested too deep", b"[" * 200_000 + b"]" * 200_000, "nested too deep"),
        ("objects nested too deep", b'{"a":' * 200_000 + b"1" + b"}" * 200_000, "nested too deep"),
        ("a number too long to be one", b"1" * 100_000, "no valid JSON"),
        ("half a character", b'{"a": "\\ud800"}', "no valid JSON"),
        ("half a character in a key", b'{"\\uD800": 1}', "no valid JSON"),
        ("the other half", b'["\\udfff\\ud800"]', "no valid JSON"),
        ("not UTF-8", b'{"a": "\xff"}', "no valid JSON"),
        ("UTF-16", '{"a": 1}'.encode("utf-16"), "no valid JSON"),
        ("half a character, encoded", b'{"a": "\xed\xa0\x80"}', "no valid JSON"),
        ("a byte order mark", b'\xef\xbb\xbf{"a": 1}', "no valid JSON"),
        ("a control character in a string", b'{"a": "\n"}', "no valid JSON"),
        ("single quotes", b"{'a': 1}", "no valid JSON"),
        ("a leading zero", b"01", "no valid JSON"),
        ("a comment", b"{} // all of it", "no valid JSON"),
    ],
    ids=lambda value: value if isinstance(value, str) and " " in value else "",
)
def test_what_json_forbids_or_two_readers_would_read_differently_is_bad_input(why, text, told):
    with pytest.raises(InputError, match=told) as refused:
        strict_json(text, "case.json")
    assert refused.value.where == "case.json"
    assert len(str(refused.value)) < 1000


@pytest.mark.parametrize(
    "text, value",
    [
        (b'{"a": {"a": 1}, "b": {"a": 1}}', {"a": {"a": 1}, "b": {"a": 1}}),
        (b'"\\ud83d\\ude00"', "\U0001f600"),
        ('"größe"'.encode(), "größe"),
        (b'{"": 0}', {"": 0}),
        (b" [1, -2, 0.5] \n", [1, -2, 0.5]),
    ],
)
def test_what_json_allows_is_read(text, value):
    assert strict_json(text, "case.json") == value


def test_a_manifest_nested_as_deep_as_can_be_read_is_read_to_its_end_or_refused():
    """Whatever reads it must be able to write it too, for its digest."""
    for depth in range(850, 1000, 7):
        text = text_of(good()).replace(b'"role":', b'"deep": ' + b"[" * depth + b"]" * depth + b', "role":', 1)
        try:
            parse_case(text)
        except InputError as refused:
            assert "nested too deep" in str(refused)


# Types and bounds


@pytest.mark.parametrize("value", [None, [], "text", 5, True])
def test_a_manifest_is_an_object(value):
    with pytest.raises(InputError, match="expected an object"):
        parse_case(text_of(value))


@pytest.mark.parametrize(
    "why, path, value",
    [
        ("bool for int", "world_size", True),
        ("float for int, even if whole", "world_size", 2.0),
        ("text for int", "world_size", "2"),
        ("negative", "world_size", -2),
        ("zero ranks", "world_size", 0),
        ("more ranks than an int32", "world_size", 1 << 31),
        ("bool in a shape", "fragments.0.global_shape", [True, 6]),
        ("float in a shape", "fragments.0.global_shape", [4.0, 6]),
        ("infinity by an exponent", "fragments.0.global_shape", [1e300, 6]),
        ("negative in a shape", "fragments.0.global_shape", [-4, 6]),
        ("negative offset", "fragments.0.element_offset", [-1, 0]),
        ("negative extent", "fragments.0.element_extent", [-4, 3]),
        ("beyond int64", "fragments.0.element_extent", [1 << 64, 3]),
        ("so large that sums leave int64", "fragments.0.element_offset", [1 << 62, 0]),
        ("hundreds of digits", "fragments.0.global_shape", [10**300, 6]),
        ("null for a shape", "fragments.0.local_shape", None),
        ("text for a shape", "fragments.0.local_shape", "43"),
        ("a number for a shape", "fragments.0.local_shape", 12),
        ("negative padding", "fragments.0.padding.before", [-1, 0]),
        ("no semantic", "fragments.0.padding.semantic", None),
        ("no member", "fragments.0.replica.member_count", 0),
        ("negative member", "fragments.0.replica.member_index", -1),
        ("an empty id", "fragments.0.fragment_id", ""),
        ("an empty file name", "fragments.0.payload_file", ""),
        ("a number for a name", "fragments.0.fqn", 5),
        ("no digest at all", "fragments.0.fragment_digest", "sha256:"),
        ("a digest in capitals", "fragments.0.fragment_digest", "sha256:" + "A" * 64),
        ("another hash", "fragments.0.fragment_digest", "md5:" + "a" * 64),
        ("a digest with a line end", "fragments.0.fragment_digest", "sha256:" + "a" * 64 + "\n"),
        ("coordinates as an object", "fragments.0.topology_coordinates", {"rank": 0, "tp": 0}),
        ("a coordinate of three", "fragments.0.topology_coordinates", [["rank", 0, 0]]),
        ("a negative coordinate", "fragments.0.topology_coordinates", [["rank", -1], ["tp", 0]]),
        ("a fragment that is none", "fragments.0", 5),
        ("fragments that are none", "fragments", {}),
        ("a topology that is none", "topology", []),
        ("an axis of text", "topology.source", {"tp": "2"}),
        ("a rule that is none", "topology.layout", {"w": {"tp": "split"}}),
        ("a negative tensor axis", "topology.layout", {"w": {"tp": -1}}),
        ("bool for a tensor axis", "topology.layout", {"w": {"tp": True}}),
        ("stages of nothing", "topology.layout", {"w": {"pp": {"stages": [0], "of": 0}}}),
        ("stages without their number", "topology.layout", {"w": {"pp": {"stages": [0]}}}),
        ("components that are text", "components", "full_model"),
        ("an oracle that is none", "oracles", [5]),
    ],
    ids=lambda value: value if isinstance(value, str) and " " in value else "",
)
def test_a_value_of_the_wrong_type_or_size_is_bad_input_that_says_where(why, path, value):
    with pytest.raises(InputError) as refused:
        parse_case(text_of(changed(good(), path, value)))
    place = "$." + path.split(".")[0]
    assert place in str(refused.value)


@pytest.mark.parametrize("key", ["schema_id", "schema_version", "case_id", "topology", "world_size", "fragments"])
def test_a_key_that_is_lacking_is_named(key):
    raw = good()
    del raw[key]
    with pytest.raises(InputError, match=key):
        parse_case(text_of(raw))


@pytest.mark.parametrize(
    "key", ["fragment_id", "logical_tensor_id", "dtype", "global_shape", "padding", "replica", "payload_key"]
)
def test_a_key_of_a_fragment_that_is_lacking_is_named(key):
    raw = good()
    del raw["fragments"][1][key]
    with pytest.raises(InputError, match=key):
        parse_case(text_of(raw))


@settings(max_examples=200)
@given(
    st.recursive(
        st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=3),
        lambda v: st.lists(v, max_size=2) | st.dictionaries(st.text(max_size=3), v, max_size=2),
        max_leaves=4,
    ),
    st.data(),
)
def test_no_value_anywhere_makes_the_reader_fail_otherwise(value, data):
    raw = good()
    paths = [
        *raw,
        *(f"fragments.0.{key}" for key in raw["fragments"][0]),
        "topology.source",
        "topology.layout",
        "oracles",
    ]
    path = data.draw(st.sampled_from(paths))
    try:
        parse_case(text_of(changed(raw, path, value)))
    except InputError as refused:
        assert len(str(refused).splitlines()) == 1


# Versions


@pytest.mark.parametrize("version", ["1.0.0", "1.0.1", "1.1.0", "1.999.7"])
def test_the_same_major_version_is_read(version):
    assert parsed(good() | {"schema_version": version}).case.schema_version == version


@pytest.mark.parametrize(
    "version",
    ["2.0.0", "0.9.0", "10.0.0", "1", "1.0", "1.0.0.0", "1.x.0", "", "1.-1.0", "v1.0.0", " 1.0.0", None, 1, 1.0],
)
def test_another_version_is_bad_input(version):
    with pytest.raises(InputError, match="schema_version"):
        parsed(good() | {"schema_version": version})


@pytest.mark.parametrize("schema_id", ["obliteratus.other", "", None, 5])
def test_another_schema_is_bad_input(schema_id):
    with pytest.raises(InputError, match="schema_id"):
        parsed(good() | {"schema_id": schema_id})


def test_unknown_keys_are_read_over_with_one_warning_that_names_them():
    raw = good() | {"schema_version": "1.1.0", "colour": "blue", "oracles": [], "oracle_file": None}
    raw["topology"]["shape"] = "torus"
    for one in raw["fragments"]:
        one["weight"] = 5
        one["padding"]["cause"] = "luck"
        one["replica"]["quality"] = [1, 1e16, 1e-07]
    read = parsed(sealed(raw))
    assert read.fragments_digest == sealed(raw)["expected_manifest_digest"]  # of what was written, unknown keys too
    (warning,) = read.warnings
    for name in ("colour", "topology.shape", "fragments[].weight", "padding.cause", "replica.quality"):
        assert name in warning
    assert warning.count("weight") == 1


def test_a_manifest_of_known_keys_has_no_warning():
    assert parsed(good()).warnings == ()


def test_a_warning_is_one_line_whatever_the_unknown_keys_contain(capsys):
    from reshard_mpi.report import warn

    warn(parsed(good() | {"a\nreshard_mpi: error: b": 1}).warnings)
    assert len(capsys.readouterr().err.splitlines()) == 1


# Digests and text


def test_the_digest_of_the_reference_example_is_reproduced():
    raw = json.loads((EXAMPLE / "case.json").read_text())
    assert fragments_digest(raw["fragments"]) == raw["expected_manifest_digest"]
    assert parse_case((EXAMPLE / "case.json").read_bytes()).fragments_digest == raw["expected_manifest_digest"]


@pytest.mark.parametrize("folder", sorted(CASES.iterdir()), ids=lambda folder: folder.name)
def test_a_case_that_is_written_and_read_again_is_the_same(folder):
    text = (folder / "case.json").read_bytes()
    case = parse_case(text).case
    again = parse_case(case_text(case))
    assert again.case.expected_manifest_digest == again.fragments_digest == case.expected_manifest_digest
    assert again.case == case
    assert case_text(again.case) == case_text(case)
    assert json.loads(case_text(case)) == json.loads(text)


@given(st.text(min_size=1) | st.text(st.characters(max_codepoint=127), min_size=1))
@example("größe")
@example("\U0001f600")
@example('a"b\\c\n\x7f')
def test_any_name_survives_being_written(name):
    case = case_of(SINGLE, tensor(name, (2,), {(): [whole((2,))]}, SINGLE))
    text = case_text(case)
    assert text == (json.dumps(json.loads(text), sort_keys=True, indent=2) + "\n").encode()
    assert parse_case(text).case.fragments == case.fragments
    assert parse_case(text).fragments_digest == fragments_digest(json.loads(text)["fragments"])


def test_a_digest_leaves_out_where_the_payloads_are_and_nothing_else():
    raw = good()
    digest = fragments_digest(raw["fragments"])
    for key in raw["fragments"][0]:
        other = json.loads(json.dumps(raw["fragments"]))
        other[0][key] = "something else"
        assert (fragments_digest(other) == digest) == (key in ("payload_file", "payload_key"))
    assert fragments_digest(raw["fragments"][::-1]) != digest


def test_the_text_is_sorted_indented_and_without_a_layout_that_is_none():
    text = case_text(case_of(SINGLE, tensor("w", (2,), {(): [whole((2,))]}, SINGLE)))
    raw = json.loads(text)
    assert text == (json.dumps(raw, sort_keys=True, indent=2) + "\n").encode()
    assert "layout" not in raw["topology"]


def test_the_judge_reads_what_was_written(tmp_path):
    for file in EXAMPLE.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    (tmp_path / "case.json").write_bytes(case_text(parse_case((EXAMPLE / "case.json").read_bytes()).case))
    assert load(tmp_path, full=True).tensors.keys() == load(EXAMPLE).tensors.keys()
