"""The exchange of one round: pack tiles, `Ialltoallv`, unpack. Opens no file.

Tiles to oneself never enter MPI: they are copied from the read buffer to the write buffer. The blocking `Alltoallv` spins, and so
takes the cores from those who read and write: a fifth of the time of a job that exchanges most of its bytes.
"""

import time

import numpy as np
from mpi4py import MPI
from numpy.typing import NDArray

from reshard_mpi.boxes import Ints
from reshard_mpi.mpi.comm import await_all
from reshard_mpi.plan.rounds import RoundWork, Tiles

Bytes = NDArray[np.uint8]


class Exchanger:
    """Moves the tiles of rounds between the ranks of `comm`; owns the send and the receive buffer."""

    def __init__(self, comm: MPI.Comm, buffer_nbytes: int):
        self._comm = comm
        self._send = np.empty(buffer_nbytes, np.uint8)
        self._receive = np.empty(buffer_nbytes, np.uint8)
        self.sent_nbytes = 0
        self.seconds = 0.0

    def exchange(self, work: RoundWork, read_buffer: Bytes, write_buffer: Bytes) -> None:
        """Collective where the round crosses: bring every tile that must be moved to the write buffer."""
        started = time.perf_counter()
        copy_tiles(read_buffer, work.local_from, write_buffer, work.local_to)
        if work.crosses:
            self._cross(work, read_buffer, write_buffer)
        self.seconds += time.perf_counter() - started

    def _cross(self, work: RoundWork, read_buffer: Bytes, write_buffer: Bytes) -> None:
        copy_tiles(read_buffer, work.send, self._send, packed(work.send))
        await_all(
            self._comm.Ialltoallv(
                [self._send, (work.send_nbytes, _starts(work.send_nbytes)), MPI.BYTE],
                [self._receive, (work.receive_nbytes, _starts(work.receive_nbytes)), MPI.BYTE],
            )
        )
        copy_tiles(self._receive, packed(work.receive), write_buffer, work.receive)
        self.sent_nbytes += int(work.send_nbytes.sum())


def _starts(nbytes: Ints) -> Ints:
    return np.cumsum(nbytes) - nbytes


def packed(tiles: Tiles) -> Tiles:
    """The same tiles one after the other, each in row-major order, as they are in a message."""
    stride = np.ones_like(tiles.shape)
    stride[:, :-1] = np.cumprod(tiles.shape[:, :0:-1], axis=1)[:, ::-1]
    return Tiles(_starts(tiles.nbytes), stride, tiles.shape)


def copy_tiles(source: Bytes, source_tiles: Tiles, target: Bytes, target_tiles: Tiles) -> None:
    """Copy each tile of the one buffer to its place in the other."""
    for shape, from_position, from_stride, to_position, to_stride, width in zip(
        source_tiles.shape.tolist(),
        source_tiles.position.tolist(),
        source_tiles.stride.tolist(),
        target_tiles.position.tolist(),
        target_tiles.stride.tolist(),
        _widths(source_tiles, target_tiles).tolist(),
        strict=True,
    ):
        _view(target, shape, to_position, to_stride, width)[...] = _view(
            source, shape, from_position, from_stride, width
        )


def _widths(a: Tiles, b: Tiles) -> Ints:
    """For each pair of tiles the widest unit, 8, 4, 2 or 1 bytes, in which it can be copied: numpy is slow on single bytes."""
    columns = np.column_stack([a.position, b.position, a.stride[:, :-1], b.stride[:, :-1], a.shape[:, -1]])
    odd = np.bitwise_or.reduce(columns, axis=1) | 8
    return odd & -odd


def _view(buffer: Bytes, shape: list[int], position: int, stride: list[int], width: int) -> NDArray[np.unsignedinteger]:
    return np.ndarray([*shape[:-1], shape[-1] // width], f"u{width}", buffer, position, [*stride[:-1], width])
