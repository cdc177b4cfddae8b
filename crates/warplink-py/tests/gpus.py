"""Which GPU a rank has. With CUDA's multi-process service, several ranks may share one."""

import os

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
