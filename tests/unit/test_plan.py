"""The plan and its rounds: every round of every rank is carried out in one process, and held against whole arrays."""

import copy
import hashlib
import re

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from reshard_mpi.errors import PlanningError
from reshard_mpi.plan import shares
from reshard_mpi.plan.plan import BUFFERS, NOBODY, Plan, plan_arrays, plan_from_arrays, received, traffic
from reshard_mpi.plan.planner import (
    LEAST_ROUND_NBYTES,
    MOST_ROUND_NBYTES,
    PlannedTensor,
    Resources,
    make_plan,
    round_nbytes_of,
)
from reshard_mpi.plan.rounds import expand_round
from reshard_mpi.plan.stored import Place, byte_form
from tests.reference.dice import Dice, HypothesisDice
from tests.reference.dtypes import bits, nelems
from tests.unit.moves import Job, Seen, Tensor, Touched, carry_out, describe_job, describe_tensors, table_of
from tests.unit.tilings import Tile

KINDS = [(writers, hashing) for writers in ("owner", "nodes", "shared") for hashing in (False, True)]
kinds = pytest.mark.parametrize("writers, hashing", KINDS, ids=[f"{w}, {'' if h else 'not '}hashing" for w, h in KINDS])


def hold_against_whole_arrays(job: Job, plan: Plan) -> Seen:
    """All target bytes are right, each written once; all source bytes needed are read once, and no other twice."""
    assert plan.buffer_nbytes <= job.resources.round_nbytes
    seen = carry_out(job, plan)
    for shard, expected in zip(job.target.shards, job.expected, strict=True):
        assert bytes(shard[: len(expected)]) == expected
    for written, needed in zip(seen.written, job.target.needed, strict=True):
        assert np.array_equal(written, needed)
    for read, needed in zip(seen.read, job.source.needed, strict=True):
        assert read.max(initial=0) <= 1
        assert np.array_equal(read[needed > 0], needed[needed > 0])
    moved = traffic(plan).matrix()
    assert seen.sent_nbytes == moved.sum() - np.trace(moved)
    assert np.array_equal(received(plan), moved.sum(axis=0) - np.diagonal(moved))
    if job.resources.hashing:
        for array, touched in seen.read_of.items():
            hold_in_order(touched, plan.source.arrays.hasher[array])
        for array in np.flatnonzero(plan.target.is_alone).tolist():
            hold_in_order(seen.written_of[array], plan.target.arrays.hasher[array])
        hold_hashes_that_are_shared(job, plan)
    if job.resources.writers == "nodes":
        hold_that_files_are_their_owners(job, plan)
    return seen


def hold_that_files_are_their_owners(job: Job, plan: Plan) -> None:
    """No other rank touches a target file: not to write it, nor to hash what it hasn't read of the source."""
    arrays = plan.target.arrays
    owner = shares.deal_in_order(len(job.target.shards), plan.nranks)[arrays.file]
    assert np.array_equal(plan.target.rank, owner[plan.target.array])
    if job.resources.hashing:
        is_read = (arrays.begins_as >= 0) & (arrays.begins_nbytes == arrays.nbytes)
        assert np.all((arrays.hasher == owner) | (arrays.hasher == NOBODY) | is_read)


def hold_hashes_that_are_shared(job: Job, plan: Plan) -> None:
    """An array begins as its source array does, which the same rank hashes; a digest that is known is the right one."""
    source, target = plan.source.arrays, plan.target.arrays
    assert np.array_equal(target.has_digest > 0, target.hasher == NOBODY)
    for array, (file, begin, nbytes) in enumerate(zip(target.file, target.begin, target.nbytes, strict=True)):
        expected = job.expected[file][begin : begin + nbytes]
        if target.has_digest[array]:
            assert target.digest[array].tobytes() == hashlib.sha256(expected).digest()
        if target.begins_as[array] >= 0:
            read, common = target.begins_as[array], target.begins_nbytes[array]
            assert target.hasher[array] == source.hasher[read]
            assert nbytes / 2 <= common <= nbytes and common <= source.nbytes[read]
            content = job.source.shards[source.file[read]][source.begin[read] :]
            assert content[:common] == expected[:common]


def hold_in_order(touched: Touched, hasher: int) -> None:
    """One rank, the one that hashes, has all spans of an array, front to back."""
    assert {rank for rank, _, _ in touched} == {hasher}
    assert all(a[2] <= b[1] for a, b in zip(touched, touched[1:], strict=False))


def equal(a: Plan, b: Plan) -> bool:
    pairs = list(zip(plan_arrays(a), plan_arrays(b), strict=True))
    return all(np.array_equal(x, y) for x, y in pairs)


def random_job(dice: Dice, writers: str, hashing: bool, by_rows: bool = False) -> Job:
    """Budgets from a tenth of all bytes, which makes many rounds, to more than all of them."""
    tensors, nsources, ntargets = describe_tensors(dice, least=1, by_rows=by_rows)
    nbytes = sum(nelems(tensor.shape) * bits(tensor.dtype) // 8 for tensor in tensors)
    round_nbytes = max(nbytes // dice.pick([10, 4, 2, 1]), dice.pick([8, 100]))
    resources = Resources(dice.integer(1, 6), round_nbytes, writers, hashing)
    return describe_job(dice, resources, tensors, nsources, ntargets)


def planned(job: Job) -> tuple[Job, Plan]:
    """The plan; where a round is too small for one, with rounds as large as the refusal asks for."""
    try:
        return job, job.plan()
    except PlanningError as refused:
        advised = re.fullmatch(
            r"--memory: a tensor is stored in too many small pieces; give at least (\d+)K", str(refused)
        )
        job = job.given((int(advised[1]) << 10) // BUFFERS)
        return job, job.plan()


def divide_finely(monkeypatch, least_share_nbytes: int) -> None:
    """Let tensors of some bytes be divided between ranks, as those of megabytes are."""
    monkeypatch.setattr(shares, "LEAST_SHARE_NBYTES", least_share_nbytes)


FINENESS = [1, 4, 100, 1 << 18]  # the least bytes that are divided


@kinds
@settings(max_examples=12, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.data())
def test_every_byte_arrives_whatever_the_tilings_the_ranks_and_the_rounds(writers, hashing, monkeypatch, data):
    dice = HypothesisDice(data.draw)
    divide_finely(monkeypatch, dice.pick(FINENESS))
    hold_against_whole_arrays(*planned(random_job(dice, writers, hashing)))


@kinds
@pytest.mark.parametrize("least_share_nbytes", FINENESS)
def test_every_byte_arrives_in_jobs_by_seed(writers, hashing, least_share_nbytes, monkeypatch):
    """By seed, examples are larger and less alike than those that can be shrunk."""
    divide_finely(monkeypatch, least_share_nbytes)
    for seed in range(12):
        hold_against_whole_arrays(*planned(random_job(Dice(seed), writers, hashing)))


@kinds
def test_no_rank_reads_a_file_that_it_does_not_see(writers, hashing):
    for seed in range(24):
        dice = Dice(seed)
        job = random_job(dice, writers, hashing)
        nranks = job.resources.nranks
        seen = [tuple(rank for rank in range(nranks) if dice.chance(50)) for _ in job.source.shards]
        readers = tuple(ranks or (dice.integer(0, nranks - 1),) for ranks in seen)
        job, plan = planned(job.given(job.resources.round_nbytes, readers=readers))
        hold_against_whole_arrays(job, plan)
        arrays = plan.source.arrays
        for file, rank in zip(arrays.file[plan.source.array].tolist(), plan.source.rank.tolist(), strict=True):
            assert rank in readers[file]
        assert all(rank in readers[file] for file, rank in zip(arrays.file, arrays.hasher, strict=True))


@pytest.mark.parametrize(
    "why, readers, ranks",
    [
        ("all see all", ((0, 1), (0, 1)), [0, 1]),
        ("each sees its own", ((0,), (1,)), [0, 1]),
        ("each sees that of the other", ((1,), (0,)), [1, 0]),
        ("one sees both", ((1,), (1,)), [1, 1]),
    ],
)
def test_a_rank_reads_its_own_shard_if_all_can(why, readers, ranks):
    tensor = Tensor("uint8", (8,), rows_of((8,), 2), rows_of((8,), 1))
    job = describe_job(Dice(0), Resources(2, BUDGET, "owner", True, readers), [tensor], 2, 1)
    assert job.plan().source.rank.tolist() == ranks


def is_cut_by_rows(plan: Plan, job: Job) -> bool:
    """Does every rank read whole rows of every tensor?"""
    for index in range(len(job.tensors)):
        boxes = plan.source.stored.boxes.take(slice(*plan.source.first[index : index + 2].tolist()))
        shape = boxes.stop.max(axis=0)
        row_axis = int(np.argmax(shape > 1)) + 1
        if np.any(boxes.start[:, row_axis:] > 0) or np.any(boxes.stop[:, row_axis:] < shape[row_axis:]):
            return False
    return True


@pytest.mark.parametrize("hashing", [False, True], ids=["not hashing", "hashing"])
@pytest.mark.parametrize("least_share_nbytes", [1, 100, 1 << 18])
def test_nothing_is_sent_when_readers_of_whole_rows_write_them(hashing, least_share_nbytes, monkeypatch):
    divide_finely(monkeypatch, least_share_nbytes)
    nheld = 0
    for seed in range(20):
        job, plan = planned(random_job(Dice(seed), "shared", hashing, by_rows=True))
        if is_cut_by_rows(plan, job):
            nheld += 1
            assert traffic(plan).sent.tolist() == [0] * plan.nranks
            assert hold_against_whole_arrays(job, plan).sent_nbytes == 0
    assert nheld > 10


@settings(max_examples=15)
@given(st.integers(0, 1 << 32), st.sampled_from(KINDS))
def test_a_plan_is_the_same_value_when_it_is_made_again_and_after_its_journey_as_arrays(seed, kind):
    job, plan = planned(random_job(Dice(seed), *kind))
    assert equal(plan, job.plan())
    values = [copy.deepcopy(value) for value in plan_arrays(plan)]
    assert all(isinstance(value, int) or value.dtype == np.int64 for value in values)
    back = plan_from_arrays(values)
    assert equal(plan, back)
    assert (back.nranks, back.nrounds, back.memory_nbytes) == (plan.nranks, plan.nrounds, plan.memory_nbytes)
    hold_against_whole_arrays(job, back)


# Budgets


def plain(offset, extent) -> Tile:
    return Tile(tuple(offset), tuple(extent), (0,) * len(extent), tuple(extent))


def rows_of(shape, nparts: int, axis: int = 0) -> list[tuple[int, Tile]]:
    """One part a shard, cut along one axis."""
    found = []
    for part in range(nparts):
        offset, extent = [0] * len(shape), list(shape)
        offset[axis] = shape[axis] * part // nparts
        extent[axis] = shape[axis] * (part + 1) // nparts - offset[axis]
        found.append((part, plain(offset, extent)))
    return found


def on_all(nshards: int, *pieces: Tile) -> list[tuple[int, Tile]]:
    return [(shard, piece) for piece in pieces for shard in range(nshards)]


BUDGET = LEAST_ROUND_NBYTES
ORDINARY = [
    (
        "rows to columns, twenty times the budget",
        [Tensor("float32", (400, 200), rows_of((400, 200), 4), rows_of((400, 200), 2, 1))],
        (4, 2),
    ),
    (
        "one row alone is larger than the budget",
        [Tensor("float32", (3, 30000), rows_of((3, 30000), 3), rows_of((3, 30000), 4, 1))],
        (3, 4),
    ),
    (
        "axis 0 of size 1: nothing is gained by cutting it",
        [Tensor("bfloat16", (1, 300, 150), rows_of((1, 300, 150), 3, 1), rows_of((1, 300, 150), 2, 2))],
        (3, 2),
    ),
    (
        "one axis, no cut, larger than the budget",
        [Tensor("uint8", (100_001,), rows_of((100_001,), 1), rows_of((100_001,), 1))],
        (1, 1),
    ),
    (
        "everything on one source shard, to four",
        [Tensor("float32", (100, 100), [(0, plain((0, 0), (100, 100)))], rows_of((100, 100), 4)) for _ in range(3)],
        (4, 4),
    ),
    (
        "everything to one target shard",
        [Tensor("float32", (100, 100), rows_of((100, 100), 4), [(2, plain((0, 0), (100, 100)))]) for _ in range(3)],
        (4, 4),
    ),
    (
        "replicated in eight shards: sent eight times",
        [Tensor("float32", (100, 50), rows_of((100, 50), 2), on_all(8, plain((0, 0), (100, 50))))],
        (2, 8),
    ),
    (
        "thousands of tiny tensors",
        [Tensor("bfloat16", (3,), [(n % 3, plain((0,), (3,)))], [(n % 2, plain((0,), (3,)))]) for n in range(2000)],
        (3, 2),
    ),
    (
        "0-d tensors",
        [Tensor("float32", (), [(n % 3, plain((), ()))], on_all(2, plain((), ()))) for n in range(9)],
        (3, 2),
    ),
    (
        "a tensor of many small boxes",
        [Tensor("uint8", (640, 64), rows_of((640, 64), 64), rows_of((640, 64), 64, 1))],
        (64, 64),
    ),
]


def job_of(
    tensors: list[Tensor], nshards: tuple[int, int], nranks: int, budget: int = BUDGET, writers="owner", hashing=True
) -> Job:
    return describe_job(Dice(1), Resources(nranks, budget, writers, hashing), tensors, *nshards)


@pytest.mark.parametrize("nranks, kind", [(1, KINDS[1]), *((4, kind) for kind in KINDS), (7, KINDS[1]), (7, KINDS[2])])
@pytest.mark.parametrize("why, tensors, nshards", ORDINARY, ids=[row[0] for row in ORDINARY])
def test_no_buffer_is_larger_than_the_budget(why, tensors, nshards, nranks, kind):
    job = job_of(tensors, nshards, nranks, BUDGET, *kind)
    plan = job.plan()
    assert plan.buffer_nbytes <= BUDGET
    if sum(map(len, job.expected)) < 250_000:
        hold_against_whole_arrays(job, plan)


@pytest.mark.parametrize("nboxes", [500, 3000])
def test_a_tensor_of_very_many_tiny_boxes_stays_within_the_budget(nboxes):
    shape = (nboxes, 4)
    tensor = Tensor("uint8", shape, [(0, plain((n, 0), (1, 4))) for n in range(nboxes)], [(0, plain((0, 0), shape))])
    job = job_of([tensor], (1, 1), 1)
    hold_against_whole_arrays(job, job.plan())


def test_a_larger_budget_makes_fewer_rounds_of_the_same_bytes():
    tensor = Tensor("float32", (100, 100), rows_of((100, 100), 4), rows_of((100, 100), 3, 1))
    rounds = []
    for budget in (2_000, 8_000, 100_000):
        job = job_of([tensor], (4, 3), 4, budget)
        plan = job.plan()
        hold_against_whole_arrays(job, plan)
        rounds.append(plan.nrounds)
    assert rounds == sorted(rounds, reverse=True) and rounds[-1] == 1


def test_tensors_of_different_readers_share_rounds_so_that_none_waits_for_another():
    """Four shards, one tensor each: as many rounds as the largest needs, not the sum."""
    tensors = [
        Tensor("float32", (50, 80), [(n, plain((0, 0), (50, 80)))], [(n, plain((0, 0), (50, 80)))]) for n in range(4)
    ]
    together = job_of(tensors, (4, 4), 4, 4_000).plan()
    alone = job_of(tensors[:1], (1, 1), 1, 4_000).plan()
    assert together.nrounds == alone.nrounds


def test_pieces_along_axis_0_that_are_read_by_who_writes_them_never_enter_a_message():
    tensor = Tensor("float32", (64, 8), rows_of((64, 8), 4), [(0, plain((0, 0), (64, 8)))])
    job = job_of([tensor], (4, 1), 1, 512)
    assert traffic(job.plan()).matrix().tolist() == [[64 * 8 * 4]]


def test_a_rank_without_data_takes_part_in_every_round_with_nothing():
    tensor = Tensor("float32", (6, 4), [(0, plain((0, 0), (6, 4)))], [(0, plain((0, 0), (6, 4)))])
    job = job_of([tensor], (3, 3), 3, 64)
    plan = job.plan()
    assert plan.nrounds > 1
    for number in range(plan.nrounds):
        work = expand_round(plan, number, 2)
        assert (work.read.buffer_nbytes, len(work.write.array)) == (0, 0)
        assert work.send_nbytes.tolist() == work.receive_nbytes.tolist() == [0, 0, 0]
    hold_against_whole_arrays(job, plan)


@pytest.mark.parametrize("axis", [1, 2])
def test_boxes_side_by_side_in_one_stored_array_are_read_once(axis):
    """gate and up, cut along a later axis: each is padding to the other, and their rows take turns in the file."""
    shape = (8, 4, 6)
    half = tuple(size // 2 if a == axis else size for a, size in enumerate(shape))
    places = [
        Place(at, half, at, shape) for at in ((0, 0, 0), tuple(h if a == axis else 0 for a, h in enumerate(half)))
    ]
    form = byte_form(shape, 8, (*places, Place((0, 0, 0), shape, (0, 0, 0), shape)))
    tensor = PlannedTensor(form, np.zeros(2, np.int64), np.zeros(1, np.int64))
    plan = make_plan(
        [tensor], table_of([(0, 0, 192)]), table_of([(0, 0, 192)]), (1, 1), Resources(1, 500, "owner", True)
    )
    runs = [expand_round(plan, number, 0).read.runs for number in range(plan.nrounds)]
    assert sum(int(run.nbytes.sum()) for run in runs) == 192


@pytest.mark.parametrize("kind", KINDS)
def test_nothing_to_move_is_a_plan_without_rounds(kind):
    plan = make_plan([], table_of([]), table_of([]), (2, 2), Resources(3, BUDGET, *kind))
    assert (plan.nrounds, plan.buffer_nbytes, plan.memory_nbytes) == (0, 0, 0)
    assert equal(plan, plan_from_arrays(list(plan_arrays(plan))))


@pytest.mark.parametrize(
    "why, shape, source_axis, target_axis",
    [
        ("rows to columns", (40, 30), 0, 1),
        ("columns to rows", (40, 30), 1, 0),
        ("columns, rows wider than the budget", (3, 3000), 1, 1),
        ("a first axis of size 1", (1, 40, 30), 1, 2),
    ],
)
def test_slabs_of_a_source_box_come_in_order_so_that_it_can_be_hashed_on_the_way(why, shape, source_axis, target_axis):
    tensors = [Tensor("float32", shape, rows_of(shape, 3, source_axis), rows_of(shape, 2, target_axis))] * 5
    plan = job_of(tensors, (3, 2), 3, 1_000).plan()
    reached: dict[int, int] = {}
    for number in range(plan.nrounds):
        for rank in range(3):
            spans = expand_round(plan, number, rank).read
            columns = (spans.array.tolist(), spans.offset.tolist(), spans.nbytes.tolist())
            for array, offset, nbytes in zip(*columns, strict=True):
                assert offset == reached.get(array, int(plan.source.arrays.begin[array]))
                reached[array] = offset + nbytes


def test_slabs_that_must_stay_in_order_pass_from_reader_to_reader_within_a_round():
    """Four readers, a quarter of the rows each; every target box needs all of them. One round has room for it all."""
    tensor = Tensor("float32", (400, 40), rows_of((400, 40), 4), rows_of((400, 40), 4, 1))
    plan = job_of([tensor], (4, 4), 4, 400 * 40 + 500).plan()
    assert len(plan.slab_tensor) >= 4
    assert plan.nrounds == 1


def test_an_array_is_read_in_order_also_where_a_slab_ends_one_band_of_boxes_and_begins_the_next():
    """Rank 0 has a tensor to read before row 0 of the second one; rank 1 doesn't wait, and begins with row 2, not 1."""
    first = Tensor("uint8", (20, 100), [(0, plain((0, 0), (20, 100)))], [(0, plain((0, 0), (20, 100)))])
    sources = [(0, plain((0, 0), (1, 50))), (0, plain((0, 50), (1, 50)))]
    sources += [(1, plain((1, 0), (5, 1))), (1, plain((1, 1), (1, 99))), (1, plain((2, 1), (4, 99)))]
    second = Tensor("uint8", (6, 100), sources, [(0, plain((0, 0), (1, 100))), (1, plain((1, 0), (5, 100)))])
    job = job_of([first, second], (2, 2), 2, 470)
    hold_against_whole_arrays(job, job.plan())


def test_copies_that_are_not_aligned_alike_are_sent_within_the_budget():
    """Rank 0 reads most of each row. Between the places where ranks 1 and 2 meet in the one file and in the other, it
    sends each row to both; the budget is for one."""
    columns = [(0, (0, 240)), (1, (240, 30)), (2, (270, 30))]
    sources = [(rank, plain((0, first), (4096, size))) for rank, (first, size) in columns]
    copied = Tensor("uint8", (4096, 300), sources, on_all(2, plain((0, 0), (4096, 300))))
    shift = Tensor("uint8", (8,), [(0, plain((0,), (8,)))], [(0, plain((0,), (8,)))])
    job = job_of([copied, shift], (3, 2), 3, 20_000, "shared", hashing=False)
    hold_against_whole_arrays(job, job.plan())


@pytest.mark.parametrize(
    "why, memory_nbytes, round_nbytes",
    [
        ("the least", BUFFERS * LEAST_ROUND_NBYTES, LEAST_ROUND_NBYTES),
        ("seven buffers", 7_000_000, 1_000_000),
        ("the most, which is fast enough", 1 << 60, MOST_ROUND_NBYTES),
    ],
)
def test_memory_is_shared_out_to_the_buffers(why, memory_nbytes, round_nbytes):
    assert round_nbytes_of(memory_nbytes) == round_nbytes


def test_too_little_memory_is_refused_with_what_would_do():
    with pytest.raises(PlanningError, match="--memory: .*at least 56K"):
        round_nbytes_of(BUFFERS * LEAST_ROUND_NBYTES - 1)


@pytest.mark.parametrize("hashing", [False, True])
def test_where_rows_fill_pages_ranks_part_a_file_at_pages(hashing):
    """Two matrices, cut by columns in the source, in one file of the target behind a header of a page."""
    rows, columns, page, nranks = 1 << 14, 2048, 4096, 3
    half = columns // 2
    form = byte_form(
        (rows, columns),
        16,
        (
            Place((0, 0), (rows, half), (0, 0), (rows, half)),
            Place((0, half), (rows, half), (0, 0), (rows, half)),
            Place((0, 0), (rows, columns), (0, 0), (rows, columns)),
        ),
    )
    nbytes = rows * columns * 2
    source = table_of([(f, 8 + t * nbytes // 2, nbytes // 2) for f in (0, 1) for t in (0, 1)])
    target = table_of([(0, page + t * nbytes, nbytes) for t in (0, 1)])
    tensors = [PlannedTensor(form, np.array([t, 2 + t]), np.array([t])) for t in (0, 1)]
    plan = make_plan(tensors, source, target, (2, 1), Resources(nranks, 1 << 22, "shared", hashing))
    first, _ = plan.target.stored.spans(np.arange(len(plan.target.rank)), plan.target.stored.boxes)
    order = np.argsort(first)
    parted = np.diff(plan.target.rank[order]) != 0
    assert set(plan.target.rank.tolist()) == set(range(nranks))
    assert parted.any() and not (first[order][1:][parted] % page).any()
