#!/usr/bin/env python3
"""Collectives over PyTorch's symmetric memory, in the terms and the JSON of `warplink bench collective`.

Run it on all GPUs of one machine:

    torchrun --nproc-per-node 2 scripts/torch_collectives.py all-reduce [--from BYTES] [--to BYTES]
        [--output FILE.json]

`warplink bench collective ... --beside FILE.json` draws its lines and prints its times beside those of Warplink.
A sample is a number of calls, one behind the other, after a barrier over all ranks; the slowest rank counts, and
the median is printed. NVLink multicast stays off.
"""

import argparse
import json
import os
import statistics

import without_multicast  # noqa: F401

import torch
import torch.distributed as dist
import torch.distributed._symmetric_memory as symm_mem

OPS = torch.ops.symm_mem


def calls_for(size):
    """Calls in a sample, as `warplink bench collective` makes them."""
    if size <= 1 << 20:
        return 50
    if size <= 16 << 20:
        return 20
    return 8 if size <= 256 << 20 else 4


def seconds(call, calls, samples, captured):
    """Times of one call: of each sample, that of the slowest rank."""

    def run():
        for _ in range(calls):
            call()

    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        run()
        torch.cuda.synchronize()
        if captured:
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, stream=stream):
                run()
            work = graph.replay
        else:
            work = run
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        times = []
        for sample in range(samples + 2):
            torch.cuda.synchronize()
            dist.barrier()
            torch.cuda.synchronize()
            begin.record()
            work()
            end.record()
            torch.cuda.synchronize()
            slowest = torch.tensor([begin.elapsed_time(end)], device="cuda")
            dist.all_reduce(slowest, op=dist.ReduceOp.MAX)
            if sample >= 2:
                times.append(slowest.item() / 1e3 / calls)
    return {"median": statistics.median(times), "least": min(times), "most": max(times)}


def drawn(count, rank, seed, world):
    """Small integers that repeat after a prime number of elements; every sum of them is exact in bfloat16."""
    generator = torch.Generator().manual_seed(1000 * seed + rank)
    period = torch.randint(0, min(100, 256 // world), (65521,), generator=generator).bfloat16()
    return period.repeat(count // len(period) + 1)[:count]


def wait(tensor):
    """Has the current stream wait for a functional collective."""
    return torch.ops._c10d_functional.wait_tensor(tensor)


class Case:
    """A collective on one size: its ways, each a call that gives the output, and what that must be."""

    def __init__(self, name, size, seed, group):
        self.world, self.rank = dist.get_world_size(), dist.get_rank()
        parts = self.world if name != "all-reduce" else 1
        self.count = size // 2 // parts
        self.bytes = 2 * parts * self.count
        inputs = parts * self.count if name == "reduce-scatter" else self.count
        every = [drawn(inputs, rank, seed, self.world) for rank in range(self.world)]
        self.input = every[self.rank]
        self.own = own = symm_mem.empty(inputs, dtype=torch.bfloat16, device="cuda")
        symm_mem.rendezvous(own, group)
        output = torch.empty(inputs if name == "all-reduce" else self.count, dtype=torch.bfloat16, device="cuda")
        total = sum(part.float() for part in every).bfloat16()
        self.factor = (self.world - 1) / self.world
        self.ways = {}
        if name == "all-reduce":
            self.factor *= 2
            self.expected = total
            for shots, op in (("one-shot", "one_shot_all_reduce_out"), ("two-shot", "two_shot_all_reduce_out")):
                if hasattr(OPS, op):
                    reduce = getattr(OPS, op)
                    self.ways[f"symm_mem {shots}"] = lambda reduce=reduce: reduce(own, "sum", group, output)
        elif name == "all-gather":
            self.expected = torch.cat(every)

            self.ways["symm_mem"] = lambda: wait(OPS._low_contention_all_gather(own, group))
        else:
            self.expected = total[self.rank * self.count : (self.rank + 1) * self.count]

            def scatter():
                OPS.reduce_scatter_out(own, group, False, output)
                return output

            self.ways["symm_mem"] = scatter

    def wrong(self, call):
        """Elements that are not right, on all ranks."""
        # Some ways change it.
        self.own.copy_(self.input)
        torch.cuda.synchronize()
        dist.barrier()
        result = call()
        torch.cuda.synchronize()
        wrong = (result.cpu() != self.expected).sum().to("cuda")
        dist.all_reduce(wrong)
        return wrong.item()


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("collective", choices=["all-reduce", "all-gather", "reduce-scatter"])
    parser.add_argument("--from", dest="least", type=int, default=1024, metavar="BYTES")
    parser.add_argument("--to", dest="most", type=int, default=1 << 30, metavar="BYTES")
    parser.add_argument("--step", type=int, default=4)
    parser.add_argument("--samples", type=int, default=9)
    parser.add_argument("--output", help="write the figures to this JSON file")
    arguments = parser.parse_args()
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("nccl", device_id=torch.device("cuda", int(os.environ["LOCAL_RANK"])))
    group, first = dist.group.WORLD.group_name, dist.get_rank() == 0
    rows, size, seed = [], arguments.least, 0
    while size <= arguments.most:
        seed += 1
        case = Case(arguments.collective, size, seed, group)
        for submission in ("eager", "captured"):
            ways = []
            for way, call in case.ways.items():
                try:
                    wrong = case.wrong(call)
                    times = seconds(call, calls_for(size), arguments.samples, submission == "captured")
                except RuntimeError as error:
                    # A size or an alignment that it does not take: on all ranks alike.
                    if first:
                        print(f"{size} bytes, {way}, {submission}: {str(error).splitlines()[0]}", flush=True)
                    continue
                rate = case.bytes / times["median"] / 1e9
                ways.append(
                    {
                        "method": way,
                        "seconds": times,
                        "bandwidth": rate,
                        "bus_bandwidth": rate * case.factor,
                        "wrong": wrong,
                    }
                )
            rows.append(
                {"bytes": case.bytes, "count": case.count, "place": "out", "submission": submission, "methods": ways}
            )
            if first:
                figures = "  ".join(f"{way['method']} {way['seconds']['median'] * 1e6:.2f} us" for way in ways)
                print(f"{case.bytes:11}  {submission:9} {figures}", flush=True)
        del case
        torch.cuda.empty_cache()
        size *= arguments.step
    if arguments.output and first:
        with open(arguments.output, "w") as file:
            report = {
                "benchmark": "collective",
                "collective": arguments.collective,
                "dtype": "bf16",
                "device": torch.cuda.get_device_name(),
                "ranks": dist.get_world_size(),
                "peers": [f"PyTorch {torch.__version__}"],
                "rows": rows,
            }
            json.dump(report, file, indent=1)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
