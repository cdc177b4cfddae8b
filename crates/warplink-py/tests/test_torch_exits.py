"""Programs that end without ``destroy_process_group``, with work under way: they end quietly, and soon."""

import json
import os
import signal
import subprocess
import sys

import pytest

torch = pytest.importorskip("torch")

#: A program that runs others, each on two ranks, and writes how they ended. The ranks are forks, which need not import
#: PyTorch again, and come to the end of the interpreter as any program does.
LAUNCHER = """
import atexit, json, os, sys, threading, time
import torch, torch.distributed as dist
import warplink.torch
from warplink.torch import joining
from warplink.torch.group import leave_at_exit

folder, programs = sys.argv[1], json.loads(sys.argv[2])
own, ended = None, {}
for name, program in programs.items():
    ranks = []
    for rank in range(2):
        ranks.append(os.fork())
        if ranks[-1] == 0:
            own = name
            break
    if own is not None:
        break
    ended[name] = [os.waitpid(each, 0)[1] for each in ranks]
if own is None:
    with open(f"{folder}/ended", "w") as file:
        json.dump(ended, file)
else:
    output = os.open(f"{folder}/{own}.{rank}", os.O_WRONLY | os.O_CREAT)
    os.dup2(output, 1), os.dup2(output, 2)
    if "at exit" in program:
        atexit.register(dist.destroy_process_group)
    def leaves(part, expected):
        # Whether the end of the interpreter closes it, and whether all have left each job.
        left, leave = [], joining.leave
        joining.leave = lambda *arguments: left.append(leave(*arguments))
        leave_at_exit()
        assert part._closed and left == expected, left

    dist.init_process_group("warplink", init_method=f"file://{folder}/{own}.store", rank=rank, world_size=2)
    dist.all_reduce(torch.ones(3))
    exec(program)
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
    "a part that was split off": """
part = dist.group.WORLD.split_group([0, 1])
work = part.allreduce([torch.ones(3)])
leaves(part, [True])
""",
    "memory that a part shares": """
part = dist.new_group([0, 1])
# Its members join a job for their memory, as on GPUs.
part._communicator = None
part.get_p2p_buffer(1 - rank, (8,), torch.float32)
part.intra_node_barrier()
leaves(part, [True, True])
""",
    "a thread": "threading.Thread(target=lambda: (time.sleep(0.5), dist.all_reduce(torch.ones(3)))).start()",
    "gradients": """
model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(4, 4))
model(torch.ones(4)).sum().backward()
""",
    "an end at exit": "# at exit",
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Where all programs have left what they wrote."""
    folder = tmp_path_factory.mktemp("programs")
    command = [sys.executable, "-W", "ignore", "-c", LAUNCHER, str(folder), json.dumps(PROGRAMS)]
    process = subprocess.Popen(command, env={**os.environ, "OMP_NUM_THREADS": "1"}, start_new_session=True)
    try:
        process.wait(timeout=150)
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
    return folder


@pytest.mark.parametrize("name", PROGRAMS)
def test_a_program_ends_quietly(folder, name):
    output = [(folder / f"{name}.{rank}").read_text() for rank in range(2)]
    codes = json.loads((folder / "ended").read_text())[name]
    assert (codes, output) == ([0, 0], ["", ""])
