"""The command line: every option and every default. Imports no MPI, so that `--help` and usage errors need none."""

import argparse
import re
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn

from reshard_mpi import __version__
from reshard_mpi.checkpoint.mesh import Mesh, parse_target
from reshard_mpi.checkpoint.template import shard_template
from reshard_mpi.checkpoint.wanted import cast_rule, rename_rule
from reshard_mpi.errors import UsageError, one_line
from reshard_mpi.streams import stderr

DEMO = "demo"  # what runs without a command
USES_ALL_RANKS = (DEMO, "reshard", "verify", "compare")
DEFAULT_MEMORY = "256M"
PICTURES = (".svg", ".png")
SOURCE_HELP = "the folder of a checkpoint: a case, PyTorch DCP, or Hugging Face"
_BINARY = {"": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30, "T": 1 << 40}


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise UsageError("command line", f"{message}; see {self.prog} --help")


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    """The arguments as options; UsageError, or SystemExit(0) after `--help` or `--version`."""
    options = _parser().parse_args([_dashes(argument) for argument in arguments])
    options.command = options.command or DEMO
    is_on_nodes = getattr(options, "source_template", None) is not None  # so each rank looks for shards
    options.uses_all_ranks = options.command in USES_ALL_RANKS or is_on_nodes
    return options


def _dashes(argument: str) -> str:
    """`--dry_run` is accepted for `--dry-run`."""
    if not argument.startswith("--"):
        return argument
    flag, equals, value = argument.partition("=")
    return flag.replace("_", "-") + equals + value


def binary_size(text: str) -> int:
    """Bytes of `256M`, `1.5GiB` or `4096`, in KiB, MiB, GiB.

    >>> binary_size("1.5K"), binary_size("2GiB")
    (1536, 2147483648)
    """
    match = re.fullmatch(r"\s*(\d{1,15}(?:\.\d{1,9})?)\s*([KMGT]?)(?:i?B)?\s*", text, re.ASCII | re.IGNORECASE)
    if not match:
        raise argparse.ArgumentTypeError(f"{text!r} is no size; write it like 256M, 2G or 1.5GiB")
    return int(float(match[1]) * _BINARY[match[2].upper()])


def decimal_size(text: str) -> int:
    """Bytes of `5GB` or `300MB` as Hugging Face counts them, in powers of 1000.

    >>> decimal_size("5GB"), decimal_size("200")
    (5000000000, 200)
    """
    match = re.fullmatch(r"\s*(\d{1,15}(?:\.\d{1,9})?)\s*([KMGT]?)B?\s*", text, re.ASCII | re.IGNORECASE)
    nbytes = int(float(match[1]) * 1000 ** " KMGT".index(match[2].upper() or " ")) if match else 0
    if not nbytes:
        raise argparse.ArgumentTypeError(f"{text!r} is no size; write it like 5GB or 300MB")
    return nbytes


def _named_number(text: str) -> tuple[str, int]:
    match = re.fullmatch(r"\s*([A-Za-z_]\w*)\s*=\s*(\d{1,18})\s*", text, re.ASCII)
    if not match or not int(match[2]):
        raise argparse.ArgumentTypeError(f"{text!r} is no number with a name; write it like head_dim=128")
    return match[1], int(match[2])


def picture_file(text: str) -> Path:
    """The file of `--plot`: its suffix says what it is to be.

    >>> picture_file("tiles.svg").name
    'tiles.svg'
    """
    if Path(text).suffix.lower() not in PICTURES:
        raise argparse.ArgumentTypeError(f"{text!r} is no picture; give a name that ends in {' or '.join(PICTURES)}")
    return Path(text)


def _target(text: str) -> Mesh:
    return parse_target(text)


def _count(text: str) -> int:
    if not text.isdecimal() or not 1 <= int(text) <= 100_000:
        raise argparse.ArgumentTypeError(f"{text!r} is no number from 1 to 100000")
    return int(text)


def _seconds(text: str) -> float:
    if not re.fullmatch(r"\d{1,9}(\.\d{1,9})?", text, re.ASCII):
        raise argparse.ArgumentTypeError(f"{text!r} is no number of seconds, like 30 or 0.5")
    return float(text)


def _seed(text: str) -> int:
    if not text.isdecimal():
        raise argparse.ArgumentTypeError(f"{text!r} is no whole number from 0")
    return int(text)


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(
        prog="python -m reshard_mpi",
        description="Turn a checkpoint saved by N ranks in one parallel topology into the shards of another.",
        epilog="Without a command: reshard the built-in sample into ./reshard-sample. "
        "Exit codes: 0 done, 1 different, 2 usage, 3 bad input, 4 integrity, 5 I/O, 6 can't be planned, 70 bug, 75 "
        "stopped by a signal.",
    )
    parser.add_argument("--version", action="version", version=f"reshard_mpi {__version__}")
    parser.set_defaults(stall_timeout=None)
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", parser_class=_Parser)
    _add_reshard(commands.add_parser("reshard", help="write SOURCE in another topology to OUT"))
    _add_plan(commands.add_parser("plan", help="say what reshard would do, from headers alone"))
    inspect = commands.add_parser("inspect", help="show what a checkpoint holds")
    inspect.add_argument("source", type=Path, metavar="SOURCE")
    inspect.add_argument("tensor", nargs="?", metavar="TENSOR", help="the fqn or id of one tensor: its tiles")
    _add_source_template(inspect)
    inspect.add_argument("--json", action="store_true", help="print JSON")
    inspect.add_argument(
        "--plot", type=picture_file, metavar="FILE", help="draw the tiles of TENSOR (svg or png; needs matplotlib)"
    )
    _add_describe(commands.add_parser("describe", help="write case.json for shards that come with none"))
    verify = commands.add_parser("verify", help="recompute every digest and name every fault")
    verify.add_argument("source", type=Path, metavar="CASE")
    _add_source_template(verify)
    compare = commands.add_parser("compare", help="are two checkpoints equal, tensor by tensor?")
    compare.add_argument("a", type=Path, metavar="A")
    compare.add_argument("b", type=Path, metavar="B")
    _add_source_template(compare, "--a-template", "A")
    _add_source_template(compare, "--b-template", "B")
    for command in (verify, compare):
        command.add_argument("--json", action="store_true", help="print JSON")
        _add_memory(command)
    _add_sample(commands.add_parser("sample", help="write a synthetic Llama-like checkpoint"))
    for name, command in commands.choices.items():
        command.add_argument(
            "--progress", choices=("auto", "plain", "bar", "off"), default="auto", help="on stderr (default auto)"
        )
        if name in USES_ALL_RANKS:
            command.add_argument(
                "--stall-timeout",
                type=_seconds,
                metavar="SECONDS",
                help="end the job when a read, a write or the like takes longer (default: wait for ever)",
            )
    return parser


def _add_selection(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--target",
        type=_target,
        metavar="AXES",
        help="tp=4, pp=2,tp=2, single, ... (default: topology.target of SOURCE)",
    )
    _add_layout(parser)
    parser.add_argument(
        "--include",
        action="append",
        default=[],
        metavar="GLOB",
        help="only tensors whose fqn matches (may be repeated)",
    )
    parser.add_argument(
        "--exclude", action="append", default=[], metavar="GLOB", help="no tensors whose fqn matches (may be repeated)"
    )
    parser.add_argument(
        "--rename",
        type=rename_rule,
        action="append",
        default=[],
        metavar="'PATTERN=>REPLACEMENT'",
        help="in every fqn, replace all matches of a Python regular expression; may be repeated: each rule works on what "
        "the one before has made of the name. Layouts, --include, --exclude and --cast know the new names",
    )
    parser.add_argument(
        "--rename-file",
        type=Path,
        action="append",
        dest="rename",
        metavar="FILE",
        help="such rules, one a line; # begins a comment line",
    )
    parser.add_argument(
        "--cast",
        "--dtype",
        type=cast_rule,
        action="append",
        default=[],
        metavar="DTYPE or 'GLOB=DTYPE'",
        help="make tensors of floating-point numbers (of 64, 32 or 16 bits), or those whose fqn matches, float32, float16 or "
        "bfloat16, rounding to the nearest even; may be repeated: the last one that matches counts. Other types stay",
    )
    parser.add_argument(
        "--cast-except",
        action="append",
        default=[],
        metavar="GLOB",
        help="tensors whose fqn matches keep their type, whatever --cast says (may be repeated)",
    )
    parser.add_argument(
        "--format",
        choices=("safetensors", "hdf5", "hf"),
        default="safetensors",
        help="case.json and shards of safetensors or HDF5, or a Hugging Face folder (default safetensors)",
    )
    parser.add_argument(
        "--max-shard-size",
        type=decimal_size,
        default=decimal_size("5GB"),
        metavar="SIZE",
        help="of a file of a Hugging Face folder (default 5GB)",
    )
    _add_memory(parser)
    parser.add_argument(
        "--writers",
        choices=("auto", "owner", "shared"),
        default="auto",
        help="one rank a target file, or several (default auto: owner on NFS, else shared)",
    )
    parser.add_argument(
        "--verify",
        choices=("source", "full", "none"),
        default="source",
        help="what is held against digests (default source)",
    )
    _add_source_template(parser)
    parser.add_argument(
        "--target-template",
        type=shard_template,
        metavar="PATH",
        help="where on the nodes the shards of OUT are written, instead of beside its case.json",
    )


def _add_source_template(parser: argparse.ArgumentParser, flag: str = "--source-template", of: str = "SOURCE") -> None:
    parser.add_argument(
        flag,
        type=shard_template,
        metavar="PATH",
        help=f"where nodes keep the shards of {of}, like /local/ckpt/rank-{{rank:05d}}.safetensors; {of} holds case.json",
    )


def _add_memory(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--memory",
        type=binary_size,
        default=binary_size(DEFAULT_MEMORY),
        metavar="SIZE",
        help=f"buffers of a rank, like 64M or 2G (default {DEFAULT_MEMORY})",
    )


def _add_layout(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--layout",
        metavar="NAME|FILE",
        help="what mesh axes do to tensors: llama, qwen2, qwen3_moe, mixtral, gpt-neox, a TOML file, or none; "
        "megatron-llama and torchtitan-llama make Hugging Face's tensors of the trainer's "
        "(default: layout.toml beside the case.json of SOURCE)",
    )
    parser.add_argument(
        "--layout-set",
        type=_named_number,
        action="append",
        default=[],
        metavar="NAME=N",
        help="a number that the layout names, like head_dim=128 (default: from the file, or config.json of SOURCE)",
    )


def _add_reshard(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("source", type=Path, metavar="SOURCE", help=SOURCE_HELP)
    _add_selection(parser)
    parser.add_argument("out", type=Path, metavar="OUT", help="the folder to write; it appears whole or not at all")
    parser.add_argument(
        "--hf-assets", type=Path, metavar="DIR", help="copy config and tokenizer from there (--format hf)"
    )
    parser.add_argument(
        "--keep-bytes",
        action="store_true",
        help="copy the entries of PyTorch DCP that are no tensors, as they are, into OUT/bytes",
    )
    parser.add_argument("--overwrite", action="store_true", help="replace OUT if it is a checkpoint")
    parser.add_argument("--restart", action="store_true", help="begin anew where a job left OUT.partial")
    parser.add_argument(
        "--journal-every",
        type=_seconds,
        default=30.0,
        metavar="SECONDS",
        help="how often what is done is synced and noted, to go on from there after a crash (default 30; 0: after every round)",
    )
    parser.add_argument("--report", type=Path, metavar="FILE", help="write what was measured as JSON")


def _add_describe(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "source", type=Path, metavar="SOURCE", help="the folder of the shards; nothing is written to it"
    )
    parser.add_argument(
        "--from", type=_target, dest="source_mesh", required=True, metavar="AXES", help="the topology that wrote them"
    )
    parser.add_argument(
        "--file-pattern",
        default="rank-{rank:05d}.safetensors",
        metavar="NAME",
        help="of the shards, with {rank:05d} or {tp:02d} and the like (default %(default)s)",
    )
    _add_layout(parser)
    parser.add_argument("--out", type=Path, metavar="FILE", help="write there (default: to stdout)")


def _add_plan(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("source", type=Path, nargs="?", metavar="SOURCE", help=SOURCE_HELP)
    _add_selection(parser)
    parser.add_argument("--simulate", metavar="MODEL", help="plan for a model without files: llama-405b, moe-256, ...")
    parser.add_argument(
        "--from", type=_target, dest="source_mesh", metavar="AXES", help="the topology of --simulate's source"
    )
    parser.add_argument(
        "--ranks",
        type=_count,
        metavar="P",
        help="MPI ranks to plan for (default: those of this run, or as many as source shards)",
    )
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.add_argument(
        "--plot",
        type=picture_file,
        metavar="FILE",
        help="draw tensors before and after, and the traffic (svg or png; needs matplotlib)",
    )


def _add_sample(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("out", type=Path, metavar="OUT")
    parser.add_argument(
        "--size",
        type=binary_size,
        default=binary_size("64M"),
        metavar="SIZE",
        help="bytes of all tensors, about (default 64M)",
    )
    for axis in ("tp", "pp", "dp", "fsdp", "cp"):
        parser.add_argument(
            f"--{axis}", type=_count, default=1, metavar="N", help=f"ranks of mesh axis {axis} (default 1)"
        )
    parser.add_argument(
        "--dtype", choices=("bfloat16", "float16", "float32"), default="bfloat16", help="(default bfloat16)"
    )
    parser.add_argument("--seed", type=_seed, default=0, help="of the values (default 0)")
    parser.add_argument("--overwrite", action="store_true", help="replace OUT if it is a checkpoint case")


def tell(error: object) -> None:
    stderr.write(f"reshard_mpi: error: {one_line(str(error))}\n")
