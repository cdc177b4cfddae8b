"""The end of a process whose calls fail without an exception."""

import os
import signal
import subprocess
import sys

import pytest

pytest.importorskip("torch")

#: A rank whose call never ends, as its peer does not take part, and what it does when the call has failed.
FAILING = """
import sys, time
import warplink

rank, meeting, reaction = int(sys.argv[1]), sys.argv[2], sys.argv[3]
job = warplink.Job.join(rank, 2, meeting, timeout=60.0)
comm = job.world()
collectives, stream, region = comm.collectives(), comm.create_stream(), comm.alloc(64)
if rank:
    try:
        while True:
            comm.barrier()
    except warplink.errors.PeerLostError:
        sys.exit(0)
watch = comm.watch(collectives, 0.2, grace=1.0)
collectives.send_receive(stream, [], [(1, region)])
end = time.monotonic() + 60
while watch.waits and time.monotonic() < end:
    time.sleep(0.01)
if reaction == "told":
    try:
        watch.check()
    except warplink.errors.TimeoutError:
        pass
if reaction == "told otherwise":
    try:
        stream.synchronize(30)
    except warplink.WarplinkError:
        pass
if reaction == "wrong call":
    try:
        comm.alloc(-1)
    except (ValueError, OverflowError):
        pass
if reaction == "closed":
    watch.close()
time.sleep(2.5)
print("goes on", flush=True)
"""


def outcome(reaction):
    """The exit status of the rank whose call fails, and what it printed."""
    import warplink

    identity = warplink.UniqueId.create()
    identity.release()
    ranks = [
        subprocess.Popen(
            [sys.executable, "-c", FAILING, str(rank), str(identity), reaction],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env={**os.environ, "WARPLINK_DEVICE": "host"},
        )
        for rank in range(2)
    ]
    try:
        ended = [(rank.communicate(timeout=100), rank.returncode) for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
    (output, errors), code = ended[0]
    assert ended[1][1] == 0, ended[1]
    return code, output, errors


@pytest.mark.parametrize("reaction", ["none", "wrong call"])
def test_a_process_that_is_not_told_of_a_failure_ends(reaction):
    code, output, errors = outcome(reaction)
    assert (code, output) == (-signal.SIGABRT, ""), errors
    assert "rank 0" in errors and "TORCH_NCCL_ASYNC_ERROR_HANDLING" in errors


@pytest.mark.parametrize("reaction", ["told", "told otherwise", "closed"])
def test_a_process_that_is_told_of_a_failure_goes_on(reaction):
    code, output, errors = outcome(reaction)
    assert (code, output) == (0, "goes on\n"), errors


@pytest.mark.parametrize(
    ("variables", "ends", "blocks"),
    [
        ({}, True, False),
        ({"TORCH_NCCL_ASYNC_ERROR_HANDLING": "1"}, True, False),
        ({"TORCH_NCCL_ASYNC_ERROR_HANDLING": "3"}, True, False),
        ({"TORCH_NCCL_ASYNC_ERROR_HANDLING": "0"}, False, False),
        ({"TORCH_NCCL_ASYNC_ERROR_HANDLING": "2", "NCCL_ASYNC_ERROR_HANDLING": "1"}, False, False),
        ({"NCCL_ASYNC_ERROR_HANDLING": "0"}, False, False),
        ({"TORCH_NCCL_BLOCKING_WAIT": "1"}, False, True),
        ({"TORCH_NCCL_BLOCKING_WAIT": "TRUE", "TORCH_NCCL_ASYNC_ERROR_HANDLING": "1"}, False, True),
        ({"NCCL_BLOCKING_WAIT": "0"}, True, False),
    ],
)
def test_variables_are_read_as_nccls_backend_does(variables, ends, blocks, monkeypatch):
    from warplink.torch import error_handling

    for name in ("ASYNC_ERROR_HANDLING", "BLOCKING_WAIT"):
        monkeypatch.delenv(f"TORCH_NCCL_{name}", raising=False)
        monkeypatch.delenv(f"NCCL_{name}", raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert (error_handling.grace() is not None, error_handling.waits_block()) == (ends, blocks)


@pytest.mark.parametrize("name", ["TORCH_NCCL_ASYNC_ERROR_HANDLING", "TORCH_NCCL_BLOCKING_WAIT"])
def test_other_values_are_refused(name, monkeypatch):
    from warplink.torch import error_handling

    monkeypatch.setenv(name, "4")
    with pytest.raises(ValueError, match=f"{name} is '4'; expected"):
        error_handling.grace()
