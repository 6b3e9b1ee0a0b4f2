# shellcheck shell=bash
# What makes python and MPI available to jobs, on every node: sourced by reshard.sbatch, many.sbatch and local.sh.
# A cluster's lines go here, for instance:
#
#   module load openmpi
#   . ~/reshard/bin/activate               # or: conda activate reshard
#   export RESHARD_MPI_TYPE=pmix           # srun --mpi=list

# Without them: the active virtual environment, else .venv of this checkout (`make venv`), else what is on PATH.
checkout=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
for environment in "${VIRTUAL_ENV-}" "$checkout/.venv"; do
    if [ -x "$environment/bin/python" ]; then
        export PATH=$environment/bin:$PATH
        break
    fi
done
