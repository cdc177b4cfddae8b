#!/usr/bin/env bash
# Measures what PyTorch gets on GPUs, within 150 seconds: collectives and messages beside NCCL's backend, fused operations on
# random shapes beside the collective and the product, and a profile (scripts/torch_table.py, which arguments go to). The
# table goes to $OUT/torch.log and $OUT/torch_table.json. RANKS is how many GPUs are used (default: 2), LIMIT the seconds.
#
# Builds nothing: needs device-bin/_warplink.abi3.so and device-bin/python (PARTS=python scripts/device-build.sh), and
# PyTorch.
set -uo pipefail
cd "$(dirname "$0")/.."
. scripts/device-environment.sh
. scripts/device-package.sh
OUT=$(realpath -m "${OUT:-device-out}")
mkdir -p "$OUT"
export OUT
trap 'rm -rf "${package:-}"' EXIT
use_package
limit=${LIMIT:-145}
timeout --signal=INT --kill-after=3 "$limit" python3 -m torch.distributed.run --standalone \
    --nproc-per-node "${RANKS:-2}" scripts/torch_table.py --seconds "$((limit - 75))" "$@" >"$OUT/torch.log" 2>&1
code=$?
cat "$OUT/torch.log"
exit $code
