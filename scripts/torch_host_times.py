#!/usr/bin/env python3
"""How long calls take to return: Warplink's collectives beside those of PyTorch's NCCL backend, and its fused operations
beside `torch.ops.symm_mem`'s.

    torchrun --nproc-per-node 2 scripts/torch_host_times.py [--only NAME]... [--output FILE.json]

Times are microseconds on the host, the median over many calls after warm-up, of the slowest rank. Calls come in batches of
a few, each after all ranks are done with all work and have met, so that no queue of a GPU is full. Sizes are those of the
longer tensor. Groups are NCCL's, Warplink's by NCCL, and Warplink's with direct collectives and messages.

Where there are fewer GPUs than ranks, ranks share them; that needs CUDA's multi-process service to run (as
`scripts/device-service.sh` starts it). With `--device cpu`, Gloo is in NCCL's place, and calls of fused operations return
when they are done. The figures also go to $OUT/torch_host_times.json.
"""

import argparse
import json
import os
import statistics
import time

RANK, RANKS = int(os.environ.get("LOCAL_RANK", "0")), int(os.environ.get("LOCAL_WORLD_SIZE", "1"))

import without_multicast  # noqa: F401

import torch
import torch.distributed as dist

import warplink.torch

SIZES = (1 << 10, 64 << 10, 2 << 20)
COLLECTIVES = ("all_reduce", "all_gather_into_tensor", "reduce_scatter_tensor", "all_to_all_single")
#: Rows of the whole, columns and columns of the product.
SHAPES = ((512, 1024, 1024), (4096, 4096, 4096), (8192, 8192, 3584))
CPU_SHAPES = ((64, 64, 64),)
FUSED = ("fused_all_gather_matmul", "fused_matmul_reduce_scatter")
SCALED = ("fused_all_gather_scaled_matmul", "fused_scaled_matmul_reduce_scatter")


def choose_device(kind):
    """This rank's device. Ranks that share a GPU need settings of NCCL, of Warplink and of symmetric memory."""
    if kind == "cpu":
        return torch.device("cpu")
    count = torch.cuda.device_count()
    if count < RANKS:
        # NCCL takes ranks with a host each for ranks on GPUs of their own.
        os.environ.update(NCCL_HOSTID=str(RANK), NCCL_SOCKET_IFNAME="lo")
        os.environ.update(WARPLINK_TOPOLOGY="fully-connected", TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES="1")
    device = torch.device("cuda", RANK * count // RANKS)
    torch.cuda.set_device(device)
    return device


def settle(device):
    """All ranks are done with everything."""
    if device.type == "cuda":
        torch.cuda.synchronize()
    dist.barrier()
    if device.type == "cuda":
        torch.cuda.synchronize()


def measure(contenders, device, batches, calls):
    """Median microseconds until a call returns, by contender: those of the slowest rank. One that raises in its first call
    is left out, with what it said. Where it raises on one rank alone, the others' call waits until its timeout."""
    failures = {}
    for name, call in contenders.items():
        try:
            settle(device)
            call()
        except Exception as error:  # of any library
            failures[name] = str(error).splitlines()[0]
    every = [None] * dist.get_world_size()
    dist.all_gather_object(every, failures)
    failures = {name: text for told in every for name, text in told.items()}
    times = {name: [] for name in contenders if name not in failures}
    for batch in range(-3, batches):
        for name, found in times.items():
            call = contenders[name]
            settle(device)
            for _ in range(calls):
                begin = time.perf_counter_ns()
                call()
                end = time.perf_counter_ns()
                if batch >= 0:
                    found.append((end - begin) / 1e3)
    names = list(times)
    medians = torch.tensor([statistics.median(times[name]) for name in names], dtype=torch.float64, device=device)
    if names:
        dist.all_reduce(medians, op=dist.ReduceOp.MAX)
    return dict(zip(names, medians.tolist())), failures


def collective(name, size, groups, device):
    """The calls of a collective by each of ``groups``."""
    whole = torch.ones(size // 2, device=device, dtype=torch.bfloat16)
    other = torch.empty_like(whole)
    part = torch.ones(whole.numel() // dist.get_world_size(), device=device, dtype=torch.bfloat16)
    calls = {
        "all_reduce": lambda group: dist.all_reduce(whole, group=group),
        "all_gather_into_tensor": lambda group: dist.all_gather_into_tensor(whole, part, group=group),
        "reduce_scatter_tensor": lambda group: dist.reduce_scatter_tensor(part, whole, group=group),
        "all_to_all_single": lambda group: dist.all_to_all_single(other, whole, group=group),
    }
    return {by: lambda group=group: calls[name](group) for by, group in groups.items()}


def fused(name, shape, libraries, device):
    """The calls of a fused operation by each of ``libraries``, an operator namespace and a group's name each."""
    (m, k, n), world = shape, dist.get_world_size()
    scaled = "scaled" in name

    def drawn(*sizes):
        values = torch.randn(*sizes, device=device).bfloat16()
        return values.to(torch.float8_e4m3fn) if scaled else values

    one = torch.ones((), device=device)
    if "all_gather" in name:
        a, b = drawn(m // world, k), drawn(n, k).t() if scaled else drawn(k, n)
        rest = ([None], [None], [torch.bfloat16], [False])

        def call(ops, group):
            if scaled:
                return ops.fused_all_gather_scaled_matmul(a, [b], one, [one], 0, group, *rest)
            return ops.fused_all_gather_matmul(a, [b], 0, group)
    else:
        a, b = drawn(m, k // world), drawn(n, k // world).t() if scaled else drawn(k // world, n)
        rest = ([m, n], None, None, torch.bfloat16)

        def call(ops, group):
            if scaled:
                return ops.fused_scaled_matmul_reduce_scatter(a, b, one, one, "sum", 0, 0, group, *rest)
            return ops.fused_matmul_reduce_scatter(a, b, "sum", 0, group)

    return {by: lambda ops=ops, group=group: call(ops, group) for by, (ops, group) in libraries.items()}


def told(seconds, failures, reference):
    """A row's figures as text, beside ``reference``."""
    texts = [f"{by} {value:7.1f}" for by, value in seconds.items()]
    ours = [value for by, value in seconds.items() if by != reference]
    if reference in seconds and ours:
        texts.append("ratio " + " ".join(f"{value / seconds[reference]:.2f}" for value in ours))
    return "  ".join(texts + [f"{by}: {text}" for by, text in failures.items()])


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    names = (*COLLECTIVES, *FUSED, *SCALED)
    parser.add_argument("--only", action="append", choices=names, help="may be given several times")
    parser.add_argument("--batches", type=int, default=25)
    parser.add_argument("--calls", type=int, default=20, help="calls in a batch; half as many of fused operations")
    parser.add_argument("--output", help="write the figures to this JSON file")
    arguments = parser.parse_args()
    device = choose_device(arguments.device)
    reference = "nccl" if device.type == "cuda" else "gloo"
    # NCCL's communicator is there from the start.
    dist.init_process_group(reference, device_id=device if device.type == "cuda" else None)
    options = warplink.torch.Options
    direct = dist.new_group(backend="warplink", pg_options=options(direct_messages=True, direct_collectives=True))
    by_nccl = dist.new_group(backend="warplink", pg_options=options(direct_messages=False, direct_collectives=False))
    groups = {reference: dist.group.WORLD, "warplink": by_nccl, "warplink direct": direct}
    for group in groups.values():
        # The first collective of a group joins what goes direct.
        dist.all_reduce(torch.ones(1, device=device), group=group)
    libraries = {"warplink": (torch.ops.warplink, direct.group_name)}
    if device.type == "cuda":
        import torch.distributed._symmetric_memory as symmetric_memory

        name = dist.group.WORLD.group_name
        symmetric_memory.enable_symm_mem_for_group(name)
        libraries = {"symm_mem": (torch.ops.symm_mem, name), **libraries}
    path = warplink.torch.get_warplink_group(direct).collectives_path
    output = arguments.output or (os.environ.get("OUT") and os.path.join(os.environ["OUT"], "torch_host_times.json"))
    first, rows = RANK == 0, []
    report = {
        "benchmark": "host times of PyTorch's calls",
        "ranks": RANKS,
        "gpus": torch.cuda.device_count(),
        "device": torch.cuda.get_device_name() if device.type == "cuda" else "cpu",
        "torch": torch.__version__,
        "path": path,
        "rows": rows,
    }
    if first:
        print(f"{RANKS} ranks on {device.type}, {torch.cuda.device_count()} GPUs; collectives_path is {path}", flush=True)

    def run(what, sizes, contenders, beside, calls):
        seconds, failures = measure(contenders, device, arguments.batches, calls)
        rows.append({"call": what, "sizes": sizes, "host_us": seconds, "failures": failures})
        if first:
            print(f"{what:36} {sizes!s:20} {told(seconds, failures, beside)}", flush=True)
            if output:
                # What was measured is kept if a later call does not end.
                with open(output, "w") as file:
                    json.dump(report, file, indent=1)

    for name in COLLECTIVES:
        for size in SIZES:
            if not arguments.only or name in arguments.only:
                run(name, size, collective(name, size, groups, device), reference, arguments.calls)
    capable = device.type == "cpu" or torch.cuda.get_device_capability(device) >= (8, 9)
    for name in (*FUSED, *(SCALED if capable else ())):
        for shape in SHAPES if device.type == "cuda" else CPU_SHAPES:
            if not arguments.only or name in arguments.only:
                run(name, list(shape), fused(name, shape, libraries, device), "symm_mem", max(1, arguments.calls // 2))
    dist.destroy_process_group()
    own = sorted({name for row in rows for name in row["failures"] if name.startswith("warplink")})
    if own:
        raise SystemExit(f"calls of {', '.join(own)} failed")


if __name__ == "__main__":
    main()
