"""PyTorch's own tests of process groups pass, as they do with Gloo.

They run twice: under the name ``warplink``, and in the place of ``gloo``, since many are for Gloo by
name. What Gloo passes passes, the events that profilers see included, but for the exceptions below.
"""

import os
import pathlib
import subprocess
import sys
import xml.etree.ElementTree as tree

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("expecttest")

SUITE = pathlib.Path(__file__).parent / "pytorch_suite.py"

#: Seconds that one run may take.
LIMIT = 900

#: Tests that pass with Gloo and cannot pass in its place, and why.
EXCEPTIONS = {
    "test_ddp_logging_data_cpu": "it compares the group's own name with 'gloo', and PyTorch's C++ reads "
    "Gloo's options from any group of that name; under the name of warplink it passes",
}

#: The variables of each run, and how many tests pass at least in releases whose tests are not listed.
RUNS = {
    "warplink": ({"BACKEND": "warplink"}, 60),
    "gloo": ({"BACKEND": "gloo", "WARPLINK_FOR_GLOO": "1"}, 85),
}

#: The tests that pass with Gloo in the release that is listed.
PASSES = SUITE.with_name("pytorch_suite_passes.txt")
LISTED_RELEASE = "2.11."


def passing(name):
    """The names of the tests that pass in a run in the release that is listed."""
    lines = [line.split() for line in PASSES.read_text().splitlines() if not line.startswith("#")]
    return {line[0] for line in lines if name == "gloo" or line[1:] == ["*"]}


def chosen(name):
    """Selects the tests of a run. Without GPUs, tests that are not listed skip themselves, but only after their ranks have
    been started and have joined."""
    if torch.cuda.device_count() > 0 or not torch.__version__.startswith(LISTED_RELEASE):
        return [str(SUITE)]
    return [f"{SUITE}::TestProcessGroup::{test}" for test in sorted(passing(name))]


def start(name, folder):
    variables, _ = RUNS[name]
    report = folder / f"{name}.xml"
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--tb=short"]
    process = subprocess.Popen(
        [*command, f"--junitxml={report}", "-o", "junit_logging=no", *chosen(name)],
        env={**os.environ, **variables},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    return process, report


def results(report):
    """The names of the tests that passed, and of those that failed."""
    passed, failed = set(), set()
    for case in tree.parse(report).getroot().iter("testcase"):
        if case.find("failure") is not None or case.find("error") is not None:
            failed.add(case.get("name"))
        elif case.find("skipped") is None:
            passed.add(case.get("name"))
    return passed, failed


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """Both runs, beside each other."""
    folder = tmp_path_factory.mktemp("suite")
    started = {name: start(name, folder) for name in RUNS}
    found = {}
    try:
        for name, (process, report) in started.items():
            output, _ = process.communicate(timeout=LIMIT)
            assert report.exists(), output[-5000:]
            found[name] = (*results(report), output)
    finally:
        for process, _ in started.values():
            if process.poll() is None:
                os.killpg(process.pid, 9)
                process.wait()
    return found


@pytest.mark.parametrize("name", RUNS)
def test_pytorchs_own_tests_pass(runs, name):
    passed, failed, output = runs[name]
    excepted = set(EXCEPTIONS) if name == "gloo" else set()
    assert failed <= excepted, f"{sorted(failed - excepted)}\n{output[-20000:]}"
    if torch.__version__.startswith(LISTED_RELEASE):
        missing = passing(name) - excepted - passed
        assert not missing, f"{sorted(missing)} did not run\n{output[-2000:]}"
    assert len(passed) >= RUNS[name][1], (len(passed), output[-2000:])


def test_every_exception_is_needed(runs):
    assert runs["gloo"][1] == set(EXCEPTIONS)
