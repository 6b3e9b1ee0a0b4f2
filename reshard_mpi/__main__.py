"""`python -m reshard_mpi`: parse, start MPI where it is needed, run the command, leave with one exit code on all ranks.

An expected error is printed once, by rank 0. Anything else is a bug of ours: it would leave the other ranks waiting for ever, so
the rank that has it prints its traceback and ends the whole job.
"""

import argparse
import contextlib
import gc
import io
import os
import signal
import sys
import time
import traceback
from typing import NoReturn

from reshard_mpi import stop
from reshard_mpi.cli import parse, tell
from reshard_mpi.errors import Interrupted, ReshardError, expected_error
from reshard_mpi.launcher import OPEN_MPI, Launch, check_world, find_launch
from reshard_mpi.streams import open_closed_streams, stderr

BUG = 70
SECONDS_UNAGREED = 2.0


def main() -> NoReturn:
    open_closed_streams()
    # numpy's OpenBLAS would start a thread a core in every rank, which spin for a while. We do no linear algebra.
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
    launch = find_launch()
    options = _options(launch)
    needs_mpi = options.uses_all_ranks or launch.nranks > 1
    code = _run_with_mpi(options, launch) if needs_mpi else _run_alone(options)
    gc.freeze()  # else the end would look through all that was imported, twice, for what could be freed
    _leave(code)


def _leave(code: int) -> NoReturn:
    if code:
        _ignore_sigterm()
    sys.exit(code)


def _ignore_sigterm() -> None:
    """srun ends all ranks as soon as one has left with an error: that must not become the exit code of the others.

    A handler would not do: Python takes them away while it ends, and MPI is finalized later still.
    """
    signal.signal(signal.SIGTERM, signal.SIG_IGN)


def _options(launch: Launch) -> argparse.Namespace:
    """The parsed command line; help and usage errors end here, said once however many ranks there are."""
    try:
        with contextlib.redirect_stdout(io.StringIO() if launch.rank else sys.stdout):
            return parse(sys.argv[1:])
    except ReshardError as error:
        if not launch.rank:
            tell(error)
        _wait_unagreed(launch)
        _leave(error.exit_code)


def _wait_unagreed(launch: Launch) -> None:
    """Before ranks without MPI leave with an error: some launchers end the others as soon as one has left.

    Under Open MPI rank 0 must have said why by then; under srun all must have come as far as this.
    """
    _ignore_sigterm()
    if launch.by_srun or (launch.name == OPEN_MPI and launch.rank):
        time.sleep(SECONDS_UNAGREED)


def _run_alone(options: argparse.Namespace) -> int:
    from reshard_mpi.commands import run_alone

    try:
        return run_alone(options)
    except KeyboardInterrupt:
        tell("stopped by a signal")
        return Interrupted.exit_code
    except Exception as error:
        told = expected_error(error)
        if told is None:
            stderr.write(traceback.format_exc())
            return BUG
        tell(told)
        return told.exit_code


def _run_with_mpi(options: argparse.Namespace, launch: Launch) -> int:
    stop.listen()
    try:
        from mpi4py import MPI
    except (ImportError, RuntimeError) as error:
        if not launch.rank:
            reason = str(error).split("\n")[0]
            tell(
                f"mpi4py: found no MPI library to run on ({reason}); load the MPI of your cluster, or install the extra "
                "mpich of reshard_mpi"
            )
        _wait_unagreed(launch)
        return BUG
    from reshard_mpi.mpi.stall import end_job, watch

    comm = MPI.COMM_WORLD
    if options.stall_timeout:
        watch(comm, options.stall_timeout)
    try:
        check_world(comm.size, launch, " ".join(MPI.Get_library_version().split("\n")[0].split())[:40])
        from reshard_mpi.commands import run_together

        code = run_together(comm, options)
        comm.Barrier()  # ranks that leave far apart look like a failure to some launchers
        return code
    except ReshardError as error:
        if not comm.rank and not launch.rank:
            tell(error)
        if comm.size < launch.nranks:
            _wait_unagreed(launch)
        return error.exit_code
    except BaseException as error:
        told = expected_error(error)  # where the ranks had no agreement ahead
        if told is None:
            stderr.write(f"reshard_mpi: rank {comm.rank} of {comm.size} failed:\n{traceback.format_exc()}")
        else:
            tell(told)
        end_job(comm, told.exit_code if told else BUG)


if __name__ == "__main__":
    main()
