"""Tests on GPUs: which of them a rank has, and its process group there. With CUDA's multi-process service, several
ranks may share one."""

import os

import pytest

#: How many ranks share a GPU; `scripts/device-service.sh` sets it.
RANKS_PER_GPU = int(os.environ.get("WARPLINK_TEST_RANKS_PER_GPU", "1"))


def gpu(rank: int) -> int:
    """The number of the rank's GPU."""
    return rank // RANKS_PER_GPU


def prepare_sharing(rank: int) -> None:
    """Lets the libraries of this process serve ranks that share a GPU; does nothing where none do."""
    if RANKS_PER_GPU == 1:
        return
    # NCCL refuses two ranks on one GPU of one host. With a host each, they talk through sockets.
    os.environ.update(NCCL_HOSTID=str(rank), NCCL_SOCKET_IFNAME="lo")
    # Warplink takes the path that it takes between GPUs of their own, and does not try NCCL first.
    os.environ["WARPLINK_TOPOLOGY"] = "fully-connected"


def needs_gpus(ranks: int) -> pytest.MarkDecorator:
    """Leaves out tests of so many ranks where PyTorch finds too few GPUs for them."""
    import torch

    return pytest.mark.skipif(
        torch.cuda.device_count() * RANKS_PER_GPU < ranks, reason="needs a GPU for each rank, or one that they share"
    )


def start_on_gpu(rank, world, place, backend="warplink", **options):
    """The process group of a rank whose current GPU is its own; gives ``torch.distributed``."""
    import torch
    from conftest import start

    torch.cuda.set_device(gpu(rank))
    return start(rank, world, place, backend, **options)
