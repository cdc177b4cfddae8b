#!/usr/bin/env bash
# Runs programs that use NCCL on two GPUs or more with libwarplink-nccl.so in front, and by NCCL itself. A line is printed
# per program; logs go to $OUT/nccl.tar. PARTS says what is run:
#
#   tests    nccl-tests with ranks that are threads, one thread and processes: results
#   shared   nccl-tests with eight ranks that share the GPUs: results
#   clients  PyTorch, CuPy, JAX and ctypes (scripts/nccl_clients.py), and CuPy's own tests if CUPY_TESTS names the file
#   suite    PyTorch's own tests of process groups (scripts/device-torch-suite.sh)
#   faults   killed ranks, aborts, different calls and others (crates/warplink-nccl/tests/programs/faults.py)
#   host     host time of calls (scripts/nccl_host_times.py)
#   times    nccl-tests beside NCCL, and NCCL with symmetric memory
#
# Builds nothing: needs device-bin/nccl/libwarplink_nccl.so and, from scripts/build-nccl-tests.sh, device-bin/nccl-tests.
# PROGRAMS chooses among nccl-tests, MODES how ranks are started (default: threads one-thread processes), CLIENTS and
# FAULTS among those; LIMIT is how many seconds one program may take, MOST the largest size of tests and times (default:
# 1G), NCCL where NCCL's library is (default: that of PyTorch's wheel). Tests and times use RANKS GPUs (default: 2), and as
# many such sets at once as there are.
set -uo pipefail
cd "$(dirname "$0")/.."
. scripts/device-environment.sh
. scripts/device-service.sh
OUT=$(realpath -m "${OUT:-device-out}")
logs=$(mktemp -d)
mkdir -p "$OUT"
trap 'stop_service; tar -C "$logs" -cf "$OUT/nccl.tar" .; rm -rf "$logs"' EXIT
front=$PWD/device-bin/nccl/libwarplink_nccl.so
real=${NCCL:-$(python3 -c 'import nvidia.nccl; print(list(nvidia.nccl.__path__)[0])')/lib/libnccl.so.2}
tests=device-bin/nccl-tests
programs=(all_reduce all_gather reduce_scatter broadcast reduce alltoall gather scatter sendrecv hypercube alltoallv)
[[ -z ${PROGRAMS:-} ]] || programs=($PROGRAMS)
LD_LIBRARY_PATH=$(dirname "$real"):${CUDA_HOME:-/usr/local/cuda}/lib64:${LD_LIBRARY_PATH:-}
export LD_LIBRARY_PATH
PATH=$PATH:$(dirname "$(command -v nvidia-smi || echo /usr/local/nvidia/bin/nvidia-smi)")
read -r -a visible <<<"$(tr , ' ' <<<"${CUDA_VISIBLE_DEVICES:-$(seq -s , 0 $(($(nvidia-smi -L | wc -l) - 1)))}")"
gpus=${#visible[@]}
failed=0

# run NAME COMMAND...: runs a command with a limit and a log.
run() {
    local log=$logs/$1.log
    shift
    timeout --kill-after=3 "${LIMIT:-60}" "$@" >"$log" 2>&1
}

# in_front COMMAND...: runs a command with the library in front of NCCL. REPORT=1 prints which calls it has executed.
in_front() {
    env LD_PRELOAD="$front" WARPLINK_NCCL_LIBRARY="$real" WARPLINK_NCCL_REPORT="${REPORT:-}" "$@"
}
export -f in_front
export front real

# judge NAME CODE: prints how nccl-tests ended.
judge() {
    local log=$logs/$1.log
    if (($2 == 0)) && grep -q 'Out of bounds values : 0 OK' "$log"; then
        echo "$1: 0 wrong"
    else
        echo "$1 FAILED ($2):"
        grep -vE '^#|^$' "$log" | tail -n 12
        failed=1
    fi
}

# Open MPI refuses to run as root unless allowed to. It would bind each of two ranks to one core, with all of its threads.
mpi=(mpirun --allow-run-as-root --oversubscribe --bind-to none)
processes=("${mpi[@]}" -np "${RANKS:-2}")

# sets_of N: the visible GPUs in sets of N.
sets_of() {
    printf '%s\n' "${visible[@]}" | xargs -n "$1" | awk -v size="$1" 'NF == size' | tr ' ' ,
}

# over_sets FUNCTION NAME...: calls the function with each name, on as many sets of GPUs at once as there are.
over_sets() {
    local function=$1 sets set at each all=()
    shift
    read -r -a sets <<<"$(sets_of "${RANKS:-2}" | xargs)"
    for ((set = 0; set < ${#sets[@]}; set++)); do
        (
            export CUDA_VISIBLE_DEVICES=${sets[set]}
            failed=0
            for ((at = set + 1; at <= $#; at += ${#sets[@]})); do "$function" "${!at}"; done
            exit $failed
        ) &
        all+=($!)
    done
    for each in "${all[@]}"; do wait "$each" || failed=1; done
}

# check_program NAME: prints whether a program's results are right.
check_program() {
    local name=$1 mode
    # Each type and operator is another kernel to compile, so of all of them only short calls are made.
    local all=(-b 8 -e 2K -f 256 -n 2 -w 1 -c 1 -d all)
    case $name in all_reduce | reduce_scatter | reduce) all+=(-o all) ;; esac
    local some=(-b 8 -e "${MOST:-1G}" -f 8 -n 3 -w 1 -c 1 -d bfloat16)
    for mode in ${MODES:-threads one-thread processes}; do
        case $mode in
            threads) run "$name-$mode" bash -c 'REPORT=1 in_front "$@"' _ "$tests/${name}_perf" -t 2 "${all[@]}" ;;
            one-thread) run "$name-$mode" bash -c 'REPORT=1 in_front "$@"' _ "$tests/${name}_perf" -g 2 "${some[@]}" -G 2 ;;
            processes) run "$name-$mode" "${processes[@]}" bash -c 'REPORT=1 in_front "$@"' _ "$tests/${name}_perf_mpi" "${some[@]}" ;;
            *) echo "MODES has '$mode'; expected threads, one-thread or processes" >&2; exit 2 ;;
        esac
        judge "$name-$mode" $?
    done
}

# Ranks choose their GPUs. NCCL refuses ranks that share one, so Warplink has to execute all calls.
shared() {
    local name ranks=8
    local RANKS_PER_GPU=$((ranks / gpus))
    . scripts/device-service.sh
    start_service
    export PER_GPU=$RANKS_PER_GPU
    on_own_gpu() { NCCL_TESTS_DEVICE=$((OMPI_COMM_WORLD_LOCAL_RANK / PER_GPU)) in_front "$@"; }
    export -f on_own_gpu
    for name in "${programs[@]}"; do
        WARPLINK_TOPOLOGY=fully-connected WARPLINK_NCCL_ROUTE=warplink run "$name-shared" "${mpi[@]}" -np $ranks \
            bash -c 'on_own_gpu "$@"' _ "$tests/${name}_perf_mpi" -b 8 -e 4M -f 64 -n 2 -w 1 -c 1 -d bfloat16
        judge "$name-shared" $?
    done
    stop_service
    unset WARPLINK_TEST_RANKS_PER_GPU CUDA_DEVICE_MAX_CONNECTIONS PER_GPU
}

clients() {
    local client library command
    for client in ${CLIENTS:-torch cupy jax ctypes}; do
        for library in warplink nccl; do
            command=(python3 scripts/nccl_clients.py "$client")
            [[ $library == nccl ]] || command=(bash -c 'REPORT=1 in_front "$@"' _ "${command[@]}")
            if LIMIT=${LIMIT:-120} run "$client-$library" "${command[@]}"; then
                grep -h right "$logs/$client-$library.log" | sed "s/^/$library, /"
            else
                echo "$client with $library FAILED ($?):"
                # Without the places of exceptions, whose lines follow, but with those of signals.
                grep -v '^  *File .*, in \|^$' "$logs/$client-$library.log" | tail -n "${LINES_OF_FAILURE:-50}"
                [[ $library == nccl ]] || failed=1
            fi
        done
    done
    [[ -n ${CUPY_TESTS:-} ]] || return 0
    for library in warplink nccl; do
        command=(python3 -m pytest -q -rf --tb=line -p no:cacheprovider "$CUPY_TESTS")
        [[ $library == nccl ]] || command=(bash -c 'in_front "$@"' _ "${command[@]}")
        run "cupy-tests-$library" "${command[@]}"
        [[ $? == 0 || $library == nccl ]] || failed=1
        grep -h '^FAILED\|passed\|failed' "$logs/cupy-tests-$library.log" | sed "s/^/CuPy's tests with $library: /"
    done
}

suite() {
    # Each test has two ranks, and most of its time is the start of their processes.
    GPU_SETS=$(sets_of 2) WORKERS=${WORKERS:-$((5 * gpus))} DISTRIBUTED_TESTS_DEFAULT_TIMEOUT=90 RUNS="nccl front" \
        LIMIT=${SUITE_LIMIT:-220} FRONT=$front REAL=$real OUT=$logs scripts/device-torch-suite.sh || failed=1
}

faults() {
    local program=crates/warplink-nccl/tests/programs/faults.py
    WARPLINK_NCCL_LIBRARY=$real timeout "${FAULTS_LIMIT:-180}" python3 -B "$program" "$front" ${FAULTS:-} 2>&1 || failed=1
}

host() {
    local library
    if ((gpus == 1)); then
        local RANKS_PER_GPU=2
        . scripts/device-service.sh
        start_service
        export WARPLINK_TOPOLOGY=fully-connected WARPLINK_NCCL_ROUTE=warplink
    fi
    for library in "$front" "$real"; do
        echo "host times of $(basename "$library"), us:"
        WARPLINK_NCCL_LIBRARY=$real timeout 120 python3 scripts/nccl_host_times.py "$library" 2>&1 || failed=1
    done
    stop_service
    unset WARPLINK_TOPOLOGY WARPLINK_NCCL_ROUTE
}

# Times out of place and in place, of a log: bytes, microseconds and microseconds a line.
times_of() {
    awk '$1 ~ /^[0-9]+$/ && NF >= 12 { print $1, $6, $10 }' "$1"
}

# time_program NAME: prints the times of a program by Warplink, NCCL, and NCCL with symmetric memory.
time_program() {
    local name=$1 graph options
    for graph in 0 20; do
        options=("$tests/${name}_perf_mpi" -b 1K -e "${MOST:-1G}" -f "${FACTOR:-4}" -n 20 -w 5 -c 0 -d bfloat16 -G "$graph")
        run "$name-nccl-$graph" "${processes[@]}" "${options[@]}"
        run "$name-symmetric-$graph" "${processes[@]}" "${options[@]}" -R 2
        run "$name-warplink-$graph" "${processes[@]}" bash -c 'in_front "$@"' _ "${options[@]}"
        local by
        for by in nccl symmetric warplink; do times_of "$logs/$name-$by-$graph.log" | sort -k1,1 >"$logs/$name-$by-$graph.us"; done
        join -a 1 -e 0 -o 0,1.2,1.3,2.2,2.3 "$logs/$name-nccl-$graph.us" "$logs/$name-symmetric-$graph.us" |
            join - "$logs/$name-warplink-$graph.us" | sort -n |
            awk -v name="$name" -v graph="$graph" '
                function least(a, b) { return b > 0 && b < a ? b : a }
                function size(bytes) { return bytes < 2^20 ? bytes / 2^10 "K" : bytes / 2^20 "M" }
                {
                    line = line sprintf(" %s:%.4g/%.4g/%.4g", size($1), $6, $2, $4)
                    out = least($2, $4) / $6; in_place = least($3, $5) / $7
                    outs += log(out); ins += log(in_place); n++
                    if (out < 1) behind = behind sprintf(" %s %.2f", size($1), out)
                    if (in_place < 1) behind = behind sprintf(" %s %.2f in place", size($1), in_place)
                    if (n == 1 || out < worst_out) { worst_out = out; at_out = size($1) }
                    if (n == 1 || in_place < worst_in) { worst_in = in_place; at_in = size($1) }
                }
                END {
                    if (!n) { print name, graph ? "graph" : "eager", "has no times"; exit 1 }
                    printf "%s %s: out of place %.2f, %.2f at %s; in place %.2f, %.2f at %s; behind:%s;%s\n", name,
                        graph ? "graph" : "eager", exp(outs / n), worst_out, at_out, exp(ins / n), worst_in, at_in, behind, line
                }'
    done
}

times() {
    local name timed=()
    for name in "${programs[@]}"; do
        [[ $name == hypercube || $name == alltoallv ]] || timed+=("$name")
    done
    echo "the better of NCCL's times / Warplink's, mean and least; bytes: Warplink / NCCL / symmetric, us, out of place"
    over_sets time_program "${timed[@]}"
}

for part in ${PARTS:-tests clients times}; do
    start=$SECONDS
    case $part in
        tests) over_sets check_program "${programs[@]}" ;;
        shared | clients | suite | faults | host | times) "$part" ;;
        *) echo "PARTS has '$part'; expected tests, shared, clients, suite, faults, host or times" >&2; exit 2 ;;
    esac
    echo "$part took $((SECONDS - start)) s"
done
exit $failed
