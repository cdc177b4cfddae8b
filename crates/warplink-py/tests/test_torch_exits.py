"""Programs that end without ``destroy_process_group``, with work under way: they end quietly, and soon."""

import subprocess
import sys
import tempfile
import time

import pytest

torch = pytest.importorskip("torch")

#: What runs on both ranks of each program.
BEGIN = """
import atexit, sys, threading, time
import torch, torch.distributed as dist
import warplink.torch
rank, place = int(sys.argv[1]), sys.argv[2]
if {at_exit}:
    atexit.register(dist.destroy_process_group)
dist.init_process_group("warplink", init_method="file://" + place, rank=rank, world_size=2)
dist.all_reduce(torch.ones(3))
"""

PROGRAMS = {
    "nothing": "",
    "asynchronous": "works = [dist.all_reduce(torch.ones(100_000), async_op=True) for _ in range(20)]",
    "callbacks": """
futures = [dist.all_reduce(torch.ones(100_000), async_op=True).get_future() for _ in range(20)]
doubled = [future.then(lambda done: done.value()[0] * 2) for future in futures]
""",
    "a receive that nobody sends": "work = dist.irecv(torch.ones(3), 1 - rank, tag=9)",
    "a send that nobody receives": "work = dist.isend(torch.ones(3), 1 - rank, tag=9)",
    "a peer that comes late": """
if rank == 0:
    future = dist.all_reduce(torch.ones(3), async_op=True).get_future().then(lambda done: 1)
else:
    time.sleep(1)
""",
    "a part of the group": """
both, one = dist.new_group([0, 1]), dist.new_group([0])
work = dist.all_reduce(torch.ones(3), group=both, async_op=True)
""",
    "a thread": "threading.Thread(target=lambda: (time.sleep(0.5), dist.all_reduce(torch.ones(3)))).start()",
    "gradients": """
model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(4, 4))
model(torch.ones(4)).sum().backward()
""",
    "an end at exit": "",
}


@pytest.mark.parametrize("name", PROGRAMS)
def test_a_program_ends_quietly(name):
    program = BEGIN.format(at_exit=name == "an end at exit") + PROGRAMS[name]
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-W", "ignore", "-c", program]
        ranks = [
            subprocess.Popen(
                [*command, str(rank), f"{folder}/store"], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
            )
            for rank in range(2)
        ]
        end = time.monotonic() + 90
        try:
            for process in ranks:
                output, _ = process.communicate(timeout=max(end - time.monotonic(), 1))
                assert (process.returncode, output) == (0, "")
        finally:
            for process in ranks:
                if process.poll() is None:
                    process.kill()
                    process.wait()
