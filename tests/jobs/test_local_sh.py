"""launch/local.sh, as a user types it: with either MPI, as root, with more ranks than cores."""

import os
import shutil
import subprocess
from pathlib import Path

import pytest

from tests.jobs.outcome import CASES, assert_done
from tests.mpirun import CHECKOUT, DROPPED_PREFIXES, OPENMPI_VARIABLES, require_mpi

UNEVEN = CASES / "tp3-uneven-to-tp2"


def local_sh(
    folder: Path, *arguments: object, launch: Path = CHECKOUT / "launch", **variables: str
) -> subprocess.CompletedProcess[str]:
    """Without the variables that other tests start Open MPI with."""
    told = (*OPENMPI_VARIABLES, "PYTHONPATH", "RESHARD_ENV")
    environ = {name: value for name, value in os.environ.items() if not name.startswith((*DROPPED_PREFIXES, *told))}
    command = ["bash", launch / "local.sh", *arguments]
    environ |= {"PYTHONPATH": str(CHECKOUT)} | variables
    return subprocess.run(
        list(map(str, command)), cwd=folder, env=environ, capture_output=True, text=True, timeout=60, check=False
    )


def test_it_reshards_with_the_ranks_asked_for(tmp_path, mpi):
    python, _ = require_mpi(mpi)
    environment = {"VIRTUAL_ENV": str(python.parent.parent), "PATH": "/usr/bin:/bin"}
    done = local_sh(tmp_path, "-n", 5, "reshard", UNEVEN, "out", **environment)
    assert "5 ranks" in assert_done(done)
    assert (tmp_path / "out" / "case.json").is_file()
    done = local_sh(tmp_path, **environment)  # as many ranks as cores, and the sample
    assert_done(done)
    assert (tmp_path / "reshard-sample" / "case.json").is_file()


@pytest.mark.parametrize("number", ["0", "x", "", "-1"])
def test_what_is_no_number_of_ranks_is_refused(tmp_path, number):
    done = local_sh(tmp_path, "-n", number)
    assert (done.returncode, done.stdout) == (2, "") and "a number of ranks is expected" in done.stderr


def test_without_an_mpirun_it_says_where_one_comes_from(tmp_path):
    tools, launch = tmp_path / "bin", shutil.copytree(CHECKOUT / "launch", tmp_path / "launch")  # no .venv beside it
    tools.mkdir()
    for name in ("bash", "dirname", "nproc"):
        (tools / name).symlink_to(shutil.which(name))
    done = local_sh(tmp_path, "-n", 2, launch=launch, PATH=str(tools), VIRTUAL_ENV="")
    assert done.returncode == 70 and "no mpirun on PATH" in done.stderr
