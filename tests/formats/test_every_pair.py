"""From every format that is read to every one that is written: the same tensors, by other readers' word and by `compare`."""

from pathlib import Path

import h5py
import ml_dtypes  # noqa: F401  (numpy learns bfloat16 by it)
import numpy as np
import pytest

from tests.formats.contents import arrays_of
from tests.formats.test_hugging_face import shard
from tests.jobs.outcome import assert_done, run_alone
from tests.mpirun import run_mpi
from tests.needed import needed

torch = needed("torch")
save_file = needed("safetensors.torch").save_file

NUMBERS = torch.arange(7 * 6 * 8, dtype=torch.uint8)
TENSORS = {
    "embed.weight": NUMBERS.view(torch.bfloat16).reshape(14, 12).clone(),
    "norm.weight": NUMBERS[:28].view(torch.float32).clone(),
    "experts.scales": NUMBERS[:105].view(torch.float8_e4m3fn).reshape(5, 3, 7).clone(),
    "rotary.complex": NUMBERS[:48].view(torch.complex64).reshape(3, 2).clone(),
    "steps": torch.arange(5),
    "mask": NUMBERS[:9] % 2 == 1,
    "scale": torch.tensor(3.5),
    "none": torch.empty(0, 4),
}
TRUTH = {
    fqn: (tuple(tensor.shape), tensor.reshape(-1).view(torch.uint8).numpy().tobytes())
    for fqn, tensor in TENSORS.items()
}
SOURCES = ("dcp", "hf", "shards", "case", "hdf5")
TARGETS = {
    "single": (),
    "case": ("--target", "fsdp=3"),
    "hdf5": ("--format", "hdf5", "--target", "fsdp=3"),
    "hf": ("--format", "hf", "--max-shard-size", "200"),
}


def two_shards(folder: Path) -> None:
    """Rows of one rank and of another; what has none is on the first."""
    cuts = {fqn: len(tensor) // 2 for fqn, tensor in TENSORS.items() if tensor.ndim and len(tensor)}
    rest = {fqn: (tensor, [0] * tensor.ndim) for fqn, tensor in TENSORS.items() if fqn not in cuts}
    for rank in range(2):
        rows = {fqn: TENSORS[fqn][cut:] if rank else TENSORS[fqn][:cut] for fqn, cut in cuts.items()}
        parts = {fqn: (part.clone(), [rank * cuts[fqn]] + [0] * (part.ndim - 1)) for fqn, part in rows.items()}
        shard(folder, rank, 2, parts | ({} if rank else rest))


@pytest.fixture(scope="module")
def sources(tmp_path_factory) -> dict[str, Path]:
    """The same tensors in every format that is read."""
    folder = tmp_path_factory.mktemp("sources")
    found = {name: folder / name for name in SOURCES}
    torch.distributed.checkpoint.save(TENSORS, checkpoint_id=found["dcp"], no_dist=True)
    found["hf"].mkdir()
    save_file(TENSORS, found["hf"] / "model.safetensors", {"format": "pt"})
    two_shards(found["shards"])
    for name, options in (("case", ()), ("hdf5", ("--format", "hdf5"))):
        assert_done(run_mpi(2, "reshard", found["hf"], found[name], "--target", "fsdp=2", *options))
    return found


def whole_tensors(out: Path) -> dict[str, tuple[tuple[int, ...], bytes]]:
    """Shape and bytes of every tensor that OUT holds whole, as others read them."""
    if (out / "global.h5").exists():
        with h5py.File(out / "global.h5") as file:
            arrays = {fqn: np.ascontiguousarray(dataset[()]) for fqn, dataset in file.items()}
            return {fqn: (array.shape if file[fqn].shape else (), array.tobytes()) for fqn, array in arrays.items()}
    found = {key: array for path in out.glob("*.safetensors") for key, array in arrays_of(path).items()}
    return {fqn: (array.shape, array.data) for fqn, array in found.items()}


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("source", SOURCES)
def test_from_every_format_to_every_other(source, target, sources, tmp_path):
    assert_done(run_mpi(2, "reshard", sources[source], tmp_path / "out", *TARGETS[target]))
    if target != "case":
        assert whole_tensors(tmp_path / "out") == TRUTH
    assert "equal: 8 tensors" in assert_done(run_alone("compare", tmp_path / "out", sources[source]))
