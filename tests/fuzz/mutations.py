"""Real files, changed at random: a few bytes anywhere, or values of a JSON text that is still one."""

import copy
import json
from collections.abc import Callable, Iterator, Sequence
from random import Random
from typing import Any

from tests.unit.journals import said, sealed

Mutate = Callable[[bytes, Random], bytes]

ODD_VALUES: list[Any] = [
    *(None, True, False, 0, 1, 2, 3, -1, 1.0, 2.5, 1e308, float("nan"), float("inf")),
    *(1 << 31, (1 << 61) + 1, (1 << 62) - 1, 1 << 62, 1 << 63, 1 << 64, 10**18, 10**400),
    *("", "w", "none", "replicate", "a\nb", "\0", "..", "../case.json", "/etc/passwd", "rank-00001.safetensors"),
    *("\ud800", "x" * 5000, "float4_e2m1fn", "bool", "F4", "U8", "sha256:" + 64 * "0", "ü" * 300),
    *(
        [],
        [[]],
        {},
        [0],
        [1],
        [10**18],
        [10**18, 10**18],
        [0, 10**18],
        [1] * 70,
        [-1],
        ["tp", 0],
        {"tp": 2},
        {"world_size": 2},
    ),
    *({"stages": [0], "of": 2}, {"stages": [], "of": 1}, {"stages": [10**18], "of": 1}, {"x": 1 << 40}),
]
BYTES = [b"", b"\0", b"\xff", b"0", b"1", b"9", b"-", b".", b"e9", b",", b":", b'"', b"[", b"]", b"{", b"}", b"\\ud800"]
BYTES += [b"NaN", b"null", b"\xff\xff\xff\x7f", b"\0\0\0\0", b"\x01\0\0\0\0\0\0\0", b"\xff\xff\xff\xff\xff\xff\xff\x7f"]


def bytes_changed(data: bytes, random: Random) -> bytes:
    """Up to four places of it written over, left out, repeated, or cut off."""
    text = bytearray(data)
    for _ in range(random.randint(1, 4)):
        at, size = random.randint(0, len(text)), random.choice([0, 1, 1, 2, 4, 8])
        kind = random.randint(0, 9)
        if kind < 5:
            text[at : at + size] = random.choice(BYTES)
        elif kind < 8 and at < len(text):
            text[at] ^= 1 << random.randint(0, 7)
        elif kind == 8:
            text[at:at] = text[at : at + random.randint(1, 64)]
        else:
            del text[at : at + random.choice([1, 16, len(text)])]
    return bytes(text)


def json_changed(data: bytes, random: Random) -> bytes:
    """The same JSON text with up to three values of it, or keys, changed; now and then its bytes instead."""
    if not random.randint(0, 4):
        return bytes_changed(data, random)
    value = json.loads(data)
    for _ in range(random.randint(1, 3)):
        places = list(_places(value))
        if not places:
            break
        container, key = random.choice(places)
        _change(container, key, [each[at] for each, at in places], random)
    text = json.dumps(value, allow_nan=True).encode()
    if not random.randint(0, 9):  # the first key of some object twice
        at = text.find(b'{"', random.randint(0, len(text)))
        end = text.find(b":", at)
        text = text[:end] + b": 1, " + text[at + 1 : end] + text[end:] if 0 <= at < end else text
    return text


def journal_changed(data: bytes, random: Random) -> bytes:
    """Its bytes changed, so that seals are broken; or what lines say, sealed anew."""
    if not random.randint(0, 2):
        return bytes_changed(data, random)
    lines = [json.dumps(says).encode() for says in said(data)]
    at = random.randrange(len(lines))
    if not random.randint(0, 4):
        lines[at:at] = random.choices(lines, k=random.randint(0, 2))
    else:
        lines[at] = json_changed(lines[at], random).replace(b"\n", b"")
    return sealed(*lines)


def _places(value: Any) -> Iterator[tuple[Any, Any]]:
    """Every value within, as the list or object that it is in, and where in it."""
    for key in list(value) if isinstance(value, dict) else range(len(value)) if isinstance(value, list) else ():
        yield value, key
        yield from _places(value[key])


def _change(container: Any, key: Any, values: Sequence[Any], random: Random) -> None:
    kind = random.randint(0, 9)
    if kind == 0:
        del container[key]
    elif kind == 1 and isinstance(container, list):
        container.insert(key, copy.deepcopy(container[key]))
    elif kind == 1:
        container[f"{key}?"] = copy.deepcopy(container[key])
    elif kind == 2:
        container[key] = [container[key]]
    elif kind < 5:
        container[key] = copy.deepcopy(random.choice(values))
    elif kind < 7 and isinstance(container[key], int):
        container[key] += random.choice([-1, 1, 2, 1 << 40])
    else:
        container[key] = copy.deepcopy(random.choice(ODD_VALUES))


def case_changed(data: bytes, random: Random) -> bytes:
    """A manifest that is changed; mostly without its digest, for which it would be refused whatever else is wrong."""
    if random.randint(0, 3):
        data = json.dumps(json.loads(data) | {"expected_manifest_digest": None}).encode()
    return json_changed(data, random)
