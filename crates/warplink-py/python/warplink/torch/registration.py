"""The backend as ``torch.distributed`` calls it, and groups that were made by it."""

from __future__ import annotations

import logging
import sys
from types import FrameType
from typing import Any, Callable

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

from warplink.torch.direct import Message
from warplink.torch.group import ProcessGroupWarplink
from warplink.torch.options import Options

_log = logging.getLogger(__name__)


def get_warplink_group(group: dist.ProcessGroup | None = None) -> ProcessGroupWarplink | None:
    """``group`` (the default group if None) as Warplink's, or None if its backend is another."""
    group = group or c10d._get_default_group()
    return group if isinstance(group, ProcessGroupWarplink) else None


def is_direct_group(group: dist.ProcessGroup | None = None) -> bool:
    """Whether ``group`` is Warplink's and its members reach one another's memory: whether
    ``get_p2p_buffer`` and the fused operations go direct."""
    found = get_warplink_group(group)
    return found is not None and found.is_direct


def create(options: Any, backend_options: Any) -> ProcessGroupWarplink:
    """Constructor of a group for ``torch.distributed``."""
    devices, gloo, bound, split_from = _configuration()
    ranks = list(options.global_ranks_in_group)
    parent = c10d._get_default_group() if ranks and dist.is_initialized() else None
    group = ProcessGroupWarplink(
        options.store,
        options.group_rank,
        options.group_size,
        options.timeout,
        Options.read(backend_options),
        devices=devices,
        gloo=gloo,
        parent=parent if isinstance(parent, ProcessGroupWarplink) else None,
        ranks_in_parent=ranks or None,
        global_ranks=ranks,
        name=options.group_id,
        split_from=split_from,
    )
    # Groups that are bound are split by the backend of the device, which on the CPU is the group itself.
    if bound is not None and bound.type != "cpu":
        group.bound_device_id = bound
    return group


def _configuration() -> tuple[dict[str, str], Any, Any, Any]:
    """The backend that was asked for on each device, the Gloo that was made already, the device
    that the group is bound to, and the backend whose split the ranks outside the group take part in.

    A backend in Python takes the place of the whole group, those of other devices included, and is not
    told of them; the caller knows. Where a release of PyTorch has another caller, it is both devices, and the log says
    so.
    """
    frame: FrameType | None = sys._getframe(1)
    for _ in range(4):
        if frame is None:
            break
        config = frame.f_locals.get("backend_config")
        if frame.f_code.co_name == "_new_process_group_helper" and config is not None:
            devices = dict(config.get_device_backend_map())
            gloo = None
            if devices.get("cpu") == "gloo":
                try:
                    gloo = frame.f_locals["pg"]._get_backend(torch.device("cpu"))
                except (KeyError, RuntimeError):
                    # It comes after this one in the list of devices.
                    gloo = None
            return devices, gloo, frame.f_locals.get("device_id"), frame.f_locals.get("split_from")
        frame = frame.f_back
    _log.warning(
        "PyTorch %s does not say which backend was asked for on each device, so the group serves CPU and CUDA tensors; "
        "expected the call of _new_process_group_helper; help: name no other backend than 'warplink'",
        torch.__version__,
    )
    return {"cpu": "warplink", "cuda": "warplink"}, None, None, None


def batch_isend_irecv(original: Callable[[list[Any]], list[Any]], p2p_op_list: list[Any]) -> list[Any]:
    """PyTorch's ``batch_isend_irecv``, which goes direct, or coalesces CUDA tensors, as NCCL needs; ``original`` for others' groups.

    PyTorch does so only for groups of its own class; sends and receives of NCCL that are posted one by
    one can wait for each other.
    """
    first: Any = p2p_op_list[0] if p2p_op_list else None
    group = getattr(first, "group", None) or (first and c10d._get_default_group())
    if not isinstance(group, ProcessGroupWarplink):
        return original(p2p_op_list)
    c10d._check_p2p_op_list(p2p_op_list)
    group._check()
    device = first.tensor.device
    if (direct := group.direct_messages(device, by_all=False)) is not None:
        sends = (dist.isend, c10d.isend)
        batch = [Message(op.group_peer, op.op in sends, op.tensor) for op in p2p_op_list]
        return [direct.exchange(batch)]
    if device.type != "cuda":
        return original(p2p_op_list)
    with c10d._coalescing_manager(group, device, async_ops=True) as manager:
        for op in p2p_op_list:
            key = "group_dst" if op.op is dist.isend else "group_src"
            op.op(op.tensor, group=op.group, tag=op.tag, **{key: op.group_peer})
    works: list[Any] = manager.works
    return works
