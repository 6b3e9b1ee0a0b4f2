"""Everything that can go wrong, each with the exit code that it ends the job with.

An error says WHERE, what was found, what was expected, and what to do; the command line prints it as one line.
"""

import errno
import os
from collections.abc import Iterable

LONGEST_LINE = 4000  # characters


def one_line(text: str) -> str:
    """Names come from untrusted files: a newline in one of them must not forge a second message, nor a long one hide the rest.

    What to do is said at the end.
    """
    if len(text) > LONGEST_LINE:
        text = f"{text[: LONGEST_LINE * 3 // 4]} ... {text[-LONGEST_LINE // 4 :]}"
    return "".join(c if c.isprintable() else repr(c)[1:-1] for c in text)


class ReshardError(Exception):
    """Base class. `where` is a file, tensor or option; the message says what was found, what was expected, what to do."""

    exit_code = 70
    host = ""  # where it was found, if that matters

    def __init__(self, where: str, message: str):
        super().__init__(where, message)
        self.where = where
        self.message = message

    def __str__(self) -> str:
        return one_line(f"{self.where}: {self.message}")


class UsageError(ReshardError):
    """The command line, or what it names, is not usable."""

    exit_code = 2


class InputError(ReshardError):
    """The checkpoint contradicts its schema, its headers or itself."""

    exit_code = 3


class IntegrityError(ReshardError):
    """Bytes differ from their digest, replica, tie or oracle."""

    exit_code = 4


class StorageError(ReshardError):
    """A file is missing, unreadable, or can't be written.

    `is_missing`: this host doesn't see it. `may_come`: it may yet be as it should be, for hosts see late what others do.
    """

    exit_code = 5
    is_missing = False
    may_come = False

    def __init__(self, where: str, message: str):
        super().__init__(where, message)
        self.host = os.uname().nodename


class PlanningError(ReshardError):
    """The job can't be planned within its limits."""

    exit_code = 6


class Interrupted(ReshardError):
    """Stopped by a signal; the same command continues."""

    exit_code = 75


def storage_error(path: object, error: OSError, what: str) -> StorageError:
    """The StorageError that says of `path` what the operating system said while we tried to `what` it."""
    if error.errno in (errno.EMFILE, errno.ENFILE):
        advice = "how many files may be open (ulimit -n)"
    elif what in ("open", "read", "look at"):
        advice = "the path and its permissions"
    else:
        advice = "its permissions and the free space"
    told = StorageError(str(path), f"can't {what}: {error.strerror or error}; check {advice}")
    told.is_missing = error.errno == errno.ENOENT
    told.may_come = may_come(error)
    return told


def may_come(error: OSError | StorageError) -> bool:
    """May what is said of a file be about to change, because hosts see late what others do?"""
    return error.may_come if isinstance(error, StorageError) else error.errno in (errno.ENOENT, errno.ESTALE)


def _lack_of_memory(error: BaseException) -> PlanningError | None:
    """The PlanningError for an exception that says that memory couldn't be had, in whatever words; else None."""
    said = str(error)
    lacking = isinstance(error, MemoryError)
    lacking |= isinstance(error, OSError) and error.errno == errno.ENOMEM
    lacking |= isinstance(error, RuntimeError) and said == "can't start new thread"  # there was no room for its stack
    lacking |= isinstance(error, ImportError) and ("failed to map" in said or os.strerror(errno.ENOMEM) in said)
    reason = f" ({said})" if said else ""
    advice = "lower --memory, use fewer ranks a node, or raise the limit (ulimit -v, or that of the job)"
    return PlanningError("memory", f"a rank can't get what it needs{reason}; {advice}") if lacking else None


def expected_error(error: BaseException) -> ReshardError | None:
    """What can happen anywhere, as an error of ours: no memory, a file that can't be used; else None."""
    if isinstance(error, ReshardError):
        return error
    lacking = _lack_of_memory(error)
    if lacking is None and isinstance(error, OSError):
        return storage_error(error.filename or "job", error, "use")
    return lacking


# SPEC section 4: of different faults on different ranks, bad input is told before a file that failed, and so on.
_TOLD_FIRST = {3: 0, 5: 1, 4: 2, 6: 3}


def telling_order(error: ReshardError) -> int:
    """Of several errors the one with the least is told."""
    return _TOLD_FIRST.get(error.exit_code, 4)


def first_to_tell(errors: Iterable[ReshardError]) -> ReshardError | None:
    """The error that stands for all; of equal ones the earliest (errors come in rank order)."""
    return min(errors, key=telling_order, default=None)


def raise_first(errors: Iterable[ReshardError]) -> None:
    """Raise the error that stands for all, if there is any."""
    told = first_to_tell(errors)
    if told is not None:
        raise told


def plural(count: int, noun: str) -> str:
    """
    >>> plural(1, "shard"), plural(0, "shard")
    ('1 shard', '0 shards')
    """
    return f"{count} {noun}{'' if count == 1 else 's'}"


def names(items: Iterable[object], most: int = 5) -> str:
    """`a, b, c and 7 more`: a list that stays on one line.

    >>> names(range(9), most=2)
    '0, 1 and 7 more'
    """
    listed = [str(item) for item in items]
    rest = len(listed) - most
    return ", ".join(listed) if rest <= 0 else f"{', '.join(listed[:most])} and {rest} more"
