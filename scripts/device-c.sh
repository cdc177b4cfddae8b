#!/usr/bin/env bash
# Runs the programs of the C interface's tests and the example on GPUs, as crates/warplink-c/tests does on the host device:
# each as two ranks, but for those that have their ranks as threads. nvcc first compiles, without a warning, every call of
# warplink/device.cuh, a program that launches its kernel itself, and one that loads machine code which nvcc made: a cubin, a
# fat binary and PTX, and a cubin for another GPU, which must be refused. These then run as two ranks too. So does a program
# whose kernels have the channels of all connections in an array, which cc compiles here: as three ranks where three have
# room. Logs go to $OUT/c.tar; the summary is printed last.
#
# With RANKS_PER_GPU=N, up to N ranks share a GPU, as in device-tests.sh, so that one GPU is enough, but for the ranks that
# are threads. TESTS names the programs to run (default: all).
#
# Builds nothing else: needs device-bin/c_* and device-bin/libwarplink.so.* (scripts/device-build.sh), cc, and nvcc, in the
# PATH, in /usr/local/cuda/bin or named by NVCC.
set -uo pipefail
cd "$(dirname "$0")/.."
. scripts/device-environment.sh
OUT=${OUT:-device-out}
logs=$(mktemp -d)
mkdir -p "$OUT"
export WARPLINK_TEST_DEVICE=${WARPLINK_TEST_DEVICE:-cuda} CUDA_DEVICE_MAX_CONNECTIONS=32 NO_COLOR=1
export WARPLINK_DEVICE=$WARPLINK_TEST_DEVICE
unset WARPLINK_ID WARPLINK_ADDRESS WARPLINK_SECRET WARPLINK_RANK WARPLINK_WORLD WARPLINK_LOCAL_RANK
. scripts/device-service.sh
trap 'stop_service; rm -rf "$logs"' EXIT
gpus=$(PATH=$PATH:/usr/local/nvidia/bin nvidia-smi -L 2>/dev/null | wc -l)

# fails NAME TEXT FILES...: notes that something failed, with the ends of its logs.
fails() {
    failed=1
    echo "$1 FAILED: $2"
    shift 2
    tail -n 20 "$@"
}

# run PROGRAM RANKS CODE...: runs that many ranks, with what is in `more` as their further arguments, and compares how they
# end: 137 is for one that was killed.
more=()
run() {
    local program=$1 name ranks=$2 address rank codes=() pids=() variables
    name=$(basename "$program")
    shift 2
    # Of its own, which a rank that is killed may leave unusable.
    start_service || { failed=1; return; }
    address=127.0.0.1:$((20000 + RANDOM % 12000))
    for ((rank = 0; rank < ranks; rank++)); do
        variables=()
        if [[ $name == c_ping_pong ]]; then
            variables+=("WARPLINK_RANK=$rank" "WARPLINK_WORLD=$ranks" "WARPLINK_ADDRESS=$address")
        fi
        if ((${RANKS_PER_GPU:-1} > 1)); then
            variables+=("CUDA_VISIBLE_DEVICES=$((rank % gpus))" WARPLINK_LOCAL_RANK=0)
        fi
        env "${variables[@]}" timeout "${LIMIT:-120}" "$program" "$rank" "$ranks" "$address" "${more[@]}" >"$logs/$name.$rank.log" 2>&1 &
        pids+=($!)
    done
    for pid in "${pids[@]}"; do
        wait "$pid" 2>/dev/null
        codes+=($?)
    done
    stop_service
    if [[ ${codes[*]} == "$*" ]]; then
        echo "$name: ok"
    else
        fails "$name" "ended with ${codes[*]}; expected $*" "$logs/$name".*.log
    fi
}

programs=crates/warplink-c/tests/programs
# Programs that are compiled here find the library by this name.
ln -s "$PWD"/device-bin/libwarplink.so.* "$logs/libwarplink.so"
includes=(-I crates/warplink-c/include -I crates/warplink/kernels)
library=(-L "$logs" -lwarplink)

# Sets `nvcc`, and its options.
find_nvcc() {
    nvcc=${NVCC:-$(PATH=$PATH:/usr/local/cuda/bin command -v nvcc)}
    [[ -n $nvcc ]] || { echo 'nvcc is missing; set NVCC'; return 1; }
    options=(-std=c++17 -O2 -arch="${NVCC_ARCH:-native}" -Werror all-warnings "${includes[@]}")
}

# Compiles with nvcc: every call as an object and as a cubin, and the program into $logs.
compile() {
    find_nvcc && "$nvcc" --version &&
        "$nvcc" "${options[@]}" -c crates/warplink/kernels/channel.cu -o "$logs/channel.o" &&
        "$nvcc" "${options[@]}" -cubin crates/warplink/kernels/channel.cu -o "$logs/channel.cubin" &&
        "$nvcc" "${options[@]}" "$programs/nvcc.cu" -o "$logs/c_nvcc" "${library[@]}" -Xlinker "-rpath=$PWD/device-bin"
    local code=$?
    rm -f "$logs"/channel.*
    return $code
}

# Compiles a kernel to images, the last one for another GPU than any at hand, and the program that loads them.
compile_images() {
    local other=sm_75 kernel=$programs/exchange.cu
    if PATH=$PATH:/usr/local/nvidia/bin nvidia-smi --query-gpu=compute_cap --format=csv,noheader | grep -q '^7\.5$'; then
        other=sm_90
    fi
    find_nvcc &&
        "$nvcc" "${options[@]}" -cubin "$kernel" -o "$logs/exchange.cubin" &&
        "$nvcc" "${options[@]}" -fatbin "$kernel" -o "$logs/exchange.fatbin" &&
        "$nvcc" -std=c++17 -arch=compute_75 "${includes[@]}" -ptx "$kernel" -o "$logs/exchange.ptx" &&
        "$nvcc" -std=c++17 -arch=$other "${includes[@]}" -cubin "$kernel" -o "$logs/other.cubin" &&
        "$nvcc" "${options[@]}" "$programs/images.cu" -o "$logs/c_images" "${library[@]}" -Xlinker "-rpath=$PWD/device-bin"
}

compile_channels() {
    cc -std=c99 -D_POSIX_C_SOURCE=200809L -O2 -pthread "${includes[@]}" "$programs/channels.c" -o "$logs/c_channels" \
        "${library[@]}" "-Wl,-rpath,$PWD/device-bin"
}

failed=0
for name in ${TESTS:-nvcc images channels ping_pong life_cycle collectives messages lost_peer threads}; do
    case $name in
        nvcc)
            if compile >"$logs/nvcc.log" 2>&1; then
                echo "nvcc: ok, $(grep -o 'release [0-9.]*' "$logs/nvcc.log" | head -1)"
                run "$logs/c_nvcc" 2 0 0
            else
                fails nvcc 'did not compile' "$logs/nvcc.log"
            fi
            ;;
        images)
            if compile_images >"$logs/images.log" 2>&1; then
                more=("$logs"/exchange.cubin "$logs"/exchange.fatbin "$logs"/exchange.ptx "$logs"/other.cubin)
                run "$logs/c_images" 2 0 0
                more=()
                grep -h '^left out' "$logs"/c_images.0.log
            else
                fails images 'did not compile' "$logs/images.log"
            fi
            ;;
        channels)
            if compile_channels >"$logs/channels.log" 2>&1; then
                if ((gpus * ${RANKS_PER_GPU:-1} >= 3)) || [[ $WARPLINK_TEST_DEVICE == host ]]; then
                    run "$logs/c_channels" 3 0 0 0
                else
                    run "$logs/c_channels" 2 0 0
                fi
            else
                fails channels 'did not compile' "$logs/channels.log"
            fi
            ;;
        ping_pong)
            run device-bin/c_ping_pong 2 0 0
            grep -q '^after 1000 rounds the number is 2000' "$logs/c_ping_pong.0.log" ||
                fails c_ping_pong 'has not said what it came to' "$logs"/c_ping_pong.*.log
            ;;
        lost_peer) run device-bin/c_lost_peer 2 0 137 ;;
        threads)
            if ((gpus >= 2)) || [[ $WARPLINK_TEST_DEVICE == host ]]; then
                run device-bin/c_threads 1 0
            else
                echo 'c_threads: left out; ranks that are threads want a GPU each'
            fi
            ;;
        *) run "device-bin/c_$name" 2 0 0 ;;
    esac
done
rm -f "$logs"/c_{nvcc,images,channels} "$logs"/*.{cubin,fatbin,ptx} "$logs/libwarplink.so"
tar -C "$logs" -cf "$OUT/c.tar" .
exit $failed
