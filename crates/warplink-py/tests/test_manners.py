"""Expectations of any Python package: Ctrl-C, names of types, commands, entry points."""

import importlib.metadata
import os
import pathlib
import signal
import subprocess
import sys
import tempfile
import threading
import time

import numpy as np
import pytest
from conftest import as_ranks, meet

import warplink


@as_ranks(2)
def test_ctrl_c_ends_a_wait(job, comm, rank, world, place):
    """Waits that nobody ends, but for Ctrl-C."""
    region, stream = comm.alloc(64), comm.create_stream()
    (transfer,) = comm.exchange([(warplink.Receive, warplink.Send)[rank](region, 1 - rank)])
    if rank == 0:
        signal.signal(signal.SIGINT, signal.default_int_handler)
        transfer.post(stream)
        transfer.wait(stream)
        for wait in (stream.synchronize, comm.barrier, lambda: comm.all_gather_bytes(b"")):
            timer = threading.Timer(0.3, os.kill, (os.getpid(), signal.SIGINT))
            timer.start()
            begin = time.monotonic()
            with pytest.raises(KeyboardInterrupt):
                wait()
            assert time.monotonic() - begin < 10
            timer.join()
    meet(place, "interrupted", rank, range(world))
    job.abort("interrupted")


@as_ranks(2)
def test_types_are_named_by_any_name(comm, rank):
    region = comm.alloc(64)
    names = ["f32", "float32", np.float32, np.dtype("float32"), "torch.float32"]
    try:
        import torch

        names.append(torch.float32)
    except ImportError:
        pass
    for name in names:
        assert region.view([16], name).dtype == "f32"
    assert region.view([64], np.bool_).dtype == "bool"
    with pytest.raises(ValueError, match="unknown element type"):
        region.view([16], "float")
    array = np.from_dlpack(region.view([16], np.float32))
    # NumPy takes memory of a version that it did not ask for as read-only.
    if int(np.__version__.split(".")[0]) > 1:
        array[:] = 3
        assert np.asarray(region.view([16], "f32")).tolist() == [3.0] * 16
    collectives = comm.collectives()
    stream = comm.create_stream()
    region.upload(np.full(16, rank, np.float32).tobytes())
    out = comm.alloc(64)
    collectives.all_reduce(stream, out.view([16], "f32"), region.view([16], "f32"), op="avg")
    stream.synchronize()
    assert np.asarray(out.view([16], "f32")).tolist() == [0.5] * 16
    assert collectives.path_of("all_reduce", 16, np.float32, "avg") == collectives.path_of(
        "all_reduce", 16, "f32", "average"
    )


@as_ranks(2)
def test_an_all_reduce_of_differing_types(comm, rank):
    collectives, stream, memory = comm.collectives(), comm.create_stream(), comm.alloc(64)
    view = memory.view([16], np.int32 if rank else np.float32)
    with pytest.raises(warplink.errors.MismatchError):
        collectives.all_reduce(stream, view, view)
        stream.synchronize(20)


def test_the_command_says_what_is_missing():
    own = pathlib.Path(sys.executable).with_name("warplink")
    code = "import sys, warplink.command; sys.argv[0] = sys.argv[1]; warplink.command.main()"
    environment = {name: value for name, value in os.environ.items() if name != "WARPLINK_COMMAND"}
    with tempfile.TemporaryDirectory() as folder:
        environment.update(HOME=folder, PATH=folder)
        ran = subprocess.run(
            [sys.executable, "-c", code, str(own)], env=environment, capture_output=True, text=True, timeout=60
        )
        assert ran.returncode == 127 and "cargo install" in ran.stderr
        # A script of this name may be another environment's command.
        for text, code_expected in (("#!/bin/sh\nexit 3\n", 127), (None, 0)):
            program = pathlib.Path(folder, "warplink")
            program.unlink(missing_ok=True)
            if text is None:
                program.symlink_to("/bin/true")
            else:
                program.write_text(text)
                program.chmod(0o755)
            ran = subprocess.run(
                [sys.executable, "-c", code, str(own)], env=environment, capture_output=True, text=True, timeout=60
            )
            assert ran.returncode == code_expected, ran.stderr


def test_pytorch_finds_the_backend_by_itself():
    pytest.importorskip("torch")
    points = importlib.metadata.entry_points(group="torch.backends")
    assert [point.value for point in points if point.name == "warplink"] == ["warplink.autoload:name_backend"]
    code = """
import sys, torch.distributed as dist
from torch.distributed import batch_isend_irecv
assert "warplink.torch" not in sys.modules and dist.Backend.WARPLINK
import warplink.torch
assert dist.batch_isend_irecv is dist.distributed_c10d.batch_isend_irecv is batch_isend_irecv
"""
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert ran.returncode == 0, ran.stderr
