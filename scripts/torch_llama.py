#!/usr/bin/env python3
"""Trains layers of Llama with tensor parallelism on NCCL, with PyTorch's asynchronous tensor parallelism,
and on Warplink, one after another in one run, and compares times and losses.

    torchrun --nproc-per-node 2 scripts/torch_llama.py [--traces FOLDER] [--output FILE.json]

The layers are those of Llama 3 8B, 8 of them, in bf16 with random weights, over all ranks of one machine;
sequences are divided between the layers' products. Each contender compiles the layers. A step is a forward
and a backward pass; the slowest rank counts, and the median of all steps is printed. With `--traces`, a
profile of one step of each goes to FOLDER/NAME.json, which Perfetto opens. NVLink multicast stays off.

    torchrun --nproc-per-node 2 scripts/torch_llama.py --device cpu --small

is a trial on the processor: Gloo and Warplink on small layers. Where ranks share a GPU (scripts/device-service.sh),
losses can be compared, but times mean nothing; PyTorch's symmetric memory refuses to share.
"""

import argparse
import dataclasses
import json
import os
import pathlib
import statistics
import sys
import time

import without_multicast  # noqa: F401
# The report tells of graphs that are compiled, not of those from a cache.
os.environ.setdefault("TORCHINDUCTOR_FORCE_DISABLE_CACHES", "1")

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

sys.path.insert(0, str(pathlib.Path(__file__).parents[1] / "crates" / "warplink-py" / "tests"))
import gpus
import llama

import warplink.torch


#: The launcher's store, and how many groups have used it.
_store, _groups = None, 0


def start(backend, device):
    global _store, _groups
    if _store is None:
        _store = next(dist.rendezvous("env://"))[0]
    options = {"device_id": device} if device.type == "cuda" else {}
    # A group must not read what an earlier one left in the store.
    store = dist.PrefixStore(f"llama {_groups}", _store)
    _groups += 1
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    dist.init_process_group(backend, store=store, rank=rank, world_size=world, **options)
    return dist.group.WORLD.group_name


class Plain:
    """PyTorch's own backend."""

    def __init__(self, device):
        self.name = "nccl" if device.type == "cuda" else "gloo"
        self.device = device

    def __enter__(self):
        start(self.name, self.device)

    def __exit__(self, *_):
        dist.destroy_process_group()

    def report(self):
        return None


class AsynchronousTensorParallel(Plain):
    """The same with PyTorch's own fused operations."""

    def __init__(self, device):
        super().__init__(device)
        self.name = "async-tp"

    def __enter__(self):
        import torch._inductor.config
        from torch.distributed._symmetric_memory import enable_symm_mem_for_group

        enable_symm_mem_for_group(start("nccl", self.device))
        torch._inductor.config._micro_pipeline_tp = True

    def __exit__(self, *_):
        torch._inductor.config._micro_pipeline_tp = False
        dist.destroy_process_group()


class Warplink(Plain):
    """Warplink's backend and its pass."""

    def __init__(self, device):
        super().__init__(device)
        self.name = "warplink"

    def __enter__(self):
        start("warplink", self.device)
        warplink.torch.fusion_report(clear=True)
        warplink.torch.enable_fusion()

    def __exit__(self, *_):
        warplink.torch.disable_fusion()
        dist.destroy_process_group()

    def report(self):
        found = warplink.torch.fusion_report()
        return {"fused": sum(one.replaced for one in found), "left": [str(one) for one in found if not one.replaced]}


def run(arguments, device, sizes, trace):
    """Losses, and seconds of each step by the slowest rank."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    dtype = torch.float32 if device.type == "cpu" else torch.bfloat16
    mesh = init_device_mesh(device.type, (dist.get_world_size(),))
    model = llama.divide(llama.Llama(sizes, sizes.layers).to(dtype).to(device), mesh)
    for layer in model.layers:
        layer.compile(fullgraph=True)
    losses, seconds = [], []

    def now():
        if device.type == "cuda":
            torch.cuda.synchronize()
        return time.perf_counter()

    def step(tokens, targets):
        loss = llama.loss_of(model(tokens), targets)
        loss.backward()
        return loss

    total = arguments.warmup + arguments.steps
    for number, (tokens, targets) in enumerate(llama.batches(sizes, total, 100, device)):
        model.zero_grad(set_to_none=True)
        dist.barrier()
        begin = now()
        loss = step(tokens, targets)
        taken = torch.tensor([now() - begin], device=device)
        dist.all_reduce(taken, dist.ReduceOp.MAX)
        losses.append(loss.item())
        if number >= arguments.warmup:
            seconds.append(taken.item())
    if trace is not None:
        # Every rank takes part; the profile is the first one's.
        with torch.profiler.profile() as profile:
            step(tokens, targets)
            now()
        if dist.get_rank() == 0:
            profile.export_chrome_trace(str(trace))
    return losses, seconds


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument("--small", action="store_true", help="small layers instead of those of Llama 3 8B")
    parser.add_argument("--tokens", type=int, help="tokens of a sequence (8192, or 16 with --small)")
    parser.add_argument("--layers", type=int, help="layers (8, or 2 with --small)")
    parser.add_argument("--vocabulary", type=int, default=16_384, help="words, as only the layers are of interest")
    parser.add_argument("--warmup", type=int, default=5, help="steps before those that count")
    parser.add_argument("--steps", type=int, default=15)
    parser.add_argument("--rounds", type=int, default=1, help="how often each contender has its turn")
    names = ["nccl", "gloo", "async-tp", "warplink"]
    parser.add_argument("--only", nargs="+", choices=names, help="these contenders instead of all")
    parser.add_argument("--traces", type=pathlib.Path, help="write a profile of each to this folder")
    parser.add_argument("--output", help="write the figures to this JSON file")
    arguments = parser.parse_args()
    rank = int(os.environ["RANK"])
    if arguments.device == "cuda":
        gpus.prepare_sharing(rank)
        device = torch.device("cuda", gpus.gpu(int(os.environ["LOCAL_RANK"])))
        torch.cuda.set_device(device)
    else:
        device = torch.device("cpu")
        torch.set_num_threads(1)
    sizes = llama.Sizes() if arguments.small else llama.LLAMA_3_8B
    changes = {"vocabulary": arguments.vocabulary if not arguments.small else sizes.vocabulary}
    changes.update({name: value for name in ("tokens", "layers") if (value := getattr(arguments, name))})
    sizes = dataclasses.replace(sizes, **changes)
    if arguments.traces and rank == 0:
        arguments.traces.mkdir(parents=True, exist_ok=True)
    contenders = [Plain, AsynchronousTensorParallel, Warplink] if device.type == "cuda" else [Plain, Warplink]
    rows, first = {}, None
    for number in range(arguments.rounds):
        for contender in contenders:
            made, began = contender(device), time.perf_counter()
            if arguments.only and made.name not in arguments.only:
                continue
            trace = arguments.traces / f"{made.name}.json" if arguments.traces and number == 0 else None
            with made:
                losses, seconds = run(arguments, device, sizes, trace)
                report = made.report()
            if device.type == "cuda":
                torch.cuda.empty_cache()
            first = first or losses
            row = rows.setdefault(made.name, {"ms": [], "losses": losses, "report": report})
            row["ms"] += [1e3 * taken for taken in seconds]
            row["off"] = max(abs(one - other) / abs(other) for one, other in zip(losses, first))
            if rank == 0:
                took = time.perf_counter() - began
                median = 1e3 * statistics.median(seconds)
                print(f"{made.name}: {median:.2f} ms a step; took {took:.0f} s in all", file=sys.stderr, flush=True)
    if rank == 0:
        for name, row in rows.items():
            row["median_ms"] = statistics.median(row["ms"])
            fused = f"  fused {row['report']['fused']}" if row["report"] else ""
            print(f"{name:10} {row['median_ms']:9.2f} ms a step  losses off by {row['off']:.1e} at most{fused}", flush=True)
        if arguments.output:
            with open(arguments.output, "w") as file:
                json.dump({"torch": torch.__version__, "sizes": dataclasses.asdict(sizes), "rows": rows}, file, indent=1)


if __name__ == "__main__":
    main()
