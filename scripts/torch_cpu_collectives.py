#!/usr/bin/env python3
"""Collectives of CPU tensors: Warplink's beside Gloo's, in one run.

    torchrun --nproc-per-node 2 scripts/torch_cpu_collectives.py [--kinds all_reduce,…] [--sizes 1024,…] [--dtype T]

Every rank has a group of each backend. They take turns, sample by sample, after a barrier; a sample is a number of calls
one after the other, of the slowest rank, and the least of the samples counts, since other work on the machine only
lengthens them. 'ratio' is Gloo's time over Warplink's: above 1, Warplink is faster. Sizes are those of each rank's
input, for all_gather and gather, of its output, for reduce_scatter and scatter, and of what is moved, for others.
"""

import argparse
import os
import time

import torch
import torch.distributed as dist

import warplink.torch  # noqa: F401 - it registers the backend

SIZES = "1024,16384,262144,1048576,16777216"


def exchange(group, tensor, other):
    """Sends to the next rank, and receives from the one before."""
    rank, world = dist.get_rank(group), dist.get_world_size(group)
    operations = [
        dist.P2POp(dist.isend, tensor, (rank + 1) % world, group),
        dist.P2POp(dist.irecv, other, (rank - 1) % world, group),
    ]
    for work in dist.batch_isend_irecv(operations):
        work.wait()


def at_root(parts):
    return parts if dist.get_rank() == 0 else None


# Each takes the group, a tensor, another one of that size, and `world` parts of it in one tensor.
KINDS = {
    "all_reduce": lambda g, t, o, p: dist.all_reduce(t, group=g),
    "all_gather": lambda g, t, o, p: dist.all_gather_into_tensor(p.view(-1), t, group=g),
    "reduce_scatter": lambda g, t, o, p: dist.reduce_scatter_tensor(t, p.view(-1), group=g),
    "all_to_all": lambda g, t, o, p: dist.all_to_all_single(o, t, group=g),
    "broadcast": lambda g, t, o, p: dist.broadcast(t, 0, group=g),
    "reduce": lambda g, t, o, p: dist.reduce(t, 0, group=g),
    "gather": lambda g, t, o, p: dist.gather(t, at_root(list(p)), 0, group=g),
    "scatter": lambda g, t, o, p: dist.scatter(t, at_root(list(p)), 0, group=g),
    "send_receive": lambda g, t, o, p: exchange(g, t, o),
}


def calls_for(size):
    """Calls in a sample."""
    return max(3, min(100, (8 << 20) // size))


def sample(group, kind, tensors, calls):
    """Seconds of a call on this rank."""
    call = KINDS[kind]
    dist.barrier(group)
    start = time.perf_counter()
    for _ in range(calls):
        call(group, *tensors)
    return (time.perf_counter() - start) / calls


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kinds", default=",".join(KINDS))
    parser.add_argument("--sizes", default=SIZES, help="bytes")
    parser.add_argument("--dtype", default="float32", help="PyTorch's name of the element type")
    parser.add_argument("--samples", type=int, default=15)
    options = parser.parse_args()
    kinds = options.kinds.split(",")
    if unknown := sorted(set(kinds) - set(KINDS)):
        parser.error(f"--kinds has {', '.join(unknown)}; expected some of {', '.join(KINDS)}")
    dtype = getattr(torch, options.dtype)
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    groups = {name: dist.new_group(backend=name) for name in ("gloo", "warplink")}
    if rank == 0:
        print(f"{options.dtype}, {world} processes on {os.cpu_count()} processors, torch {torch.__version__}")
        print(f"{'collective':14} {'bytes':>10} {'gloo us':>10} {'warplink us':>12} {'ratio':>6}")
    for kind in kinds:
        for size in map(int, options.sizes.split(",")):
            count = size // dtype.itemsize
            tensors = [torch.zeros(shape, dtype=dtype) for shape in (count, count, (world, count))]
            least = dict.fromkeys(groups, float("inf"))
            for number in range(options.samples + 1):
                for name, group in groups.items():
                    own = torch.tensor([sample(group, kind, tensors, calls_for(size))])
                    dist.all_reduce(own, op=dist.ReduceOp.MAX, group=groups["gloo"])
                    if number:
                        least[name] = min(least[name], own.item())
            if rank == 0:
                gloo, ours = (least[name] * 1e6 for name in groups)
                print(f"{kind:14} {size:10} {gloo:10.1f} {ours:12.1f} {gloo / ours:6.2f}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
