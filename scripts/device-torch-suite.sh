#!/usr/bin/env bash
# Runs PyTorch's own tests of process groups on GPUs: by NCCL's backend, and with Warplink's process group in its place, as
# it is by default and with direct collectives and messages. Prints which tests pass by NCCL and not by Warplink, and fails
# where there is one. Reports go to $OUT.
#
# With RANKS_PER_GPU=N, up to N ranks share a GPU, as in device-tests.sh, so that one GPU is enough. RUNS names the runs
# (default: nccl warplink direct), WORKERS how many tests run at a time (pytest-xdist), FILTER chooses tests as pytest's -k
# does, and arguments go to pytest.
#
# Builds nothing: needs device-bin/_warplink.abi3.so and device-bin/python (PARTS=python scripts/device-build.sh), and
# PyTorch.
set -uo pipefail
cd "$(dirname "$0")/.."
. scripts/device-service.sh
. scripts/device-package.sh
OUT=$(realpath -m "${OUT:-device-out}")
mkdir -p "$OUT"
trap 'rm -rf "${package:-}"; stop_service' EXIT
use_package
start_service
export PYTHONPATH=$PYTHONPATH:$PWD/crates/warplink-py/tests
export NCCL_NVLS_ENABLE=0 TORCH_SYMM_MEM_DISABLE_MULTICAST=1 NO_COLOR=1 BACKEND=nccl WORLD_SIZE=${WORLD_SIZE:-2}
cd crates/warplink-py/tests
for run in ${RUNS:-nccl warplink direct}; do
    unset WARPLINK_FOR_NCCL WARPLINK_DIRECT
    case $run in
        warplink) export WARPLINK_FOR_NCCL=1 ;;
        direct) export WARPLINK_FOR_NCCL=1 WARPLINK_DIRECT=1 ;;
    esac
    start=$SECONDS
    timeout --signal=INT --kill-after=20 "${LIMIT:-280}" python3 -m pytest -q -p no:cacheprovider --tb=short -n "${WORKERS:-6}" \
        --junitxml="$OUT/$run.xml" -o junit_logging=no -k "${FILTER:-test}" pytorch_suite.py "$@" >"$OUT/$run.log" 2>&1
    echo "$run: $(tail -n 1 "$OUT/$run.log") ($((SECONDS - start)) s)"
done
python3 - "$OUT" ${RUNS:-nccl warplink direct} <<'PYTHON'
import pathlib, sys
import xml.etree.ElementTree as tree

folder, first, *others = pathlib.Path(sys.argv[1]), *sys.argv[2:]


def passed(run):
    cases = tree.parse(folder / f"{run}.xml").getroot().iter("testcase")
    kinds = ("failure", "error", "skipped")
    return {case.get("name") for case in cases if all(case.find(kind) is None for kind in kinds)}


expected = passed(first)
failed = not expected
for run in others:
    missing = sorted(expected - passed(run))
    failed |= bool(missing)
    print(f"{run}: {len(expected) - len(missing)} of the {len(expected)} tests that pass by {first}", *missing, sep="\n  ")
sys.exit(failed)
PYTHON
