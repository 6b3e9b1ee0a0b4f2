"""The command line: what is accepted, what is refused in one line, and sizes as people type them."""

import argparse
from pathlib import Path

import pytest

from reshard_mpi.cli import binary_size, parse, tell
from reshard_mpi.errors import UsageError

# Commands


@pytest.mark.parametrize(
    "words, command, uses_all_ranks",
    [
        ("", "demo", True),
        ("reshard a b", "reshard", True),
        ("verify a", "verify", True),
        ("compare a b", "compare", True),
        ("plan a", "plan", False),
        ("plan --simulate llama-8b --from tp=8 --target tp=4", "plan", False),
        ("inspect a w", "inspect", False),
        ("sample a", "sample", False),
    ],
)
def test_a_command_uses_all_ranks_or_one(words, command, uses_all_ranks):
    options = parse(words.split())
    assert (options.command, options.uses_all_ranks) == (command, uses_all_ranks)


def test_what_is_not_given_has_its_default():
    options = parse(["reshard", "a", "b"])
    assert (options.source, options.out, options.memory) == (Path("a"), Path("b"), 256 << 20)
    assert (options.target, options.include, options.exclude, options.report) == (None, [], [], None)
    assert (options.writers, options.verify, options.progress) == ("auto", "source", "auto")
    assert (options.overwrite, options.restart) == (False, False)


def test_options_are_read():
    options = parse("reshard a b --target tp=4,pp=2 --include x* --include y --memory 1.5G --writers shared".split())
    assert (str(options.target), options.include, options.memory) == ("pp=2,tp=4", ["x*", "y"], 3 << 29)
    assert options.writers == "shared"
    assert str(parse("plan --simulate moe-256 --from ep=8".split()).source_mesh) == "ep=8"


@pytest.mark.parametrize(
    "why, words, told",
    [
        ("no such command", "resharde a b", "invalid choice: 'resharde'"),
        ("no such option", "reshard a b --fast", "unrecognized arguments: --fast"),
        ("an operand is lacking", "reshard a", "OUT"),
        ("one operand too many", "verify a b", "unrecognized arguments: b"),
        ("a size that is none", "reshard a b --memory much", "'much' is no size"),
        ("a choice that is none", "reshard a b --verify all", "invalid choice: 'all'"),
        ("no ranks", "plan a --ranks 0", "'0' is no number from 1 to 100000"),
        ("negative ranks", "plan a --ranks=-1", "'-1' is no number"),
        ("more ranks than can be named", "sample a --tp 100001", "'100001' is no number"),
    ],
)
def test_a_mistake_is_a_usage_error_of_one_line_that_says_where_help_is(why, words, told):
    with pytest.raises(UsageError) as refused:
        parse(words.split())
    text = str(refused.value)
    assert text.startswith("command line: ") and told in text and "--help" in text
    assert len(text.splitlines()) == 1


def test_a_target_that_is_none_is_a_usage_error_that_names_the_option():
    with pytest.raises(UsageError, match="^--target: 'tp' is no mesh axis with a size"):
        parse(["plan", "a", "--target", "tp"])


@pytest.mark.parametrize("words", ["--help", "--version", "reshard --help"])
def test_help_and_version_are_no_errors(words, capsys):
    with pytest.raises(SystemExit) as left:
        parse(words.split())
    assert left.value.code == 0
    assert "reshard" in capsys.readouterr().out


def test_an_error_is_told_on_one_line_of_stderr(capsys):
    tell("a\nreshard_mpi: error: b")
    assert capsys.readouterr().err == "reshard_mpi: error: a\\nreshard_mpi: error: b\n"


# Sizes


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
