"""What may be imported without MPI, and what a start costs."""

import pkgutil
import subprocess
import sys

import reshard_mpi

# `comm` and `exchange` speak MPI; the others say in their signatures that they are called by all ranks.
NEED_MPI = {"comm", "exchange", "audit", "compare", "job", "load", "move", "verify"}
HEAVY = ("torch", "matplotlib", "h5py", "tqdm", "rich", "ml_dtypes", "safetensors")

IMPORT_ALL = """
import importlib, sys
for name in sys.argv[1:]:
    importlib.import_module(name)
    found = sorted({module.split(".")[0] for module in sys.modules} & {"mpi4py", *HEAVY})
    assert not found, f"{name} imports {found}"
"""


def modules() -> list[str]:
    found = [module.name for module in pkgutil.walk_packages(reshard_mpi.__path__, "reshard_mpi.")]
    return [name for name in found if name != "reshard_mpi.__main__"]


def run(code: str, *names: str) -> None:
    done = subprocess.run(
        [sys.executable, "-B", "-c", code, *names], capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 0, done.stderr


def test_the_modules_that_need_mpi_are_those_of_the_list():
    assert {f"reshard_mpi.{name}" for name in NEED_MPI} < set(modules())


def test_all_other_modules_are_imported_without_mpi_torch_or_anything_heavy():
    names = [name for name in modules() if name.removeprefix("reshard_mpi.") not in NEED_MPI]
    assert len(names) > 20
    run(IMPORT_ALL.replace("HEAVY", repr(HEAVY)), *names)


def test_the_entry_point_is_imported_without_mpi():
    run(IMPORT_ALL.replace("HEAVY", repr(HEAVY)), "reshard_mpi.__main__")


def test_the_modules_that_need_mpi_need_nothing_heavy():
    code = IMPORT_ALL.replace('{"mpi4py", *HEAVY}', repr(set(HEAVY)))
    run("import mpi4py; mpi4py.rc.initialize = False\n" + code, *(f"reshard_mpi.{name}" for name in sorted(NEED_MPI)))


def test_help_and_the_command_line_need_not_even_numpy():
    run("import reshard_mpi.__main__, sys; assert 'numpy' not in sys.modules")
