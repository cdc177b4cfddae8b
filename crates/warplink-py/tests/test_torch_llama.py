"""A small model in the style of Llama trains on the process group as it does on PyTorch's own."""

import pytest

torch = pytest.importorskip("torch")

from conftest import as_ranks, compile_every_graph, start  # noqa: E402


def losses(rank, world, _, place, backend, way, device="cpu", fused=False, **sizes):
    """``fused`` compiles the layers with the pass on, which is to replace collectives. ``sizes`` are others than those of
    ``llama.Sizes``."""
    import llama

    import warplink.torch

    dist = start(rank, world, place + backend.replace(":", "-") + str(fused), backend)
    if fused:
        compile_every_graph()
        warplink.torch.enable_fusion()
        warplink.torch.fusion_report(clear=True)
    try:
        found = llama.train(way, torch.device(device), llama.Sizes(**sizes), compiled=fused)
    finally:
        warplink.torch.disable_fusion()
    if fused:
        kinds = {found.kind for found in warplink.torch.fusion_report() if found.replaced}
        assert kinds == {"all-gather + matmul", "matmul + reduce-scatter"}, warplink.torch.fusion_report()
    dist.destroy_process_group()
    return found


@as_ranks(2)
def test_a_model_trains_as_with_gloo_in_every_way(rank, world, meeting, place):
    for way in ("ddp", "fsdp2", "tp", "pipeline", "experts"):
        expected = losses(rank, world, meeting, place + way, "gloo", way)
        assert len(expected) == 20 and expected[-1] < 0.8 * expected[0], (way, expected)
        assert losses(rank, world, meeting, place + way, "cpu:warplink", way) == pytest.approx(expected, rel=1e-4), way


@pytest.mark.skipif(
    torch.__version__ >= "2.15",
    reason="PyTorch's compiled layers get gradients that are no DTensors, on Gloo without Warplink too",
)
@as_ranks(2, limit=400.0)
def test_a_model_compiled_with_the_pass_trains_as_with_gloo(rank, world, meeting, place):
    # One layer, since compiling takes long.
    expected = losses(rank, world, meeting, place, "gloo", "tp", layers=1)
    found = losses(rank, world, meeting, place, "cpu:warplink", "tp", fused=True, layers=1)
    assert found == pytest.approx(expected, rel=1e-4)
