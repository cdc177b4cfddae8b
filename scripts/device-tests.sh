#!/usr/bin/env bash
# Runs the device tests on GPUs: the same cases as on the host device, one after another, since each
# takes all GPUs. Logs go to $OUT/tests.tar; the summary is printed last.
#
# With RANKS_PER_GPU=N, up to N ranks share a GPU through CUDA's multi-process service. That shows what is
# right, also on one GPU; times mean nothing. TESTS names the tests to run (default: all that are there), and
# LIMIT how many seconds one may take.
set -uo pipefail
cd "$(dirname "$0")/.."
OUT=${OUT:-device-out}
logs=$(mktemp -d)
mkdir -p "$OUT"
trap 'rm -rf "$logs"' EXIT
export WARPLINK_TEST_DEVICE=cuda CUDA_DEVICE_MAX_CONNECTIONS=32 NCCL_NVLS_ENABLE=0 NO_COLOR=1
if ((${RANKS_PER_GPU:-1} > 1)); then
    export WARPLINK_TEST_RANKS_PER_GPU=$RANKS_PER_GPU CUDA_DEVICE_MAX_CONNECTIONS=$((64 / RANKS_PER_GPU))
    service=$(mktemp -d)
    export CUDA_MPS_PIPE_DIRECTORY=$service CUDA_MPS_LOG_DIRECTORY=$service
    PATH=$PATH:$(dirname "$(command -v nvidia-smi || echo /usr/local/nvidia/bin/nvidia-smi)")
    nvidia-cuda-mps-control -d || exit
    trap 'echo quit | nvidia-cuda-mps-control; rm -rf "$service" "$logs"' EXIT
fi
failed=0
all=(device-bin/test-*)
names=(${TESTS:-${all[@]#device-bin/test-}})
for name in "${names[@]}"; do
    test=device-bin/test-$name
    # What fails says so at once, also where the limit ends the rest.
    if timeout "${LIMIT:-240}" "$test" --test-threads=1 --nocapture ${TEST_FILTER:-} >"$logs/$name.log" 2>&1; then
        echo "$name: $(grep '^test result' "$logs/$name.log")"
    else
        code=$? failed=1
        echo "$name FAILED ($code):"
        grep -E 'FAILED|panicked|^test result' -A3 "$logs/$name.log" | head -n "${LINES_OF_FAILURE:-60}"
        tail -n 3 "$logs/$name.log"
    fi
    # At once: the machine may end this at any time.
    tar -C "$logs" -cf "$OUT/tests.tar" .
done
exit $failed
