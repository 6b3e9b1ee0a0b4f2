"""What people are shown: tables of tensors, how a command ended, and plans for models without files."""

import json

import pytest

from reshard_mpi.check.verify import Verdict
from reshard_mpi.checkpoint.manifest import Stages
from reshard_mpi.checkpoint.mesh import Mesh, parse_target
from reshard_mpi.errors import InputError, IntegrityError, UsageError
from reshard_mpi.plan.planner import Resources
from reshard_mpi.report import size_text, summary_of
from reshard_mpi.show import simulation, tensors
from reshard_mpi.show.outcomes import comparison_text, fault_facts, summary_text, verdict_facts, verdict_text
from reshard_mpi.show.simulation import NAMES, simulate, simulation_text
from reshard_mpi.show.tensors import layout_text, tensor_facts, tensor_lines
from tests.unit.manifests import SINGLE, case_of, tensor, whole

# Tensors


def facts(name: str, shape=(4, 6), dtype="float32", nfragments=2, layout=None) -> dict:
    nbytes = 4 * shape[0] if shape else 4
    return {
        "tensor": name,
        "dtype": dtype,
        "shape": list(shape),
        "nbytes": nbytes,
        "nfragments": nfragments,
        "layout": layout or {},
    }


def test_what_there_is_to_say_of_a_tensor_is_json():
    case = case_of(SINGLE, tensor("w", (4, 6), {(): [whole((4, 6))]}, SINGLE, dtype="bfloat16", role="buffer"))
    found = tensor_facts(case.fragments, {"tp": 1, "pp": Stages((0,), 2), "dp": "replicate"})
    assert json.loads(json.dumps(found)) == {
        "tensor": "w",
        "fqn": "w",
        "component": "model",
        "role": "buffer",
        "dtype": "bfloat16",
        "shape": [4, 6],
        "nbytes": 48,
        "nfragments": 1,
        "layout": {"dp": "replicate", "pp": {"stages": [0], "of": 2}, "tp": 1},
    }


@pytest.mark.parametrize(
    "why, names, shown",
    [
        ("layers", [f"h.{n}.w" for n in range(12)], ["h.{0-11}.w"]),
        ("layers, whatever their order", ["h.2.w", "h.0.w", "h.1.w"], ["h.{0-2}.w"]),
        ("experts within layers", [f"h.{n}.e.{m}.w" for n in (3, 4) for m in (0, 1)], ["h.{3-4}.e.{0-1}.w"]),
        ("a number that all have stays", [f"v2.h.{n}.3.w" for n in range(3)], ["v2.h.{0-2}.3.w"]),
        ("one tensor keeps its name", ["h.7.w"], ["h.7.w"]),
        ("numbers within words are none", ["w1", "w2"], ["w1", "w2"]),
        ("other names are other lines", ["h.0.a", "h.0.b", "h.1.a"], ["h.{0-1}.a", "h.0.b"]),
        ("digits of another alphabet are none", ["h.\u0663.w", "h.3.w"], ["h.\u0663.w", "h.3.w"]),
        ("no tensors", [], []),
    ],
)
def test_tensors_that_differ_in_numbers_of_their_names_alone_share_a_line(why, names, shown):
    lines = tensor_lines([facts(name) for name in names], {"tp": 2})
    assert [line.split()[0] for line in lines] == shown


@pytest.mark.parametrize("other", [{"shape": (5, 6)}, {"dtype": "int32"}, {"layout": {"tp": 1}}])
def test_tensors_that_differ_otherwise_do_not(other):
    assert len(tensor_lines([facts("h.0.w"), facts("h.1.w", **other)], {"tp": 2})) == 2


def test_a_line_has_the_sums_of_its_tensors_and_what_each_mesh_axis_does():
    layers = [facts(f"h.{n}.w", layout={"tp": 1, "pp": {"stages": [n], "of": 2}}) for n in (0, 1)]
    (line,) = tensor_lines(layers, {"pp": 2, "tp": 2})
    assert line.split() == "h.{0-1}.w float32 4x6 32 B 4 fragments tp splits axis 1; pp places".split()
    (line,) = tensor_lines([facts("s", (), nfragments=1)], {"tp": 2})
    assert line.split() == "s float32 scalar 4 B 1 fragment".split()


def test_a_long_table_is_cut_and_says_so():
    lines = tensor_lines([facts(f"w{n}") for n in range(tensors.MOST_LINES + 3)], {})
    assert len(lines) == tensors.MOST_LINES + 1
    assert lines[-1] == "  ... and 3 more (--json has all)"


def test_what_a_layout_remembers_of_other_topologies_is_in_brackets():
    layout = {"dp": "replicate", "pp": {"stages": [0, 2], "of": 3}, "tp": 0}
    assert layout_text(layout, {"pp": 3, "tp": 2}) == "(dp replicates); pp at 0,2 of 3; tp splits axis 0"
    assert layout_text({}, {"tp": 2}) == ""


# Outcomes


def rank(**measured) -> dict:
    keys = ("read", "hashed", "sent", "written", "read_again")
    seconds = ("read", "hash", "exchange", "write")
    found = (
        {f"{key}_nbytes": 0 for key in keys} | {f"{key}_seconds": 0.0 for key in seconds} | {"peak_rss_nbytes": 1 << 20}
    )
    return found | measured


def report(verify="source", **changes) -> dict:
    ranks = [
        rank(read_nbytes=3 << 20, written_nbytes=1 << 20, read_seconds=0.5),
        rank(read_nbytes=1 << 20, written_nbytes=1 << 20, read_seconds=0.25, sent_nbytes=100),
    ]
    of_job = {
        "source": "a",
        "out": "b",
        "source_topology": "tp=2",
        "target_topology": "single",
        "ntensors": 1,
        "nfragments": 1,
        "nshards": 1,
        "nrounds": 3,
        "verify": verify,
        "unread_replica_nbytes": 0,
        "narrays_read": 12,
        "narrays_unverifiable": 0,
        "continued_nbytes": 0,
        "noracles": 1,
        "seconds": 1.5,
        "changes": {},
        "kept_bytes": [],
        "target_template": None,
    }
    return summary_of(ranks, **(of_job | changes))


def test_a_job_is_summed_up_in_few_lines():
    text = summary_text(report())
    assert len(text.splitlines()) <= 10
    assert text.startswith("a (tp=2) -> b (single)\n  1 tensor, 1 fragment, 1 shard, 2 ranks, 3 rounds\n")
    assert "  read         4.0 MiB      0.50 s     0.01 GB/s" in text
    assert "busiest rank 1.33 of the mean" in text


def test_a_job_says_what_it_changed_and_kept():
    changes, kept = {"cast": [{}], "padded": [{}, {}]}, [{"entry": "step"}]
    lines = summary_text(report(changes=changes, kept_bytes=kept, continued_nbytes=1)).splitlines()
    assert "  changed: 1 tensor cast, 2 tensors padded; kept: 1 file of what is no tensor, in bytes/" in lines
    assert "  kept: 1 file of what is no tensor, in bytes/" in summary_text(report(kept_bytes=kept)).splitlines()
    assert len(lines) <= 10


def test_a_job_that_went_on_says_where():
    lines = summary_text(report(continued_nbytes=3 << 20)).splitlines()
    assert "  continued: 3.0 MiB of the tensors were there from an earlier run" in lines


@pytest.mark.parametrize(
    "verify, changes, told",
    [
        ("none", {}, "nothing was hashed"),
        ("source", {}, "every fragment read holds its digest"),
        ("source", {"unread_replica_nbytes": 2048}, "; 2.0 KiB of replicas were compared by digest alone"),
        ("full", {}, "source, replicas and target hold their digests; 1 oracle checked"),
        ("full", {"noracles": 2}, "2 oracles checked"),
        ("source", {"narrays_unverifiable": 12}, "the source has no digests, so its bytes could not be checked"),
        ("source", {"narrays_unverifiable": 5}, "7 of 12 arrays read hold their digests, the others have none"),
        (
            "full",
            {"narrays_unverifiable": 12},
            "the source has no digests, so its bytes could not be checked; the target holds its digests; 1 oracle checked",
        ),
    ],
)
def test_a_summary_says_what_was_verified(verify, changes, told):
    assert summary_text(report(verify, **changes)).splitlines()[-1].startswith(f"  verified ({verify}): ")
    assert summary_text(report(verify, **changes)).endswith(told)


def test_a_verdict_has_a_line_a_fault_and_its_json_the_same_faults():
    faults = [InputError("w", "a\nb"), IntegrityError("v", "differs")]
    verdict = Verdict(nfragments=3, ndigests=2, noracles=1, nunverifiable=1, faults=faults)
    assert verdict_text("a", verdict).splitlines() == [
        "fault (exit 3): w: a\\nb",
        "fault (exit 4): v: differs",
        "a: 3 fragments, 2 digests and 1 oracle recomputed, 1 fragment unverifiable, 2 faults",
    ]
    assert verdict_facts(verdict)["faults"] == [fault_facts(fault) for fault in faults]
    assert fault_facts(faults[1]) == {"exit_code": 4, "where": "v", "message": "differs"}


@pytest.mark.parametrize(
    "found, lines",
    [
        ({"equal": True, "ntensors": 1, "differences": []}, ["equal: 1 tensor, 0 of them differ"]),
        (
            {
                "equal": False,
                "ntensors": 3,
                "differences": [
                    {"tensor": "v", "what": "only in a"},
                    {"tensor": "w", "what": "bytes differ", "first_index": [1, 2], "count": 1},
                ],
            },
            [
                "v: only in a",
                "w: bytes differ, first at [1, 2], 1 element",
                "different: 3 tensors, 2 of them differ",
            ],
        ),
    ],
)
def test_a_comparison_has_a_line_a_difference(found, lines):
    assert comparison_text(found).splitlines() == lines


@pytest.mark.parametrize(
    "nbytes, text", [(0, "0 B"), (1023, "1023 B"), (1024, "1.0 KiB"), (5 << 40, "5.0 TiB"), (5 << 50, "5120.0 TiB")]
)
def test_sizes_are_in_binary_units(nbytes, text):
    assert size_text(nbytes) == text


# Plans without files


@pytest.mark.parametrize("writers", ["owner", "shared"])
@pytest.mark.parametrize("target", ["tp=2", "pp=2,tp=2", "single", "ep=2", "fsdp=3"])
def test_a_model_without_files_is_planned(target, writers, monkeypatch):
    small = simulation.Model(layers=2, hidden=64, intermediate=96, key_value=16, vocabulary=100, experts=2)
    monkeypatch.setitem(simulation.MODELS, "moe-256", small)
    found = simulate("moe-256", parse_target("pp=2,tp=2"), parse_target(target), Resources(3, 1 << 14, writers, True))
    nelems = sum(shape[0] * (shape[1] if len(shape) > 1 else 1) for _, shape, _ in small.tensors())
    assert (found["nbytes"], found["ntensors"]) == (2 * nelems, len(list(small.tensors())))
    assert found["nranks"] == 3 and found["nrounds"] >= 2 * nelems / 3 / (1 << 14)
    assert json.loads(json.dumps(found)) == found
    assert found["busiest_over_mean"] < 1.5 or (target, writers) == ("single", "owner")
    text = simulation_text(found)
    assert text.startswith("moe-256: pp=2,tp=2 -> ") and "3 ranks" in text and len(text.splitlines()) == 4
    assert 3 * found["ranks"]["written_nbytes"]["mean"] >= found["nbytes"] - 3


@pytest.mark.parametrize("nranks, most", [(16, 1.1), (4, 1.1), (3, 1.2)])
def test_of_replicas_those_are_read_that_keep_all_ranks_busy(nranks, most, monkeypatch):
    small = simulation.Model(layers=12, hidden=256, intermediate=512, key_value=64, vocabulary=512)
    monkeypatch.setitem(simulation.MODELS, "llama-8b", small)
    resources = Resources(nranks, 1 << 16, "shared", True)
    found = simulate("llama-8b", parse_target("tp=2,dp=8"), parse_target("tp=4"), resources)
    assert found["busiest_over_mean"] < most


def test_what_layers_have_in_common_is_computed_once(monkeypatch):
    calls = []
    form = simulation.byte_form_of_arrays
    monkeypatch.setattr(simulation, "byte_form_of_arrays", lambda *given: calls.append(given) or form(*given))
    for nlayers in (2, 40):
        simulation._form.cache_clear()
        small = simulation.Model(nlayers, hidden=64, intermediate=96, key_value=16, vocabulary=100)
        monkeypatch.setitem(simulation.MODELS, "llama-8b", small)
        simulate("llama-8b", parse_target("tp=2"), parse_target("tp=4"), Resources(2, 1 << 16, "shared", True))
        assert len(calls) == 7
        calls.clear()


def test_a_model_that_is_not_known_is_a_usage_error_that_lists_those_that_are():
    with pytest.raises(UsageError, match="--simulate: 'gpt-9' is not known; expected one of .*llama-8b") as refused:
        simulate("gpt-9", Mesh(()), Mesh(()), Resources(1, 1 << 20, "owner", True))
    assert all(name in str(refused.value) for name in NAMES)


@pytest.mark.parametrize(
    "name, nbillions", [("llama-8b", (7.9, 8.1)), ("llama-405b", (404, 407)), ("moe-256", (600, 680))]
)
def test_models_are_as_large_as_their_names_say(name, nbillions):
    nelems = 0
    for _, shape, rules in simulation.MODELS[name].tensors():
        assert set(rules) == {"tp"}
        nelems += shape[0] * (shape[1] if len(shape) > 1 else 1)
    assert nbillions[0] <= nelems / 1e9 <= nbillions[1]
