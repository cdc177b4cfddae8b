#!/usr/bin/env bash
# Runs a short form of the tests of channels, transfers by kernels, collectives, messages, experts and barriers on GPUs
# under compute-sanitizer: memcheck, and racecheck for what blocks share. Only tests whose ranks are processes: the sanitizer may have the kernels of one
# process wait for one another, which two ranks in it would never end.
#
# Builds nothing: needs device-bin/test-channels, test-transfers and test-collectives (scripts/device-build.sh) and
# compute-sanitizer, in the PATH or named by COMPUTE_SANITIZER. With RANKS_PER_GPU=N, up to N ranks share a GPU, as in
# device-tests.sh, so that one GPU is enough. TESTS names other tests, each as the executable, a colon and its name, and
# TOOLS one of the tools. Logs go to $OUT/sanitizer.tar; an error of either tool fails the script.
set -uo pipefail
cd "$(dirname "$0")/.."
. scripts/device-environment.sh
OUT=${OUT:-device-out}
logs=$(mktemp -d)
. scripts/device-service.sh
trap 'stop_service; rm -rf "$logs"' EXIT
mkdir -p "$OUT"
sanitizer=${COMPUTE_SANITIZER:-compute-sanitizer}
command -v "$sanitizer" >/dev/null || { echo "$sanitizer is missing; set COMPUTE_SANITIZER" >&2; exit 2; }
export WARPLINK_TEST_DEVICE=cuda WARPLINK_TEST_SHORT=1 NO_COLOR=1
export CUDA_DEVICE_MAX_CONNECTIONS=${CUDA_DEVICE_MAX_CONNECTIONS:-32}
limit=${LIMIT:-120}
# The limit of ranks is shorter, so that their output is reported.
export WARPLINK_TEST_LIMIT=$((limit > 30 ? limit - 15 : limit))
# The sanitizer slows what gives signs of life too.
export WARPLINK_HEARTBEAT_LIMIT=60
tests=(${TESTS:-channels:data::a_million_rounds channels:data::several_tags_between_one_pair
    channels:data::all_pairs_at_once channels:data::packets_between_processes
    channels:data::signals_without_a_connection channels:data::barriers_over_a_set_of_peers
    channels:groups::warps_of_two_blocks_put_and_get_on_one_channel
    channels:groups::warps_of_two_blocks_exchange_packets_on_one_channel
    channels:groups::a_grid_puts_and_gets channels:groups::warps_make_barriers_at_the_same_time
    transfers:paths::processes_move_some_ranges_by_each_path
    collectives:data::processes_make_each_collective_by_each_algorithm
    collectives:direct::processes_reach_one_another
    collectives:buffers::processes_read_one_anothers_memory_between_barriers
    collectives:messages::processes_exchange_messages_and_parts
    collectives:on_device::processes_exchange_parts_of_sizes_in_device_memory
    collectives:experts::processes_dispatch_and_combine})
failed=0

# check TOOL NAME ARGUMENTS...: runs a test of an executable under a tool; sets code, and the number of errors that the tool
# reports.
check() {
    local tool=$1 name=$2 test=$3
    shift 3
    log=$logs/$tool-$name.log
    # The driver reports the end of a kernel's parameter list as an error, once for each kernel.
    local options=()
    if [[ $tool == memcheck ]]; then options=(--report-api-errors no); fi
    timeout --kill-after=5 "$limit" "$sanitizer" --tool "$tool" "${options[@]}" --target-processes all \
        --error-exitcode 9 --print-limit 20 "device-bin/test-${test%%:*}" "${test#*:}" --exact --test-threads=1 "$@" \
        >"$log" 2>&1
    code=$?
    # One for the test and all its ranks; what was not checked has none.
    summaries=$(grep -cE 'ERROR SUMMARY|RACECHECK SUMMARY' "$log")
    bad=$(grep -E 'ERROR SUMMARY|RACECHECK SUMMARY' "$log" | grep -vcE ' 0 errors| 0 hazards')
    # At once: the machine may end this at any time.
    tar -C "$logs" -cf "$OUT/sanitizer.tar" .
}

start_service || exit
for tool in ${TOOLS:-memcheck racecheck}; do
    # A tool that does not see the mistakes of ranks says nothing by finding none.
    WARPLINK_TEST_MISTAKE=$tool check "$tool" mistakes channels:mistakes::mistakes_that_the_sanitizer_finds --include-ignored
    if ((bad == 0)); then
        failed=1
        echo "$tool does not find the mistake of a rank ($code, $summaries summaries)"
    else
        echo "$tool finds the mistakes of ranks: $(grep -E 'ERROR SUMMARY|RACECHECK SUMMARY' "$log" | head -1)"
    fi
    for test in "${tests[@]}"; do
        check "$tool" "${test##*::}" "$test"
        if ((code == 0 && summaries > 0 && bad == 0)); then
            echo "$tool ${test##*::}: clean"
        else
            failed=1
            echo "$tool ${test##*::} FAILED ($code, $summaries summaries, $bad with errors):"
            grep -E '=========|panicked' "$log" | head -20
        fi
    done
done
exit $failed
