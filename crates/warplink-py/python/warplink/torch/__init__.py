"""PyTorch: the process group backend ``warplink`` and fused operations.

Importing this registers the backend::

    import torch.distributed as dist
    import warplink.torch

    dist.init_process_group("warplink")                 # CPU and CUDA tensors
    dist.init_process_group("cpu:gloo,cuda:warplink")   # CUDA tensors; CPU tensors by Gloo

CPU tensors of a group on one machine go over Warplink's host device, CUDA tensors to NCCL, and CPU
tensors of groups that span machines to Gloo.
"""

from warplink.torch.group import ProcessGroupWarplink
from warplink.torch.options import DEFAULT_BUFFER_SIZE, Options
from warplink.torch import ops as _ops  # noqa: F401 - registers torch.ops.warplink
from warplink.torch.registration import get_warplink_group, is_direct_group, register

register()

__all__ = [
    "DEFAULT_BUFFER_SIZE",
    "Options",
    "ProcessGroupWarplink",
    "get_warplink_group",
    "is_direct_group",
]
