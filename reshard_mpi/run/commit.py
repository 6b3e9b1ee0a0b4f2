"""OUT appears whole or not at all: everything is written to OUT.partial, made durable, then renamed.

OUT.partial holds a journal, which says of which job it is, and a lock, held by rank 0 while the job lives. The kernel frees the
lock when the process ends, however it ends.
"""

import ctypes
import fcntl
import hashlib
import json
import os
import shutil
from collections.abc import Mapping
from pathlib import Path

from reshard_mpi.checkpoint.manifest import CASE_FILE
from reshard_mpi.errors import StorageError, UsageError, storage_error
from reshard_mpi.storage.files import sync_folder

JOURNAL = "journal.json"
LOCK = "lock"
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
    here = Path(os.path.realpath(source))
    for path in (out, partial_of(out)):
        there = Path(os.path.realpath(path))
        if here == there or here in there.parents or there in here.parents:
            raise UsageError(str(path), f"is equal to, inside or around the source {source}; write to another folder")
    check_out(out, overwrite)


def check_out(out: Path, overwrite: bool) -> None:
    """UsageError when `out` is there and may not be replaced."""
    try:
        if not os.path.lexists(out):
            return
        if not overwrite:
            raise UsageError(str(out), "exists; choose another folder, or --overwrite to replace it")
        if not any((out / name).is_file() for name in REPLACEABLE):
            raise UsageError(str(out), f"holds no {CASE_FILE}, so it is not replaced; choose another folder")
    except OSError as error:
        raise storage_error(out, error, "look at") from error


class PartialFolder:
    """OUT.partial, owned by the job with this `identity` until it is committed. On rank 0 alone.

    identity: whatever decides the bytes of OUT, as JSON values.
    """

    def __init__(self, out: Path, identity: Mapping[str, object], restart: bool):
        self.out = named(out)
        self.path = partial_of(out)
        self._lock = -1
        self._identity = dict(identity)
        self._job = hashlib.sha256(json.dumps(self._identity, sort_keys=True).encode()).hexdigest()
        try:
            self._claim(restart)
        except OSError as error:
            self.close()
            raise storage_error(self.path, error, "write to") from error
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Let go of the lock; what was written stays."""
        if self._lock >= 0:
            os.close(self._lock)
            self._lock = -1

    def _claim(self, restart: bool) -> None:
        _check_no_links(self.out)
        if os.path.lexists(self.path) and not self.path.is_dir():
            raise UsageError(str(self.path), "is in the way and is no folder; remove it")
        is_new = not self.path.exists()
        if is_new:
            self.out.parent.mkdir(parents=True, exist_ok=True)
            self.path.mkdir()
        elif not (self.path / JOURNAL).is_file() and {entry.name for entry in self.path.iterdir()} - OURS:
            raise UsageError(str(self.path), "is not of a job of ours; remove it, or choose another OUT")
        self._lock = os.open(self.path / LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            holder = os.read(self._lock, 1000).decode(errors="replace").strip()
            raise UsageError(
                str(self.path), f"a job is writing it ({holder or error.strerror}); wait for it, or end it"
            ) from error
        if not is_new and not restart:
            self._check_journal()
        self._clear()
        os.ftruncate(self._lock, 0)
        os.pwrite(
            self._lock,
            f"host {os.uname().nodename}, pid {os.getpid()}, job {os.environ.get('SLURM_JOB_ID', 'none')}\n".encode(),
            0,
        )
        self._write_journal("writing")

    def _check_journal(self) -> None:
        try:
            journal = json.loads((self.path / JOURNAL).read_bytes())
            job, state = journal["job"], journal["state"]
        except FileNotFoundError:
            return  # killed before it wrote anything
        except (ValueError, KeyError, TypeError) as error:
            raise UsageError(str(self.path / JOURNAL), "can't be understood; --restart begins anew") from error
        if job != self._job:
            raise UsageError(
                str(self.path), "was left by a job of another source, target or options; --restart begins anew"
            )
        if state == "failed":
            raise UsageError(
                str(self.path),
                "was left by this job when a digest did not hold, which can't be continued; --restart begins anew",
            )

    def _clear(self) -> None:
        for entry in self.path.iterdir():
            if entry.name not in (LOCK, JOURNAL):
                shutil.rmtree(entry) if entry.is_dir() and not entry.is_symlink() else entry.unlink()

    def _write_journal(self, state: str) -> None:
        new = self.path / f"{JOURNAL}.new"
        new.write_text(
            json.dumps({"job": self._job, "identity": self._identity, "state": state}, indent=2, sort_keys=True) + "\n"
        )
        new.replace(self.path / JOURNAL)

    def fail(self) -> None:
        """Note that what is here must not be continued."""
        self._write_journal("failed")

    def check_space(self, nbytes: int) -> None:
        """StorageError when the file system has less than `nbytes` left."""
        status = os.statvfs(self.path)
        free = status.f_bavail * status.f_frsize
        if free < nbytes:
            raise StorageError(str(self.path), f"needs {nbytes} bytes, {free} are free; make room, or write elsewhere")

    def commit(self) -> None:
        """Make OUT of it: all names durable, then one rename."""
        try:
            sync_folder(self.path)
            if os.path.lexists(self.out):
                replaced = _exchange(self.path, self.out)
                shutil.rmtree(replaced, ignore_errors=True)
            else:
                os.rename(self.path, self.out)
            for name in (JOURNAL, LOCK):
                (self.out / name).unlink()
            sync_folder(self.out.parent)
        except OSError as error:
            raise storage_error(self.out, error, "put the finished folder at") from error
        finally:
            self.close()


def _exchange(new: Path, old: Path) -> Path:
    """Put `new` in the place of `old` in one step; returns where `old` is now."""
    libc = ctypes.CDLL(None, use_errno=True)
    if hasattr(libc, "renameat2") and not libc.renameat2(
        _AT_FDCWD, os.fsencode(new), _AT_FDCWD, os.fsencode(old), _RENAME_EXCHANGE
    ):
        return new
    aside = old.with_name(f"{old.name}.replaced-{os.getpid()}")  # the file system can't exchange
    os.rename(old, aside)
    os.rename(new, old)
    return aside
