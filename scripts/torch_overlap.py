#!/usr/bin/env python3
"""PyTorch's fused products beside NCCL and a plain product, on the shapes of `warplink bench overlap`.

Run it on all GPUs of one machine:

    torchrun --nproc-per-node 8 scripts/torch_overlap.py [--shape M,K,N]... [--output FILE.json]

Every sample starts with a barrier over all ranks, the slowest rank counts, and the median is
printed, as `warplink bench overlap` does. NVLink multicast stays off.
"""

import argparse
import json
import os
import statistics

os.environ.setdefault("NCCL_NVLS_ENABLE", "0")
os.environ.setdefault("TORCH_SYMM_MEM_DISABLE_MULTICAST", "1")

import torch
import torch.distributed as dist

SHAPES = [(32768, 16384, 8192), (32768, 16384, 1024), (16384, 8192, 1024), (8192, 8192, 3584)]


def measure(work, samples):
    """Median over samples of the slowest rank's time, in microseconds."""
    for _ in range(3):
        work()
    times = []
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    for _ in range(samples):
        torch.cuda.synchronize()
        dist.barrier()
        torch.cuda.synchronize()
        begin.record()
        work()
        end.record()
        torch.cuda.synchronize()
        slowest = torch.tensor([begin.elapsed_time(end)], device="cuda")
        dist.all_reduce(slowest, op=dist.ReduceOp.MAX)
        times.append(slowest.item() * 1e3)
    return statistics.median(times)


def error(result, reference):
    return (torch.linalg.vector_norm((result - reference).double()) / torch.linalg.vector_norm(reference.double())).item()


def all_gather_matmul(m, k, n, group, samples):
    world = dist.get_world_size()
    shard = torch.randn(m // world, k, device="cuda").bfloat16()
    b = torch.randn(k, n, device="cuda").bfloat16()
    gathered = torch.empty(m, k, device="cuda", dtype=torch.bfloat16)
    out = torch.empty(m, n, device="cuda", dtype=torch.bfloat16)

    def plain():
        dist.all_gather_into_tensor(gathered, shard)
        torch.matmul(gathered, b, out=out)

    def fused():
        return torch.ops.symm_mem.fused_all_gather_matmul(shard, [b], gather_dim=0, group_name=group)

    plain()
    wrong = error(fused()[1][0], out)
    return {
        "op": "all-gather + matmul",
        "matmul_us": measure(lambda: torch.matmul(gathered, b, out=out), samples),
        "nccl_then_matmul_us": measure(plain, samples),
        "fused_us": measure(fused, samples),
        "error": wrong,
    }


def matmul_reduce_scatter(m, k, n, group, samples):
    world = dist.get_world_size()
    a = torch.randn(m, k // world, device="cuda").bfloat16()
    b = torch.randn(k // world, n, device="cuda").bfloat16()
    partial = torch.empty(m, n, device="cuda", dtype=torch.bfloat16)
    out = torch.empty(m // world, n, device="cuda", dtype=torch.bfloat16)

    def plain():
        torch.matmul(a, b, out=partial)
        dist.reduce_scatter_tensor(out, partial)

    def fused():
        return torch.ops.symm_mem.fused_matmul_reduce_scatter(a, b, "sum", scatter_dim=0, group_name=group)

    plain()
    wrong = error(fused(), out)
    return {
        "op": "matmul + reduce-scatter",
        "matmul_us": measure(lambda: torch.matmul(a, b, out=partial), samples),
        "matmul_then_nccl_us": measure(plain, samples),
        "fused_us": measure(fused, samples),
        "error": wrong,
    }


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", action="append", help="M,K,N; may be given several times")
    parser.add_argument("--samples", type=int, default=9)
    parser.add_argument("--output", help="write the figures to this JSON file")
    arguments = parser.parse_args()
    shapes = [tuple(map(int, text.split(","))) for text in arguments.shape] if arguments.shape else SHAPES
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("nccl", device_id=torch.device("cuda", int(os.environ["LOCAL_RANK"])))
    import torch.distributed._symmetric_memory as symmetric_memory

    group = dist.group.WORLD.group_name
    symmetric_memory.enable_symm_mem_for_group(group)
    torch.manual_seed(1 + dist.get_rank())
    rows = []
    for m, k, n in shapes:
        for run in (all_gather_matmul, matmul_reduce_scatter):
            row = {"m": m, "k": k, "n": n, **run(m, k, n, group, arguments.samples)}
            rows.append(row)
            if dist.get_rank() == 0:
                figures = "  ".join(f"{name} {value:.0f}" for name, value in row.items() if name.endswith("_us"))
                print(f"{m:6} {k:6} {n:5}  {row['op']:24} {figures}  error {row['error']:.1e}", flush=True)
            torch.cuda.empty_cache()
    if arguments.output and dist.get_rank() == 0:
        with open(arguments.output, "w") as file:
            json.dump({"torch": torch.__version__, "world": dist.get_world_size(), "rows": rows}, file, indent=1)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
