"""`accelerate merge-weights` as the judge: what it makes of a folder of sharded weights is what `--format hf` makes of it."""

import pytest

from tests.formats.contents import arrays_of
from tests.formats.test_dcp import written
from tests.jobs.outcome import assert_done
from tests.mpirun import run_mpi
from tests.needed import needed

torch = needed("torch")
fsdp_utils = needed("accelerate.utils.fsdp_utils")


@pytest.mark.parametrize(("kind", "nranks"), [pytest.param("fsdp", 2, marks=pytest.mark.thorough), ("fsdp_tp", 4)])
def test_weights_are_merged_as_accelerate_does(kind, nranks, tmp_path):
    """It saves them as {"model": state dict}, and takes that key off again."""
    saved, truth = written(tmp_path, "nested", kind, nranks)
    fsdp_utils.merge_fsdp_weights(saved, tmp_path / "merged")
    done = run_mpi(3, "reshard", saved, tmp_path / "out", "--format", "hf")
    assert_done(done)
    ours, theirs = (arrays_of(tmp_path / folder / "model.safetensors") for folder in ("out", "merged"))
    assert ours == theirs == arrays_of(truth)
    assert "all names begin with 'model.'" in done.stderr
    assert "equal: " in assert_done(run_mpi(2, "compare", tmp_path / "out", tmp_path / "merged"))
