"""Files that are known to be there: waited for when they come late, told when they don't come, or are others."""

import os
import threading
import time

import pytest

from reshard_mpi.errors import StorageError
from reshard_mpi.storage import known as known_module
from reshard_mpi.storage.files import Files, file_stamps
from reshard_mpi.storage.known import Stamp, waited_for

PATIENCE_S = 1.0
LATE_S = 0.2


@pytest.fixture(autouse=True)
def patience(monkeypatch):
    monkeypatch.setattr(known_module, "PATIENCE_S", PATIENCE_S)


def later(do) -> threading.Timer:
    timer = threading.Timer(LATE_S, do)
    timer.start()
    return timer


def first_byte(folder, stamp: Stamp) -> bytes:
    buffer = bytearray(1)
    with Files(folder, known={"a": stamp}) as files:
        files.read("a", 0, memoryview(buffer))
    return bytes(buffer)


def write(path, content: bytes) -> None:
    path.with_name("new").write_bytes(content)
    path.with_name("new").rename(path)


@pytest.mark.parametrize("why, before", [("it isn't there yet", None), ("it hasn't its length yet", b"")])
def test_a_file_that_comes_late_is_waited_for(why, before, tmp_path):
    if before is not None:
        (tmp_path / "a").write_bytes(before)
    timer = later(lambda: write(tmp_path / "a", b"abc"))
    assert first_byte(tmp_path, Stamp(3)) == b"a"
    timer.join()


def test_so_is_its_folder(tmp_path):
    def come():
        (tmp_path / "new").mkdir()
        (tmp_path / "new" / "a").write_bytes(b"abc")
        (tmp_path / "new").rename(tmp_path / "folder")

    timer = later(come)
    assert first_byte(tmp_path / "folder", Stamp(3)) == b"a"
    timer.join()


def test_a_file_that_never_comes_is_told_as_missing_after_a_while(tmp_path):
    began = time.monotonic()
    with pytest.raises(StorageError, match="No such file") as told:
        first_byte(tmp_path, Stamp(3))
    assert PATIENCE_S <= time.monotonic() - began < 3 * PATIENCE_S
    assert told.value.is_missing


def test_what_waiting_does_not_mend_is_told_at_once(tmp_path):
    def refuse():
        raise PermissionError(13, "Permission denied")

    began = time.monotonic()
    with pytest.raises(PermissionError):
        waited_for(tmp_path / "a", refuse)
    assert time.monotonic() - began < PATIENCE_S / 2


def test_a_file_that_is_not_known_is_not_waited_for(tmp_path):
    began = time.monotonic()
    with Files(tmp_path, known={"b": Stamp(3)}) as files, pytest.raises(StorageError):
        files.descriptor("a")
    assert time.monotonic() - began < PATIENCE_S / 2


def test_another_file_of_the_same_name_is_refused(tmp_path):
    path = tmp_path / "a"
    path.write_bytes(b"abc")
    stamp = file_stamps(tmp_path, ["a"])["a"]
    assert first_byte(tmp_path, stamp) == b"a"
    os.utime(path, (0, 0))
    with pytest.raises(StorageError, match="hosts see different files") as told:
        first_byte(tmp_path, stamp)
    assert not told.value.is_missing
    with pytest.raises(StorageError, match="3 bytes, expected 4"):
        first_byte(tmp_path, Stamp(4))


@pytest.mark.parametrize(
    "why, one, other, fits",
    [
        ("the same", Stamp(3, 5_000_000_001), Stamp(3, 5_000_000_001), True),
        ("a client that keeps whole seconds", Stamp(3, 5_999_999_999), Stamp(3, 5_000_000_000), True),
        ("another second", Stamp(3, 5_999_999_999), Stamp(3, 6_000_000_000), False),
        ("another length", Stamp(3, 5), Stamp(4, 5), False),
        ("no time is known", Stamp(3), Stamp(3, 5), True),
        ("no time, and another length", Stamp(3), Stamp(4), False),
    ],
)
def test_stamps_are_of_one_file(why, one, other, fits):
    assert one.fits(other) is other.fits(one) is fits
