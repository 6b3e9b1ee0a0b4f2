"""A pickle is read by what it holds, not by what it asks for: no memory beyond its size, no endless hash, no call."""

import pickle
import resource
import struct
from pathlib import Path

import pytest

from reshard_mpi.errors import InputError
from reshard_mpi.formats.pickles import METADATA_NAMES, TENSOR_NAMES, Record, Size, read_pickle

DCP = Path(__file__).resolve().parents[2] / "fixtures" / "v1" / "formats" / "dcp"
SIZE = b"\x8c\x05torch\x8c\x04Size\x93"
PATH = b"\x8c\x07pathlib\x8c\tPosixPath\x93"
DICT = b"\x8c\x0bcollections\x8c\x0bOrderedDict\x93"
TWICE = b"".join(b"\x94h" + bytes([n]) + b"\x86" for n in range(60))  # a pair of twice what came before, and so on
HOSTILE = [
    # why, pickle after its protocol, a word of the message
    ("an opcode that drops what it has read", b"N0.", "KeyError"),
    ("a key of 2**60 tuples", b"}N" + TWICE + b"Ns.", "keys that are no names"),
    ("such a key among others", b"}(N" + TWICE + b"Nu.", "keys that are no names"),
    ("such a key given to OrderedDict", DICT + b"]N" + TWICE + b"N\x86a\x85R.", "TypeError"),
    ("a state for a class", SIZE + b"N}\x8c\x01xNs\x86b.", "gives a state to a type"),
    ("a state for a tuple", SIZE + b")R}\x8c\x01xNsb.", "gives a state to a Size"),
    ("a call of what was made", SIZE + b")R)R.", "calls what it has made itself"),
    ("a call of a text", b"\x8c\x01x)R.", "calls what it has made itself"),
    ("half a character", b"\x8c\x03\xed\xa0\x80.", "surrogates"),
    ("an instance of the old kind", b"(cos\nsystem\no.", "os.system"),
    ("an extension", b"\x82\x01.", "KeyError"),
    ("a number of a million digits", b"I" + b"9" * 1_000_000 + b"\n.", "KeyError"),
    ("no end", b"N", "EOFError"),
]


@pytest.mark.parametrize(
    ("content", "word", "names"),
    [pytest.param(content, word, METADATA_NAMES, id=f"{why}, metadata") for why, content, word in HOSTILE]
    + [
        pytest.param(content, word, TENSOR_NAMES, id=f"{why}, tensor")
        for why, content, word in HOSTILE
        if SIZE not in content and PATH not in content  # which are no names of a tensor
    ],
)
def test_what_no_pickler_writes_is_bad_input(content, word, names):
    with pytest.raises(InputError) as refused:
        read_pickle(b"\x80\x04" + content, names, "here")
    assert word in str(refused.value) or "pickle names os.system" in str(refused.value)
    assert len(str(refused.value)) < 1000


def test_an_index_of_the_memo_takes_no_memory():
    """In the unpickler that is written in C it takes eight bytes for each smaller index: here 64 GiB."""
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    found = read_pickle(b"\x80\x02Nr" + struct.pack("<I", (1 << 32) - 1) + b".", METADATA_NAMES, "here")
    assert found is None
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 10_000  # KiB


def test_a_path_does_not_double_with_every_byte():
    found = read_pickle(
        b"\x80\x04" + PATH + b"\x94\x8c\x01x\x94" + b"h\x00h\x01h\x01\x86R\x94" * 3 + b".", METADATA_NAMES, "here"
    )
    assert isinstance(found, Record)


@pytest.mark.parametrize("protocol", [2, 3, 4, 5])
def test_what_python_writes_is_read(protocol):
    values = {
        "n": [None, True, False, 0, 255, 65535, -1, 1 << 40, -(1 << 100), 2.5],
        "s": ["", "ü", "x" * 300],
        "t": ((), (1, 2)),
    }
    values |= {"b": [b"", b"x" * 300]} if protocol > 2 else {}
    assert read_pickle(pickle.dumps(values, protocol), TENSOR_NAMES, "here") == values


def test_metadata_of_torch_is_read():
    found = read_pickle((DCP / ".metadata").read_bytes(), METADATA_NAMES, "here")
    assert {fqn: getattr(entry, "size", None) for fqn, entry in found.state_dict_metadata.items()} == {
        "model.w": Size((2, 3)),
        "model.t": Size((3, 2)),
        "model.s": Size(()),
        "model.e": Size((0, 2)),
        "step": None,
    }
