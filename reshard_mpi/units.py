"""Sizes as people type them."""

import argparse
import re

_BINARY = {"": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30, "T": 1 << 40}


def binary_size(text: str) -> int:
    """Bytes of `256M`, `1.5GiB` or `4096`, in KiB, MiB, GiB.

    >>> binary_size("1.5K"), binary_size("2GiB")
    (1536, 2147483648)
    """
    match = re.fullmatch(r"\s*(\d{1,15}(?:\.\d{1,9})?)\s*([KMGT]?)(?:i?B)?\s*", text, re.ASCII | re.IGNORECASE)
    if not match:
        raise argparse.ArgumentTypeError(f"{text!r} is no size; write it like 256M, 2G or 1.5GiB")
    return int(float(match[1]) * _BINARY[match[2].upper()])
