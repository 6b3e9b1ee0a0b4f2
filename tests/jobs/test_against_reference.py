"""The product from outside, on generated checkpoints, against whole-array answers: every byte, every field.

RESHARD_SEEDS widens the run: a number of seeds ("200"), or a range of them ("100:300").
"""

import math
import os
from pathlib import Path

import pytest

from tests.mpirun import run_mpi
from tests.reference import handmade, naive
from tests.reference.case import Case, load
from tests.reference.describe import REGULAR
from tests.reference.dice import Dice
from tests.reference.errors import Refused
from tests.reference.generate import generate, write_case
from tests.reference.judge import boxes_by_coordinates, judge, raw_tensors
from tests.reference.targets import describe_target, spelled

pytestmark = pytest.mark.slow

RANKS = (1, 2, 3, 4, 7)
LARGE = {"max_extent": 900, "max_nelems": 900_000, "max_tensors": 4, "max_ranks": 6, "zero_size": 0}


def seeds(default: str = "25") -> range:
    first, _, last = os.environ.get("RESHARD_SEEDS", default).rpartition(":")
    return range(int(first or 0), int(last))


def expected_or_refusal(source: Case, target: dict | None) -> Refused | None:
    """Whether the answer is a refusal."""
    try:
        naive.reshard(source, target)
    except Refused as refused:
        return refused
    return None


def reshard(nranks: int, source, out, *options: str):
    return run_mpi(nranks, "reshard", source, out, *options, "--progress", "off")


def hold_against_the_answer(done, source: Case, target: dict | None, out: Path) -> Case | None:
    """OUT as `naive` has it, or the refusal as `naive` has it and no OUT."""
    refusal = expected_or_refusal(source, target)
    if refusal is None:
        assert done.returncode == 0, done.stderr
        return judge(source, target, out)
    errors = [line for line in done.stderr.splitlines() if line.startswith("reshard_mpi: error:")]
    assert (done.returncode, len(errors)) == (refusal.exit_code, 1), f"expected {refusal}\n{done.stderr}"
    assert "Traceback" not in done.stderr
    assert not out.exists()
    return None


def there_and_back(seed: int, folder: Path, **knobs) -> tuple[Case, Case | None]:
    """Reshard a generated case to a target of the seed's, and what came of it back; ranks are the seed's."""
    dice = Dice(f"job {seed}")
    source = load(generate(seed, folder / "source", **knobs).folder)
    target = describe_target(dice, source)
    done = reshard(dice.pick(RANKS), source.folder, folder / "out", "--target", spelled(target))
    out = hold_against_the_answer(done, source, target, folder / "out")
    if out is None:
        return source, None
    assert raw_tensors(out) == raw_tensors(source)
    done = reshard(dice.pick(RANKS), folder / "out", folder / "back")
    back = hold_against_the_answer(done, out, None, folder / "back")
    assert back is None or raw_tensors(back) == raw_tensors(source)
    return source, back


@pytest.mark.parametrize("seed", seeds())
def test_out_is_the_answer_and_back_is_the_source(seed, tmp_path):
    there_and_back(seed, tmp_path)


@pytest.mark.parametrize("seed", seeds("5"))
def test_a_regular_checkpoint_comes_back_with_its_boxes(seed, tmp_path):
    source, back = there_and_back(seed, tmp_path, **REGULAR)
    assert back is not None
    assert boxes_by_coordinates(back) == boxes_by_coordinates(source)


SINGLE = {"world_size": 1}
EXPLAINED = [row for row in handmade.COORDINATES if None not in row]
UNEXPLAINED = [row for row in handmade.COORDINATES if None in row]
HANDMADE = [
    # why, checkpoint, targets
    (
        "all that coordinates can show",
        handmade.case_of_coordinates(EXPLAINED),
        [{"pp": 3, "tp": 3}, {"tp": 2, "dp": 2}, {"pp": 2}],
    ),
    ("joining needs no explanation", handmade.case_of_coordinates(handmade.COORDINATES), [SINGLE, {"dp": 2}]),
    *((row[0], handmade.case_of_coordinates([row]), [{"tp": 2}, {"pp": 2}]) for row in UNEXPLAINED),
    ("64 fragments are named as evidence", handmade.case_of_many_boxes(64), [SINGLE]),
    ("65 are not", handmade.case_of_many_boxes(65), [SINGLE, {"fsdp": 2}]),
    (
        "only the mesh tells of most ranks",
        handmade.case_of_one_rank_with_everything(),
        [{"dp": 2}, {"pp": 3}],
    ),
    ("two tensors would have one key", handmade.case_of_clashing_keys(), [SINGLE]),
    ("a key that is none", handmade.case_of_a_key_that_headers_keep(), [SINGLE]),
]


@pytest.mark.parametrize("why, spec, targets", HANDMADE, ids=[why for why, _, _ in HANDMADE])
def test_a_handmade_checkpoint_gives_the_answer_or_is_refused(why, spec, targets, tmp_path):
    source = load(write_case(spec, tmp_path / "source").folder)
    for n, target in enumerate(targets):
        done = reshard(3, source.folder, tmp_path / str(n), "--target", spelled(target))
        hold_against_the_answer(done, source, target, tmp_path / str(n))


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in sorted(folder.iterdir())}


def accepted_target(source: Case, dice: Dice) -> dict[str, int]:
    """A target that isn't refused; `single` never is, but for sub-byte dtypes, which are left out here."""
    for _ in range(20):
        if expected_or_refusal(source, target := describe_target(dice, source)) is None:
            return target
    return {"world_size": 1}


@pytest.mark.parametrize("seed", seeds("4"))
def test_out_does_not_depend_on_ranks_or_memory(seed, tmp_path):
    """Large enough that 1 MiB of buffers takes several rounds."""
    dice = Dice(f"rounds {seed}")
    source = load(generate(seed, tmp_path / "source", sub_byte=0, **LARGE).folder)
    target = accepted_target(source, dice)
    some, others = dice.shuffled(RANKS)[:2]
    runs = {"one": (some, "256M"), "two": (others, "1M"), "three": (some, "1M")}
    for name, (nranks, memory) in runs.items():
        done = reshard(nranks, source.folder, tmp_path / name, "--target", spelled(target), "--memory", memory)
        assert done.returncode == 0, f"{nranks} ranks, {memory}: {done.stderr}"
    judge(source, target, tmp_path / "one")
    outs = {name: contents(tmp_path / name) for name in runs}
    for name in ("two", "three"):
        differing = [
            file for file in outs["one"].keys() | outs[name].keys() if outs["one"].get(file) != outs[name].get(file)
        ]
        assert not differing, f"{runs['one']} and {runs[name]}: {sorted(differing)}"


@pytest.mark.parametrize("seed", seeds("3"))
def test_more_ranks_than_shards_and_fewer_do_the_same(seed, tmp_path):
    """One rank, as many as target shards, and more than there are shards of either side."""
    dice = Dice(f"ranks {seed}")
    source = load(generate(seed, tmp_path / "source", max_ranks=4, sub_byte=0).folder)
    target = accepted_target(source, dice)
    counts = sorted({1, math.prod(target.values()), 7})
    for nranks in counts:
        done = reshard(nranks, source.folder, tmp_path / str(nranks), "--target", spelled(target))
        assert done.returncode == 0, f"{nranks} ranks: {done.stderr}"
    outs = [contents(tmp_path / str(nranks)) for nranks in counts]
    assert all(out == outs[0] for out in outs), counts
    judge(source, target, tmp_path / "1")
