#!/usr/bin/env bash
# Runs reshard_mpi on this machine, with any MPI, also as root and with more ranks than cores:
#
#   launch/local.sh -n 4                                     the built-in sample
#   launch/local.sh -n 4 reshard SOURCE OUT --target tp=4    one's own checkpoint
#
# env.sh says where python and mpirun come from. Without -n: as many ranks as cores.
set -eu

# shellcheck source=launch/env.sh
. "$(dirname "${BASH_SOURCE[0]}")/env.sh"

nranks=$(nproc)
if [ "${1-}" = -n ]; then
    nranks=${2-}
    if ! [[ $nranks =~ ^[1-9][0-9]*$ ]]; then
        echo "local.sh: -n: a number of ranks is expected, not '$nranks'" >&2
        exit 2
    fi
    shift 2
fi

if ! command -v mpirun >/dev/null; then
    echo "local.sh: no mpirun on PATH; 'make venv' brings one, or load the MPI module of this machine" >&2
    exit 70
fi
# Debian, for one, has `python` only inside environments.
python=$(command -v python || command -v python3)

# Open MPI refuses to start as root, or more ranks than cores, unless told so: first as 4 wants it, then as 5.
export OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1
export OMPI_MCA_rmaps_base_oversubscribe=${OMPI_MCA_rmaps_base_oversubscribe-1}
export PRTE_MCA_rmaps_default_mapping_policy=${PRTE_MCA_rmaps_default_mapping_policy-:oversubscribe}

exec mpirun -n "$nranks" "$python" -m reshard_mpi "$@"
