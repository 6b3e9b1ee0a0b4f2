"""One run of one contender, with everything around it that makes it comparable.

    remove the former output, sync -> wait until the machine is quiet -> touch and free memory -> run -> who else was busy?

These machines give free memory back to their host, so the first touch of a page can take longer than the work: up to
2 s a GiB. A program that takes as much memory as the run will, and ends just before it, pays that price for it.

How busy others were is the CPU time of the machine (/proc/stat) less that of the contender and its descendants (wait4).
"""

import json
import os
import resource
import shutil
import subprocess
import sys
import threading
import time
from dataclasses import dataclass, field
from pathlib import Path

from tests.benchmarks.contenders import Contender, Task
from tests.mpirun import kill_session

QUIET_SHARE = 0.05  # of the machine's CPU time that others may take in the pause before a run
TICK_SECONDS = 0.1  # that /proc/stat may be off
TOUCH = "import mmap, sys; mmap.mmap(-1, int(sys.argv[1]), mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | mmap.MAP_POPULATE)"


@dataclass(frozen=True)
class Limits:
    """busy_share: of the machine's CPU time that others may take during a run. repeats: of a run that was disturbed.

    patience: seconds to wait for a quiet machine. timeout: seconds of a run.
    """

    busy_share: float
    repeats: int
    patience: float
    timeout: float


@dataclass
class Run:
    """What was measured. peak_rss_nbytes: of the largest process; None if not larger than the one that started it."""

    seconds: float
    data_seconds: float | None = None
    peak_rss_nbytes: int | None = None
    report_rss_nbytes: int | None = None
    cpu_seconds: float = 0.0
    busy_share: float = 0.0
    steal_share: float = 0.0
    loadavg: str = ""
    waited_seconds: float = 0.0
    is_quiet: bool = True
    failure: str = ""


@dataclass
class Result:
    """All runs of a contender at a work. note: why it can't, or what is wrong with its output."""

    contender: str
    note: str = ""
    can_run: bool = True
    runs: list[Run] = field(default_factory=list)

    @property
    def counted(self) -> list[Run]:
        """The runs that were not disturbed; all of them if there is no such run."""
        done = [run for run in self.runs if not run.failure]
        return [run for run in done if run.is_quiet] or done


def undisturbed_run(contender: Contender, task: Task, limits: Limits) -> list[Run]:
    """Run until nobody else was busy, `repeats` times more at most; all runs, the one that counts last."""
    runs = []
    for _ in range(1 + limits.repeats):
        runs.append(run_once(contender, task, limits))
        if runs[-1].failure or runs[-1].is_quiet:
            break
    return runs


def run_once(contender: Contender, task: Task, limits: Limits) -> Run:
    remove_output(task)
    os.sync()  # nothing that was written before is on its way to the disk meanwhile
    waited = wait_until_quiet(limits.patience)
    touch_memory(task.nbytes + contender.memory(task))
    loadavg = Path("/proc/loadavg").read_text().strip()
    before = _machine_cpu()
    run = _timed(contender.command(task), contender.environ, task, limits.timeout)
    idle, busy, steal = (after - first for after, first in zip(_machine_cpu(), before, strict=True))
    total = max(idle + busy + steal, TICK_SECONDS)
    others = max(busy - run.cpu_seconds - TICK_SECONDS, 0.0)
    run.busy_share, run.steal_share = round(others / total, 3), round(steal / total, 3)
    run.is_quiet = run.busy_share + run.steal_share <= limits.busy_share
    run.loadavg, run.waited_seconds = loadavg, round(waited, 1)
    if not run.failure:
        _add_what_it_tells(run, contender, task)
    return run


def remove_output(task: Task) -> None:
    for path in task.out.parent.glob(f"{task.out.name}*"):
        shutil.rmtree(path) if path.is_dir() else path.unlink()


def wait_until_quiet(patience: float) -> float:
    """The seconds until a pause of a second went by in which nobody was busy; not much more than `patience`."""
    started = time.monotonic()
    while True:
        before = _machine_cpu()
        time.sleep(1)
        idle, busy, steal = (after - first for after, first in zip(_machine_cpu(), before, strict=True))
        waited = time.monotonic() - started
        if busy + steal <= QUIET_SHARE * (idle + busy + steal) or waited >= patience:
            return waited


def touch_memory(nbytes: int) -> None:
    """Make the host give this machine `nbytes` of memory, as far as it is free; a GiB stays untouched."""
    nbytes = min(nbytes, available_memory() - (1 << 30))
    if nbytes > 0:
        subprocess.run([sys.executable, "-S", "-c", TOUCH, str(nbytes)], check=True)


def available_memory() -> int:
    lines = Path("/proc/meminfo").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("MemAvailable")) * 1024


def _machine_cpu() -> tuple[float, float, float]:
    """(idle, busy, stolen by the host) seconds of all cores since the machine started."""
    user, nice, system, idle, iowait, irq, softirq, steal = (
        int(ticks) / os.sysconf("SC_CLK_TCK") for ticks in Path("/proc/stat").read_text().splitlines()[0].split()[1:9]
    )
    return idle + iowait, user + nice + system + irq + softirq, steal


def _timed(command: list[str], environ: dict[str, str], task: Task, timeout: float) -> Run:
    """Start, wait, and measure the whole process with all its descendants."""
    own_peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    printed, said = _outputs(task)
    with printed.open("wb") as stdout, said.open("wb") as stderr:
        started = time.perf_counter()
        process = subprocess.Popen(
            command, env=environ, stdin=subprocess.DEVNULL, stdout=stdout, stderr=stderr, start_new_session=True
        )
        killer = threading.Timer(timeout, kill_session, (process.pid,))
        killer.start()
        try:
            _, status, usage = os.wait4(process.pid, 0)
        finally:
            seconds = time.perf_counter() - started
            killer.cancel()
            kill_session(process.pid)
    process.returncode = os.waitstatus_to_exitcode(status)
    return Run(
        seconds,
        peak_rss_nbytes=usage.ru_maxrss * 1024 if usage.ru_maxrss > own_peak else None,
        cpu_seconds=usage.ru_utime + usage.ru_stime,
        failure=_failure(process.returncode, seconds >= timeout, said),
    )


def _outputs(task: Task) -> tuple[Path, Path]:
    """Files for what the contender prints on stdout and on stderr."""
    return task.out.with_name(f"{task.out.name}.stdout"), task.out.with_name(f"{task.out.name}.stderr")


def _failure(code: int, is_late: bool, said: Path) -> str:
    if is_late:
        return "not done in time"
    lines = [line for line in said.read_text(errors="replace").splitlines() if line.strip()]
    return f"exit {code}: {lines[-1][:200] if lines else 'without a word'}" if code else ""


def _add_what_it_tells(run: Run, contender: Contender, task: Task) -> None:
    """The seconds of the data path, and for ours the peak memory of a rank."""
    if contender.is_ours:
        report = json.loads(task.report.read_text())
        run.data_seconds, run.report_rss_nbytes = report["seconds"], report["peak_rss_nbytes"]
        return
    lines = _outputs(task)[0].read_text().splitlines()
    run.data_seconds = json.loads(lines[-1])["seconds"] if lines else run.seconds
