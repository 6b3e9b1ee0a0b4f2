"""Smoke tests: MPI works here, and all ranks are in one world."""

import numpy as np
import pytest
from mpi4py import MPI


def verdict(comm: MPI.Intracomm, holds: bool) -> bool:
    """Whether it holds on all ranks: each then asserts the same."""
    return comm.allreduce(holds, op=MPI.LAND)


def test_ranks_are_in_one_world(comm):
    assert comm.allgather(comm.rank) == list(range(comm.size))
    assert comm.size > 1


@pytest.mark.parametrize("nelems", [0, 1, 1000])
def test_alltoallv_brings_each_block_to_its_rank(comm, nelems):
    # Rank r sends r + t elements more to rank t than nelems: uneven, and empty between rank 0 and itself.
    send_counts = nelems + comm.rank + np.arange(comm.size)
    recv_counts = nelems + comm.rank + np.arange(comm.size)
    send = np.full(send_counts.sum(), comm.rank, dtype=np.int32)
    recv = np.empty(recv_counts.sum(), dtype=np.int32)
    comm.Alltoallv([send, send_counts], [recv, recv_counts])
    assert verdict(comm, np.array_equal(recv, np.repeat(np.arange(comm.size), recv_counts)))


@pytest.mark.mpi(min_size=3)
def test_a_rank_without_data_takes_part(comm):
    gathered = comm.gather([] if comm.rank == 1 else [comm.rank], root=2)
    holds = comm.rank != 2 or sum(gathered, []) == [r for r in range(comm.size) if r != 1]
    assert verdict(comm, holds)


def test_the_folder_is_the_same_on_all_ranks(comm, mpi_tmp_path):
    (mpi_tmp_path / f"rank-{comm.rank}").touch()
    comm.Barrier()
    assert verdict(comm, len(list(mpi_tmp_path.iterdir())) == comm.size)
