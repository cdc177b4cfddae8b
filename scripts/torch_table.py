#!/usr/bin/env python3
"""A short table of what PyTorch gets: collectives and messages of a default Warplink group beside NCCL's backend, fused
operations on random shapes beside the collective and the product, and a profile of both kinds of call.

    torchrun --nproc-per-node 2 scripts/torch_table.py [--part PART]... [--random N] [--seconds S] [--symmetric]
        [--output FILE.json]

Every time is that of the slowest rank, in microseconds: of the device, and of the host until the call returns. With
`--device cpu`, Gloo is in NCCL's place, messages and fused operations are on the host device, and sizes are small.
Random shapes are measured until `--seconds` have passed. The figures also go to $OUT/torch_table.json. Parts are the
profiles, calls and fused of the table, and steps: how the host's time of fused operations and of a batch is spent.
"""

import argparse
import cProfile
import io
import json
import math
import os
import pstats
import statistics
import time

import without_multicast  # noqa: F401

import torch
import torch.distributed as dist
import torch_messages
import torch_overlap

import warplink.torch

SIZES = (1 << 10, 16 << 10, 256 << 10, 4 << 20, 64 << 20)
CPU_SIZES = (1 << 10, 256 << 10)
PARTS = ("profiles", "calls", "fused", "steps")
#: Rows of the whole, columns, and columns of the product, of the profiled call.
PROFILED = (1024, 1024, 512)


class Collective:
    """A collective whose longer tensor has ``size`` bytes, for `torch_messages.measure`."""

    def __init__(self, name, size, device):
        rank, world = dist.get_rank(), dist.get_world_size()
        self.name, part = name, max(1, size // 2 // world)
        self.bytes = 2 * part * world
        own = [torch_messages.numbers(part, rank, to, device) for to in range(world)]
        every = [torch_messages.numbers(part, of, rank, device) for of in range(world)]
        if name == "all_reduce":
            # In place, of what the outputs are filled with.
            self._input = None
            self.expected = torch.full([part * world], -world, device=device, dtype=torch.bfloat16)
        elif name == "all_gather_into_tensor":
            self._input = torch_messages.numbers(part, rank, 0, device)
            self.expected = torch.cat([torch_messages.numbers(part, of, 0, device) for of in range(world)])
        elif name == "reduce_scatter_tensor":
            self._input = torch.cat(own).remainder(64)
            self.expected = sum(one.remainder(64) for one in every)
        elif name == "all_to_all_single":
            self._input, self.expected = torch.cat(own), torch.cat(every)
        else:
            self._input = torch_messages.numbers(part * world, 0, 0, device)
            self.expected = torch.full_like(self._input, -1) if rank == 0 else self._input
        self.output = torch.empty_like(self.expected)

    def call(self, group):
        if self.name == "all_reduce":
            dist.all_reduce(self.output, group=group)
        elif self.name == "broadcast":
            dist.broadcast(self._input if dist.get_rank() == 0 else self.output, 0, group=group)
        else:
            getattr(dist, self.name)(self.output, self._input, group=group)


COLLECTIVES = ("all_reduce", "all_gather_into_tensor", "reduce_scatter_tensor", "all_to_all_single", "broadcast")


def mean(values):
    """The geometric mean."""
    return math.exp(sum(map(math.log, values)) / len(values)) if values else math.nan


def ratios(rows, ours, theirs, key):
    return [row[theirs][key] / row[ours][key] for row in rows if ours in row and theirs in row]


def calls(groups, reference, sizes, device, say):
    """Collectives and messages by each group."""
    rows = []
    say(f"{'call':24}{'bytes':>10}" + "".join(f"{name + ' us, host':>28}" for name in groups) + "   ratio, host")
    kinds = [lambda size, name=name: Collective(name, size, device) for name in COLLECTIVES]
    kinds += [lambda size, kind=kind: kind(size, device) for kind in (torch_messages.Uneven, torch_messages.Ring)]
    for kind in kinds:
        for size in sizes:
            case = kind(size)
            found = torch_messages.measure(case, groups, device)
            row = {"call": case.name, "bytes": case.bytes, **found}
            rows.append(row)
            cells = "".join(
                f"{it['seconds'] * 1e6:18.1f}{it['host_seconds'] * 1e6:9.1f}{'!' if it['wrong'] else ' '}"
                for it in found.values()
            )
            base, ours = found[reference], found["warplink"]
            say(
                f"{case.name:24}{case.bytes:10}{cells}   {base['seconds'] / ours['seconds']:5.2f} "
                f"{ours['host_seconds'] / base['host_seconds']:5.2f}"
            )
    for key in ("seconds", "host_seconds"):
        found = ratios(rows, "warplink", reference, key)
        behind = [f"{row['call']} {row['bytes']}" for row, ratio in zip(rows, found) if ratio < 1]
        say(
            f"{key}: {reference} over warplink, geometric mean {mean(found):.2f}, least {min(found):.2f}; behind on "
            f"{len(behind)} of {len(found)}: {', '.join(behind[:12])}"
        )
    return rows


def fused(shapes, seconds, samples, symmetric, say):
    """Fused operations on ``shapes``, until time is up on rank 0."""
    rows, begin = [], time.perf_counter()
    say(f"{'m':>6}{'k':>6}{'n':>6}  operation: matmul | plain pair, host | fused, host, error | pair over fused, how it runs")
    space = warplink.torch.get_warplink_group(torch_overlap.warplink_group()).workspace("cuda")
    for m, k, n in shapes:
        over = torch.tensor([time.perf_counter() - begin > seconds], device="cuda", dtype=torch.int32)
        dist.broadcast(over, 0)
        if over.item():
            say(f"{seconds:.0f} s are over")
            break
        for run in (torch_overlap.all_gather_matmul, torch_overlap.matmul_reduce_scatter):
            since = time.perf_counter()
            row = {"m": m, "k": k, "n": n, **run(m, k, n, "rows", samples)}
            pair = next(name for name in ("nccl_then_matmul", "matmul_then_nccl") if f"{name}_us" in row)
            row["gain"] = row[f"{pair}_us"] / row["warplink_us"]
            # Behind its first call, the last decision is this shape's.
            row["fuses"] = next(reversed(space.decisions.values())).eager
            row["lowering"] = next(reversed(space.plans.values())).plan.lowering if row["fuses"] else None
            rows.append(row)
            theirs = f" | symm_mem {row['symm_mem_us']:6.0f}" if symmetric else ""
            how = row["lowering"] or "plain"
            say(
                f"{m:6}{k:6}{n:6}  {row['op'][:24]:24} {row['matmul_us']:7.0f} | {row[f'{pair}_us']:6.0f} "
                f"{row[f'{pair}_host_us']:5.0f} | {row['warplink_us']:6.0f} {row['warplink_host_us']:5.0f} "
                f"{row['warplink_error']:.0e} | {row['gain']:.2f} {how}{theirs}   ({time.perf_counter() - since:.1f} s)"
            )
        torch.cuda.empty_cache()
    gains = [row["gain"] for row in rows]
    least = min(gains, default=math.nan)
    behind = sum(gain < 0.97 for gain in gains)
    say(f"fused: geometric mean {mean(gains):.2f}, least {least:.2f}, below 0.97 on {behind} of {len(gains)}")
    return rows


def profiled(name, call, settle, count, say):
    """Where the time of a call goes on rank 0; the other ranks make as many calls."""
    for _ in range(5):
        call()
    settle()
    begin, own = time.perf_counter(), time.thread_time()
    for _ in range(count):
        call()
    plain, own = (time.perf_counter() - begin) / count, (time.thread_time() - own) / count
    settle()
    profile = cProfile.Profile()
    profile.enable()
    for _ in range(count):
        call()
    profile.disable()
    settle()
    text = io.StringIO()
    pstats.Stats(profile, stream=text).sort_stats("tottime").print_stats(15)
    lines = [line for line in text.getvalue().splitlines() if line.strip()]
    say(
        f"--- {name}: {plain * 1e6:.1f} us a call without the profiler, {own * 1e6:.1f} of the calling thread's; "
        f"{count} calls with it"
    )
    say("\n".join(lines[-16:]))


def profiles(group, device, say):
    world, name = dist.get_world_size(), group.group_name
    m, k, n = PROFILED if device.type == "cuda" else (16, 16, 16)
    a, b = torch.ones(m // world, k, device=device).bfloat16(), torch.ones(k, n, device=device).bfloat16()
    left, right = torch.ones(m, k // world, device=device).bfloat16(), torch.ones(k // world, n, device=device).bfloat16()
    small = torch.ones(512, device=device, dtype=torch.bfloat16)

    def settle():
        torch_messages.synchronize(device)
        dist.barrier()

    ops = torch.ops.warplink
    profiled("fused_all_gather_matmul", lambda: ops.fused_all_gather_matmul(a, [b], 0, name), settle, 200, say)
    scatter = lambda: ops.fused_matmul_reduce_scatter(left, right, "sum", 0, name)  # noqa: E731
    profiled("fused_matmul_reduce_scatter", scatter, settle, 200, say)
    profiled("all_reduce", lambda: dist.all_reduce(small, group=group), settle, 500, say)
    ring = torch_messages.Ring(1 << 10, device)
    profiled("batch_isend_irecv", lambda: ring.call(group), settle, 500, say)


def host_times(calls, settle, device, say, batches=15, count=10):
    """Prints the times of ``calls``, medians of the slowest rank: of a call by itself, after all ranks are done with
    everything, the host's and from before it to when the device is done; and the host's of calls in a row. A call may
    return a time at which a part of it was over, to which "first part" is the host's time in a call by itself."""
    say(f"{'us':58}{'alone':>8}{'done':>8}{'row':>8}{'first part':>12}")
    on_gpu = device.type == "cuda"
    events = [torch.cuda.Event(enable_timing=True) for _ in range(2)] if on_gpu else []
    for name, call in calls.items():
        for _ in range(5):
            call()
        samples = []
        for _ in range(batches):
            settle()
            if on_gpu:
                events[0].record()
            begin = time.perf_counter()
            between = call()
            alone = time.perf_counter() - begin
            if on_gpu:
                events[1].record()
            torch_messages.synchronize(device)
            done = events[0].elapsed_time(events[1]) / 1e3 if on_gpu else time.perf_counter() - begin
            first = between - begin if isinstance(between, float) else math.nan
            begin = time.perf_counter()
            for _ in range(count):
                call()
            samples.append((alone, done, (time.perf_counter() - begin) / count, first))
        settle()
        medians = [statistics.median(column) for column in zip(*samples)]
        medians = torch.tensor(medians, dtype=torch.float64, device=device)
        dist.all_reduce(medians, op=dist.ReduceOp.MAX)
        *whole, first = (value * 1e6 for value in medians.tolist())
        say(f"{name:58}" + "".join(f"{value:8.1f}" for value in whole) + ("" if math.isnan(first) else f"{first:12.1f}"))


def steps(group, device, say):
    """Where the host's time of fused operations and of a batch goes: whole calls, each way of them, and their parts."""
    from warplink.torch import ops as path
    from warplink.torch.trials import Decision

    world, name = dist.get_world_size(), group.group_name
    own = warplink.torch.get_warplink_group(group)
    m, k, n = PROFILED if device.type == "cuda" else (16, 16, 16)
    a, b = torch.ones(m // world, k, device=device).bfloat16(), torch.ones(k, n, device=device).bfloat16()
    left, right = torch.ones(m, k // world, device=device).bfloat16(), torch.ones(k // world, n, device=device).bfloat16()
    whole, product = a.new_empty(m, k), a.new_empty(m, n)
    part = a.new_empty(m // world, n)
    ops, space, bs = torch.ops.warplink, own.workspace(device), [b]
    library = torch.library.Library("warplink_table", "DEF")
    library.define("nothing(Tensor A, Tensor[] Bs, int dim, str group_name, *, bool return_A = True) -> (Tensor?, Tensor[])")
    for key in ("CPU", "CUDA"):
        library.impl("nothing", lambda A, Bs, dim, group_name, *, return_A=True: (A, [A]), key)

    def settle():
        space.stream.synchronize()
        dist.barrier()
        torch_messages.synchronize(device)

    def gather():
        return ops.fused_all_gather_matmul(a, [b], 0, name)

    def scatter():
        return ops.fused_matmul_reduce_scatter(left, right, "sum", 0, name)

    def gathered_then(by):
        dist.all_gather_into_tensor(whole, a, group=by)
        between = time.perf_counter()
        torch.matmul(whole, b)
        return between

    def then_scattered(by):
        made = torch.matmul(left, right)
        between = time.perf_counter()
        dist.reduce_scatter_tensor(part, made, group=by)
        return between

    gather(), scatter()
    for key, decision in space.decisions.items():
        say(f"{key}: {decision}")
    before = dict(space.decisions)
    for fuses in (True, False):
        space.decisions.update(dict.fromkeys(space.decisions, Decision(fuses, fuses)))
        # The plan is made again where it was dropped.
        gather(), scatter()
        if fuses:
            plans = {key.operation: plan for key, plan in space.plans.items() if hasattr(plan, "launcher")}
            for operation, plan in plans.items():
                say(f"{operation}: {plan.plan.lowering}, copied: {sorted(plan.own)}")
        word = "fused" if fuses else "plain"
        both = {f"fused_all_gather_matmul, {word}": gather, f"fused_matmul_reduce_scatter, {word}": scatter}
        both[f"the same past PyTorch's dispatcher, {word}"] = lambda: path._GATHER(a, bs, 0, name)
        host_times(both, settle, device, say)
    stream = space.stream
    addresses = {
        "fused_all_gather_matmul": [tensor.data_ptr() for tensor in (a, b, product, whole)],
        "fused_matmul_reduce_scatter": [tensor.data_ptr() for tensor in (left, right, part)],
    }

    def turn():
        space.turns.begin(stream)
        space.turns.end(stream)

    parts = {
        "all-gather and product, the world's group": lambda: gathered_then(None),
        "all-gather and product, Warplink's group": lambda: gathered_then(group),
        "product and reduce-scatter, the world's group": lambda: then_scattered(None),
        "product and reduce-scatter, Warplink's group": lambda: then_scattered(group),
        "torch.matmul": lambda: torch.matmul(whole, b),
        "torch.mm with out=": lambda: torch.mm(whole, b, out=product),
        "an operator in Python that does nothing": lambda: torch.ops.warplink_table.nothing(a, bs, 0, name),
        "new_empty": lambda: a.new_empty((m, k)),
        "a lookup that finds nothing": lambda: path._RECENT.call("nothing", 0, name, a, bs),
        "an empty turn": turn,
    }
    for operation, plan in plans.items():
        given = addresses[operation]
        parts[f"launch of {operation}"] = lambda plan=plan, given=given: plan.launcher.launch(space.turns, stream, given)
    if (direct := own._on_gpu) is not None:
        ring = torch_messages.Ring(1 << 10, device)
        side = direct._side[1]
        sent, received = ((tensor.data_ptr(), tensor.nbytes) for tensor in (ring.input, ring.output))
        messages = [(ring.right, sent)], [(ring.left, received)]

        def posted():
            return [
                dist.P2POp(dist.isend, ring.input, ring.right, group),
                dist.P2POp(dist.irecv, ring.output, ring.left, group),
            ]

        listed = posted()
        bytes_of_a = (a.nbytes, "u8", None, None)
        parts |= {
            "all_gather, direct.now": lambda: direct.now("all_gather", whole, a, a),
            "all_gather, native": lambda: direct._collectives.call_at(
                "all_gather", stream, whole.data_ptr(), a.data_ptr(), *bytes_of_a
            ),
            "batch, the world's group": lambda: ring.call(None),
            "batch, Warplink's group": lambda: ring.call(group),
            "batch without P2POp and wait": lambda: dist.batch_isend_irecv(listed),
            "P2POp, two": posted,
            "batch, native on the current stream": lambda: direct._collectives.send_receive_at(stream, *messages),
            "the side stream follows": lambda: side.follow(stream),
            "a mark in the side stream": side.mark,
            "record_stream": lambda: ring.input.record_stream(direct._side[0]),
        }
    host_times(parts, settle, device, say)
    space.decisions.update(before)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument("--part", action="append", choices=PARTS, help="may be given several times; all but steps by default")
    parser.add_argument("--random", type=int, default=20, metavar="N", help="random shapes of fused operations")
    parser.add_argument("--seconds", type=float, default=70, help="after which no other shape is begun")
    parser.add_argument("--samples", type=int, default=9)
    parser.add_argument("--symmetric", action="store_true", help="print symmetric memory's fused operations, too")
    parser.add_argument("--output", help="write the figures to this JSON file")
    arguments = parser.parse_args()
    device = torch.device(arguments.device)
    reference = "nccl" if device.type == "cuda" else "gloo"
    if device.type == "cuda":
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(device)
    dist.init_process_group(reference, device_id=device if device.type == "cuda" else None)
    if arguments.symmetric:
        import torch.distributed._symmetric_memory as symmetric_memory

        symmetric_memory.enable_symm_mem_for_group(dist.group.WORLD.group_name)
    torch.manual_seed(1 + dist.get_rank())
    first, begin = dist.get_rank() == 0, time.perf_counter()

    def say(text):
        if first:
            print(text, flush=True)

    group = torch_overlap.warplink_group()
    groups = {reference: dist.group.WORLD, "warplink": group}
    for one in groups.values():
        # The first collective of a group joins what goes direct.
        dist.all_reduce(torch.ones(1, device=device), group=one)
    own = warplink.torch.get_warplink_group(group)
    say(
        f"{dist.get_world_size()} ranks on {device.type}; PyTorch {torch.__version__}; collectives_path "
        f"{own.collectives_path}, messages_path {own.messages_path}"
    )
    sizes = SIZES if device.type == "cuda" else CPU_SIZES
    report = {"benchmark": "a table of PyTorch", "torch": torch.__version__, "ranks": dist.get_world_size()}
    output = arguments.output or (os.environ.get("OUT") and os.path.join(os.environ["OUT"], "torch_table.json"))

    def keep():
        # What was measured is kept if a later call does not end.
        if output and first:
            with open(output, "w") as file:
                json.dump(report, file, indent=1)

    parts = arguments.part or PARTS[:-1]
    if "steps" in parts:
        steps(group, device, say)
    if "profiles" in parts:
        profiles(group, device, say)
    if "calls" in parts:
        report["calls"] = calls(groups, reference, sizes, device, say)
        keep()
    say(f"({time.perf_counter() - begin:.0f} s)")
    if "fused" in parts and device.type == "cuda":
        shapes = torch_overlap.random_shapes(arguments.random, dist.get_world_size())
        report["fused"] = fused(shapes, arguments.seconds, arguments.samples, arguments.symmetric, say)
        keep()
        say(f"({time.perf_counter() - begin:.0f} s)")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
