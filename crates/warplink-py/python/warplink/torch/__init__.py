"""PyTorch: the process group backend ``warplink`` and fused operations.

Importing this registers the backend::

    import torch.distributed as dist
    import warplink.torch

    dist.init_process_group("warplink")                 # CPU and CUDA tensors
    dist.init_process_group("cpu:gloo,cuda:warplink")   # CUDA tensors; CPU tensors by Gloo

CPU tensors of a group on one machine go over Warplink's host device, CUDA tensors by Warplink's collectives where all members
can and by NCCL otherwise, and CPU tensors of groups that span machines to Gloo.
"""

from warplink.autoload import name_backend as _name_backend
from warplink.torch.flight_recorder import dump_flight_recorder
from warplink.torch.fusion import disable_fusion, enable_fusion, fusion_report
from warplink.torch.group import ProcessGroupWarplink
from warplink.torch.options import DEFAULT_BUFFER_SIZE, Options, from_environment as _from_environment
from warplink.torch import ops as _ops, scaled as _scaled  # noqa: F401 - torch.ops.warplink
from warplink.torch.fused import AllReduceFusionPattern, QuantizationSFLayout, allreduce_fusion, register_for_vllm
from warplink.torch.registration import get_warplink_group, is_direct_group

_name_backend()
if _from_environment("WARPLINK_TORCH_FUSION"):
    enable_fusion()

__all__ = [
    "AllReduceFusionPattern",
    "DEFAULT_BUFFER_SIZE",
    "Options",
    "ProcessGroupWarplink",
    "QuantizationSFLayout",
    "allreduce_fusion",
    "disable_fusion",
    "dump_flight_recorder",
    "enable_fusion",
    "fusion_report",
    "get_warplink_group",
    "is_direct_group",
    "register_for_vllm",
]
