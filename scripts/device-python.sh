#!/usr/bin/env bash
# Runs Python's tests that need GPUs, against the package in this checkout: nothing is installed. TESTS names their files
# (default: all of them, test_cuda_*.py), and arguments go to pytest. The log goes to $OUT/python.log, as it is written.
#
# With RANKS_PER_GPU=N, up to N ranks share a GPU, as in device-tests.sh, so that one GPU is enough.
#
# Builds nothing: needs device-bin/_warplink.abi3.so and device-bin/python (PARTS=python scripts/device-build.sh), and
# PyTorch. Tests of CuPy's and JAX's arrays are left out where these are not installed.
set -uo pipefail
cd "$(dirname "$0")/.."
. scripts/device-environment.sh
. scripts/device-service.sh
. scripts/device-package.sh
OUT=$(realpath -m "${OUT:-device-out}")
mkdir -p "$OUT"
trap 'rm -rf "${package:-}"; stop_service' EXIT
use_package
start_service
export CUDA_DEVICE_MAX_CONNECTIONS=${CUDA_DEVICE_MAX_CONNECTIONS:-32} NO_COLOR=1
cd crates/warplink-py/tests
timeout --kill-after=5 "${LIMIT:-300}" python3 -m pytest -p no:cacheprovider -rfEs --durations=8 -v "$@" \
    ${TESTS:-$(echo test_cuda_*.py)} >"$OUT/python.log" 2>&1
code=$?
grep -E 'PASSED|FAILED|ERROR|SKIPPED|^=' "$OUT/python.log" | tail -n "${LINES_OF_LOG:-40}"
grep -q ' PASSED' "$OUT/python.log" || { echo 'no test was run' >&2; ((code)) || code=1; }
exit $code
