#!/usr/bin/env bash
# Runs programs that use NCCL on two GPUs with libwarplink-nccl.so in front: nccl-tests with ranks that are threads, one thread
# and processes, then PyTorch, CuPy and JAX (scripts/nccl_clients.py), and times nccl-tests beside NCCL itself. A line is
# printed per program, and the times of both last; logs go to $OUT/nccl.tar.
#
# Builds nothing: needs device-bin/nccl/libwarplink_nccl.so and, from scripts/build-nccl-tests.sh, device-bin/nccl-tests.
# PARTS says what is run (default: tests clients times), PROGRAMS which of nccl-tests, MODES how its ranks are started
# (default: threads one-thread processes), LIMIT how many seconds one program may take, MOST up to which size programs are timed, NCCL where NCCL's library is (default: that of PyTorch's wheel).
set -uo pipefail
cd "$(dirname "$0")/.."
. scripts/device-environment.sh
OUT=$(realpath -m "${OUT:-device-out}")
logs=$(mktemp -d)
mkdir -p "$OUT"
trap 'tar -C "$logs" -cf "$OUT/nccl.tar" .; rm -rf "$logs"' EXIT
front=$PWD/device-bin/nccl/libwarplink_nccl.so
real=${NCCL:-$(python3 -c 'import nvidia.nccl; print(list(nvidia.nccl.__path__)[0])')/lib/libnccl.so.2}
tests=device-bin/nccl-tests
programs=(all_reduce all_gather reduce_scatter broadcast reduce alltoall gather scatter sendrecv hypercube alltoallv)
[[ -z ${PROGRAMS:-} ]] || programs=($PROGRAMS)
LD_LIBRARY_PATH=$(dirname "$real"):${CUDA_HOME:-/usr/local/cuda}/lib64:${LD_LIBRARY_PATH:-}
export LD_LIBRARY_PATH
failed=0

# run NAME COMMAND...: runs a command with a limit and a log.
run() {
    local log=$logs/$1.log
    shift
    timeout --kill-after=3 "${LIMIT:-60}" "$@" >"$log" 2>&1
}

# in_front COMMAND...: arguments of `env` that put the library in front of NCCL.
in_front() {
    env LD_PRELOAD="$front" WARPLINK_NCCL_LIBRARY="$real" WARPLINK_NCCL_REPORT=1 "$@"
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

# Open MPI refuses to run as root unless allowed to.
processes=(mpirun --allow-run-as-root --oversubscribe -np 2)

correct() {
    local name mode
    for name in "${programs[@]}"; do
        # Each type and operator is another kernel to compile, so of all of them only short calls are made.
        local all=(-b 8 -e 2K -f 256 -n 2 -w 1 -c 1 -d all)
        case $name in all_reduce | reduce_scatter | reduce) all+=(-o all) ;; esac
        local some=(-b 8 -e 64M -f 16 -n 3 -w 1 -c 1 -d bfloat16)
        for mode in ${MODES:-threads one-thread processes}; do
            case $mode in
                threads) run "$name-$mode" bash -c 'in_front "$@"' _ "$tests/${name}_perf" -t 2 "${all[@]}" ;;
                one-thread) run "$name-$mode" bash -c 'in_front "$@"' _ "$tests/${name}_perf" -g 2 "${some[@]}" -G 2 ;;
                processes) run "$name-$mode" "${processes[@]}" bash -c 'in_front "$@"' _ "$tests/${name}_perf_mpi" "${some[@]}" ;;
                *) echo "MODES has '$mode'; expected threads, one-thread or processes" >&2; exit 2 ;;
            esac
            judge "$name-$mode" $?
        done
    done
}

clients() {
    local client library
    for client in torch cupy jax; do
        for library in warplink nccl; do
            local command=(python3 scripts/nccl_clients.py "$client")
            [[ $library == nccl ]] || command=(bash -c 'in_front "$@"' _ "${command[@]}")
            if LIMIT=${LIMIT:-120} run "$client-$library" "${command[@]}"; then
                grep -h right "$logs/$client-$library.log" | sed "s/^/$library, /"
            else
                echo "$client with $library FAILED ($?):"
                grep -v '^  *File\|^$' "$logs/$client-$library.log" | tail -n "${LINES_OF_FAILURE:-25}"
                [[ $library == nccl ]] || failed=1
            fi
        done
    done
}

# Times out of place and in place, of a log: bytes, microseconds and microseconds a line.
times_of() {
    awk '$1 ~ /^[0-9]+$/ && NF >= 12 { print $1, $6, $10 }' "$1"
}

times() {
    local name
    for name in "${programs[@]}"; do
        [[ $name != hypercube && $name != alltoallv ]] || continue
        local options=(-b 1K -e "${MOST:-1G}" -f 8 -n 20 -w 5 -c 0 -d bfloat16)
        for graph in 0 20; do
            run "$name-nccl-$graph" "${processes[@]}" "$tests/${name}_perf_mpi" "${options[@]}" -G "$graph"
            run "$name-warplink-$graph" "${processes[@]}" bash -c 'in_front "$@"' _ "$tests/${name}_perf_mpi" \
                "${options[@]}" -G "$graph"
            join <(times_of "$logs/$name-nccl-$graph.log" | sort -k1,1) \
                <(times_of "$logs/$name-warplink-$graph.log" | sort -k1,1) | sort -n |
                awk -v name="$name" -v graph="$graph" '
                    { line = line sprintf(" %s:%.2f/%.2f=%.2f,%.2f", $1, $4, $2, $2 / $4, $3 / $5); sum += log($2 / $4); n++ }
                    END { if (n) printf "%s %s (ours/NCCL us = ratio, in place): mean %.2f;%s\n", name, graph ? "graph" : "eager", exp(sum / n), line }'
        done
    done
}

for part in ${PARTS:-tests clients times}; do
    case $part in
        tests) correct ;;
        clients) clients ;;
        times) times ;;
        *) echo "PARTS has '$part'; expected tests, clients or times" >&2; exit 2 ;;
    esac
done
exit $failed
