"""What is asked of file systems: told with its file when it fails, and seen by other threads while it lasts."""

import threading
import time
from pathlib import Path

import pytest

from reshard_mpi.errors import InputError, StorageError
from reshard_mpi.storage.touching import longest_touch, touching


def test_what_the_system_refuses_is_told_with_what_was_tried_and_the_file():
    with pytest.raises(StorageError, match=r"^a/b: can't read: Input/output error") as caught:
        with touching("read", Path("a"), "b"):
            raise OSError(5, "Input/output error")
    assert isinstance(caught.value.__cause__, OSError)
    assert longest_touch() is None


@pytest.mark.parametrize("error", [InputError("a", "lies"), MemoryError(), KeyboardInterrupt()], ids=repr)
def test_other_errors_pass_as_they_are(error):
    with pytest.raises(type(error)) as caught:
        with touching("read", Path("a")):
            raise error
    assert caught.value is error
    assert longest_touch() is None


def test_of_several_threads_the_one_that_has_waited_longest_is_seen():
    begun, over = threading.Barrier(2), threading.Event()

    def wait() -> None:
        with touching("write", Path("slow")):
            begun.wait()
            over.wait()

    thread = threading.Thread(target=wait, daemon=True)
    thread.start()
    begun.wait()
    with touching("read", Path("folder"), "quick"):
        assert (longest_touch().what, longest_touch().path) == ("write", Path("slow"))
        over.set()
        thread.join()
        assert longest_touch()[1:] == ("read", Path("folder"), "quick")
    assert longest_touch() is None


def test_what_is_done_within_another_counts_alone_and_its_end_is_progress():
    with touching("read", Path("header")):
        with touching("open", Path("file")):
            assert longest_touch().path == Path("file")
            time.sleep(0.02)
            ended = time.monotonic()
        assert longest_touch().path == Path("header")
        assert longest_touch().since >= ended
