#!/usr/bin/env bash
# Measures collectives with every number of lanes and threads that can be forced, in graphs, on all GPUs of this machine:
# what the choice of lanes is compared with. Tables go to $OUT/sweep.log, the shortest times are printed.
#
# KINDS names the collectives, LANES and THREADS the shapes, ARGS more arguments of each.
set -uo pipefail
cd "$(dirname "$0")/.."
. scripts/device-environment.sh
[ -x device-bin/warplink ] || { echo 'device-bin/warplink is missing; run scripts/device-build.sh first' >&2; exit 2; }
OUT=${OUT:-device-out}
mkdir -p "$OUT"
export CUDA_DEVICE_MAX_CONNECTIONS=32 NO_COLOR=1
ranks=${RANKS:-$(nvidia-smi -L | wc -l)}
for kind in ${KINDS:-all-reduce all-gather reduce-scatter all-to-all}; do
    for lanes in ${LANES:-4 8 16 32 64 128}; do
        for threads in ${THREADS:-512 1024}; do
            timeout --kill-after=5 60 device-bin/warplink bench collective "$kind" -n "$ranks" --peers none \
                --submission captured --lanes "$lanes" --threads "$threads" --from "${FROM:-1MiB}" --to "${TO:-256MiB}" \
                --samples 5 --json ${ARGS:-} >"$OUT/one.json" 2>>"$OUT/sweep.err" || echo "$kind $lanes $threads ended with $?"
            echo "$kind $lanes $threads $(cat "$OUT/one.json")" >>"$OUT/sweep.log"
        done
    done
done
rm -f "$OUT/one.json"
python3 - "$OUT/sweep.log" <<'PY'
import json, sys
best = {}
for line in open(sys.argv[1]):
    kind, lanes, threads, text = line.split(" ", 3)
    try:
        report = json.loads(text)
    except ValueError:
        continue
    for row in report.get("rows", []):
        own = next(one for one in row["methods"] if one["method"] == "warplink")
        shape = (own["seconds"]["median"] * 1e6, int(lanes), int(threads), row["algorithm"])
        best.setdefault((kind, row["bytes"]), []).append(shape)
for (kind, size), all in sorted(best.items()):
    shown = "  ".join(f"{lanes}x{threads} {us:.1f}" for us, lanes, threads, _ in sorted(all)[:12])
    print(f"{kind:15} {size >> 10:8} KiB  {shown}")
PY
