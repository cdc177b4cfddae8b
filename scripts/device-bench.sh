#!/usr/bin/env bash
# Measures on all GPUs of this machine: transfers, host programs, overlapped products, and PyTorch's
# fused products beside them. Full tables and JSON go to $OUT.
set -uo pipefail
cd "$(dirname "$0")/.."
OUT=${OUT:-device-out}
mkdir -p "$OUT"
export CUDA_DEVICE_MAX_CONNECTIONS=32 NCCL_NVLS_ENABLE=0 TORCH_SYMM_MEM_DISABLE_MULTICAST=1 NO_COLOR=1
ranks=${RANKS:-$(nvidia-smi -L | wc -l)}
part() { # name, limit in seconds, command
    local name=$1 limit=$2
    shift 2
    echo "== $name"
    timeout --kill-after=5 "$limit" "$@" >"$OUT/$name.log" 2>&1 || echo "$name ended with $?"
    cat "$OUT/$name.log"
}
for name in ${PARTS:-p2p ring program overlap torch}; do
    case $name in
    p2p) part p2p 60 device-bin/warplink bench p2p -n "$ranks" ${P2P_ARGS:-} ;;
    ring) part ring 60 device-bin/warplink bench p2p -n "$ranks" --ring --from 64KiB --step 16 ${RING_ARGS:-} ;;
    program) part program 60 device-bin/warplink bench program -n "$ranks" ${PROGRAM_ARGS:-} ;;
    overlap)
        part overlap 240 device-bin/warplink bench overlap -n "$ranks" --output "$OUT/overlap.json" \
            --plot "$OUT/overlap.svg" ${OVERLAP_ARGS:-}
        ;;
    torch)
        part torch 150 torchrun --nproc-per-node "$ranks" scripts/torch_overlap.py --output "$OUT/torch.json" \
            ${TORCH_ARGS:-}
        ;;
    esac
done
