#!/usr/bin/env bash
# Measures on all GPUs of this machine: the hardware model, transfers, host programs, overlapped GEMMs,
# and PyTorch's fused operations beside them. Full tables and JSON go to $OUT/bench.tar.
#
# PARTS names the parts to run (default: tune p2p ring program overlap random torch; there are collective, bound and
# experts as well, and every other benchmark by its name, with the arguments in NAME_ARGS). COLLECTIVES names those of the
# part collective, for which PyTorch's symmetric memory is measured, too; bound are collectives that are bound to their
# memory. With a command of an earlier commit in device-bin/base/, the parts p2p, ring and overlap are measured with both,
# one after the other.
set -uo pipefail
cd "$(dirname "$0")/.."
. scripts/device-environment.sh
[ -x device-bin/warplink ] || { echo 'device-bin/warplink is missing; run scripts/device-build.sh first' >&2; exit 2; }
failed=0
OUT=${OUT:-device-out}
mkdir -p "$OUT/bench"
export CUDA_DEVICE_MAX_CONNECTIONS=32 NO_COLOR=1
ranks=${RANKS:-$(nvidia-smi -L | wc -l)}
part() { # name, limit in seconds, command
    local name=$1 limit=$2 start=$SECONDS
    shift 2
    timeout --kill-after=5 "$limit" "$@" >"$OUT/bench/$name.log" 2>&1 || { echo "$name ended with $?"; failed=1; }
    echo "== $name, $((SECONDS - start)) s"
    head -c "${PART_BYTES:-6000}" "$OUT/bench/$name.log"
}
both() { # name, limit, arguments of the command
    local name=$1 limit=$2
    shift 2
    if [ -x device-bin/base/warplink ]; then
        part "$name-base" "$limit" device-bin/base/warplink "$@"
    fi
    part "$name" "$limit" device-bin/warplink "$@"
}
for name in ${PARTS:-tune p2p ring program overlap random torch}; do
    case $name in
    tune)
        part tune 280 device-bin/warplink tune -n "$ranks" --output "$OUT/bench/model.json" ${TUNE_ARGS:-}
        if [ -s "$OUT/bench/model.json" ]; then export WARPLINK_MODEL=$OUT/bench/model.json; fi
        ;;
    p2p) both p2p 60 bench p2p -n "$ranks" ${P2P_ARGS:-} ;;
    ring) both ring 60 bench p2p -n "$ranks" --ring --from 64KiB --step 16 ${RING_ARGS:-} ;;
    overlap)
        both overlap 240 bench overlap -n "$ranks" ${OVERLAP_ARGS:-}
        ;;
    random)
        part random 280 device-bin/warplink bench overlap -n "$ranks" --random 100 \
            --output "$OUT/bench/random.json" ${RANDOM_ARGS:---samples 10}
        tail -n 3 "$OUT/bench/random.log"
        ;;
    collective)
        for kind in ${COLLECTIVES:-all-reduce all-gather reduce-scatter all-to-all}; do
            beside=()
            if [ "$kind" != all-to-all ]; then
                part "torch-$kind" 60 torchrun --nproc-per-node "$ranks" scripts/torch_collectives.py "$kind" \
                    --output "$OUT/bench/torch-$kind.json" ${TORCH_ARGS:-}
                if [ -s "$OUT/bench/torch-$kind.json" ]; then beside=(--beside "$OUT/bench/torch-$kind.json"); fi
            fi
            part "$kind" 60 device-bin/warplink bench collective "$kind" -n "$ranks" --peers nccl,nccl-symmetric \
                "${beside[@]}" --plot "$OUT/bench/$kind.svg" ${COLLECTIVE_ARGS:-}
        done
        ;;
    bound)
        for kind in all-gather all-to-all; do
            place=out
            [[ $kind == all-to-all ]] || place=both
            part "bound-$kind" 60 device-bin/warplink bench collective "$kind" -n "$ranks" --bound --place "$place" \
                --from 16MiB --peers nccl,nccl-symmetric ${BOUND_ARGS:-}
        done
        ;;
    experts)
        for routing in random one-rank; do
            part "experts-$routing" 120 device-bin/warplink bench expert-parallel -n "$ranks" --routing "$routing" \
                ${EXPERT_ARGS:-}
        done
        ;;
    torch)
        part torch 150 torchrun --nproc-per-node "$ranks" scripts/torch_overlap.py \
            --output "$OUT/bench/torch.json" ${TORCH_ARGS:-}
        ;;
    *)
        more=${name^^}_ARGS
        more=${more//-/_}
        part "$name" 120 device-bin/warplink bench "$name" -n "$ranks" ${!more:-}
        ;;
    esac
done
tar -C "$OUT" -cf "$OUT/bench.tar" bench && rm -r "$OUT/bench"
exit "$failed"
