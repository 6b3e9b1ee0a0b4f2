"""What a job under Slurm left behind."""

import hashlib
from pathlib import Path

from tests.slurm.cluster import Job

TARGET = ("--target", "tp=4", "--progress", "off")


def digests(folder: Path) -> dict[str, str]:
    return {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in sorted(folder.iterdir())}


def assert_done(job: Job, out: Path, expected: dict[str, str], within_s: float = 60) -> None:
    """The job has ended, and OUT is what it should be, with nothing beside it."""
    assert job.wait_for_state(within_s=within_s) == "COMPLETED", job.explain()
    assert digests(out) == expected
    assert not out.with_name(f"{out.name}.partial").exists()
