"""Files as byte spans: whole reads and writes, few descriptors, and nothing that is no file of the folder."""

import errno
import os
import subprocess
import sys
from pathlib import Path

import pytest

from reshard_mpi.errors import InputError, StorageError
from reshard_mpi.storage import files as files_module
from reshard_mpi.storage.files import Files, create_file, open_regular, sync_folder


@pytest.fixture
def folder(tmp_path):
    """A case folder with one file of ten bytes, and a secret beside it."""
    case = tmp_path / "case"
    case.mkdir()
    (case / "a").write_bytes(b"0123456789")
    (tmp_path / "secret").write_bytes(b"secret")
    return case


def read(files: Files, name: str, offset: int, nbytes: int) -> bytes:
    buffer = bytearray(nbytes)
    files.read(name, offset, memoryview(buffer))
    return bytes(buffer)


# Reading and writing


@pytest.mark.parametrize(
    "why, offset, nbytes, found",
    [
        ("all of it", 0, 10, b"0123456789"),
        ("the middle", 3, 4, b"3456"),
        ("the last byte", 9, 1, b"9"),
        ("nothing", 5, 0, b""),
        ("nothing, beyond the end", 50, 0, b""),
    ],
)
def test_spans_are_read_at_their_offsets(why, offset, nbytes, found, folder):
    with Files(folder) as files:
        assert read(files, "a", offset, nbytes) == found


@pytest.mark.parametrize(
    "offset, nbytes, told", [(5, 6, "ends at byte 10, expected 1 more"), (20, 3, "ends at byte 20, expected 3 more")]
)
def test_a_file_that_is_too_short_is_a_storage_error_that_says_where_it_ends(offset, nbytes, told, folder):
    with Files(folder) as files, pytest.raises(StorageError, match=told):
        read(files, "a", offset, nbytes)


def test_short_reads_and_writes_are_continued(folder, monkeypatch):
    whole_read, whole_write = os.preadv, os.pwrite
    monkeypatch.setattr(os, "preadv", lambda fd, views, offset: whole_read(fd, [views[0][:3]], offset))
    monkeypatch.setattr(os, "pwrite", lambda fd, data, offset: whole_write(fd, data[:3], offset))
    with Files(folder, os.O_RDWR) as files:
        assert read(files, "a", 1, 8) == b"12345678"
        files.write("a", 2, memoryview(b"abcdefg"))
    assert (folder / "a").read_bytes() == b"01abcdefg9"


def test_a_read_that_fails_names_the_file_and_the_reason(folder, monkeypatch):
    def fails(*_):
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(os, "preadv", fails)
    with Files(folder) as files, pytest.raises(StorageError, match="case/a: can't read: Input/output error"):
        read(files, "a", 0, 1)


def test_a_disk_that_is_full_while_writing_is_a_storage_error(folder, monkeypatch):
    def fails(*_):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "pwrite", fails)
    with Files(folder, os.O_RDWR) as files, pytest.raises(StorageError, match="case/a: can't write: No space left"):
        files.write("a", 0, memoryview(b"x"))


def test_a_write_that_is_told_to_have_failed_when_the_file_is_closed_is_an_error_while_it_matters(folder, monkeypatch):
    """As NFS does. At the end nothing is to be said: what must last has been synced."""
    (folder / "b").write_bytes(b"x")
    plain = os.close

    def fails(fd):
        plain(fd)
        raise OSError(errno.EIO, "Input/output error")

    with Files(folder) as files:
        monkeypatch.setattr(files, "_most", 1)
        monkeypatch.setattr(os, "close", fails)
        files.descriptor("a")
        with pytest.raises(StorageError, match="case/a: can't close: Input/output error"):
            files.descriptor("b")
        monkeypatch.setattr(os, "close", plain)
        files.descriptor("b")
        monkeypatch.setattr(os, "close", fails)


def test_a_source_can_not_be_written_to(folder):
    with Files(folder) as files, pytest.raises(StorageError, match="can't write"):
        files.write("a", 0, memoryview(b"x"))
    assert (folder / "a").read_bytes() == b"0123456789"


def test_a_file_can_be_synced(folder):
    with Files(folder, os.O_RDWR) as files:
        files.write("a", 0, memoryview(b"x"))
        files.sync("a")
    sync_folder(folder)


def test_a_folder_that_is_gone_can_not_be_synced(folder):
    with pytest.raises(StorageError, match="can't sync"):
        sync_folder(folder / "gone")


# What is opened, and what isn't


def test_what_is_no_regular_file_of_the_folder_is_bad_input(folder):
    (folder / "sub").mkdir()
    (folder / "sub" / "b").write_bytes(b"b")
    os.mkfifo(folder / "fifo")
    (folder / "out").symlink_to("../secret")
    (folder / "absolute").symlink_to(folder.parent / "secret")
    (folder / "chain").symlink_to("out")
    (folder / "below").symlink_to("sub/b")
    (folder / "device").symlink_to("/dev/zero")
    for name in ("sub", "fifo", "out", "absolute", "chain", "below", "device"):
        with Files(folder) as files, pytest.raises(InputError, match=f"case/{name}"):
            read(files, name, 0, 1)


def test_a_fifo_that_nobody_writes_does_not_hang_a_writer_either(folder):
    os.mkfifo(folder / "fifo")
    with Files(folder, os.O_RDWR) as files, pytest.raises(InputError, match="no regular file"):
        files.write("fifo", 0, memoryview(b"x"))


def test_a_link_within_the_folder_and_a_folder_that_is_a_link_are_followed(folder):
    (folder / "link").symlink_to("a")
    (folder.parent / "alias").symlink_to(folder)
    for where in (folder, folder.parent / "alias"):
        with Files(where) as files:
            assert read(files, "link", 0, 3) == b"012"


@pytest.mark.parametrize("name, prepare", [("gone", None), ("dangling", "nowhere"), ("loop", "loop")])
def test_what_is_not_there_is_a_storage_error(name, prepare, folder):
    if prepare:
        (folder / name).symlink_to(prepare)
    with Files(folder) as files, pytest.raises(StorageError, match=f"case/{name}: can't open"):
        read(files, name, 0, 1)


def test_a_refused_file_leaves_no_descriptor_open(folder):
    (folder / "sub").mkdir()
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(3):
        with pytest.raises(InputError):
            open_regular(folder, "sub", os.O_RDONLY)
    assert len(os.listdir("/proc/self/fd")) == before


# Descriptors


def test_only_so_many_files_are_open_at_a_time_and_all_are_closed_in_the_end(folder, monkeypatch):
    for n in range(30):
        (folder / f"f{n}").write_bytes(bytes([n]))
    before = len(os.listdir("/proc/self/fd"))
    with Files(folder) as files:
        monkeypatch.setattr(files, "_most", 5)
        for n in [*range(30), *range(29, -1, -1)]:
            assert read(files, f"f{n}", 0, 1) == bytes([n])
            assert len(os.listdir("/proc/self/fd")) <= before + 5
    assert len(os.listdir("/proc/self/fd")) == before


def test_the_file_used_last_is_not_the_one_that_is_closed(folder, monkeypatch):
    for name in "bcdefg":
        (folder / name).write_bytes(b"x")
    opened = []
    plain = files_module.open_regular
    monkeypatch.setattr(files_module, "open_regular", lambda *a: opened.append(a[1]) or plain(*a))
    with Files(folder) as files:
        monkeypatch.setattr(files, "_most", 2)
        for name in "abacadae":
            read(files, name, 0, 1)
    assert opened == list("abcde")


MANY_FILES = """
import resource, sys
from pathlib import Path
resource.setrlimit(resource.RLIMIT_NOFILE, (24, 24))
from reshard_mpi.storage.files import Files
with Files(Path(sys.argv[1])) as a, Files(Path(sys.argv[1])) as b:
    for n in range(100):
        for files in (a, b):
            buffer = bytearray(1)
            files.read(f"f{n}", 0, memoryview(buffer))
            assert buffer[0] == n
"""


def test_more_files_than_descriptors_can_be_read(folder):
    for n in range(100):
        (folder / f"f{n}").write_bytes(bytes([n]))
    subprocess.run([sys.executable, "-B", "-c", MANY_FILES, str(folder)], check=True, timeout=60)


# New files


@pytest.mark.parametrize(
    "why, nbytes, head",
    [
        ("a head and room", 100, b"head"),
        ("a head alone", 4, b"head"),
        ("nothing", 0, b""),
        ("no head", 5, b""),
    ],
)
def test_a_new_file_has_its_full_size_and_begins_with_its_head(why, nbytes, head, tmp_path):
    create_file(tmp_path / "f", nbytes, head)
    assert (tmp_path / "f").read_bytes() == head + bytes(nbytes - len(head))


def test_a_new_file_takes_the_place_of_a_longer_one(tmp_path):
    (tmp_path / "f").write_bytes(b"x" * 1000)
    create_file(tmp_path / "f", 6, b"head")
    assert (tmp_path / "f").read_bytes() == b"head\0\0"


def test_the_space_of_a_new_file_is_taken_at_once(tmp_path):
    create_file(tmp_path / "f", 1 << 20, b"")
    assert (tmp_path / "f").stat().st_blocks * 512 >= 1 << 20


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT], ids=["disk full", "quota used up"])
def test_space_that_is_not_there_is_a_storage_error_before_anything_is_written(number, tmp_path, monkeypatch):
    def full(*_):
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(os, "posix_fallocate", full)
    with pytest.raises(StorageError, match="can't write 1000000 bytes to: .*free space"):
        create_file(tmp_path / "f", 1_000_000, b"head")


@pytest.mark.parametrize("number", [errno.EOPNOTSUPP, errno.ENOSYS, errno.EINVAL], ids=os.strerror)
def test_a_file_system_that_can_not_allocate_ahead_does_without(number, tmp_path, monkeypatch):
    def cannot(*_):
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(os, "posix_fallocate", cannot)
    create_file(tmp_path / "f", 1000, b"head")
    assert (tmp_path / "f").read_bytes() == b"head" + bytes(996)


def test_a_file_that_can_not_be_made_is_a_storage_error(tmp_path):
    with pytest.raises(StorageError, match="No such file or directory"):
        create_file(tmp_path / "gone" / "f", 10, b"")


# Copying from file to file


def copied(folder, tmp_path, from_offset=2, offset=1, nbytes=5) -> bytes:
    target = tmp_path / "target"
    target.mkdir()
    (target / "b").write_bytes(b"..........")
    with Files(folder) as source, Files(target, os.O_RDWR) as files:
        files.copy(source, "a", from_offset, "b", offset, nbytes)
    return (target / "b").read_bytes()


def refusing(code):
    def refuse(*_):
        raise OSError(code, os.strerror(code))

    return refuse


@pytest.mark.parametrize(
    "why, way",
    [
        ("the kernel copies", None),
        ("the kernel can't copy", refusing(errno.ENOSYS)),
        ("between these file systems it can't", refusing(errno.EXDEV)),
        ("it says nothing and does nothing", lambda *_: 0),
    ],
)
def test_bytes_are_copied_whether_or_not_the_kernel_can(why, way, folder, tmp_path, monkeypatch):
    if way:
        monkeypatch.setattr(os, "copy_file_range", way)
    assert copied(folder, tmp_path) == b".23456...."


def test_short_copies_are_continued_also_when_the_kernel_gives_up_in_between(folder, tmp_path, monkeypatch):
    plain, calls = os.copy_file_range, []

    def some(source, target, nbytes, *offsets):
        calls.append(nbytes)
        return plain(source, target, 2, *offsets) if len(calls) < 3 else 0

    monkeypatch.setattr(os, "copy_file_range", some)
    assert copied(folder, tmp_path) == b".23456...."
    assert calls == [5, 3, 1]


def test_a_source_that_ends_before_its_bytes_are_copied_is_named(folder, tmp_path):
    with pytest.raises(StorageError, match=r"case/a: ends at byte 10, expected 1 more"):
        copied(folder, tmp_path, from_offset=6, nbytes=5)


def test_a_full_disk_while_copying_is_an_error_of_the_target(folder, tmp_path, monkeypatch):
    monkeypatch.setattr(os, "copy_file_range", refusing(errno.ENOSPC))
    with pytest.raises(StorageError, match=r"target/b: can't write: No space left"):
        copied(folder, tmp_path)


def test_the_type_of_a_file_system_is_read_as_stat_reads_it(tmp_path, monkeypatch):
    """There is no NFS here; but there are others, which the same call must tell apart."""
    for folder in (Path("/proc"), Path("/sys"), Path("/dev"), tmp_path):
        told = subprocess.run(
            ["stat", "--file-system", "--format=%t", folder], capture_output=True, text=True, check=True
        )
        monkeypatch.setattr(files_module, "NFS_SUPER_MAGIC", int(told.stdout, 16))
        assert files_module.is_on_nfs(folder) and files_module.is_on_nfs(folder / "not" / "there" / "yet")
        monkeypatch.setattr(files_module, "NFS_SUPER_MAGIC", 0x6969)  # linux/magic.h
        assert not files_module.is_on_nfs(folder)


def test_nfs_is_known_by_the_number_of_the_kernel():
    assert files_module.NFS_SUPER_MAGIC == 0x6969
