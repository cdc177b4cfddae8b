"""Fused operations and barriers of two groups on two streams of a GPU, in a random order."""

import pytest

torch = pytest.importorskip("torch")

from gpus import gpu, needs_gpus  # noqa: E402
from conftest import on_ranks  # noqa: E402
from test_torch_mixed import mixed  # noqa: E402

WORLD = 2

pytestmark = needs_gpus(WORLD)


def on_streams(rank, world, meeting, place, steps, seed):
    torch.cuda.set_device(gpu(rank))
    mixed(rank, world, meeting, place, steps, seed, f"cuda:{gpu(rank)}")


@pytest.mark.parametrize("seed", [7, 8])
def test_fused_operations_and_barriers_on_two_streams_and_groups(seed):
    on_ranks(on_streams, WORLD, 300, seed)
