#!/usr/bin/env python3
"""Collectives of CPU tensors: Warplink's beside Gloo's, in one run.

    torchrun --nproc-per-node 2 scripts/torch_cpu_collectives.py [--sizes 1024,16384,…] [--samples N]

Every rank has a group of each backend. They take turns, sample by sample, after a barrier; a sample is a number of calls
one after the other, of the slowest rank, and the least of the samples counts, since other work on the machine only
lengthens them. 'ratio' is Gloo's time over Warplink's: above 1, Warplink is faster.
"""

import argparse
import os
import time

import torch
import torch.distributed as dist

import warplink.torch  # noqa: F401 - it registers the backend

SIZES = "1024,16384,262144,1048576,16777216"


def calls_for(size):
    """Calls in a sample."""
    return max(3, min(100, (8 << 20) // size))


def sample(group, kind, tensors, calls):
    """Seconds of a call on this rank."""
    tensor, gathered = tensors
    dist.barrier(group)
    start = time.perf_counter()
    for _ in range(calls):
        if kind == "all_reduce":
            dist.all_reduce(tensor, group=group)
        else:
            dist.all_gather_into_tensor(gathered, tensor, group=group)
    return (time.perf_counter() - start) / calls


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--sizes", default=SIZES, help="bytes of each rank's tensor")
    parser.add_argument("--samples", type=int, default=15)
    options = parser.parse_args()
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    groups = {name: dist.new_group(backend=name) for name in ("gloo", "warplink")}
    if rank == 0:
        print(f"{world} processes on {os.cpu_count()} processors, torch {torch.__version__}")
        print(f"{'collective':12} {'bytes':>10} {'gloo us':>10} {'warplink us':>12} {'ratio':>6}")
    for kind in ("all_reduce", "all_gather"):
        for size in map(int, options.sizes.split(",")):
            tensors = torch.zeros(size // 4), torch.zeros(world * size // 4)
            least = dict.fromkeys(groups, float("inf"))
            for number in range(options.samples + 1):
                for name, group in groups.items():
                    own = torch.tensor([sample(group, kind, tensors, calls_for(size))])
                    dist.all_reduce(own, op=dist.ReduceOp.MAX, group=groups["gloo"])
                    if number:
                        least[name] = min(least[name], own.item())
            if rank == 0:
                gloo, ours = (least[name] * 1e6 for name in groups)
                print(f"{kind:12} {size:10} {gloo:10.1f} {ours:12.1f} {gloo / ours:6.2f}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
