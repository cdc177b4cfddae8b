#!/usr/bin/env bash
# Measures what a user gets on this machine without tuning: every collective beside NCCL, with an empty cache. Prints a
# table of times; full reports go to $OUT/as-it-comes.json, a report a line.
#
# PARTS names the parts to run (default: collective multiprocessors forced):
#   collective       every kind, 1 KiB to 1 GiB, in place and not, eager and captured, beside NCCL and its symmetric memory
#   multiprocessors  64 MiB and 1 GiB with 8, 16, 32 and 64 multiprocessors, beside NCCL with as many
#   forced           beside the fastest number of lanes and threads that can be forced
# KINDS names the collectives, PLACE and ARGS the place and more arguments of the first part.
set -uo pipefail
cd "$(dirname "$0")/.."
. scripts/device-environment.sh
[ -x device-bin/warplink ] || { echo 'device-bin/warplink is missing; run scripts/device-build.sh first' >&2; exit 2; }
OUT=${OUT:-device-out}
mkdir -p "$OUT"
# Nothing that an earlier run has measured or compiled.
WARPLINK_CACHE_DIR=$(mktemp -d)
trap 'rm -rf "$WARPLINK_CACHE_DIR"' EXIT
unset WARPLINK_MODEL
export WARPLINK_CACHE_DIR NO_COLOR=1 CUDA_DEVICE_MAX_CONNECTIONS=32
ranks=${RANKS:-$(nvidia-smi -L | wc -l)}
bench() { # label, arguments
    local label=$1 limit=${LIMIT:-150}
    shift
    if timeout --kill-after=5 "$limit" device-bin/warplink bench collective "$@" -n "$ranks" --samples 5 --json >"$OUT/one" 2>>"$OUT/as-it-comes.log"; then
        printf '{"label": "%s", "report": %s}\n' "$label" "$(cat "$OUT/one")" >>"$OUT/as-it-comes.json"
    else
        echo "$label ended with $?: $(head -c 300 "$OUT/one")"
    fi
    rm -f "$OUT/one"
}
in_place() { case $1 in all-to-all | send-receive | gather | scatter | broadcast | reduce) echo out ;; *) echo both ;; esac; }
for part in ${PARTS:-collective multiprocessors forced}; do
    for kind in ${KINDS:-all-reduce all-gather reduce-scatter all-to-all broadcast reduce gather scatter send-receive}; do
        case $part in
        collective) bench "$kind" "$kind" --place "${PLACE:-$(in_place "$kind")}" --peers nccl,nccl-symmetric ${ARGS:-} ;;
        multiprocessors)
            case $kind in all-reduce | all-gather | reduce-scatter) ;; *) continue ;; esac
            for most in 8 16 32 64; do
                NCCL_MAX_CTAS=$most bench "$kind, $most multiprocessors" "$kind" --from 64MiB --step 16 --submission captured \
                    --multiprocessors "$most" --peers nccl
            done
            ;;
        forced)
            case $kind in all-reduce | all-gather | reduce-scatter | all-to-all) ;; *) continue ;; esac
            for shape in 8x1024 16x512 16x1024 32x512 64x512 95x512 128x512; do
                bench "$kind forced" "$kind" --from 4MiB --submission captured --lanes "${shape%x*}" --threads "${shape#*x}" --peers none
            done
            ;;
        esac
    done
done
python3 - "$OUT/as-it-comes.json" <<'PY'
import json, math, sys

own, peers, forced = {}, {}, {}
for line in open(sys.argv[1]):
    entry = json.loads(line)
    label, report = entry["label"], entry["report"]
    for row in report["rows"]:
        times = {one["method"]: one["seconds"]["median"] for one in row["methods"]}
        wrong = sum(one["wrong"] for one in row["methods"] if one["method"] == "warplink")
        if wrong:
            print(f"WRONG: {label} {row['bytes']} {wrong}")
        key = (row["bytes"], row["place"], row["submission"])
        if label.endswith(" forced"):
            kind = label.removesuffix(" forced")
            forced.setdefault(kind, {}).setdefault(key, []).append((times["warplink"], row["lanes"], row["threads"]))
            continue
        own.setdefault(label, {})[key] = (times.pop("warplink"), row["algorithm"], row["lanes"])
        if times:
            peers.setdefault(label, {})[key] = min(times.values())

def size(bytes):
    for unit, name in ((1 << 30, "G"), (1 << 20, "M"), (1 << 10, "K")):
        if bytes >= unit:
            return f"{bytes // unit}{name}"
    return str(bytes)

print("time in us / the better of NCCL's; below 1.0 in the last column, NCCL is faster")
for label, rows in own.items():
    for place in ("out", "in"):
        for submission in ("captured", "eager"):
            cells, ratios = [], []
            for (bytes, where, how), (seconds, algorithm, lanes) in sorted(rows.items()):
                if (where, how) != (place, submission):
                    continue
                peer = peers.get(label, {}).get((bytes, where, how))
                mark = "" if peer is None or peer > seconds else "!"
                cells.append(f"{size(bytes)} {seconds * 1e6:.4g}/{(peer or 0) * 1e6:.4g}{mark}")
                if peer:
                    ratios.append(peer / seconds)
            if cells:
                mean = math.exp(sum(map(math.log, ratios)) / len(ratios)) if ratios else 0
                print(f"{label} {place} {submission}: {'  '.join(cells)}  mean {mean:.2f}, least {min(ratios, default=0):.2f}")
for kind, rows in forced.items():
    cells = []
    for key, all in sorted(rows.items()):
        best, lanes, threads = min(all)
        chosen = own.get(kind, {}).get(key)
        if chosen:
            cells.append(f"{size(key[0])} {best / chosen[0]:.3f} ({lanes}x{threads}, chosen {chosen[2]})")
    if cells:
        print(f"{kind}, fastest forced / chosen: {'  '.join(cells)}")
PY
