#!/usr/bin/env bash
# Runs PyTorch's own tests of process groups on GPUs: by NCCL's backend, with Warplink's process group in its place, as
# it is by default, where its own collectives and messages serve what they can (`warplink`), and without those (`indirect`), and,
# as `front`, by NCCL's backend with the library FRONT in front of NCCL, which is REAL. The first run says which tests pass;
# the others run those, print which do not pass, and fail where there is one. Reports go to $OUT.
#
# With RANKS_PER_GPU=N, up to N ranks share a GPU, so that one GPU is enough. They take turns on it: CUDA's multi-process
# service, which device-tests.sh uses, has no room for the ranks of so many tests. RUNS names the runs
# (default: nccl warplink indirect), WORKERS how many tests run at a time (pytest-xdist), GPU_SETS the sets of GPUs that they
# take in turn, such as '0,1 2,3', FILTER chooses tests as pytest's -k does, and arguments go to pytest.
#
# Builds nothing: needs device-bin/python and, for Warplink's process group, device-bin/_warplink.abi3.so
# (PARTS=python scripts/device-build.sh), and PyTorch.
set -uo pipefail
cd "$(dirname "$0")/.."
. scripts/device-environment.sh
. scripts/device-package.sh
OUT=$(realpath -m "${OUT:-device-out}")
mkdir -p "$OUT"
trap 'rm -rf "${package:-}"' EXIT
RUNS=${RUNS:-nccl warplink indirect}
if [[ $RUNS == *warplink* || $RUNS == *indirect* ]]; then
    use_package
else
    export PYTHONPATH=$PWD/device-bin/python
fi
[[ -z ${RANKS_PER_GPU:-} ]] || export WARPLINK_TEST_RANKS_PER_GPU=$RANKS_PER_GPU
export PYTHONPATH=$PYTHONPATH:$PWD/crates/warplink-py/tests
export NO_COLOR=1 BACKEND=nccl WORLD_SIZE=${WORLD_SIZE:-2}
cd crates/warplink-py/tests

# passed RUN: the names of the tests that passed in a run, as far as it came.
passed() {
    python3 - "$OUT/$1.xml" <<'PYTHON'
import sys
import xml.etree.ElementTree as tree

cases = tree.parse(sys.argv[1]).getroot().iter("testcase")
kinds = ("failure", "error", "skipped")
names = [case.get("name") for case in cases if all(case.find(kind) is None for kind in kinds)]
# What was interrupted has none.
print(*sorted(filter(None, names)), sep="\n")
PYTHON
}

first= failed=0
export WARPLINK_TEST_GPU_SETS=${GPU_SETS:-}
for run in $RUNS; do
    unset WARPLINK_FOR_NCCL WARPLINK_TORCH_DIRECT_MESSAGES WARPLINK_TORCH_DIRECT_COLLECTIVES
    in_front=()
    case $run in
        front) in_front=(env LD_PRELOAD="$FRONT" WARPLINK_NCCL_LIBRARY="$REAL") ;;
        warplink) export WARPLINK_FOR_NCCL=1 ;;
        indirect) export WARPLINK_FOR_NCCL=1 WARPLINK_TORCH_DIRECT_MESSAGES=0 WARPLINK_TORCH_DIRECT_COLLECTIVES=0 ;;
    esac
    chosen=(-k "${FILTER:-test}" pytorch_suite.py)
    # What does not pass in the first run says nothing in the others.
    [[ -z $first ]] || chosen=("@$OUT/$first.passed")
    start=$SECONDS
    # An interrupt, so that what has run is reported.
    timeout --signal=INT --kill-after=20 "${LIMIT:-280}" "${in_front[@]}" python3 -m pytest -q -p no:cacheprovider --tb=short \
        -n "${WORKERS:-6}" --junitxml="$OUT/$run.xml" -o junit_logging=no "${chosen[@]}" "$@" >"$OUT/$run.log" 2>&1
    echo "$run: $(tail -n 1 "$OUT/$run.log") ($((SECONDS - start)) s)"
    if [[ -z $first ]]; then
        first=$run
        passed "$run" | sed 's/^./pytorch_suite.py::TestProcessGroup::&/' >"$OUT/$run.passed"
        [[ -s $OUT/$run.passed ]] || { echo "no test passed by $run" >&2; exit 1; }
        continue
    fi
    missing=$(comm -23 <(sed 's/.*:://' "$OUT/$first.passed") <(passed "$run"))
    expected=$(wc -l <"$OUT/$first.passed")
    echo "$run: $((expected - $(grep -c . <<<"$missing"))) of the $expected tests that pass by $first"
    [[ -z $missing ]] || { failed=1; sed 's/^/  /' <<<"$missing"; }
done
exit $failed
