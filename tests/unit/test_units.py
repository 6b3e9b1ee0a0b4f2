"""Sizes as people type them."""

import argparse

import pytest

from reshard_mpi.units import binary_size


@pytest.mark.parametrize(
    "text, nbytes",
    [
        ("0", 0),
        ("4096", 4096),
        ("1B", 1),
        ("1K", 1 << 10),
        ("1KB", 1 << 10),
        ("1KiB", 1 << 10),
        ("256M", 256 << 20),
        ("256m", 256 << 20),
        ("2GiB", 2 << 30),
        ("1T", 1 << 40),
        ("1.5K", 1536),
        ("0.5G", 1 << 29),
        (" 64 MiB ", 64 << 20),
        ("1.5", 1),
        ("999999999999999", 999999999999999),
    ],
)
def test_sizes_count_in_binary_units(text, nbytes):
    assert binary_size(text) == nbytes


@pytest.mark.parametrize(
    "why, text",
    [
        ("nothing", ""),
        ("no number", "M"),
        ("negative", "-1M"),
        ("no such unit", "1X"),
        ("two units", "1KM"),
        ("an exponent", "1e6"),
        ("nothing before the point", ".5G"),
        ("nothing after it", "1.G"),
        ("hexadecimal", "0x10"),
        ("underscores", "1_000"),
        ("digits of another alphabet", "٣M"),
        ("infinity", "inf"),
        ("longer than any memory", "1" * 16),
        ("two numbers", "1 2"),
        ("a second line", "1M\n2M"),
    ],
)
def test_what_is_no_size_is_refused_with_examples(why, text):
    with pytest.raises(argparse.ArgumentTypeError, match="is no size; write it like 256M"):
        binary_size(text)
