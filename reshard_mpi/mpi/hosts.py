"""What an error says of hosts, where ranks are on several: on which one it was found, and who sees what a rank doesn't see."""

import os

from mpi4py import MPI

from reshard_mpi.errors import ReshardError, StorageError

OF_A_HOST = (3, 4, 5)  # exit codes of what may be found on one host, and not on another


def on_hosts(comm: MPI.Comm, error: ReshardError) -> ReshardError:
    """Collective: the error, which is the same on all ranks, with what is to be said of hosts."""
    is_missing = isinstance(error, StorageError) and error.is_missing
    sight = comm.allgather((os.uname().nodename, is_missing and os.path.lexists(error.where)))
    hosts, sees = zip(*sight, strict=True)
    if any(sees) and not all(sees):
        here, there = sees.index(False), sees.index(True)
        error.message += (
            f"; rank {here} on host {hosts[here]} does not see it, which rank {there} on host {hosts[there]} does"
        )
    elif error.host and error.exit_code in OF_A_HOST and len(set(hosts)) > 1:
        error.where += f" on host {error.host}"
    return error
