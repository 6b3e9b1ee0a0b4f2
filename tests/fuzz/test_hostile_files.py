"""Changed files end in an error of ours or in something sound: examples drawn by hypothesis, the same in every run.

`make fuzz` searches on, led by coverage. The address space is bounded meanwhile: a small file must not take much memory.
"""

import contextlib
import resource
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.fuzz.targets import TARGETS

MOST_NBYTES = 1 << 30  # more than is mapped already
NEXAMPLES = {"hdf5": 150, "case": 250, "layout": 200}


@contextlib.contextmanager
def bounded_memory() -> Iterator[None]:
    """A MemoryError for what would take more: none of the files is larger than some kilobytes."""
    mapped = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    before = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (mapped + MOST_NBYTES, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, before)


@pytest.mark.parametrize("name", TARGETS)
def test_files_to_begin_with_are_read(name):
    for seed in TARGETS[name].seeds():
        TARGETS[name].run(seed)


@pytest.mark.parametrize("name", TARGETS)
def test_a_changed_file_is_refused_or_sound(name):
    target = TARGETS[name]

    @settings(max_examples=NEXAMPLES.get(name, 400), suppress_health_check=list(HealthCheck))
    @given(st.sampled_from(target.seeds()), st.randoms(use_true_random=False))
    def holds(seed, random):
        target.run(target.mutate(seed, random))

    with bounded_memory():
        holds()
