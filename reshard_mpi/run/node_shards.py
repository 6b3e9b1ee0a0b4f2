"""Target shards that lie on the nodes: each is written by one rank, beside its place there, and put there when all are whole.

Until then a shard is called `PLACE.OUT-MARK.partial`. It is put in its place by a second name for the same file (link(2)), which
fails where there is a file, and leaves the first name to a job that goes on: whatever happens between the shards of several
nodes, the same command finds everything where it was.
"""

import hashlib
import os
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

from reshard_mpi.checkpoint.template import ShardTemplate
from reshard_mpi.errors import UsageError
from reshard_mpi.plan.shares import deal_in_order
from reshard_mpi.report import warn
from reshard_mpi.storage.files import sync_folder
from reshard_mpi.storage.touching import touching


class Found(NamedTuple):
    """What an earlier run has left on a node: is all of it there, and what is in its place already, with the host?"""

    is_all: bool
    placed: tuple[str, ...]


class NodeShards(NamedTuple):
    """By shard of the target: its place, what it is called until it is there, and the rank on whose node that is."""

    places: tuple[str, ...]
    partial: tuple[str, ...]
    owners: tuple[int, ...]

    def _of(self, rank: int) -> list[tuple[Path, Path]]:
        """(partial, place) of the shards of a rank."""
        names = zip(self.partial, self.places, self.owners, strict=True)
        return [(Path(partial), Path(place)) for partial, place, owner in names if owner == rank]

    def find(self, rank: int) -> Found:
        """What an earlier run has left of the shards of a rank; UsageError when other files are in their places."""
        mine, placed = self._of(rank), []
        for partial, place in mine:
            with touching("look at", place):
                if not os.path.lexists(place):
                    continue
                if not (partial.is_file() and partial.samefile(place)):
                    raise _taken(_on_host(place))
                placed.append(_on_host(place))
        return Found(all(partial.is_file() and not partial.is_symlink() for partial, _ in mine), tuple(placed))

    def make_room(self, rank: int) -> None:
        """Make the folders of the shards of a rank, and remove what an earlier run has left."""
        for partial, place in self._of(rank):
            with touching("make", place.parent):
                place.parent.mkdir(parents=True, exist_ok=True)
            with touching("remove", partial):
                partial.unlink(missing_ok=True)  # not written over: it may be another name of a shard of a finished OUT

    def put_in_place(self, rank: int) -> None:
        """Return when the shards of a rank have their names on the storage."""
        mine = self._of(rank)
        for partial, place in mine:
            with touching("put the finished shard at", place):
                if not (os.path.lexists(place) and partial.samefile(place)):
                    os.link(partial, place)
        _sync_folders(place for _, place in mine)

    def tidy(self, rank: int) -> None:
        """Remove the other names of what is in its place; the job is done anyway."""
        for partial, _ in self._of(rank):
            try:
                partial.unlink()
            except OSError as error:
                warn([f"{partial}: can't be removed ({error.strerror}); it is a second name of the finished shard"])


def check_target_template(template: ShardTemplate, format: str) -> None:
    """UsageError unless files of that format can be called so."""
    suffix = {"safetensors": ".safetensors", "hdf5": ".h5"}.get(format)
    if suffix is None:
        raise UsageError("--target-template", f"is for the shards of a case; leave it out with --format {format}")
    if not template.text.endswith(suffix):
        raise UsageError(
            "--target-template", f"names no files that end with {suffix}, as those of --format {format} do"
        )


def node_shards(template: ShardTemplate, out: Path, nshards: int, nranks: int) -> NodeShards:
    """Shards go to the nodes of ranks in order: of as many ranks as shards, shard r to that of rank r.

    The mark is of OUT, so that jobs for other OUTs have other files.

    >>> node_shards(ShardTemplate("/local/{rank}.safetensors"), Path("out"), 2, 4).owners
    (0, 2)
    """
    places = tuple(template.path(shard) for shard in range(nshards))
    mark = f"{out.name}-{hashlib.sha256(os.fsencode(os.path.realpath(out))).hexdigest()[:12]}"
    owners = tuple(deal_in_order(nshards, nranks).tolist())
    return NodeShards(places, tuple(f"{place}.{mark}.partial" for place in places), owners)


def check_not_placed(found: Iterable[Found]) -> None:
    """UsageError when a shard is in its place, though no job is to go on that has put it there."""
    for of_rank in found:
        for place in of_rank.placed:
            raise _taken(place)


def _taken(place: str) -> UsageError:
    return UsageError(place, "exists; remove it, or write the shards elsewhere")


def _on_host(place: Path) -> str:
    return f"{place} on host {os.uname().nodename}"


def _sync_folders(paths: Iterable[Path]) -> None:
    for folder in sorted({path.parent for path in paths}):
        sync_folder(folder)
