"""What may be imported without MPI, and what a start costs."""

import pkgutil
import re
import subprocess
import sys

import reshard_mpi

ROOMS = ("check", "checkpoint", "formats", "layout", "mpi", "plan", "run", "show", "storage")
# What talks MPI, or says in its signatures that all ranks call it.
MAY_NEED_MPI = re.compile(r"reshard_mpi\.(mpi\..+|check\.(across|audit|compare|verify)|run\.(job|lead|move))")
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


def need_mpi() -> list[str]:
    return [name for name in modules() if MAY_NEED_MPI.fullmatch(name)]


def test_every_room_is_looked_into():
    assert {name.split(".")[1] for name in modules() if name.count(".") > 1} == set(ROOMS)
    assert len(need_mpi()) >= 8


def test_all_other_modules_are_imported_without_mpi_torch_or_anything_heavy():
    names = [name for name in modules() if not MAY_NEED_MPI.fullmatch(name)]
    assert len(names) > 30
    run(IMPORT_ALL.replace("HEAVY", repr(HEAVY)), *names)


def test_the_entry_point_is_imported_without_mpi():
    run(IMPORT_ALL.replace("HEAVY", repr(HEAVY)), "reshard_mpi.__main__")


def test_the_modules_that_need_mpi_need_nothing_heavy():
    code = IMPORT_ALL.replace('{"mpi4py", *HEAVY}', repr(set(HEAVY)))
    run("import mpi4py; mpi4py.rc.initialize = False\n" + code, *need_mpi())


def test_help_and_the_command_line_need_not_even_numpy():
    run("import reshard_mpi.__main__, reshard_mpi.commands, sys; assert 'numpy' not in sys.modules")


def test_a_rank_that_only_moves_needs_nothing_that_reads_manifests_or_plans():
    code = """
import mpi4py, sys
mpi4py.rc.initialize = False
import reshard_mpi.commands, reshard_mpi.run.job, reshard_mpi.check.audit
found = [name for name in ("msgspec", "json", "reshard_mpi.checkpoint.checks", "reshard_mpi.layout.rules",
         "reshard_mpi.plan.planner", "reshard_mpi.show.planning", "reshard_mpi.sample") if name in sys.modules]
assert not found, found
"""
    run(code)
