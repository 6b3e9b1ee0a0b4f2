"""Arrays that are converted while they are read: any span of them, in little memory, as numpy and ml_dtypes convert them."""

from dataclasses import replace

import ml_dtypes
import numpy as np
import pytest

from reshard_mpi.checkpoint.wanted import cast_rule
from reshard_mpi.errors import UsageError
from reshard_mpi.plan.changes import cast_source
from reshard_mpi.plan.plan import BUFFERS, CAST_BUFFERS
from reshard_mpi.plan.planner import LEAST_ROUND_NBYTES, PlannedTensor, Resources, make_plan, round_nbytes_of
from reshard_mpi.plan.rounds import expand_round
from reshard_mpi.plan.stored import Place, byte_form
from reshard_mpi.run.transfer import Reader
from reshard_mpi.storage.cast import CastArray, Caster
from reshard_mpi.storage.files import Files
from reshard_mpi.storage.safetensors import StoredArray
from reshard_mpi.storage.source import Source
from tests.unit.manifests import manifest, parsed, tensor, whole
from tests.unit.moves import table_of

FLOATS = {"float64": "f8", "float32": "f4", "float16": "f2", "bfloat16": ml_dtypes.bfloat16}
TO = ("float32", "float16", "bfloat16")
PAIRS = [(old, new) for old in FLOATS for new in TO if old != new]


def every_half() -> np.ndarray:
    """Every float32 whose upper half may be anything, and whose lower half is a tie, near one, or nothing."""
    upper = np.arange(1 << 16, dtype=np.uint32) << 16
    return np.concatenate([upper | low for low in (0, 1, 0x0FFF, 0x1000, 0x1001, 0x7FFF, 0x8000, 0x8001)]).view("f4")


def values_of(dtype: str) -> np.ndarray:
    if dtype in ("float16", "bfloat16"):
        return np.arange(1 << 16, dtype=np.uint16).view(FLOATS[dtype])
    with np.errstate(all="ignore"):
        return every_half().astype(FLOATS[dtype])


def converted(caster: Caster, array: CastArray, stored: bytes, first: int, last: int) -> tuple[bytes, list[int]]:
    """The bytes [first, last) of what is shown, and where in them what has become infinite begins."""
    into, infinite = bytearray(last - first), []

    def read(offset: int, part: memoryview) -> None:
        begin = offset - array.stored_begin
        part[:] = stored[begin : begin + len(part)]

    caster.read(array, first, memoryview(into), read, lambda found: infinite.extend(found.tolist()))
    return bytes(into), infinite


@pytest.mark.parametrize("old, new", PAIRS)
def test_every_value_becomes_what_numpy_has_for_it(old, new):
    values = values_of(old)
    with np.errstate(all="ignore"):
        expected = values.astype(FLOATS[new])
        lost = np.flatnonzero(np.isfinite(values) & np.isinf(expected)) * expected.itemsize
    array = CastArray("w", values.shape, 40, old, 8, new)
    found, infinite = converted(Caster(1 << 16), array, values.tobytes(), 0, array.nbytes)
    assert found == expected.tobytes()
    assert infinite == lost.tolist()


@pytest.mark.parametrize(
    "why, value, old, new, bits",
    [
        ("a tie goes down to even", 1 + 2**-8, "float32", "bfloat16", 0x3F80),
        ("a tie goes up to even", 1 + 3 * 2**-8, "float32", "bfloat16", 0x3F82),
        ("more than a tie", 1 + 2**-8 + 2**-20, "float32", "bfloat16", 0x3F81),
        ("the smallest subnormal", 2.0**-24, "float64", "float16", 1),
        ("half of it, a tie", 2.0**-25, "float32", "float16", 0),
        ("the largest that stays finite", 65519.996, "float32", "float16", 0x7BFF),
        ("the next one", 65520.0, "float32", "float16", 0x7C00),
        ("a negative zero", -0.0, "float64", "bfloat16", 0x8000),
    ],
)
def test_numbers_are_rounded_to_the_nearest_even(why, value, old, new, bits):
    raw = np.array([value], FLOATS[old]).tobytes()
    found, _ = converted(Caster(0), CastArray("w", (), 0, old, 0, new), raw, 0, 2)
    assert int.from_bytes(found, "little") == bits


@pytest.mark.parametrize("old, new", PAIRS)
def test_a_span_may_begin_and_end_anywhere_also_within_an_element(old, new):
    """And what has become infinite counts where it begins: over adjacent spans, once."""
    rng = np.random.default_rng(3)
    with np.errstate(all="ignore"):
        values = (rng.standard_normal(40) * 10.0 ** rng.integers(-40, 40, 40)).astype(FLOATS[old])
        expected = values.astype(FLOATS[new])
    array, caster = CastArray("w", (5, 8), 3, old, 64, new), Caster(100)
    for cuts in ([0, 1, 2, 3, 7, 8, 50, 79, 80], [0, 33, 80], [0, 80]):
        scaled = sorted({min(cut * expected.itemsize // 2, array.nbytes) for cut in cuts} | {5, 17})
        parts = [
            (low, *converted(caster, array, values.tobytes(), low, high))
            for low, high in zip(scaled, scaled[1:], strict=False)
        ]
        assert b"".join(part for _, part, _ in parts) == expected.tobytes()
        lost = np.flatnonzero(np.isfinite(values) & np.isinf(expected)) * expected.itemsize
        assert [low + at for low, _, found in parts for at in found] == lost.tolist()


# In a plan


def cast_plan(nbytes: int):
    """One float32 array of a file of its own, padded by a row before and two elements after, that becomes float16."""
    n = 1000
    places = (Place((0, 0), (n, 3), (1, 0), (n + 1, 5)), Place((0, 0), (n, 3), (0, 0), (n, 3)))
    form = byte_form((n, 3), 16, places)
    stored_nbytes = (n + 1) * 5 * 4
    shown = stored_nbytes + 8
    source = replace(table_of([(0, shown, stored_nbytes // 2)]), converted_nbytes=np.array([stored_nbytes]))
    planned = PlannedTensor(form, np.zeros(1, np.int64), np.zeros(1, np.int64))
    plan = make_plan(
        [planned], source, table_of([(0, 0, n * 6)]), (1, 1), Resources(1, nbytes, "shared", hashing=False)
    )
    return plan, CastArray("w", (n + 1, 5), 0, "float32", shown, "float16")


@pytest.mark.parametrize("nbytes", [300, 5000, 1 << 20])
def test_what_is_cast_is_never_copied_and_its_padding_not_counted(nbytes, tmp_path):
    plan, cast = cast_plan(nbytes)
    values = np.full((1001, 5), 1e9, "f4")
    values[1:, 0] = 1.0
    (tmp_path / "0").write_bytes(values.tobytes())
    with Files(tmp_path) as files:
        reader = Reader(files, ["0"], ["w"], plan.source.arrays, plan.buffer_nbytes, False, {0: cast})
        for number in range(plan.nrounds):
            work = expand_round(plan, number, 0)
            assert not len(work.copy.nbytes)
            reader.read(number, work.read, work.cast)
    assert reader.infinite_in(range(plan.nrounds)) == {0: 2000}  # two of three elements a row


def test_the_hash_of_a_cast_array_is_no_beginning_of_another():
    """A target array has the bytes that are shown; the digest is of those in the file."""
    whole_array = byte_form((64,), 16, (Place((0,), (64,), (0,), (64,)),) * 2)
    planned = PlannedTensor(whole_array, np.zeros(1, np.int64), np.zeros(1, np.int64))
    for converted_nbytes, known in ((0, 1), (256, 0)):
        digest = {"has_digest": np.array([1]), "converted_nbytes": np.array([converted_nbytes])}
        source = replace(table_of([(0, 0, 128)]), **digest)
        plan = make_plan([planned], source, table_of([(0, 0, 128)]), (1, 1), Resources(1, 1 << 14, "owner", True))
        assert plan.target.arrays.has_digest.tolist() == [known]
        assert plan.target.arrays.begins_as.tolist() == [-1]


def test_the_memory_of_a_rank_is_shared_with_what_casts():
    least = BUFFERS * LEAST_ROUND_NBYTES
    assert round_nbytes_of(least, casting=True) == least // (BUFFERS + CAST_BUFFERS)
    plan, _ = cast_plan(4000)
    assert plan.memory_nbytes == (BUFFERS + CAST_BUFFERS) * plan.buffer_nbytes


# Of a source


def source_of(*tensors, **changes) -> Source:
    """With headers that fit, each array behind the other from byte 104 on."""
    raw = manifest({}, *tensors, **changes)
    source = Source(None, parsed(raw), None)  # type: ignore[arg-type]
    arrays, begin = {}, 104
    for f in source.case.fragments:
        nbytes = int(np.prod(f.local_shape, dtype=int)) * (8 if f.dtype in ("float64", "int64") else 4)
        arrays[f.payload_key] = StoredArray(f.dtype, f.local_shape, begin, nbytes)
        begin += nbytes
    source.headers = {"rank-00000.safetensors": arrays}
    return source


def of(name: str, shape, dtype: str = "float32", **changes):
    return tensor(name, shape, {(): [whole(shape)]}, {}, dtype=dtype, **changes)


def test_cast_arrays_are_shown_behind_their_file_aligned_and_apart():
    source = source_of(of("a", (3,)), of("b", (5,), "int64"), of("c", (7,), "float64"), of("d", ()))
    cast, casts, warnings = cast_source(source, "abcd", [cast_rule("float16")], [])
    assert [(one.tensor, one.old, one.new) for one in casts] == [
        ("a", "float32", "float16"),
        ("c", "float64", "float16"),
        ("d", "float32", "float16"),
    ]
    assert warnings == ()
    arrays = [cast.headers[f.payload_file][f.payload_key] for f in cast.case.fragments]
    assert [f.dtype for f in cast.case.fragments] == ["float16", "int64", "float16", "float16"]
    end = 104 + 12 + 40 + 56 + 4
    spans = sorted((array.begin, array.nbytes) for array in arrays if array.cast)
    assert [nbytes for _, nbytes in spans] == [6, 14, 2]
    for begin, nbytes in spans:
        assert begin > end and begin % 8 == 0
        end = begin + nbytes
    assert [array.cast.stored_begin for array in arrays if array.cast] == [104, 156, 212]
    assert source.headers["rank-00000.safetensors"].keys() == {"a|r0", "b|r0", "c|r0", "d|r0"}


def test_tensors_that_are_left_out_are_not_cast():
    source = source_of(of("a", (3,)), of("b", (5,)))
    cast, casts, _ = cast_source(source, ["b"], [cast_rule("float16")], [])
    assert [one.tensor for one in casts] == ["b"]
    assert [f.dtype for f in cast.case.fragments] == ["float32", "float16"]


def test_tied_tensors_of_two_types_are_refused_unless_one_is_left_out():
    source = source_of(*(of(name, (3,), tie_group_id="t") for name in "ab"))
    with pytest.raises(UsageError, match="--cast: tied tensors 'a' and 'b' would be float32 and float16"):
        cast_source(source, "ab", [cast_rule("b=float16")], [])
    assert len(cast_source(source, "b", [cast_rule("b=float16")], [])[1]) == 1
    assert len(cast_source(source, "ab", [cast_rule("float16")], [])[1]) == 2


def test_without_rules_the_source_is_as_it_was():
    source = source_of(of("a", (3,)))
    assert cast_source(source, "a", [], []) == (source, (), ())
