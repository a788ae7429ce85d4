#!/bin/sh
# SPDX-License-Identifier: Apache-2.0
# mpirun.sh N PROGRAM [ARGUMENT...]: runs a program on N MPI ranks of this
# machine, also as root, with more ranks than cores, and in containers without
# ptrace. Exits 77 (skipped) where there is no mpirun.
set -eu

command -v mpirun >/dev/null 2>&1 || exit 77
ranks=$1
shift

flags=""
if mpirun --version 2>&1 | grep -q 'Open MPI'; then
    flags="--oversubscribe"
    if [ "$(id -u)" = 0 ]; then
        flags="$flags --allow-run-as-root"
    fi
    export OMPI_MCA_btl_vader_single_copy_mechanism=none
    export OMPI_MCA_mpi_yield_when_idle=1
    export OMPI_MCA_rmaps_base_oversubscribe=1
    export OMPI_MCA_hwloc_base_binding_policy=none
    # Ranks of one machine need no network.
    export OMPI_MCA_btl=self,vader
    export OMPI_MCA_pml=ob1
fi

# MPI itself keeps memory until the end, and so do runs that failed on purpose.
export ASAN_OPTIONS="${ASAN_OPTIONS:-}:detect_leaks=0"

# shellcheck disable=SC2086
exec mpirun $flags -n "$ranks" "$@"
