"""The safetensors container: headers that lie are refused, headers of ours are read by the library."""

import json
import os
import struct

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors import SafetensorError, safe_open
from safetensors.numpy import load_file, save_file

from reshard_mpi.checkpoint.dtypes import BY_SAFETENSORS, DTYPES, dtype_named, nbytes_of
from reshard_mpi.errors import InputError
from reshard_mpi.storage.safetensors import (
    ALIGNMENT,
    LARGEST_HEADER,
    StoredArray,
    build_header,
    parse_header,
    read_header,
)
from tests.reference import dtypes as reference_dtypes
from tests.reference import shards

WHERE = "rank-00000.safetensors"


def entry(dtype="F32", shape=(2,), data_offsets=(0, 8)) -> dict:
    return {"dtype": dtype, "shape": list(shape), "data_offsets": list(data_offsets)}


def parsed(header: object, data_nbytes: int) -> dict[str, StoredArray]:
    """The arrays of a file with this header (JSON text, or a value) and so many bytes of data."""
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return parse_header(text, 8 + len(text), 8 + len(text) + data_nbytes, WHERE)


def opened(path, content: bytes) -> dict[str, StoredArray]:
    path.write_bytes(content)
    fd = os.open(path, os.O_RDONLY)
    try:
        return read_header(fd, WHERE)
    finally:
        os.close(fd)


# Headers that lie


HOSTILE = [
    ("an array beyond the file", {"a": entry(shape=[4], data_offsets=[0, 16])}, 8, "8 bytes short of"),
    ("bytes after the last array", {"a": entry()}, 9, "1 bytes longer than"),
    ("nothing but data", {}, 8, "8 bytes longer than"),
    ("two arrays in one place", {"a": entry(), "b": entry()}, 8, "overlap or leave a gap"),
    ("two arrays that overlap", {"a": entry(), "b": entry(data_offsets=[4, 12])}, 12, "overlap or leave a gap"),
    ("a gap between two arrays", {"a": entry(), "b": entry(data_offsets=[12, 20])}, 20, "overlap or leave a gap"),
    ("a gap before the first", {"a": entry(data_offsets=[8, 16])}, 16, "overlap or leave a gap"),
    (
        "an empty array inside another",
        {"a": entry(), "b": entry(shape=[0], data_offsets=[4, 4])},
        8,
        "overlap or leave a gap",
    ),
    ("an end before its begin", {"a": entry(data_offsets=[8, 0])}, 8, "needs 8 bytes, data_offsets give -8"),
    ("more bytes than elements", {"a": entry(data_offsets=[0, 12])}, 12, "needs 8 bytes, data_offsets give 12"),
    ("fewer bytes than elements", {"a": entry(shape=[3])}, 8, "needs 12 bytes, data_offsets give 8"),
    ("a dtype that isn't", {"a": entry(dtype="F31")}, 8, "'F31'; expected one of"),
    ("a dtype as torch spells it", {"a": entry(dtype="float32")}, 8, "'float32'; expected one of"),
    ("a dtype in small letters", {"a": entry(dtype="f32")}, 8, "'f32'; expected one of"),
    ("a dtype that is a number", {"a": entry() | {"dtype": 32}}, 8, "Expected `str`"),
    ("half a byte", {"a": entry(dtype="F4", shape=[3], data_offsets=[0, 2])}, 2, "12 bits"),
    ("a negative extent", {"a": entry(shape=[-2])}, 8, "Expected `int` >= 0"),
    ("two negative extents", {"a": entry(shape=[-2, -1])}, 8, "Expected `int` >= 0"),
    ("a negative offset", {"a": entry(data_offsets=[-8, 0])}, 8, "Expected `int` >= 0"),
    ("a fraction", {"a": entry(shape=[2.5])}, 8, "Expected `int`, got `float`"),
    ("a float, even if whole", {"a": entry(data_offsets=[0, 8.0])}, 8, "Expected `int`, got `float`"),
    ("a bool", {"a": entry(shape=[True, 2])}, 8, "Expected `int`, got `bool`"),
    ("text for a number", {"a": entry(shape=["2"])}, 8, "Expected `int`, got `str`"),
    ("a shape beyond any file", {"a": entry(shape=[1 << 61, 1 << 61])}, 8, "data_offsets give 8"),
    ("a shape beyond int64", {"a": entry(shape=[1 << 64])}, 8, "header entry 'a'"),
    ("a product that would wrap to 8 bytes", {"a": entry(shape=[(1 << 61) + 1, 2])}, 8, "data_offsets give 8"),
    ("offsets beyond int64", {"a": entry(data_offsets=[1 << 64, (1 << 64) + 8])}, 8, "header entry 'a'"),
    (
        "offsets just below int64",
        {"a": entry(data_offsets=[(1 << 62) - 9, (1 << 62) - 1])},
        8,
        "overlap or leave a gap",
    ),
    ("three offsets", {"a": entry(data_offsets=[0, 8, 16])}, 8, "header entry 'a'"),
    ("one offset", {"a": entry(data_offsets=[8])}, 8, "header entry 'a'"),
    ("no offsets", {"a": {"dtype": "F32", "shape": [2]}}, 8, "data_offsets"),
    ("no shape", {"a": {"dtype": "F32", "data_offsets": [0, 8]}}, 8, "shape"),
    ("more axes than numpy has", {"a": entry(shape=[1] * 64, data_offsets=[0, 4])}, 4, "length <= 63"),
    ("an entry that is none", {"a": [0, 8]}, 8, "header entry 'a'"),
    ("metadata that is no map", {"__metadata__": ["pt"], "a": entry()}, 8, "no map of strings"),
    ("metadata of numbers", {"__metadata__": {"step": 5}, "a": entry()}, 8, "no map of strings"),
    ("metadata within metadata", {"__metadata__": {"format": {"a": "b"}}, "a": entry()}, 8, "no map of strings"),
    ("no object", [entry()], 8, "no JSON object"),
    ("no value", b"", 8, "no valid JSON"),
    ("not UTF-8", b'{"\xff": 1}', 8, "no valid JSON"),
    (
        "a key twice",
        b'{"a":{"dtype":"F32","shape":[2],"data_offsets":[0,8]},"a":{"dtype":"F32","shape":[2],"data_offsets":[0,8]}}',
        8,
        "key 'a' is given twice",
    ),
    (
        "dtype twice",
        b'{"a":{"dtype":"I32","dtype":"F32","shape":[2],"data_offsets":[0,8]}}',
        8,
        "key 'dtype' is given twice",
    ),
    ("NaN", b'{"a":{"dtype":"F32","shape":[NaN],"data_offsets":[0,8]}}', 8, "NaN"),
    ("nested too deep", b'{"a":' + b"[" * 100_000 + b"]" * 100_000 + b"}", 8, "nested too deep"),
    ("a number of a million digits", b'{"a":' + b"9" * 1_000_000 + b"}", 8, "no valid JSON"),
]


@pytest.mark.parametrize("why, header, data_nbytes, told", HOSTILE, ids=[row[0] for row in HOSTILE])
def test_a_header_that_contradicts_itself_or_the_file_is_bad_input(why, header, data_nbytes, told):
    with pytest.raises(InputError) as refused:
        parsed(header, data_nbytes)
    assert told in str(refused.value)
    assert WHERE in refused.value.where
    assert len(str(refused.value)) < 2000


@pytest.mark.parametrize(
    "why, content",
    [
        ("an empty file", b""),
        ("shorter than a length", b"\x02\0\0\0\0\0\0"),
        ("a length beyond the file", struct.pack("<Q", 3) + b"{}"),
        ("a length beyond any memory", struct.pack("<Q", 1 << 60) + b"{}"),
        ("a length beyond int64", b"\xff" * 8 + b"{}"),
        ("a length of nothing", struct.pack("<Q", 0)),
        ("another format", b"PK\x03\x04" + bytes(100)),
        ("a pickle", b"\x80\x04\x95" + bytes(100)),
    ],
)
def test_a_file_that_is_none_is_bad_input(why, content, tmp_path):
    with pytest.raises(InputError):
        opened(tmp_path / WHERE, content)


def test_a_header_as_long_as_the_file_that_is_too_long_for_the_library_is_not_read(tmp_path):
    path = tmp_path / WHERE
    path.write_bytes(struct.pack("<Q", LARGEST_HEADER + 1))
    os.truncate(path, LARGEST_HEADER + 100)  # sparse: takes no space
    fd = os.open(path, os.O_RDONLY)
    try:
        with pytest.raises(InputError, match="100000001 bytes"):
            read_header(fd, WHERE)
    finally:
        os.close(fd)


@settings(max_examples=150)
@given(st.data())
def test_what_is_read_of_a_mutilated_header_lies_within_the_file(data):
    """Whatever is done to a header, either it is refused or its arrays fill the data exactly."""
    header = {
        "__metadata__": {"format": "pt"},
        "a": entry(),
        "b": entry(shape=[], data_offsets=[8, 12]),
        "c": entry(shape=[0], data_offsets=[12, 12]),
    }
    text = bytearray(json.dumps(header).encode())
    for _ in range(data.draw(st.integers(1, 3))):
        at = data.draw(st.integers(0, len(text) - 1))
        text[at : at + data.draw(st.integers(0, 2))] = data.draw(
            st.sampled_from([b"", b"0", b"9", b"-", b",", b'"', b"}", b"\x00", b"1e3"])
        )
    try:
        arrays = parsed(bytes(text), 12)
    except InputError:
        return
    assert sum(array.nbytes for array in arrays.values()) == 12
    assert all(
        8 + len(text) <= array.begin and array.begin + array.nbytes <= 20 + len(text) for array in arrays.values()
    )


@pytest.mark.parametrize(
    "why, header, data_nbytes, keys",
    [
        ("nothing at all", {}, 0, []),
        ("metadata alone", {"__metadata__": {"format": "pt"}}, 0, []),
        ("0-d", {"a": entry(shape=[], data_offsets=[0, 4])}, 4, ["a"]),
        (
            "empty arrays at both ends",
            {"a": entry(shape=[0], data_offsets=[0, 0]), "b": entry(), "c": entry(shape=[3, 0], data_offsets=[8, 8])},
            8,
            ["a", "b", "c"],
        ),
        ("keys in another order than the data", {"b": entry(data_offsets=[8, 16]), "a": entry()}, 16, ["b", "a"]),
        ("any name", {'größe/重み \n"': entry()}, 8, ['größe/重み \n"']),
        ("an empty name", {"": entry()}, 8, [""]),
        ("half bytes", {"a": entry(dtype="F4", shape=[3, 2], data_offsets=[0, 3])}, 3, ["a"]),
        ("six bits", {"a": entry(dtype="F6_E2M3", shape=[4], data_offsets=[0, 3])}, 3, ["a"]),
    ],
)
def test_a_sound_header_is_read(why, header, data_nbytes, keys):
    assert list(parsed(header, data_nbytes)) == keys


def test_what_the_library_writes_is_read(tmp_path):
    arrays = {
        "w": np.arange(12, dtype=np.float32).reshape(3, 4),
        "s": np.array(7, np.int64),
        "e": np.empty((0, 5), np.uint8),
        "b": np.array([True, False]),
    }
    save_file(arrays, tmp_path / WHERE, {"format": "np"})
    content = (tmp_path / WHERE).read_bytes()
    found = opened(tmp_path / WHERE, content)
    assert found.keys() == arrays.keys()
    for key, array in arrays.items():
        span = found[key]
        assert (span.dtype, span.shape) == (array.dtype.name, array.shape)
        assert content[span.begin : span.begin + span.nbytes] == array.tobytes()


def test_every_dtype_is_spelled_as_the_independent_reader_spells_it():
    spelled = {name: (dtype.safetensors, dtype.nbits) for name, dtype in DTYPES.items()}
    assert spelled == reference_dtypes.DTYPES
    assert {dtype.name for dtype in BY_SAFETENSORS.values()} == set(DTYPES)


# Headers of ours


ARRAYS = [
    ("wide", "complex64", (2, 3)),
    ("d", "float64", ()),
    ("empty", "int64", (0, 7)),
    ("f", "float32", (5,)),
    ("bf", "bfloat16", (3, 1)),
    ("flag", "bool", (3,)),
    ("f8", "float8_e4m3fn", (1, 1, 1)),
    ("f6", "float6_e2m3fn", (2, 2)),
    ("f4", "float4_e2m1fn", (2, 3)),
    ("f4 empty", "float4_e2m1fn", (3, 0)),
]


def written(path, arrays, metadata, fill=0x11) -> tuple[bytes, list[StoredArray]]:
    head, spans = build_header(arrays, metadata)
    path.write_bytes(head + bytes([fill]) * sum(span.nbytes for span in spans))
    return head, spans


def test_the_library_reads_our_headers_also_of_empty_and_sub_byte_arrays(tmp_path):
    _, spans = written(tmp_path / WHERE, ARRAYS, {"format": "pt", "tied": "w"})
    with safe_open(tmp_path / WHERE, framework="numpy") as file:
        assert set(file.keys()) == {key for key, _, _ in ARRAYS}
        assert file.metadata() == {"format": "pt", "tied": "w"}
        for key, name, shape in ARRAYS:
            assert tuple(file.get_slice(key).get_shape()) == shape
            assert file.get_slice(key).get_dtype() == DTYPES[name].safetensors
        assert file.get_tensor("f").tobytes() == b"\x11" * 20
        assert file.get_tensor("empty").shape == (0, 7)
    assert opened(tmp_path / WHERE, (tmp_path / WHERE).read_bytes()) == {
        key: span for (key, _, _), span in zip(ARRAYS, spans, strict=True)
    }


def test_the_independent_reader_reads_our_headers(tmp_path):
    written(tmp_path / WHERE, ARRAYS, {"format": "pt"})
    shard = shards.read_shard(tmp_path / WHERE)
    assert [(key, array.dtype, tuple(array.shape)) for key, array in shard.arrays.items()] == ARRAYS
    assert shard.metadata == {"format": "pt"}


def test_a_shard_that_holds_nothing_is_a_file_all_the_same(tmp_path):
    written(tmp_path / WHERE, [], {"format": "pt"})
    assert load_file(tmp_path / WHERE) == {}


@pytest.mark.parametrize("key", ["größe", "重み", 'a"b', "a\\b", "a\nb", "a/b|c#d", "\U0001f600", " ", "\x7f"])
def test_any_key_is_written_so_that_the_library_reads_it(key, tmp_path):
    written(tmp_path / WHERE, [(key, "float32", (2,))], {"format": "pt", "tied " + key: key})
    with safe_open(tmp_path / WHERE, framework="numpy") as file:
        assert list(file.keys()) == [key]
        assert file.metadata()["tied " + key] == key
    assert list(opened(tmp_path / WHERE, (tmp_path / WHERE).read_bytes())) == [key]


@pytest.mark.parametrize("length", range(9))
def test_data_begins_at_a_multiple_of_8_whatever_the_length_of_the_names(length):
    head, (span,) = build_header([("k" * (length + 1), "float64", (2,))], {"format": "pt"})
    assert len(head) % ALIGNMENT == 0 and ALIGNMENT == 4096
    assert span.begin == len(head)
    assert struct.unpack("<Q", head[:8])[0] == len(head) - 8


def test_arrays_in_order_of_their_item_size_are_all_aligned():
    _, spans = build_header(ARRAYS, {})
    for span in spans:
        item_nbytes = max(DTYPES[span.dtype].nbits // 8, 1)
        assert span.nbytes == 0 or span.begin % min(item_nbytes, 8) == 0
    assert [span.begin for span in spans[1:]] == [span.begin + span.nbytes for span in spans[:-1]]


def test_the_order_of_metadata_and_not_that_of_arrays_is_the_same_every_time():
    a, b = (build_header(ARRAYS, dict(items)) for items in ([("x", "1"), ("a", "2")], [("a", "2"), ("x", "1")]))
    assert a == b
    assert list(json.loads(a[0][8:])) == ["__metadata__", *(key for key, _, _ in ARRAYS)]


def test_an_array_that_fills_no_whole_bytes_is_bad_input():
    with pytest.raises(InputError, match="12 bits"):
        build_header([("a", "float4_e2m1fn", (3,))], {})


def test_a_header_that_the_library_would_refuse_is_not_written(monkeypatch):
    monkeypatch.setattr("reshard_mpi.storage.safetensors.LARGEST_HEADER", 200)
    with pytest.raises(InputError, match="use more target ranks"):
        build_header([("k" * 200, "float32", (2,))], {})


@pytest.mark.parametrize("header", [row[1] for row in HOSTILE if isinstance(row[1], dict)][:8])
def test_the_library_refuses_the_same_lies_about_offsets(header, tmp_path):
    """Not our taste alone: a file that we refuse for its offsets can't be opened by others either."""
    nbytes = next(row[2] for row in HOSTILE if row[1] is header)
    text = json.dumps(header).encode()
    (tmp_path / WHERE).write_bytes(struct.pack("<Q", len(text)) + text + bytes(nbytes))
    with pytest.raises(SafetensorError), safe_open(tmp_path / WHERE, framework="numpy"):
        pass


# Element types


@pytest.mark.parametrize(
    "nelems, name, nbytes",
    [(0, "float4_e2m1fn", 0), (6, "float4_e2m1fn", 3), (4, "float6_e3m2fn", 3), (3, "bool", 3), (5, "complex64", 40)],
)
def test_bytes_of_elements(nelems, name, nbytes):
    assert nbytes_of(nelems, DTYPES[name], "w") == nbytes


def test_a_dtype_that_is_not_known_is_bad_input_that_lists_those_that_are():
    with pytest.raises(InputError, match="w: dtype 'float31' is not known; expected one of bool, .*float4_e2m1fn"):
        dtype_named("float31", "w")
