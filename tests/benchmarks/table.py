"""The results, as Markdown and as values for JSON."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from statistics import median

from tests.benchmarks.measure import Result, Run
from tests.benchmarks.works import SOURCES, Work

YARDSTICK = "cp"
LEGEND = """\
Seconds are medians (least to most) of the runs that count. whole: from start to exit, with imports and the launcher. data
path: inside the process, after imports and the set-up of MPI or gloo, until OUT is there. CPU: of all processes. peak RSS:
of the largest process; mapped files count, what is smaller than the benchmark itself is left out. runs: those in which others
were busy are dropped; a star: there were no others.
"""


@dataclass(frozen=True)
class Measured:
    """A work and what its contenders took."""

    work: Work
    nbytes: int
    results: list[Result]


@dataclass(frozen=True)
class Stat:
    """Of the runs that count."""

    median: float
    least: float
    most: float


def whole(run: Run) -> float | None:
    return run.seconds


def data(run: Run) -> float | None:
    return run.data_seconds


def stat(result: Result, of: Callable[[Run], float | None]) -> Stat | None:
    """None where nothing was measured."""
    values = [value for run in result.counted if (value := of(run)) is not None]
    return Stat(median(values), min(values), max(values)) if values else None


def facts(measured: Measured) -> dict[str, object]:
    return {
        "work": asdict(measured.work),
        "nbytes": measured.nbytes,
        "results": [_result_facts(result, measured.results) for result in measured.results],
    }


def _result_facts(result: Result, results: Sequence[Result]) -> dict[str, object]:
    of = {"whole_seconds": whole, "data_seconds": data}
    stats = {name: asdict(found) if (found := stat(result, value)) else None for name, value in of.items()}
    others = [other.contender for other in results if other is not result]
    ratios = {
        name: {other: _ratio(result, _named(results, other), value) for other in others} for name, value in of.items()
    }
    return {**asdict(result), **stats, "over": ratios}


def markdown(measured: Measured) -> str:
    work = measured.work
    head = f"### {work.name}: {SOURCES[work.source]} -> {work.target}, {measured.nbytes / (1 << 30):.2f} GiB"
    parts = [head, _main_table(measured.results), _speedup_table(measured.results)]
    return "\n\n".join(filter(None, parts)) + "\n"


def _main_table(results: Sequence[Result]) -> str:
    yardstick = _named(results, YARDSTICK)
    rows = [
        (
            result.contender,
            _seconds(stat(result, whole)),
            _ratio_text(_ratio(result, yardstick, whole)),
            _seconds(stat(result, data)),
            _ratio_text(_ratio(result, yardstick, data)),
            _cpu(stat(result, lambda run: run.cpu_seconds)),
            _mebibytes(stat(result, lambda run: run.report_rss_nbytes or run.peak_rss_nbytes)),
            _runs(result),
            result.note,
        )
        for result in results
    ]
    columns = ("contender", "whole, s", "÷ cp", "data path, s", "÷ cp", "CPU, s", "peak RSS, MiB", "runs", "note")
    return table(columns, rows)


def _speedup_table(results: Sequence[Result]) -> str:
    """How many times faster ours is than each peer."""
    ours = [result for result in results if result.contender.startswith("ours-") and result.counted]
    peers = [result for result in results if not result.contender.startswith("ours-") and result.counted]
    rows = [
        [one.contender, *(f"{_ratio_text(_ratio(p, one, whole))} / {_ratio_text(_ratio(p, one, data))}" for p in peers)]
        for one in ours
    ]
    title = "Times faster than (whole process / data path):\n\n"
    return title + table(["", *(peer.contender for peer in peers)], rows) if rows and peers else ""


def against_row(works: Sequence[Measured]) -> str:
    """What the other cuts of one matrix cost, over that of `row`."""
    row = next((one for one in works if one.work.name == "row"), None)
    others = [one for one in works if one.work.source in ("column", "grid")]
    if row is None or not others:
        return ""
    rows = []
    for result in row.results:
        if result.counted:
            found = [_named(one.results, result.contender) for one in others]
            rows.append([result.contender, *(_ratio_text(_ratio(other, result, data)) for other in found)])
    return "### Data path over that of row\n\n" + table(["", *(one.work.name for one in others)], rows) + "\n"


def table(columns: Iterable[str], rows: Iterable[Iterable[str]]) -> str:
    """A Markdown table.

    >>> print(table(["a", "b"], [["1", "2"]]))
    | a | b |
    |---|---|
    | 1 | 2 |
    """
    columns = list(columns)
    lines = [columns, *map(list, rows)]
    text = [f"| {' | '.join(cell.replace('|', '/') for cell in line)} |" for line in lines]
    return "\n".join([text[0], "|" + "---|" * len(columns), *text[1:]])


def _named(results: Iterable[Result], name: str) -> Result | None:
    return next((result for result in results if result.contender == name), None)


def _ratio(a: Result | None, b: Result | None, of: Callable[[Run], float | None]) -> float | None:
    """The median of `a` over that of `b`."""
    over, under = (stat(result, of) if result else None for result in (a, b))
    return over.median / under.median if over and under and under.median else None


def _ratio_text(ratio: float | None) -> str:
    return "-" if ratio is None else f"{ratio:.2f}"


def _seconds(found: Stat | None) -> str:
    return "-" if found is None else f"{found.median:.2f} ({found.least:.2f} to {found.most:.2f})"


def _cpu(found: Stat | None) -> str:
    return "-" if found is None else f"{found.median:.2f}"


def _mebibytes(found: Stat | None) -> str:
    return "-" if found is None else f"{found.most / (1 << 20):.0f}"


def _runs(result: Result) -> str:
    """How many count, how many were dropped because others were busy; a star where only such runs are left."""
    done = [run for run in result.runs if not run.failure]
    counted = result.counted
    dropped = len(done) - len(counted)
    star = "*" if counted and not counted[0].is_quiet else ""
    return f"{len(counted)}{star}" + (f" ({dropped} dropped)" if dropped else "")
