#!/usr/bin/env bash
# Runs the programs of the C interface's tests on two GPUs, as crates/warplink-c/tests/programs.rs does on the host
# device: each as two ranks, but for those that have their ranks as threads. Logs go to $OUT/c.tar; the summary is printed
# last. TESTS names the programs to run (default: all).
set -uo pipefail
cd "$(dirname "$0")/.."
OUT=${OUT:-device-out}
logs=$(mktemp -d)
mkdir -p "$OUT"
trap 'rm -rf "$logs"' EXIT
export WARPLINK_TEST_DEVICE=${WARPLINK_TEST_DEVICE:-cuda} CUDA_DEVICE_MAX_CONNECTIONS=32 NCCL_NVLS_ENABLE=0 NO_COLOR=1
unset WARPLINK_ID WARPLINK_ADDRESS WARPLINK_SECRET

# run NAME RANKS CODE...: runs that many ranks, and compares how they end: 137 is for one that was killed.
run() {
    local name=$1 ranks=$2 address rank codes=() pids=()
    shift 2
    address=127.0.0.1:$((20000 + RANDOM % 12000))
    for ((rank = 0; rank < ranks; rank++)); do
        timeout "${LIMIT:-120}" "device-bin/c_$name" "$rank" "$ranks" "$address" >"$logs/c_$name.$rank.log" 2>&1 &
        pids+=($!)
    done
    for pid in "${pids[@]}"; do
        wait "$pid" 2>/dev/null
        codes+=($?)
    done
    if [[ ${codes[*]} == "$*" ]]; then
        echo "c_$name: ok"
    else
        failed=1
        echo "c_$name FAILED: ended with ${codes[*]}; expected $*"
        tail -n 20 "$logs/c_$name".*.log
    fi
}

failed=0
for name in ${TESTS:-life_cycle collectives messages lost_peer threads}; do
    case $name in
        lost_peer) run "$name" 2 0 137 ;;
        threads) run "$name" 1 0 ;;
        *) run "$name" 2 0 0 ;;
    esac
done
tar -C "$logs" -cf "$OUT/c.tar" .
exit $failed
