#!/usr/bin/env bash
# Runs the device tests on GPUs: the same cases as on the host device, one after another, since each
# takes all GPUs. Logs go to $OUT/tests.tar; the summary is printed last.
#
# With RANKS_PER_GPU=N, up to N ranks share a GPU through CUDA's multi-process service. That shows what is
# right, also on one GPU; times mean nothing. TESTS names the tests to run (default: all that are there),
# TEST_FILTER those of their cases whose name contains it, and LIMIT how many seconds one may take. With EACH=1
# every case is one, with a service of its own, which a rank that was killed may leave unusable.
#
# Counts are said by variables, and how much was done is printed: WARPLINK_TEST_ROUNDS for
# TESTS=channels TEST_FILTER=a_million_rounds, WARPLINK_TEST_CALLS and WARPLINK_TEST_REPLAYS for TESTS=collectives
# TEST_FILTER=thousands_of_mixed_calls, which wants a LIMIT for a million calls.
set -uo pipefail
cd "$(dirname "$0")/.."
. scripts/device-environment.sh
OUT=${OUT:-device-out}
logs=$(mktemp -d)
mkdir -p "$OUT"
export WARPLINK_TEST_DEVICE=cuda CUDA_DEVICE_MAX_CONNECTIONS=32 NO_COLOR=1
# Ranks that are processes have a limit of their own: a shorter one, so that what they printed is told.
if [[ -n ${LIMIT:-} ]]; then export WARPLINK_TEST_LIMIT=$((LIMIT > 30 ? LIMIT - 15 : LIMIT)); fi
. scripts/device-service.sh
trap 'stop_service; rm -rf "$logs"' EXIT

# run NAME LOG ARGUMENTS...: runs a test, or some of its cases.
run() {
    local name=$1 log=$2 code
    shift 2
    # What fails says so at once, also where the limit ends the rest.
    if timeout --kill-after=5 "${LIMIT:-240}" "device-bin/test-$name" --test-threads=1 --nocapture "$@" >"$log" 2>&1; then
        echo "$(basename "$log" .log): $(grep '^test result' "$log")"
        grep -o 'counted: .*' "$log"
    else
        code=$? failed=1
        echo "$(basename "$log" .log) FAILED ($code):"
        grep -E 'FAILED|panicked|^test result' -A3 "$log" | head -n "${LINES_OF_FAILURE:-60}"
        tail -n 3 "$log"
    fi
    # At once: the machine may end this at any time.
    tar -C "$logs" -cf "$OUT/tests.tar" .
}

failed=0
all=(device-bin/test-*)
names=(${TESTS:-${all[@]#device-bin/test-}})
if [[ ${EACH:-} == 1 ]]; then
    for name in "${names[@]}"; do
        for case in $("device-bin/test-$name" --list ${TEST_FILTER:-} 2>/dev/null | sed -n 's/: test$//p'); do
            start_service || exit
            run "$name" "$logs/$name-${case//::/-}.log" --exact "$case"
            stop_service
        done
    done
    exit $failed
fi
start_service || exit
for name in "${names[@]}"; do
    run "$name" "$logs/$name.log" ${TEST_FILTER:-}
done
exit $failed
