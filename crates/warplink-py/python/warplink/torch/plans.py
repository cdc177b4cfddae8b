"""Plans of fused operations, which access the caller's tensors in place.

A plan names its memory when it is made. Memory that peers access (by reads or puts) stays there, and is copied in
and out. Everything else, weights and results above all, is named anew in each run, which is the launch of a graph where
the same addresses come back.
"""

from __future__ import annotations

import contextlib
from typing import Any, Callable, Sequence

import torch

import warplink
from warplink.torch.element_types import DTYPES
from warplink.torch.workspace import Workspace

_NO_SPAN = contextlib.nullcontext()


def span(name: str) -> Any:
    """A span in the profile, if one is taken."""
    if torch.autograd.profiler._is_profiler_enabled:
        return torch.profiler.record_function(name)
    return _NO_SPAN


def family(name: str, tensors: Sequence[torch.Tensor]) -> dict[str, torch.Tensor]:
    """``tensors`` by the names that a program has for them: ``B[0]``, ``B[1]``, …"""
    return {f"{name}[{index}]": tensor for index, tensor in enumerate(tensors)}


def are_transposed(bs: Sequence[torch.Tensor]) -> bool:
    """Whether memory holds the transposes of right operands, as of the weights of a linear layer."""
    return all(not b.is_contiguous() and b.t().is_contiguous() for b in bs)


def in_memory(bs: Sequence[torch.Tensor], transposed: bool) -> list[torch.Tensor]:
    """Right operands as the plan wants them in memory. Copies only where operands are neither whole nor transposed, or some
    are and others are not."""
    return [b.t() if transposed else b.contiguous() for b in bs]


def to_front(tensor: torch.Tensor, dim: int) -> torch.Tensor:
    """``tensor`` with dimension ``dim`` as its first one."""
    # An operation of PyTorch takes the host a microsecond, also where it changes nothing.
    return tensor.movedim(dim, 0) if dim else tensor


def _in_rows(flat: torch.Tensor, leading: list[int]) -> torch.Tensor:
    """The rows of ``flat`` as an array of ``leading`` sizes."""
    return flat.view(*leading, flat.shape[-1]) if len(leading) > 1 else flat


def moved_back(flat: torch.Tensor, leading: list[int], dim: int) -> torch.Tensor:
    """The rows of ``flat`` as an array of ``leading`` sizes, the first of which is dimension ``dim`` of the result."""
    whole = _in_rows(flat, leading)
    return whole.movedim(0, dim) if dim else whole


def copied_back(flat: torch.Tensor, leading: list[int], dim: int) -> torch.Tensor:
    """The same of a contiguous ``flat``, in the order of memory that a new tensor has."""
    whole = _in_rows(flat, leading)
    moved = whole.movedim(0, dim).contiguous() if dim else whole
    # Where a dimension has one element, strides may be others, by which PyTorch's compiler distinguishes tensors.
    return moved.flatten().view(moved.shape) if 1 in moved.shape else moved


class FusedPlan:
    """A plan, and what runs it on the tensors of a call."""

    def __init__(self, plan: warplink.OverlapPlan, launcher: warplink.OverlapLauncher, own: set[str]) -> None:
        self.plan = plan
        self.launcher = launcher
        self.has_collectives = plan.has_collectives
        #: The names of the tensors that runs copy, since peers reach the plan's.
        self.own = own

    @staticmethod
    def make(
        space: Workspace,
        key: Any,
        tensors: dict[str, torch.Tensor],
        shared: set[str],
        plan: Callable[[dict[str, Any], str | None], warplink.OverlapPlan],
    ) -> FusedPlan:
        """The plan for ``key`` that ``plan`` makes of views by name, and of a lowering if one is wanted: of memory that peers
        reach for the tensors ``shared``, of ``tensors`` themselves for the others. Every rank makes it at the same time. Runs
        get the addresses of tensors in the order of ``tensors``."""
        if key in space.without_overlap:
            return FusedPlan._make(space, tensors, set(), plan, "collective")
        return FusedPlan._make(space, tensors, shared, plan, None)

    @staticmethod
    def _make(
        space: Workspace,
        tensors: dict[str, torch.Tensor],
        shared: set[str],
        plan: Callable[[dict[str, Any], str | None], warplink.OverlapPlan],
        lowering: str | None,
    ) -> FusedPlan:
        views: dict[str, warplink.View] = {}
        taken: list[torch.Tensor] = []
        names = [name for name in tensors if name in shared]
        regions = dict(zip(names, space.alloc([tensors[name].nbytes for name in names])))
        for name, tensor in tensors.items():
            if name in shared:
                views[name] = regions[name].view(list(tensor.shape), DTYPES[tensor.dtype])
                # Lowerings are tried on it, and zeros would be multiplied faster.
                torch.from_dlpack(views[name]).copy_(tensor)
                continue
            # A run distinguishes tensors by their addresses.
            if any(tensor.data_ptr() == other.data_ptr() for other in taken):
                tensor = tensor.clone()
            taken.append(tensor)
            views[name] = space.communicator.view_at(
                tensor.data_ptr(), list(tensor.shape), DTYPES[tensor.dtype]
            )
        made = plan(views, lowering)
        told = space.communicator.all_gather_bytes(",".join(made.replaceable).encode())
        free = set.intersection(*(set(names.decode().split(",")) for names in told))
        fixed = tensors.keys() - free
        if made.has_collectives and lowering is None and not fixed:
            # Peers reach tensors where they are, so that the memory of this one would never be used.
            lowering = made.lowering
            del made, views, regions
            return FusedPlan._make(space, tensors, set(), plan, lowering)
        if fixed <= shared:
            nbytes = [tensor.nbytes for tensor in tensors.values()]
            launcher = made.launcher(list(tensors), nbytes, {name: views[name] for name in fixed})
            return FusedPlan(made, launcher, fixed)
        # This program exchanges more; and so does the next plan.
        del made
        return FusedPlan._make(space, tensors, shared | fixed, plan, lowering)
