#!/usr/bin/env bash
# Builds nccl-tests, from where you have its sources, for scripts/device-nccl.sh: without MPI, for ranks that are
# threads or share a thread, and with MPI, for ranks that are processes.
#
# usage: scripts/build-nccl-tests.sh SOURCES [TO]
#
# TO is device-bin/nccl-tests if not given. CUDA_HOME, NCCL_HOME and MPI_HOME say where headers and libraries are; without
# MPI_HOME only the first kind is built. ARCHITECTURE is 90 if not set.
set -euo pipefail
(($# == 1 || $# == 2)) || { echo 'usage: scripts/build-nccl-tests.sh SOURCES [TO]' >&2; exit 2; }
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
to=${2:-$root/device-bin/nccl-tests}
build=$(mktemp -d)
trap 'rm -rf "$build"' EXIT
code=${ARCHITECTURE:-90}
options=(NVCC_GENCODE="-gencode=arch=compute_$code,code=sm_$code" -j "$(nproc)" -C "$1/src" build)
mkdir -p "$to"
make "${options[@]}" DSO=1 BUILDDIR="$build/threads"
[[ -z ${MPI_HOME:-} ]] || make "${options[@]}" DSO=1 BUILDDIR="$build/processes" MPI=1 NAME_SUFFIX=_mpi
find "$build" \( -name '*_perf*' -o -name 'libverifiable.so*' \) -type f ! -name '*.o' -exec cp -f -t "$to" {} \;
strip "$to"/*
