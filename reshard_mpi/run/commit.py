"""OUT appears whole or not at all: everything is written to OUT.partial, made durable, then renamed.

OUT.partial holds a journal, which says of which job it is and what is done, and the lock of the job.
"""

import ctypes
import os
import shutil
import stat
from collections.abc import Collection, Iterable, Mapping
from contextlib import suppress
from pathlib import Path

from reshard_mpi.checkpoint.manifest import CASE_FILE
from reshard_mpi.errors import StorageError, UsageError, storage_error
from reshard_mpi.report import warn
from reshard_mpi.run.journal import JOURNAL, Durable, Journal, replaces_out
from reshard_mpi.run.lock import LOCK, freed_lock, lock_alone, share
from reshard_mpi.storage.files import sync_folder
from reshard_mpi.storage.touching import touching

OURS = {JOURNAL, f"{JOURNAL}.new", LOCK}
REPLACEABLE = (CASE_FILE, "model.safetensors", "model.safetensors.index.json")  # one of them: a checkpoint
_AT_FDCWD, _RENAME_EXCHANGE = -100, 2


def named(out: Path) -> Path:
    """`out` with a name of its own: `.` and `..` have none, and can't be renamed."""
    found = out if out.name not in ("", "..") else Path(os.path.realpath(out))
    if not found.name:
        raise UsageError(str(out), "is no folder that can be replaced; give OUT a name of its own")
    return found


def partial_of(out: Path) -> Path:
    """The folder in which `out` is prepared."""
    return named(out).with_name(named(out).name + ".partial")


def _check_no_links(out: Path) -> None:
    for path in (out, partial_of(out)):
        if os.path.islink(path):
            raise UsageError(str(path), "is a link; remove it, or write to another folder")


def check_paths(source: Path, out: Path, overwrite: bool) -> None:
    """UsageError unless OUT may be written: apart from SOURCE, and not there yet (or a case that may be replaced)."""
    _check_no_links(out)
    check_apart(f"the source {source}", source, (out, partial_of(out)))
    check_out(out, overwrite)


def check_apart(what: str, folder: Path, others: Iterable[Path]) -> None:
    """UsageError when one of the `others` is equal to, inside or around a folder."""
    here = Path(os.path.realpath(folder))
    for path in others:
        there = Path(os.path.realpath(path))
        if here == there or here in there.parents or there in here.parents:
            raise UsageError(str(path), f"is equal to, inside or around {what}; write to another folder")


def check_out(out: Path, overwrite: bool) -> None:
    """UsageError when `out` is there and may not be replaced."""
    try:
        if not os.path.lexists(out):
            return
        if not overwrite:
            raise UsageError(str(out), "exists; choose another folder, or --overwrite to replace it")
        if not _is_checkpoint(out):
            raise UsageError(str(out), f"holds no {CASE_FILE}, so it is not replaced; choose another folder")
    except OSError as error:
        raise storage_error(out, error, "look at") from error


class PartialFolder:
    """OUT.partial, owned by the job with this `identity` until it is committed. On rank 0 alone.

    identity: whatever decides the bytes of OUT, as JSON values. `durable` is what an earlier run of the job has left in `files`,
    which are kept then; everything else goes.
    """

    def __init__(self, out: Path, identity: Mapping[str, object], restart: bool, files: Collection[str] = ()):
        self.out = named(out)
        self.path = partial_of(out)
        self.durable = Durable()
        self._lock = -1
        self._journal: Journal | None = None
        try:
            self._claim(identity, restart, files)
        except OSError as error:
            self.close()
            raise storage_error(self.path, error, "write to") from error
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Let go of the lock; what was written stays."""
        self._close_journal()
        if self._lock >= 0:
            os.close(self._lock)
            self._lock = -1

    def _close_journal(self) -> None:
        if self._journal is not None:
            self._journal.close()

    def _claim(self, identity: Mapping[str, object], restart: bool, files: Collection[str]) -> None:
        _check_no_links(self.out)
        if os.path.lexists(self.path) and not self.path.is_dir():
            raise UsageError(str(self.path), "is in the way and is no folder; remove it")
        is_new = not self.path.exists()
        if is_new:
            self.out.parent.mkdir(parents=True, exist_ok=True)
            self.path.mkdir()
        elif not (self.path / JOURNAL).is_file() and {entry.name for entry in self.path.iterdir()} - OURS:
            raise UsageError(str(self.path), "is not of a job of ours; remove it, or choose another OUT")
        self._check_files({*OURS, *files})
        self._lock = lock_alone(self.path)
        if not is_new and not restart:
            self._journal, self.durable = Journal.continued(self.path, identity)
        self._clear({*files, JOURNAL} if self.durable.written else ())
        if not self.durable.written:
            self._close_journal()
            self._journal = Journal.begun(self.path, identity)
        share(self._lock)

    def _check_files(self, ours: Collection[str]) -> None:
        """A FIFO would be waited for, a link followed, and what it leads to written over."""
        for path in (self.path / name for name in sorted(ours)):
            if os.path.lexists(path) and not stat.S_ISREG(os.lstat(path).st_mode):
                raise UsageError(str(path), "is no file, so not of a job of ours; remove it, or choose another OUT")

    def _clear(self, kept: Collection[str]) -> None:
        for entry in self.path.iterdir():
            if entry.name != LOCK and entry.name not in kept:
                shutil.rmtree(entry) if entry.is_dir() and not entry.is_symlink() else entry.unlink()

    def begin_anew(self, identity: Mapping[str, object]) -> None:
        """Forget what an earlier run has left: it is gone."""
        self._close_journal()
        self._journal, self.durable = Journal.begun(self.path, identity), Durable()

    def note(self, durable: Durable) -> None:
        """Return when it is on the storage that this is durable."""
        assert self._journal is not None
        with touching("write", self._journal.path):
            self._journal.note(durable)

    def fail(self, why: str) -> None:
        """Note that what is here must not be continued; where it can't be noted, the next run finds out again."""
        assert self._journal is not None
        with suppress(OSError):
            self._journal.fail(why)

    def check_space(self, nbytes: int) -> None:
        """StorageError when there is no room for `nbytes`, those included that are there already."""
        status = os.statvfs(self.path)
        taken = sum(entry.stat().st_blocks * 512 for entry in self.path.iterdir())
        room = status.f_bavail * status.f_frsize + taken
        if room < nbytes:
            raise StorageError(str(self.path), f"needs {nbytes} bytes, {room} are free; make room, or write elsewhere")

    def commit(self) -> None:
        """Make OUT of it: all names durable, then one rename. Killed after that, `finish_commit` does the rest."""
        try:
            sync_folder(self.path)
            replaced = self._rename()
            self._settle()
            _tidy(self.out, replaced)
        finally:
            self.close()

    def _rename(self) -> Path | None:
        """Where the folder is now that was called OUT before."""
        assert self._journal is not None
        if os.path.lexists(self.out):
            with touching("write", self._journal.path):
                self._journal.replace_out()
        with touching("put the finished folder at", self.out):
            if os.path.lexists(self.out):
                return _exchange(self.path, self.out)
            os.rename(self.path, self.out)
            return None

    def _settle(self) -> None:
        try:
            sync_folder(self.out.parent)
        except StorageError as error:
            message = f"{error.message}; {self.out} is whole, but may be gone again if the machine fails now"
            raise StorageError(error.where, message) from error


def finish_commit(out: Path) -> None:
    """Do what is left of a job that was killed when OUT had got its name: what it replaced, its journal and lock must go.

    If it was killed when the old OUT had lost its name, and the new one had none yet, the old one gets it back.
    """
    out, partial, aside = named(out), partial_of(out), _aside(out)
    if any(path.is_symlink() for path in (out, partial, aside)):
        return
    has_name = out.exists()
    folder = out if has_name else partial
    if not (folder / JOURNAL).is_file() or (has_name and not _is_checkpoint(out)):
        return
    with suppress(OSError), freed_lock(folder) as is_free:
        replaces = replaces_out(folder)
        if not is_free or replaces is None:
            return
        if has_name:
            old = aside if aside.exists() else partial
            _tidy(out, old if replaces and old.exists() and not (old / JOURNAL).exists() else None)
        elif replaces and aside.exists():
            os.rename(aside, out)


def _is_checkpoint(folder: Path) -> bool:
    return any((folder / name).is_file() for name in REPLACEABLE)


def _tidy(out: Path, replaced: Path | None) -> None:
    """What is left to do once OUT is there. The journal goes last: as long as it is there, `finish_commit` knows what to do."""
    if replaced is not None:
        _remove(replaced)
    for name in (LOCK, JOURNAL):
        try:
            (out / name).unlink(missing_ok=True)
        except OSError as error:
            warn([f"{out / name}: can't be removed ({error.strerror}); {out} is whole, and doesn't need it"])


def _aside(out: Path) -> Path:
    """Where the old OUT is meanwhile, on file systems that can't exchange two names."""
    return out.with_name(out.name + ".replaced")


def _exchange(new: Path, old: Path) -> Path:
    """Put `new` in the place of `old` in one step; returns where `old` is now."""
    libc = ctypes.CDLL(None, use_errno=True)
    if hasattr(libc, "renameat2") and not libc.renameat2(
        _AT_FDCWD, os.fsencode(new), _AT_FDCWD, os.fsencode(old), _RENAME_EXCHANGE
    ):
        return new
    aside = _aside(old)  # the file system can't exchange
    os.rename(old, aside)
    try:
        os.rename(new, old)
    except OSError:
        os.rename(aside, old)
        raise
    return aside


def _remove(replaced: Path) -> None:
    """Remove the folder that was OUT, as far as that can be: the job is done anyway."""
    shutil.rmtree(replaced, ignore_errors=True)
    if os.path.lexists(replaced):
        warn([f"{replaced}: what OUT was before can't be removed; look at its permissions, and remove it"])
