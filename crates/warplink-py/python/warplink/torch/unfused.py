"""The collectives of fused operations that run as a collective and a matmul, in the order of the caller's stream."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed._functional_collectives as funcol
from torch.distributed import distributed_c10d as c10d

from warplink.torch.group import ProcessGroupWarplink


def group_size(group_name: str) -> int:
    """How many ranks the group has."""
    return c10d._get_group_size_by_name(group_name)  # type: ignore[arg-type]


def all_gathered(part: torch.Tensor, group_name: str) -> torch.Tensor:
    """Every rank's ``part``, which is contiguous, one behind another along the first dimension."""
    size, name = group_size(group_name), group_name
    group = c10d._resolve_process_group(name)  # type: ignore[arg-type]
    if not isinstance(group, ProcessGroupWarplink):
        started = torch.ops._c10d_functional.all_gather_into_tensor(part, size, name)
        gathered: torch.Tensor = funcol.wait_tensor(started)
        return gathered
    whole = part.new_empty([size * part.shape[0], *part.shape[1:]])
    options = c10d.AllgatherOptions()
    options.asyncOp = False
    _finish(group._allgather_base(whole, part, options))
    return whole


def reduce_scattered(whole: torch.Tensor, reduce_op: str, group_name: str) -> torch.Tensor:
    """This rank's part, along the first dimension, of the sum or average of every rank's ``whole``, which is contiguous."""
    name: Any = group_name
    group = c10d._resolve_process_group(name)
    if not isinstance(group, ProcessGroupWarplink):
        scattered: torch.Tensor = funcol.wait_tensor(funcol.reduce_scatter_tensor(whole, reduce_op, 0, name))
        return scattered
    part = whole.new_empty([whole.shape[0] // group_size(group_name), *whole.shape[1:]])
    options = c10d.ReduceScatterOptions()
    options.reduceOp = c10d.ReduceOp(c10d.ReduceOp.AVG if reduce_op == "avg" else c10d.ReduceOp.SUM)
    options.asyncOp = False
    _finish(group._reduce_scatter_base(part, whole, options))
    return part


def _finish(work: Any) -> None:
    """Has the caller's stream follow a call, which gives no work where that does already."""
    if work is not None:
        work.wait()
