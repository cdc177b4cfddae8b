#!/usr/bin/env python3
"""All-to-alls with a size for each pair and batches of sends and receives: PyTorch's backend beside Warplink.

    torchrun --nproc-per-node 2 scripts/torch_messages.py [--from BYTES] [--to BYTES] [--output FILE.json]

On GPUs these are NCCL and Warplink with direct_messages. With --device cpu they are Gloo, Warplink's host device, and
that with direct_messages. All ways run in turn in each sample, and their results are compared with what must come
out. A sample is a number of calls, one behind the other; the slowest rank counts. `us` is the median time of a call,
`host` the median time until a call returns.
"""

import argparse
import json
import os
import statistics
import time

import without_multicast  # noqa: F401

import torch
import torch.distributed as dist

import warplink.torch

SAMPLES, WARM = 9, 2


def ways(device):
    """The groups that are compared, by name."""
    options = warplink.torch.Options
    direct = dist.new_group(backend="warplink", pg_options=options(direct_messages=True))
    if device.type == "cuda":
        return {"nccl": dist.group.WORLD, "warplink direct": direct}
    host = dist.new_group(backend="warplink", pg_options=options(direct_messages=False))
    return {"gloo": dist.group.WORLD, "warplink": host, "warplink direct": direct}


def numbers(length, of, to, device):
    """What rank ``of`` sends to rank ``to``."""
    return (torch.arange(length, device=device) * 7 + 31 * of + to).remainder(251).to(torch.bfloat16)


class Uneven:
    """An all-to-all in which rank a sends rank b (1 + (a + b) % 3) / 2 times the mean."""

    name = "all_to_all_single"

    def __init__(self, size, device):
        rank, world = dist.get_rank(), dist.get_world_size()
        mean = max(2, size // 2 // world)
        rows = [[mean * (1 + (a + b) % 3) // 2 for b in range(world)] for a in range(world)]
        self.sent, self.received = rows[rank], [row[rank] for row in rows]
        self.bytes = 2 * sum(self.sent)
        self.input = torch.cat([numbers(n, rank, to, device) for to, n in enumerate(self.sent)])
        self.expected = torch.cat([numbers(n, of, rank, device) for of, n in enumerate(self.received)])
        self.output = torch.empty_like(self.expected)

    def call(self, group):
        dist.all_to_all_single(self.output, self.input, self.received, self.sent, group=group)


class Ring:
    """A batch in which each rank sends to the next and receives from the one before."""

    name = "batch_isend_irecv"

    def __init__(self, size, device):
        rank, world = dist.get_rank(), dist.get_world_size()
        self.right, self.left = (rank + 1) % world, (rank - 1) % world
        length = max(1, size // 2)
        self.bytes = 2 * length
        self.input = numbers(length, rank, self.right, device)
        self.expected = numbers(length, self.left, rank, device)
        self.output = torch.empty_like(self.expected)

    def call(self, group):
        operations = [
            dist.P2POp(dist.isend, self.input, self.right, group),
            dist.P2POp(dist.irecv, self.output, self.left, group),
        ]
        for work in dist.batch_isend_irecv(operations):
            work.wait()


def sample(case, group, calls, device):
    """Seconds of a call, and until it returns."""
    dist.barrier()
    synchronize(device)
    begin = time.perf_counter()
    for _ in range(calls):
        case.call(group)
    returned = time.perf_counter()
    synchronize(device)
    times = torch.tensor([time.perf_counter() - begin, returned - begin], dtype=torch.float64, device=device)
    dist.all_reduce(times, op=dist.ReduceOp.MAX)
    return [one / calls for one in times.tolist()]


def synchronize(device):
    if device.type == "cuda":
        torch.cuda.synchronize()


def measure(case, groups, device):
    """Medians by way, and how many elements came out wrong, on all ranks."""
    calls = 5 if device.type == "cpu" else 50 if case.bytes <= 1 << 20 else 8
    found = {name: [] for name in groups}
    wrong = {}
    for name, group in groups.items():
        case.output.fill_(-1)
        case.call(group)
        synchronize(device)
        count = (case.output != case.expected).sum()
        dist.all_reduce(count)
        wrong[name] = count.item()
    for turn in range(WARM + SAMPLES):
        for name, group in groups.items():
            times = sample(case, group, calls, device)
            if turn >= WARM:
                found[name].append(times)
    return {
        name: {
            "seconds": statistics.median(times[0] for times in all_times),
            "host_seconds": statistics.median(times[1] for times in all_times),
            "wrong": wrong[name],
        }
        for name, all_times in found.items()
    }


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--from", dest="least", type=int, default=1024, metavar="BYTES")
    parser.add_argument("--to", dest="most", type=int, default=64 << 20, metavar="BYTES")
    parser.add_argument("--step", type=int, default=8)
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument("--output", help="write the figures to this JSON file")
    arguments = parser.parse_args()
    device = torch.device(arguments.device)
    if device.type == "cuda":
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(device)
        dist.init_process_group("nccl", device_id=device)
    else:
        dist.init_process_group("gloo")
    groups = ways(device)
    # The first collective of a group joins what goes direct.
    for group in groups.values():
        dist.all_reduce(torch.ones(1, device=device), group=group)
    direct = warplink.torch.get_warplink_group(groups["warplink direct"])
    first, rows, size = dist.get_rank() == 0, [], arguments.least
    if first:
        print(f"{dist.get_world_size()} ranks on {device.type}; messages_path is {direct.messages_path}", flush=True)
    while size <= arguments.most:
        for kind in (Uneven, Ring):
            case = kind(size, device)
            found = measure(case, groups, device)
            rows.append({"call": case.name, "bytes": case.bytes, "ways": found})
            if first:
                figures = "  ".join(
                    f"{name} {it['seconds'] * 1e6:.1f} us, host {it['host_seconds'] * 1e6:.1f}"
                    + (f", {it['wrong']} WRONG" if it["wrong"] else "")
                    for name, it in found.items()
                )
                print(f"{case.name:18} {case.bytes:10}  {figures}", flush=True)
        size *= arguments.step
    if arguments.output and first:
        report = {
            "benchmark": "messages of PyTorch",
            "ranks": dist.get_world_size(),
            "device": torch.cuda.get_device_name() if device.type == "cuda" else "cpu",
            "torch": torch.__version__,
            "path": direct.messages_path,
            "rows": rows,
        }
        with open(arguments.output, "w") as file:
            json.dump(report, file, indent=1)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
