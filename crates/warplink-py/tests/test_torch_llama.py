"""A small model in the style of Llama trains on the process group as it does on PyTorch's own."""

import pytest

torch = pytest.importorskip("torch")

from test_torch_group import on_ranks, start  # noqa: E402


def losses(rank, world, _, place, backend, way, device="cpu"):
    import llama

    dist = start(rank, world, place + backend.replace(":", "-"), backend)
    found, _ = llama.train(way, torch.device(device))
    dist.destroy_process_group()
    return found


def compare(rank, world, meeting, place, way):
    expected = losses(rank, world, meeting, place, "gloo", way)
    assert len(expected) == 20 and expected[-1] < 0.8 * expected[0], expected
    assert losses(rank, world, meeting, place, "cpu:warplink", way) == pytest.approx(expected, rel=1e-4)


@pytest.mark.parametrize("way", ["ddp", "fsdp2", "tp", "pipeline"])
def test_a_model_trains_as_with_gloo(way):
    on_ranks(compare, 2, way)
