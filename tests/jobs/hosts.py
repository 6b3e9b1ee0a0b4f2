"""Two hosts on one machine: each has a network, a name and a disk of its own, and shares the rest with the other.

    with two_hosts(tmp_path) as hosts:
        shutil.copy(shard, hosts.disk(1))            # what host 1 sees under hosts.local
        done = hosts.run("reshard", ...)             # 4 ranks: 0 and 1 on host-0, 2 and 3 on host-1

Made of namespaces (network, mounts, hostname), which takes root; `require_hosts` skips where that isn't allowed.
"""

import contextlib
import functools
import os
import stat
import subprocess
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.mpirun import job_environ, kill_session, require_mpi, started, tail, wait_for

ADDRESSES = ("10.77.0.1", "10.77.0.2")
NETWORK = "10.77.0.0/24"
RANKS_A_HOST = 2
NAMESPACES = ("--net", "--uts", "--mount")
DISK_NBYTES = 256 << 20

# Through the memory of the machine, which both hosts have, the ranks would talk also without a link.
OVER_THE_LINK = {"MPIR_CVAR_CH4_NETMOD": "ofi", "FI_PROVIDER": "tcp"}

# The state is what libfabric goes by, which leaves out what isn't up. It comes some time after `ip link set`.
SHOW_LINK = ("ip", "link", "show", "dev", "link0")

# What starts a command on a host, in place of ssh: LAUNCHER [OPTIONS] ADDRESS COMMAND...
LAUNCHER = """#!/bin/sh
while [ "${1#-}" != "$1" ]; do shift; done
case $1 in
%s
*) echo "no such host: $1" >&2; exit 1 ;;
esac
shift
exec nsenter --target $pid --net --uts --mount -- sh -c "$*"
"""


@functools.cache
def _refusal() -> str:
    """Why there can be no hosts here, or nothing."""
    try:
        done = subprocess.run(["unshare", *NAMESPACES, "ip", "link"], capture_output=True, text=True, timeout=20)
    except FileNotFoundError as error:
        return f"no {error.filename}"
    return done.stderr.strip() if done.returncode else ""


def require_hosts() -> None:
    """Without namespaces the test is skipped; on CI it fails."""
    if _refusal():
        (pytest.fail if os.environ.get("CI") else pytest.skip)(f"can't make namespaces: {_refusal()}")


@dataclass(frozen=True)
class Hosts:
    """`pids` of the processes that keep the namespaces; on each host `local` is a disk of its own."""

    folder: Path
    pids: tuple[int, ...]

    @property
    def local(self) -> Path:
        return self.folder / "local"

    def disk(self, host: int) -> Path:
        """The disk of a host, as it can be reached from outside."""
        return Path(f"/proc/{self.pids[host]}/root{self.local}")

    def on(self, host: int, *command: object) -> list[str]:
        """The command, to be run on a host."""
        return ["nsenter", "--target", str(self.pids[host]), *NAMESPACES, "--", *map(str, command)]

    def set_link(self, state: str) -> None:
        """The link between the hosts: `up` or `down`."""
        _run(self.on(0, "ip", "link", "set", "link0", state))
        wait_for(lambda: all(f"state {state.upper()}" in _run(self.on(host, *SHOW_LINK)) for host in (0, 1)))

    @contextlib.contextmanager
    def started(
        self, *arguments: object, mpi: str = "mpich", ranks_a_host: int = RANKS_A_HOST
    ) -> Iterator[subprocess.Popen[str]]:
        """`mpirun python ARGUMENTS` on both hosts, running; what is left of it at the end of the block is killed."""
        python, mpirun = require_mpi(mpi)
        command = self.on(0, mpirun, *self._options(mpi, ranks_a_host), python, *arguments)
        try:
            with started(command, job_environ(mpirun, OVER_THE_LINK), self.folder) as process:
                yield process
        finally:
            self._kill_left()

    def _kill_left(self) -> None:
        """Daemons of a launcher leave their session, but not the hosts."""
        for pid in _processes_in(self.pids) - set(self.pids):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, 9)

    def _options(self, mpi: str, ranks_a_host: int) -> Sequence[object]:
        nranks = ranks_a_host * len(self.pids)
        if mpi == "mpich":
            launcher = ("-launcher", "ssh", "-launcher-exec", self.folder / "launcher", "-iface", "link0")
            return (*launcher, "-hosts", ",".join(ADDRESSES), "-ppn", ranks_a_host, "-n", nranks)
        hosts = ",".join(f"{address}:{ranks_a_host}" for address in ADDRESSES)
        launcher = ("--prtemca", "plm_ssh_agent", self.folder / "launcher", "--prtemca", "prte_if_include", NETWORK)
        forwarded = (part for name in ("PYTHONPATH", "PATH") for part in ("-x", name))
        return (*launcher, *forwarded, "--host", hosts, "--map-by", f"ppr:{ranks_a_host}:node", "-n", nranks)

    def run_python(
        self, *arguments: object, timeout: float = 60, **options: object
    ) -> subprocess.CompletedProcess[str]:
        with self.started(*arguments, **options) as process:
            try:
                stdout, stderr = process.communicate(timeout=timeout)
            except subprocess.TimeoutExpired:
                kill_session(process.pid)
                self._kill_left()
                stdout, stderr = process.communicate()
                pytest.fail(f"{process.args}: not done after {timeout:g} s\n{tail(stdout)}\n{tail(stderr)}")
        return subprocess.CompletedProcess(process.args, process.returncode, stdout, stderr)

    def run(self, *arguments: object, **options: object) -> subprocess.CompletedProcess[str]:
        """`mpirun python -m reshard_mpi ARGUMENTS` on both hosts."""
        return self.run_python("-m", "reshard_mpi", *arguments, **options)


@contextlib.contextmanager
def two_hosts(folder: Path) -> Iterator[Hosts]:
    """host-0 and host-1; gone at the end of the block, with all that runs on them."""
    require_hosts()
    (folder / "local").mkdir()
    with contextlib.ExitStack() as stack:
        keepers = [stack.enter_context(_namespaces(f"host-{number}", folder / "local")) for number in (0, 1)]
        hosts = Hosts(folder, tuple(keepers))
        peer = ("peer", "name", "link0", "netns", str(keepers[1]))
        _run(hosts.on(0, "ip", "link", "add", "link0", "type", "veth", *peer))
        for number, address in enumerate(ADDRESSES):
            _run(hosts.on(number, "ip", "address", "add", f"{address}/24", "dev", "link0"))
            for link in ("lo", "link0"):
                _run(hosts.on(number, "ip", "link", "set", link, "up"))
        hosts.set_link("up")
        _write_launcher(hosts)
        try:
            yield hosts
        finally:
            hosts._kill_left()


@contextlib.contextmanager
def _namespaces(name: str, local: Path) -> Iterator[int]:
    """The pid of a process that keeps the namespaces of a host."""
    script = f"hostname {name} && mount -t tmpfs -o size={DISK_NBYTES} none '{local}' && echo ready && exec sleep 3600"
    keeper = subprocess.Popen(["unshare", *NAMESPACES, "sh", "-c", script], stdout=subprocess.PIPE, text=True)
    try:
        assert keeper.stdout.readline() == "ready\n"
        yield keeper.pid
    finally:
        keeper.kill()
        keeper.wait()
        keeper.stdout.close()


def _write_launcher(hosts: Hosts) -> None:
    cases = [f"{address}) pid={pid} ;;" for address, pid in zip(ADDRESSES, hosts.pids, strict=True)]
    launcher = hosts.folder / "launcher"
    launcher.write_text(LAUNCHER % "\n".join(cases))
    launcher.chmod(launcher.stat().st_mode | stat.S_IXUSR)


def _processes_in(pids: Sequence[int]) -> set[int]:
    """The processes that are in the network of one of these."""
    networks = {os.readlink(f"/proc/{pid}/ns/net") for pid in pids}
    found = set()
    for link in Path("/proc").glob("[0-9]*/ns/net"):
        with contextlib.suppress(OSError):
            if os.readlink(link) in networks:
                found.add(int(link.parts[2]))
    return found


def _run(command: Sequence[str]) -> str:
    done = subprocess.run(command, capture_output=True, text=True, timeout=20)
    assert not done.returncode, (command, done.stderr)
    return done.stdout
