"""Models on GPUs: trained, compiled, and many steps of one process."""

import gc
import os

import pytest

torch = pytest.importorskip("torch")

from gpus import gpu, needs_gpus, start_on_gpu  # noqa: E402
from conftest import as_ranks, on_ranks, resident_bytes  # noqa: E402

WORLD = 2

#: A long run is WARPLINK_TEST_STEPS=10000.
STEPS = int(os.environ.get("WARPLINK_TEST_STEPS", "500"))

pytestmark = needs_gpus(WORLD)


def models(rank, world, meeting, place, way):
    import test_torch_llama

    torch.cuda.set_device(gpu(rank))
    device = f"cuda:{gpu(rank)}"
    expected = test_torch_llama.losses(rank, world, meeting, place, "nccl", way, device)
    assert len(expected) == 20 and expected[-1] < 0.8 * expected[0], expected
    for backend in ("warplink", "cpu:gloo,cuda:warplink"):
        found = test_torch_llama.losses(rank, world, meeting, place, backend, way, device)
        assert found == pytest.approx(expected, rel=1e-3), backend


@pytest.mark.parametrize("way", ["ddp", "fsdp2", "tp", "pipeline", "experts"])
def test_a_model_trains_as_with_nccl(way):
    on_ranks(models, WORLD, way)


def models_without_direct_calls(*arguments):
    for calls in ("COLLECTIVES", "MESSAGES"):
        os.environ[f"WARPLINK_TORCH_DIRECT_{calls}"] = "0"
    models(*arguments)


@pytest.mark.parametrize("way", ["ddp", "fsdp2", "tp"])
def test_a_model_trains_without_direct_calls_as_with_nccl(way):
    on_ranks(models_without_direct_calls, WORLD, way)


@as_ranks(WORLD)
def test_a_model_compiled_with_the_pass_trains_as_with_nccl(rank, world, meeting, place):
    import test_torch_llama

    torch.cuda.set_device(gpu(rank))
    device = f"cuda:{gpu(rank)}"
    # A layer sees what the one before it gives, also where a dimension has one element.
    expected = test_torch_llama.losses(rank, world, meeting, place, "nccl", "tp", device, batch=1)
    found = test_torch_llama.losses(
        rank, world, meeting, place, "warplink", "tp", device, fused=True, batch=1
    )
    assert found == pytest.approx(expected, rel=1e-3)


@as_ranks(WORLD, starts=start_on_gpu)
def test_fused_operations_in_graphs_of_the_compiler(rank, dist):
    from torch._dynamo.utils import counters

    ops, name = torch.ops.warplink, dist.group.WORLD.group_name
    device = torch.device("cuda", gpu(rank))
    up, down = (torch.ones(*shape, dtype=torch.bfloat16, device=device) for shape in ((128, 96), (96, 32)))

    def both(a):
        _, (product,) = ops.fused_all_gather_matmul(a, [up], 0, name, return_A=False)
        return ops.fused_matmul_reduce_scatter(product, down, "sum", 0, name)

    compiled = torch.compile(both, fullgraph=True, mode="reduce-overhead")
    with torch.no_grad():
        # The first call makes the plans, the second records a graph, and the others launch it.
        for turn in range(6):
            torch.compiler.cudagraph_mark_step_begin()
            a = torch.full((64, 128), turn + 1.0, dtype=torch.bfloat16, device=device)
            expected = both(a)
            assert torch.equal(compiled(a), expected), turn
    assert counters["inductor"]["cudagraph_skips"] == 0
    assert dist.group.WORLD.workspace(device)._recorded, "no graph was recorded"


@as_ranks(WORLD, limit=120 + STEPS / 20)
def test_steps_of_random_sizes_take_constant_memory(rank, world, place):
    import warplink.torch

    options = warplink.torch.Options(direct_collectives=True)
    dist = start_on_gpu(rank, world, place, pg_options=options)
    device = torch.device("cuda", gpu(rank))
    group = dist.group.WORLD
    name, space = group.group_name, group.workspace(device)
    generator = torch.Generator().manual_seed(0)
    weights = torch.ones(64, 32, device=device, dtype=torch.bfloat16)

    def used():
        """Bytes of the GPU that are not PyTorch's own, and of this process."""
        torch.cuda.synchronize()
        gc.collect()
        dist.barrier(device_ids=[gpu(rank)])
        free, total = torch.cuda.mem_get_info()
        reserved = [None] * world
        dist.all_gather_object(reserved, torch.cuda.memory_reserved())
        here = sum(reserved[peer] for peer in range(world) if gpu(peer) == gpu(rank))
        return total - free - here, resident_bytes()

    def drawn(most):
        return int(torch.randint(1, most, (1,), generator=generator))

    marks = []
    for turn in range(STEPS):
        own = torch.full((drawn(1 << drawn(22)),), rank + 1.0, device=device)
        whole = torch.empty(world * own.numel(), device=device)
        dist.all_gather_into_tensor(whole, own)
        dist.all_reduce(own)
        a = torch.ones(drawn(4000), 64, device=device, dtype=torch.bfloat16)
        gathered, (product,) = torch.ops.warplink.fused_all_gather_matmul(a, [weights], 0, name)
        sums = torch.ops.warplink.fused_matmul_reduce_scatter(gathered, weights, "sum", 0, name)
        if turn % 50 == 0:
            assert (own == 3).all() and (whole.view(2, -1) == torch.tensor([[1], [2]], device=device)).all()
            assert (product == 64).all() and (sums == 128).all()
        if turn in (STEPS // 2, STEPS - 1):
            marks.append((*used(), sum(space.communicator.registrations_and_mappings())))
    dist.destroy_process_group()
    early, late = marks
    print("GPU, host, registered:", early, late)
    assert late[0] <= early[0] + (256 << 20)
    assert late[1] < early[1] + (64 << 20)
    assert late[2] <= early[2] + 120
