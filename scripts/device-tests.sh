#!/usr/bin/env bash
# Runs the device tests on GPUs: the same cases as on the host device, one after another, since each
# takes all GPUs. Logs go to $OUT/tests.tar; the summary is printed last.
#
# With RANKS_PER_GPU=N, up to N ranks share a GPU through CUDA's multi-process service. That shows what is
# right, also on one GPU; times mean nothing. TESTS names the tests to run (default: all that are there),
# TEST_FILTER those of their cases whose name contains it, and LIMIT how many seconds one may take. With EACH=1
# every case is one, with a service of its own, which a rank that was killed may leave unusable.
#
# JOBS=N deals the cases of a test out to N processes at a time, which shortens what is mostly the compilation of kernels, but is
# for tests without short limits only: processes take turns on a GPU, and kernels that wait use up theirs. With GPUS_PER_JOB=2 on
# four GPUs, every other process has the second pair. Lines of logs begin with the seconds since the start.
#
# Counts are said by variables, and how much was done is printed: WARPLINK_TEST_ROUNDS for
# TESTS=channels TEST_FILTER=a_million_rounds, WARPLINK_TEST_CALLS and WARPLINK_TEST_REPLAYS for TESTS=collectives
# TEST_FILTER=thousands_of_mixed_calls, which wants a LIMIT for a million calls. Tests whose cases all compile kernels of their own
# run some of them; WARPLINK_TEST_EVERY=1 runs all.
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
    timeout --kill-after=5 "${LIMIT:-240}" "device-bin/test-$name" --test-threads=1 --nocapture "$@" 2>&1 |
        while IFS= read -r line; do printf '%4d %s\n' "$SECONDS" "$line"; done >"$log"
    code=${PIPESTATUS[0]}
    if ((code == 0)); then
        echo "$(basename "$log" .log): $(grep -o 'test result.*' "$log")"
        grep -o 'counted: .*' "$log"
    else
        failed=1
        echo "$(basename "$log" .log) FAILED ($code):"
        grep -E 'FAILED|panicked|test result' -A3 "$log" | head -n "${LINES_OF_FAILURE:-60}"
        tail -n 3 "$log"
    fi
    # At once: the machine may end this at any time.
    tar -C "$logs" -cf "$OUT/tests.tar.$BASHPID" .; mv "$OUT/tests.tar.$BASHPID" "$OUT/tests.tar"
    return $failed
}

# cases NAME: the cases of a test, by TEST_FILTER.
cases() { "device-bin/test-$1" --list ${TEST_FILTER:-} 2>/dev/null | sed -n 's/: test$//p'; }

# deal NAME: runs a test as JOBS processes, each with every JOBS-th of its cases and, by GPUS_PER_JOB, with some of the GPUs.
deal() {
    local name=$1 job own gpus=${GPUS_PER_JOB:-0} first count jobs=()
    count=$(nvidia-smi -L | wc -l)
    for ((job = 0; job < JOBS; job++)); do
        own=($(cases "$name" | awk -v job="$job" -v jobs="$JOBS" 'NR % jobs == job'))
        ((${#own[@]})) || continue
        (
            if ((gpus > 0)); then
                first=$((job * gpus % (count / gpus * gpus)))
                export CUDA_VISIBLE_DEVICES=$(seq -s, "$first" $((first + gpus - 1)))
            fi
            run "$name" "$logs/$name-$job.log" --exact "${own[@]}"
        ) &
        jobs+=($!)
    done
    for job in "${jobs[@]}"; do wait "$job" || failed=1; done
}

failed=0
all=(device-bin/test-*)
names=(${TESTS:-${all[@]#device-bin/test-}})
if [[ ${EACH:-} == 1 ]]; then
    for name in "${names[@]}"; do
        for case in $(cases "$name"); do
            start_service || exit
            run "$name" "$logs/$name-${case//::/-}.log" --exact "$case"
            stop_service
        done
    done
    exit $failed
fi
start_service || exit
for name in "${names[@]}"; do
    if ((${JOBS:-1} > 1)); then deal "$name"; else run "$name" "$logs/$name.log" ${TEST_FILTER:-}; fi
done
exit $failed
