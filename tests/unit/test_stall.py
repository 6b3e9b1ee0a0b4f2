"""A file system that doesn't answer: how long each rank is patient."""

import pytest

from reshard_mpi.mpi.stall import patience_s


@pytest.mark.parametrize("rank, patience", [(0, 300), (5, 305), (4000, 600)])
def test_the_first_rank_tells_before_the_others_lose_patience(rank, patience):
    assert patience_s(rank, 300) == patience
