#!/usr/bin/env python3
"""Programs that use NCCL, unchanged, for scripts/device-nccl.sh: right results from whichever library is in front.

    nccl_clients.py torch    ranks are processes: collectives, messages, sub-groups, DDP, FSDP2 and tensor parallel
    nccl_clients.py cupy     ranks are threads
    nccl_clients.py jax      one process with all GPUs
    nccl_clients.py ctypes   ranks are processes that call NCCL beside PyTorch, as vLLM does

Each prints a line per part that was right, with losses, which have to be equal for both libraries, and fails otherwise.
"""

import ctypes
import faulthandler
import os
import sys
import threading

import without_multicast  # noqa: F401

COUNT = 100_003

# Also in the processes that are started from here: a signal that ends one prints the line that it was in.
faulthandler.enable(all_threads=False)


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


def run_processes(rank_of):
    import torch
    import torch.multiprocessing as multiprocessing

    world = torch.cuda.device_count()
    multiprocessing.spawn(rank_of, (world, 20000 + os.getpid() % 20000), nprocs=world)


class UniqueId(ctypes.Structure):
    _fields_ = [("bytes", ctypes.c_byte * 128)]


class Library:
    """NCCL's functions by ctypes, from the library that programs find by its name."""

    #: NCCL's numbers of types and operators.
    TYPES = {"float32": 7, "float16": 6, "bfloat16": 9, "int32": 2}
    SUM, MAX = 0, 2

    def __init__(self):
        self.loaded = ctypes.CDLL(os.environ.get("VLLM_NCCL_SO_PATH", "libnccl.so.2"))

    def __call__(self, name, *arguments):
        code = getattr(self.loaded, f"nccl{name}")(*arguments)
        if code != 0:
            last = self.loaded.ncclGetLastError
            last.restype = ctypes.c_char_p
            raise RuntimeError(f"nccl{name} gives {code}: {(last(None) or b'').decode()}")

    def memory(self, tensor):
        """Pointer, count and type of a tensor, as arguments."""
        kind = self.TYPES[str(tensor.dtype).removeprefix("torch.")]
        return ctypes.c_void_p(tensor.data_ptr()), ctypes.c_size_t(tensor.numel()), kind


def ctypes_rank(rank, world, port):
    """The calls of vLLM's communicator: its id goes by another process group, its stream and memory are PyTorch's."""
    import torch
    import torch.distributed as dist

    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), RANK=str(rank), WORLD_SIZE=str(world))
    device = torch.device("cuda", rank)
    torch.cuda.set_device(device)
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    dist.init_process_group("gloo")
    nccl, identifier, comm = Library(), UniqueId(), ctypes.c_void_p()
    version = ctypes.c_int()
    nccl("GetVersion", ctypes.byref(version))
    if rank == 0:
        nccl("GetUniqueId", ctypes.byref(identifier))
    shared = torch.tensor(list(identifier.bytes), dtype=torch.int8)
    dist.broadcast(shared, 0)
    identifier.bytes[:] = shared.tolist()
    nccl("CommInitRank", ctypes.byref(comm), world, identifier, rank)
    stream = torch.cuda.Stream()
    torch.cuda.set_stream(stream)
    tail = (comm, ctypes.c_void_p(stream.cuda_stream))

    def pointer(tensor):
        return ctypes.c_void_p(tensor.data_ptr())

    def values(of, count, dtype):
        return (torch.arange(count, device=device) % 7 + of).to(dtype)

    def group(*calls):
        nccl("GroupStart")
        for name, *arguments in calls:
            nccl(name, *arguments, *tail)
        nccl("GroupEnd")

    # With uneven parts, gathers are broadcasts in a group, and reduce-scatters reductions.
    lengths = [1000 * (each + 1) for each in range(world)]
    for dtype in (torch.float32, torch.bfloat16, torch.float16, torch.int32):
        for count in (1, 1000, 1_000_003):
            every = [values(each, count, dtype) for each in range(world)]
            given, out = every[rank].clone(), torch.empty(count, dtype=dtype, device=device)
            memory, number, kind = nccl.memory(given)
            nccl("AllReduce", memory, pointer(out), number, kind, nccl.SUM, *tail)
            assert torch.equal(out, sum(every).to(dtype)), ("all_reduce", dtype, count)
            nccl("AllReduce", memory, memory, number, kind, nccl.MAX, *tail)
            assert torch.equal(given, every[-1]), ("all_reduce in place", dtype, count)
            given.copy_(every[rank])
            nccl("Reduce", memory, pointer(out), number, kind, nccl.SUM, world - 1, *tail)
            assert rank < world - 1 or torch.equal(out, sum(every).to(dtype)), ("reduce", dtype, count)
            whole = torch.empty(world * count, dtype=dtype, device=device)
            nccl("AllGather", memory, pointer(whole), number, kind, *tail)
            assert torch.equal(whole, torch.cat(every)), ("all_gather", dtype, count)
            nccl("ReduceScatter", pointer(whole), pointer(out), number, kind, nccl.SUM, *tail)
            assert torch.equal(out, (world * every[rank].float()).to(dtype)), ("reduce_scatter", dtype, count)
            nccl("Broadcast", memory, pointer(out), number, kind, world - 1, *tail)
            assert torch.equal(out, every[-1]), ("broadcast", dtype, count)
            group(
                ("Send", memory, number, kind, (rank + 1) % world),
                ("Recv", pointer(out), number, kind, (rank - 1) % world),
            )
            assert torch.equal(out, every[(rank - 1) % world]), ("send and receive", dtype, count)
        parts = [values(each, length, dtype) for each, length in enumerate(lengths)]
        gathered = [torch.empty_like(part) for part in parts]
        own = pointer(parts[rank])
        calls = [("Broadcast", own, *nccl.memory(part), each) for each, part in enumerate(gathered)]
        group(*calls)
        assert all(map(torch.equal, gathered, parts)), ("all_gather of uneven parts", dtype)
        calls = [
            ("Reduce", pointer(part), *nccl.memory(out), nccl.SUM, each)
            for each, (part, out) in enumerate(zip(parts, gathered, strict=True))
        ]
        group(*calls)
        expected = (world * parts[rank].float()).to(dtype)
        assert torch.equal(gathered[rank], expected), ("reduce_scatter of uneven parts", dtype)

    # A message without a group, a graph, and memory of a window.
    one = torch.ones(COUNT, device=device)
    if rank == 0:
        nccl("Send", *nccl.memory(one * 5), 1, *tail)
    elif rank == 1:
        nccl("Recv", *nccl.memory(one), 0, *tail)
        assert torch.equal(one, torch.full_like(one, 5))
    one.fill_(1)
    memory, number, kind = nccl.memory(one)
    nccl("AllReduce", memory, memory, number, kind, nccl.SUM, *tail)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        nccl("AllReduce", memory, memory, number, kind, nccl.SUM, *tail)
    one.fill_(1)
    for _ in range(3):
        graph.replay()
    torch.cuda.synchronize()
    assert torch.equal(one, torch.full_like(one, float(world**3))), "graph"
    del graph
    place, window = ctypes.c_void_p(), ctypes.c_void_p()
    nccl("MemAlloc", ctypes.byref(place), ctypes.c_size_t(4 << 20))
    nccl("CommWindowRegister", comm, place, ctypes.c_size_t(4 << 20), ctypes.byref(window), 1)
    nccl("AllReduce", place, place, ctypes.c_size_t(1 << 20), 7, nccl.SUM, *tail)
    torch.cuda.synchronize()
    nccl("CommWindowDeregister", comm, window)
    code = ctypes.c_int(-1)
    nccl("CommGetAsyncError", comm, ctypes.byref(code))
    assert code.value == 0
    nccl("CommDestroy", comm)
    nccl("MemFree", place)
    dist.barrier()
    if rank == 0:
        print(f"ctypes: right, with version {version.value}", flush=True)
    dist.destroy_process_group()


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

    def call(part):
        after = [(at, (at + 1) % world) for at in range(world)]
        whole = jax.lax.all_gather(part, "x", tiled=True)
        return jax.lax.psum(part, "x"), whole, jax.lax.ppermute(part, "x", after)

    mapped = jax.jit(jax.shard_map(call, mesh=mesh, in_specs=spec, out_specs=(spec, spec, spec), check_vma=False))
    for count in (1024, 1 << 20):
        # Small numbers, whose sums are exact.
        values = (numpy.arange(world * count, dtype=numpy.float32) % 1021).reshape(world, count)
        placed = jax.device_put(values, NamedSharding(mesh, spec))
        for _ in range(5):
            total, whole, moved = (numpy.asarray(one) for one in mapped(jnp.asarray(placed)))
            assert numpy.array_equal(total, numpy.tile(values.sum(0), (world, 1)))
            assert numpy.array_equal(whole, numpy.tile(values, (world, 1)))
            assert numpy.array_equal(moved, numpy.roll(values, 1, 0))
    print("jax psum, all_gather, ppermute: right", flush=True)


if __name__ == "__main__":
    runs = {
        "torch": lambda: run_processes(torch_rank),
        "ctypes": lambda: run_processes(ctypes_rank),
        "cupy": run_cupy,
        "jax": run_jax,
    }
    if len(sys.argv) != 2 or sys.argv[1] not in runs:
        sys.exit(__doc__)
    runs[sys.argv[1]]()
