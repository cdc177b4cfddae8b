#!/usr/bin/env bash
# Prints the tables of `warplink faults` on GPUs: two ranks on two GPUs, and eight on two, each with the last
# rank and with rank 0, which serves the store, as the victim. Logs and JSON go to $OUT in one archive; the
# tables are printed last.
#
# PARTS chooses among two-last, two-first, eight-last and eight-first. With four GPUs, the tables of two ranks
# run on the first two beside those of eight on the others. JOBS_TWO and JOBS_EIGHT say how many cells of one
# table run at the same time. That takes CUDA's multi-process service, also where no ranks of a cell share a
# GPU: without it, processes take turns on a GPU, and those that wait for one another seldom have theirs
# together (SERVICE_TWO=no leaves it out; then JOBS_TWO should be 1). LIMIT_TWO and LIMIT_EIGHT say how many
# seconds a table may take: what is done by then is printed. ARGS are more arguments, such as `--phase graph`.
set -uo pipefail
cd "$(dirname "$0")/.."
. scripts/device-environment.sh
OUT=${OUT:-device-out}
mkdir -p "$OUT"
export NO_COLOR=1 WARPLINK_DEVICE=cuda
PATH=$PATH:$(dirname "$(command -v nvidia-smi || echo /usr/local/nvidia/bin/nvidia-smi)")
PARTS=${PARTS:-two-last two-first eight-last eight-first}
logs=$(mktemp -d)
trap 'rm -rf "$logs"' EXIT

# table NAME LIMIT ARGUMENTS...: one table, as JSON and with its progress in a log.
table() {
    local name=$1 limit=$2 start=$SECONDS
    shift 2
    timeout -k 20 "$limit" device-bin/warplink faults --json "$@" ${ARGS:-} \
        >"$logs/$name.json" 2>"$logs/$name.log"
    echo "$name: exit code $?, $((SECONDS - start)) s, $(grep -c '^warplink: \[' "$logs/$name.log") cells"
}

# tables KIND LIMIT ARGUMENTS...: the tables of that kind, one after another.
tables() {
    local kind=$1 limit=$2 part
    shift 2
    for part in $PARTS; do
        case $part in
        "$kind-last") table "$part" "$limit" "$@" ;;
        "$kind-first") table "$part" "$limit" "$@" --victim 0 ;;
        esac
    done
}
two=("${LIMIT_TWO:-150}" -n 2 --jobs "${JOBS_TWO:-4}")
if [ "${SERVICE_TWO:-yes}" = yes ]; then two+=(--ranks-per-gpu 1); fi
eight=("${LIMIT_EIGHT:-220}" -n 8 --ranks-per-gpu "${RANKS_PER_GPU:-4}" --jobs "${JOBS_EIGHT:-4}")
if (($(nvidia-smi -L | wc -l) >= 4)); then
    CUDA_VISIBLE_DEVICES=0,1 tables two "${two[@]}" &
    CUDA_VISIBLE_DEVICES=2,3 tables eight "${eight[@]}"
    wait
else
    tables two "${two[@]}"
    tables eight "${eight[@]}"
fi
tar -C "$logs" -czf "$OUT/faults.tgz" .

python3 - "$logs" $PARTS <<'PYTHON'
import json, os, sys

folder, *parts = sys.argv[1:]
failed = False
for part in parts:
    try:
        with open(os.path.join(folder, part + ".json")) as file:
            report = json.load(file)
    except (OSError, ValueError):
        report = None
    if report is None or "cells" not in report:
        failed = True
        print(f"\n{part}: no table; the end of its log:")
        with open(os.path.join(folder, part + ".log"), errors="replace") as file:
            print("".join(line[:300] + "\n" for line in file.read().splitlines()[-30:]))
        continue
    cells = report["cells"]
    failed |= report["wrong"] + report["not_run"] > 0
    print(
        f"\n{part}: {report['ranks']} ranks, victim {report['victim']}, {report['seconds']:.0f} s: "
        f"{len(cells) - report['wrong']} right, {report['wrong']} wrong, {report['not_run']} not run, "
        f"service restarted {report['service_restarts']} times"
    )
    phases = list(dict.fromkeys(cell["phase"] for cell in cells))
    faults = list(dict.fromkeys(cell["fault"] for cell in cells))
    print(f"{'fault':12}" + "".join(f"{phase:>17}" for phase in phases))
    for fault in faults:
        row = f"{fault:12}"
        for phase in phases:
            cell = next((c for c in cells if (c["fault"], c["phase"]) == (fault, phase)), None)
            text = "-"
            if cell:
                seconds = cell["seconds"]
                mark = ("!" if cell["problems"] else "") + ("*" if cell["spoiled"] else "")
                text = mark + cell["summary"] + (f" {seconds:.2f}" if seconds is not None else "")
            row += f"{text[:16]:>17}"
        print(row)
    times = [cell["seconds"] for cell in cells if cell["seconds"] is not None]
    print(f"longest wait {max(times, default=0):.2f} s; ! wrong, * ran again after the service had failed")
    for cell in cells:
        for problem in cell["problems"][:3]:
            print(f"  {cell['fault']} in {cell['phase']}: {problem[:400]}")
        for problem in cell["spoiled"][:2]:
            print(f"  {cell['fault']} in {cell['phase']}, before it ran again: {problem[:400]}")
sys.exit(failed)
PYTHON
