"""Journals for the tests, as plain JSON values: read without a look at their seals, and sealed."""

import itertools
import json
import zlib


def said(text: bytes) -> list[dict]:
    return [json.loads(line)["says"] for line in text.splitlines()]


def sealed(*says: bytes) -> bytes:
    """The lines of a journal that say this."""
    crc32s = itertools.accumulate(says, lambda before, one: zlib.crc32(one, before), initial=0)
    seals = zip(says, itertools.islice(crc32s, 1, None), strict=True)
    return b"".join(b'{"says":%s,"crc32":%d}\n' % seal for seal in seals)
