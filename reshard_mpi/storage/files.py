"""Files as byte spans: whole reads and writes at offsets, with errors that name the file.

Reads go through `pread` into buffers of the caller: a memory map of a file on a network file system was seen 200 times slower
than large reads, and a file that is cut short under a map kills the process.
"""

import ctypes
import errno
import os
import resource
import stat
from bisect import bisect_right, insort
from collections import OrderedDict
from collections.abc import Iterable
from contextlib import suppress
from functools import partial
from pathlib import Path

from reshard_mpi.errors import InputError, StorageError
from reshard_mpi.storage.known import Known, Stamp, opened_as_known
from reshard_mpi.storage.shown import OpenArray, ShownArray
from reshard_mpi.storage.touching import touching

NFS_SUPER_MAGIC = 0x6969
COPY_NBYTES = 1 << 20  # of the buffer for bytes that are only hashed or copied
# The kernel, or one of the file systems, can't copy: then we read and write.
CANNOT_COPY = frozenset({errno.EXDEV, errno.EINVAL, errno.ENOSYS, errno.EOPNOTSUPP, errno.EPERM})


class Files:
    """Files of one folder, opened when needed; only so many are open at a time.

    flags: `os.O_RDONLY` for a source, `os.O_RDWR` for a target that exists already. `known`: what is awaited,
    and compared, as it is opened. One thread at a time.
    """

    def __init__(self, folder: Path, flags: int = os.O_RDONLY, known: Known | None = None):
        self.folder, self._known = folder, known or {}
        self._flags = flags | os.O_CLOEXEC | os.O_NONBLOCK  # O_NONBLOCK: a FIFO must not hang us
        self._open: OrderedDict[str, int] = OrderedDict()
        self._shown: dict[str, dict[int, ShownArray]] = {}  # name -> begin -> array
        self._begins: dict[str, list[int]] = {}  # the same, sorted
        self._held: tuple[str, int, OpenArray] | None = None
        self._most = max(1, min(256, _nfree_descriptors() // 4))  # a job has three of us at a time

    def descriptor(self, name: str) -> int:
        """An open descriptor of the regular file `name`, valid until the next call."""
        if name in self._open:
            self._open.move_to_end(name)
            return self._open[name]
        if len(self._open) >= self._most:
            oldest, fd = self._open.popitem(last=False)
            with touching("close", self.folder, oldest):  # NFS may tell only now that a write has failed
                os.close(fd)
        self._open[name] = fd = open_known(self.folder, name, self._flags, self._known)
        return fd

    def show(self, name: str, arrays: Iterable[ShownArray]) -> None:
        """From now on arrays of `name` that are no span of it can be read as if they lay where they are shown."""
        shown, begins = self._shown.setdefault(name, {}), self._begins.setdefault(name, [])
        for array in arrays:
            if array.begin not in shown:
                insort(begins, array.begin)
            shown[array.begin] = array

    def read(self, name: str, offset: int, into: memoryview) -> None:
        """Fill `into` with the bytes of `name` from `offset` on."""
        array = self._shown_at(name, offset)
        if array is not None:
            self._read_shown(name, array, offset, into)
        else:
            self._read_span(name, offset, into)

    def _shown_at(self, name: str, offset: int) -> ShownArray | None:
        """The array that is shown at `offset` of `name`, if any."""
        if name not in self._shown:
            return None
        number = bisect_right(self._begins[name], offset)
        return self._shown[name][self._begins[name][number - 1]] if number else None

    def _read_shown(self, name: str, array: ShownArray, offset: int, into: memoryview) -> None:
        """What is shown behind the end of a file: arrays follow each other there, and a span may go over several."""
        while len(into):
            if self._held is None or self._held[:2] != (name, array.begin):
                self._drop_held()  # its memory goes before the next one's comes
                self._held = (name, array.begin, array.open(partial(self._read_span, name), str(self.folder / name)))
            part = into[: array.begin + array.nbytes - offset]
            self._held[2].read(offset - array.begin, part)
            offset, into = offset + len(part), into[len(part) :]
            if offset == array.begin + array.nbytes:
                self._drop_held()
                array = self._shown[name].get(offset, array)

    def _drop_held(self) -> None:
        held, self._held = self._held, None
        if held:
            held[2].close()

    def _read_span(self, name: str, offset: int, into: memoryview) -> None:
        fd, done = self.descriptor(name), 0
        while done < len(into):
            with touching("read", self.folder, name):
                count = os.preadv(fd, [into[done:]], offset + done)
            if not count:
                raise StorageError(
                    str(self.folder / name),
                    f"ends at byte {offset + done}, expected {len(into) - done} more; it changed while it was read",
                )
            done += count

    def write(self, name: str, offset: int, data: memoryview) -> None:
        """Write all of `data` to `name` at `offset`."""
        fd, done = self.descriptor(name), 0
        while done < len(data):
            with touching("write", self.folder, name):
                done += os.pwrite(fd, data[done:], offset + done)

    def copy(self, source: "Files", from_name: str, from_offset: int, name: str, offset: int, nbytes: int) -> None:
        """Copy bytes of a source's file to `name`, within the kernel where it can; some file systems share the blocks."""
        done = 0
        while done < nbytes and source._shown_at(from_name, from_offset) is None:
            from_fd, fd = source.descriptor(from_name), self.descriptor(name)
            with touching("write", self.folder, name):
                count = _copied(from_fd, fd, nbytes - done, from_offset + done, offset + done)
            if not count:  # also what some file systems return when they can't
                break
            done += count
        buffer = memoryview(bytearray(min(COPY_NBYTES, nbytes - done)))
        while done < nbytes:
            part = buffer[: nbytes - done]
            source.read(from_name, from_offset + done, part)
            self.write(name, offset + done, part)
            done += len(part)

    def sync(self, name: str) -> None:
        """Return when the bytes of `name` are on the storage."""
        with touching("sync", self.folder, name):
            os.fsync(self.descriptor(name))

    def close(self) -> None:
        self._drop_held()
        while self._open:
            with suppress(OSError):  # of what was written and must last, the sync has told
                os.close(self._open.popitem()[1])

    def __enter__(self) -> "Files":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _nfree_descriptors() -> int:
    """How many more files this process may open: MPI libraries have many open, which nobody knows."""
    return resource.getrlimit(resource.RLIMIT_NOFILE)[0] - len(os.listdir("/proc/self/fd"))


def open_known(folder: Path, name: str, flags: int, known: Known) -> int:
    """A descriptor of the regular file `folder/name`, which is waited for if it is known; the caller closes it."""
    if name not in known:
        return open_regular(folder, name, flags)
    return opened_as_known(folder / name, known[name], partial(open_regular, folder, name, flags))


def open_regular(folder: Path, name: str, flags: int) -> int:
    """A descriptor of the regular file `folder/name`, or of `name` if that is an absolute path; the caller closes it."""
    path = folder / name
    folder = path.parent if os.path.isabs(name) else folder
    with touching("open", folder, name):
        fd = os.open(path, flags)
        try:
            if not stat.S_ISREG(os.fstat(fd).st_mode):
                raise InputError(str(path), "is no regular file; expected a file that holds a shard")
            if os.path.dirname(os.path.realpath(path)) not in _homes(folder):
                raise InputError(str(path), "is a link out of the case folder; expected the file itself")
        except BaseException:
            os.close(fd)
            raise
    return fd


def _homes(folder: Path) -> tuple[str, ...]:
    """Where the files of a folder may lie: in it, or, of a snapshot in the cache of the Hugging Face hub, among its blobs.

    `models--NAME/snapshots/REVISION/model.safetensors` is a link to `models--NAME/blobs/HASH`.
    """
    home = os.path.realpath(folder)
    parent, name = os.path.split(os.path.dirname(home))
    return (home, os.path.join(parent, "blobs")) if name == "snapshots" else (home,)


def read_text(folder: Path, name: str, most: int) -> bytes:
    """All of a small regular file of the folder."""
    fd = open_regular(folder, name, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    with os.fdopen(fd, "rb") as file:
        size = os.fstat(fd).st_size
        if size > most:
            raise InputError(str(folder / name), f"has {size} bytes; expected at most {most}")
        with touching("read", folder, name):
            return file.read()


def _copied(from_fd: int, fd: int, nbytes: int, from_offset: int, offset: int) -> int:
    """How many bytes the kernel has copied; 0 where it can't."""
    try:
        return os.copy_file_range(from_fd, fd, nbytes, from_offset, offset)
    except OSError as error:
        if error.errno in CANNOT_COPY:
            return 0
        raise


def create_file(path: Path, nbytes: int, head: bytes | bytearray) -> None:
    """A new file of `nbytes` bytes that begins with `head`, on the storage.

    Space for all of it is taken now, so that none lacks later.
    """
    with touching(f"write {nbytes} bytes to", path):
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o666)
        try:
            _allocate(fd, nbytes)
            done = 0
            while done < len(head):
                done += os.pwrite(fd, memoryview(head)[done:], done)
            with touching(
                "sync", path
            ):  # there may be nothing more to write: to a shard without arrays, or of padding alone
                os.fsync(fd)
        finally:
            os.close(fd)


def is_as_created(folder: Path, name: str, nbytes: int, head: bytes | bytearray, known: Known | None = None) -> bool:
    """Is the file what `create_file` made of it: as long, and with the same beginning? One that is `known` is waited for."""
    fd = open_known(folder, name, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK, known or {})
    try:
        with touching("read", folder, name):
            return os.fstat(fd).st_size == nbytes and _beginning(fd, len(head)) == head
    finally:
        os.close(fd)


def _beginning(fd: int, nbytes: int) -> bytes:
    found = b""
    while len(found) < nbytes and (part := os.pread(fd, nbytes - len(found), len(found))):
        found += part
    return found


def _allocate(fd: int, nbytes: int) -> None:
    try:
        os.posix_fallocate(fd, 0, nbytes)
    except OSError as error:
        if error.errno in (28, 122):  # ENOSPC, EDQUOT: what we came to find out
            raise
        os.ftruncate(fd, nbytes)  # a file system that can't allocate ahead


def file_stamps(folder: Path, names: Iterable[str]) -> dict[str, Stamp]:
    """The stamp of each of these files: what changes when a file does."""
    found = {}
    for name in names:
        with touching("look at", folder, name):
            found[name] = Stamp.of(os.stat(folder / name))
    return found


def is_on_nfs(path: Path) -> bool:
    """Will `path` lie on NFS? By the type of the file system of its nearest folder that is there (statfs(2))."""
    folder = next(parent for parent in [path, *path.absolute().parents] if os.path.exists(parent))
    status = ctypes.create_string_buffer(256)  # larger than any struct statfs, which begins with f_type
    if ctypes.CDLL(None, use_errno=True).statfs(os.fsencode(folder), status):
        return False
    return ctypes.c_long.from_buffer(status).value == NFS_SUPER_MAGIC


def sync_folder(path: Path) -> None:
    """Return when the names in the folder `path` are on the storage."""
    with touching("sync", path):
        fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            os.fsync(fd)
        finally:
            os.close(fd)
