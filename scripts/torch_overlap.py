#!/usr/bin/env python3
"""PyTorch's and Warplink's fused products beside NCCL and a plain product, on the shapes of `warplink bench overlap`.

Run it on all GPUs of one machine:

    torchrun --nproc-per-node 8 scripts/torch_overlap.py [--shape M,K,N]... [--random N] [--form FORM]...
        [--output FILE.json]

Every sample starts with a barrier over all ranks, the slowest rank counts, and the median is
printed, as `warplink bench overlap` does: of the GPUs' time, and of the host's until the call returns (`_host_us`).
Libraries take turns, so that all see the same clock rates and the same of what else the machine does.
NVLink multicast stays off. Without Warplink's Python package, it is left out.
"""

import argparse
import json
import os
import random
import statistics
import time

import without_multicast  # noqa: F401

import torch
import torch.distributed as dist
import torch.distributed._symmetric_memory as symmetric_memory

try:
    import warplink.torch
except ImportError:
    warplink = None

SHAPES = [(32768, 16384, 8192), (32768, 16384, 1024), (16384, 8192, 1024), (8192, 8192, 3584)]

#: bf16 along the first dimension and along the last one, and fp8 along the first.
FORMS = ("rows", "columns", "fp8")


def measure(works, samples):
    """Of each of ``works``, medians over samples of the slowest rank's times, of the GPU and of the host, in microseconds."""
    for work in works:
        for _ in range(3):
            work()
    times = [[] for _ in works]
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    for _ in range(samples):
        for work, own in zip(works, times):
            torch.cuda.synchronize()
            dist.barrier()
            torch.cuda.synchronize()
            begin.record()
            called = time.perf_counter()
            work()
            host = time.perf_counter() - called
            end.record()
            torch.cuda.synchronize()
            slowest = torch.tensor([begin.elapsed_time(end) * 1e3, host * 1e6], device="cuda", dtype=torch.float64)
            dist.all_reduce(slowest, op=dist.ReduceOp.MAX)
            own.append(slowest.tolist())
    return [tuple(statistics.median(column) for column in zip(*own)) for own in times]


def error(result, reference):
    difference = torch.linalg.vector_norm(result.double() - reference.double())
    return (difference / torch.linalg.vector_norm(reference.double())).item()


def figures(op, contenders, results, reference, samples):
    """Times of ``contenders``, and how far from ``reference`` are the results of those in ``results``, which gives a
    result of what the contender returns."""
    row = {"op": op}
    for name, result in results.items():
        row[f"{name}_error"] = error(result(contenders[name]()), reference)
    for name, times in zip(contenders, measure(contenders.values(), samples)):
        row[f"{name}_us"], row[f"{name}_host_us"] = times
    return row


def fused_by(call):
    """The same call of each library that has it and is in use."""
    libraries, world = {}, dist.group.WORLD.group_name
    if symmetric_memory.is_symm_mem_enabled_for_group(world):
        libraries["symm_mem"] = (torch.ops.symm_mem, world)
    if warplink is not None:
        libraries["warplink"] = (torch.ops.warplink, warplink_group().group_name)
    return {name: lambda ops=ops, group=group: call(ops, group) for name, (ops, group) in libraries.items()}


_made = []


def warplink_group():
    """A group of all ranks whose backend is Warplink, as the default one is NCCL's."""
    if not _made:
        _made.append(dist.new_group(backend="warplink"))
    return _made[0]


def drawn(*sizes, fp8):
    values = torch.randn(*sizes, device="cuda").bfloat16()
    return values.to(torch.float8_e4m3fn) if fp8 else values


def all_gather_matmul(m, k, n, form, samples):
    world, fp8 = dist.get_world_size(), form == "fp8"
    columns = form == "columns"
    shard = drawn(m, k // world, fp8=False) if columns else drawn(m // world, k, fp8=fp8)
    # The scaled matmul wants its right operand transposed.
    b = drawn(n, k, fp8=True).t() if fp8 else drawn(k, n, fp8=False)
    flat = torch.empty(world * shard.shape[0], shard.shape[1], device="cuda", dtype=shard.dtype)
    scale = torch.ones((), device="cuda")

    def multiplied(whole):
        if fp8:
            return torch._scaled_mm(whole, b, scale, scale, out_dtype=torch.bfloat16)
        return torch.matmul(whole, b)

    def plain():
        dist.all_gather_into_tensor(flat.view(torch.uint8), shard.view(torch.uint8))
        return multiplied(torch.cat(flat.chunk(world), 1) if columns else flat)

    def fused(ops, group):
        if fp8:
            rest = ([None], [None], [torch.bfloat16], [False])
            return ops.fused_all_gather_scaled_matmul(shard, [b], scale, [scale], 0, group, *rest)
        return ops.fused_all_gather_matmul(shard, [b], int(columns), group)

    reference = plain()
    whole = torch.cat(flat.chunk(world), 1) if columns else flat
    own = fused_by(fused)
    contenders = {"matmul": lambda: multiplied(whole), "nccl_then_matmul": plain, **own}
    return figures(
        f"all-gather + matmul, {form}", contenders, {name: lambda got: got[1][0] for name in own}, reference, samples
    )


def matmul_reduce_scatter(m, k, n, form, samples):
    world, fp8 = dist.get_world_size(), form == "fp8"
    columns = form == "columns"
    a = drawn(m, k // world, fp8=fp8)
    b = drawn(n, k // world, fp8=True).t() if fp8 else drawn(k // world, n, fp8=False)
    sizes = (m, n // world) if columns else (m // world, n)
    out = torch.empty(sizes, device="cuda", dtype=torch.bfloat16)
    scale = torch.ones((), device="cuda")

    def multiplied():
        if fp8:
            return torch._scaled_mm(a, b, scale, scale, out_dtype=torch.bfloat16)
        return torch.matmul(a, b)

    def plain():
        product = multiplied()
        dist.reduce_scatter_tensor(out, torch.cat(product.chunk(world, 1)) if columns else product)
        return out

    def fused(ops, group):
        if fp8:
            rest = ([m, n], None, None, torch.bfloat16)
            return ops.fused_scaled_matmul_reduce_scatter(a, b, scale, scale, "sum", 0, 0, group, *rest)
        return ops.fused_matmul_reduce_scatter(a, b, "sum", int(columns), group)

    reference = plain().clone()
    own = fused_by(fused)
    contenders = {"matmul": multiplied, "matmul_then_nccl": plain, **own}
    return figures(
        f"matmul + reduce-scatter, {form}", contenders, {name: lambda got: got for name in own}, reference, samples
    )


def random_shapes(count, world):
    """Shapes that are the same on all ranks and that every form takes."""
    generator = random.Random(7)

    def drawn(low, high, multiple):
        return max(1, round(2 ** generator.uniform(low, high) / multiple)) * multiple

    return [
        (drawn(8, 15, world), drawn(9, 14, 16 * world), drawn(9, 13, 16 * world)) for _ in range(count)
    ]


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", action="append", help="M,K,N; may be given several times")
    parser.add_argument("--random", type=int, default=0, metavar="N", help="N shapes at random, beside those given")
    parser.add_argument("--form", action="append", choices=FORMS, help="may be given several times; rows if none is")
    parser.add_argument("--samples", type=int, default=9)
    parser.add_argument("--output", help="write the figures to this JSON file")
    arguments = parser.parse_args()
    shapes = [tuple(map(int, text.split(","))) for text in arguments.shape or []]
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("nccl", device_id=torch.device("cuda", int(os.environ["LOCAL_RANK"])))
    symmetric_memory.enable_symm_mem_for_group(dist.group.WORLD.group_name)
    torch.manual_seed(1 + dist.get_rank())
    shapes += random_shapes(arguments.random, dist.get_world_size())
    rows = []
    for m, k, n in shapes or SHAPES:
        for form in arguments.form or FORMS[:1]:
            for run in (all_gather_matmul, matmul_reduce_scatter):
                row = {"m": m, "k": k, "n": n, **run(m, k, n, form, arguments.samples)}
                rows.append(row)
                if dist.get_rank() == 0:
                    told = "  ".join(f"{name} {value:.0f}" for name, value in row.items() if name.endswith("_us"))
                    wrong = "  ".join(f"{name} {value:.1e}" for name, value in row.items() if name.endswith("_error"))
                    print(f"{m:6} {k:6} {n:5}  {row['op']:32} {told}  {wrong}", flush=True)
                torch.cuda.empty_cache()
    if arguments.output and dist.get_rank() == 0:
        with open(arguments.output, "w") as file:
            json.dump({"torch": torch.__version__, "world": dist.get_world_size(), "rows": rows}, file, indent=1)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
