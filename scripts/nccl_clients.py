#!/usr/bin/env python3
"""Programs that use NCCL, unchanged, for scripts/device-nccl.sh: right results from whichever library is in front.

    nccl_clients.py torch    ranks are processes: collectives, messages, sub-groups, DDP, FSDP2 and tensor parallel
    nccl_clients.py cupy     ranks are threads
    nccl_clients.py jax      one process with all GPUs

Each prints a line per part that was right, with losses, which have to be equal for both libraries, and fails otherwise.
"""

import os
import sys
import threading

import without_multicast  # noqa: F401

COUNT = 100_003


def torch_rank(rank, world, port):
    """The parts of PyTorch, on one rank."""
    import torch
    import torch.distributed as dist

    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), RANK=str(rank), WORLD_SIZE=str(world))
    device = torch.device("cuda", rank)
    torch.cuda.set_device(device)
    dist.init_process_group("nccl", device_id=device)

    def right(part, value=""):
        dist.barrier()
        if rank == 0:
            print(f"torch {part}: right {value}", flush=True)

    def values(of, dtype, count=COUNT):
        return (torch.arange(count, device=device) % 7 + of).to(dtype)

    for dtype in (torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.int32, torch.int64, torch.uint8):
        every = [values(of, dtype) for of in range(world)]
        for op, meant in (("SUM", sum(every)), ("MAX", every[-1]), ("MIN", every[0])):
            tensor = values(rank, dtype)
            dist.all_reduce(tensor, getattr(dist.ReduceOp, op))
            assert torch.equal(tensor, meant.to(dtype)), ("all_reduce", dtype, op)
        whole = torch.empty(world * COUNT, dtype=dtype, device=device)
        dist.all_gather_into_tensor(whole, every[rank])
        assert torch.equal(whole, torch.cat(every)), ("all_gather", dtype)
        part = torch.empty(COUNT, dtype=dtype, device=device)
        dist.reduce_scatter_tensor(part, values(rank, dtype, world * COUNT))
        own = slice(rank * COUNT, (rank + 1) * COUNT)
        meant = sum(values(of, dtype, world * COUNT)[own] for of in range(world))
        assert torch.equal(part, meant.to(dtype)), ("reduce_scatter", dtype)
        tensor = values(rank, dtype)
        dist.broadcast(tensor, world - 1)
        assert torch.equal(tensor, every[-1]), ("broadcast", dtype)
        tensor = values(rank, dtype)
        dist.reduce(tensor, 0)
        assert rank > 0 or torch.equal(tensor, sum(every).to(dtype)), ("reduce", dtype)
        out = torch.empty_like(whole)
        dist.all_to_all_single(out, torch.cat([values(rank + to, dtype) for to in range(world)]))
        assert torch.equal(out, torch.cat([values(of + rank, dtype) for of in range(world)])), ("all_to_all", dtype)
    premultiplied = torch.ones(COUNT, device=device)
    dist.all_reduce(premultiplied, dist._make_nccl_premul_sum(0.5))
    assert torch.equal(premultiplied, torch.full_like(premultiplied, 0.5 * world))
    average = values(rank, torch.float32)
    dist.all_reduce(average, dist.ReduceOp.AVG)
    right("collectives")

    ahead, behind = (rank + 1) % world, (rank - 1) % world
    for count in (0, 1, 1000, 3_000_001):
        mine, theirs = values(rank, torch.float32, count), torch.empty(count, device=device)
        sent = [dist.P2POp(dist.isend, mine, ahead), dist.P2POp(dist.irecv, theirs, behind)]
        for work in dist.batch_isend_irecv(sent):
            work.wait()
        assert torch.equal(theirs, values(behind, torch.float32, count)), ("messages", count)
    gathered = [torch.empty(COUNT, device=device) for _ in range(world)] if rank == 0 else None
    dist.gather(values(rank, torch.float32), gathered)
    assert rank > 0 or all(torch.equal(one, values(of, torch.float32)) for of, one in enumerate(gathered))
    right("messages")

    group = dist.new_group(list(range(world)))
    both = [torch.ones(COUNT, device=device) for _ in range(2)]
    for _ in range(50):
        order = (0, 1) if rank % 2 == 0 else (1, 0)
        works = {at: dist.all_reduce(both[at], group=(None, group)[at], async_op=True) for at in order}
        for work in works.values():
            work.wait()
        for one in both:
            one.div_(world)
    assert all(torch.equal(one, torch.ones_like(one)) for one in both)
    right("two communicators, in opposite orders")

    stream, graph = torch.cuda.Stream(), torch.cuda.CUDAGraph()
    captured = torch.ones(COUNT, device=device)
    with torch.cuda.stream(stream):
        dist.all_reduce(captured)
        torch.cuda.synchronize()
        with torch.cuda.graph(graph, stream=stream):
            dist.all_reduce(captured)
        captured.fill_(1)
        for _ in range(3):
            graph.replay()
        torch.cuda.synchronize()
    assert torch.equal(captured, torch.full_like(captured, float(world**3)))
    right("graphs")

    for name, train in (("DDP", ddp), ("FSDP2", fsdp), ("tensor parallel", tensor_parallel)):
        torch.manual_seed(0)
        layers = [torch.nn.Linear(256, 1024), torch.nn.ReLU(), torch.nn.Linear(1024, 256)]
        model = train(torch.nn.Sequential(*layers).to(device), rank, world)
        optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
        losses = []
        for step in range(20):
            torch.manual_seed(step * world + (rank if name != "tensor parallel" else 0))
            batch = torch.randn(64, 256, device=device)
            loss = (model(batch) - batch.flip(1)).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
        assert losses[-1] < losses[0], name
        right(name, f"{losses[0]:.6f} {losses[10]:.6f} {losses[-1]:.6f}")
    # NCCL does not end while a graph with its kernels is alive.
    del graph
    dist.destroy_process_group()


def ddp(model, rank, world):
    from torch.nn.parallel import DistributedDataParallel

    return DistributedDataParallel(model, device_ids=[rank])


def fsdp(model, rank, world):
    from torch.distributed.fsdp import fully_shard

    for layer in (model[0], model[2]):
        fully_shard(layer)
    return fully_shard(model)


def tensor_parallel(model, rank, world):
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    mesh = init_device_mesh("cuda", (world,))
    return parallelize_module(model, mesh, {"0": ColwiseParallel(), "2": RowwiseParallel()})


def run_torch():
    import torch
    import torch.multiprocessing as multiprocessing

    world = torch.cuda.device_count()
    multiprocessing.spawn(torch_rank, (world, 20000 + os.getpid() % 20000), nprocs=world)


def run_cupy():
    import cupy
    from cupy.cuda import nccl

    world, failed = cupy.cuda.runtime.getDeviceCount(), []
    identifier = nccl.get_unique_id()

    def rank_of(rank):
        try:
            with cupy.cuda.Device(rank):
                comm = nccl.NcclCommunicator(world, identifier, rank)
                own, total = cupy.arange(COUNT, dtype=cupy.float32) + rank, cupy.empty(COUNT, cupy.float32)
                stream = cupy.cuda.Stream.null.ptr
                comm.allReduce(own.data.ptr, total.data.ptr, COUNT, nccl.NCCL_FLOAT32, nccl.NCCL_SUM, stream)
                whole = cupy.empty(world * COUNT, cupy.float32)
                comm.allGather(own.data.ptr, whole.data.ptr, COUNT, nccl.NCCL_FLOAT32, stream)
                every = [cupy.arange(COUNT, dtype=cupy.float32) + of for of in range(world)]
                assert cupy.array_equal(total, sum(every)) and cupy.array_equal(whole, cupy.concatenate(every))
                comm.bcast(own.data.ptr, COUNT, nccl.NCCL_FLOAT32, 0, stream)
                assert cupy.array_equal(own, every[0])
                comm.destroy()
        except BaseException as error:
            failed.append(error)
            raise

    ranks = [threading.Thread(target=rank_of, args=(rank,)) for rank in range(world)]
    for rank in ranks:
        rank.start()
    for rank in ranks:
        rank.join()
    assert not failed
    print(f"cupy: right, with version {nccl.get_version()}", flush=True)


def run_jax():
    import jax
    import jax.numpy as jnp
    import numpy
    from jax.sharding import Mesh, NamedSharding, PartitionSpec

    world = jax.device_count()
    mesh = Mesh(numpy.array(jax.devices()), ("x",))
    spec = PartitionSpec("x")
    values = numpy.arange(world * 1024, dtype=numpy.float32).reshape(world, 1024)
    placed = jax.device_put(values, NamedSharding(mesh, spec))

    def call(part):
        after = [(at, (at + 1) % world) for at in range(world)]
        whole = jax.lax.all_gather(part, "x", tiled=True)
        return jax.lax.psum(part, "x"), whole, jax.lax.ppermute(part, "x", after)

    mapped = jax.jit(jax.shard_map(call, mesh=mesh, in_specs=spec, out_specs=(spec, spec, spec), check_vma=False))
    for _ in range(5):
        total, whole, moved = (numpy.asarray(one) for one in mapped(jnp.asarray(placed)))
        assert numpy.array_equal(total, numpy.tile(values.sum(0), (world, 1)))
        assert numpy.array_equal(whole, numpy.tile(values, (world, 1)))
        assert numpy.array_equal(moved, numpy.roll(values, 1, 0))
    print("jax: right", flush=True)


if __name__ == "__main__":
    runs = {"torch": run_torch, "cupy": run_cupy, "jax": run_jax}
    if len(sys.argv) != 2 or sys.argv[1] not in runs:
        sys.exit(__doc__)
    runs[sys.argv[1]]()
