"""The ranks of the peers that run on torch.distributed.

They are started by mpirun, as ours are, and not by torchrun, which would import torch once more before it starts them.
"""

import os
from collections.abc import Iterator
from contextlib import contextmanager

import torch.distributed as dist


def _variable(*names: str) -> int | None:
    return next((int(os.environ[name]) for name in names if name in os.environ), None)


@contextmanager
def process_group(rendezvous: str) -> Iterator[int]:
    """This process' rank in a gloo group of all processes that mpirun started; `rendezvous` is a new file."""
    rank = _variable("PMI_RANK", "OMPI_COMM_WORLD_RANK")
    size = _variable("PMI_SIZE", "OMPI_COMM_WORLD_SIZE")
    assert rank is not None and size is not None, "to be started by mpirun"
    dist.init_process_group("gloo", init_method=f"file://{rendezvous}", rank=rank, world_size=size)
    dist.barrier()
    try:
        yield rank
    finally:
        dist.destroy_process_group()
