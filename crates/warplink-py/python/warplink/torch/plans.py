"""Plans of fused operations, which run where the tensors lie.

A plan names its memory when it is made. What peers reach (this rank's part of A, what they put into) stays
there, and is copied in and out. Everything else, weights and results above all, is named anew in each run.
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


def in_memory(bs: Sequence[torch.Tensor]) -> tuple[list[torch.Tensor], bool]:
    """Right operands as memory holds them, and whether that is their transposes, as of the weights of a
    linear layer. Copies only where operands are neither, or some are and others are not."""
    transposed = all(not b.is_contiguous() and b.t().is_contiguous() for b in bs)
    return [(b.t() if transposed else b).contiguous() for b in bs], transposed


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
    # Where a dimension has one element, strides may be others, by which PyTorch's compiler tells tensors apart.
    return moved.flatten().view(moved.shape) if 1 in moved.shape else moved


class FusedPlan:
    """A plan, with tensors of its own for what cannot lie elsewhere."""

    def __init__(self, plan: warplink.OverlapPlan, own: dict[str, torch.Tensor]) -> None:
        self.plan = plan
        #: What peers reach, by name.
        self.own = own

    @staticmethod
    def make(
        space: Workspace,
        tensors: dict[str, torch.Tensor],
        shared: set[str],
        plan: Callable[[dict[str, Any]], warplink.OverlapPlan],
    ) -> FusedPlan:
        """The plan that ``plan`` makes of views by name: of memory that peers reach for the tensors
        ``shared``, of ``tensors`` themselves for the others. Every rank makes it at the same time."""
        own: dict[str, torch.Tensor] = {}
        views: dict[str, warplink.View] = {}
        taken: list[torch.Tensor] = []
        names = [name for name in tensors if name in shared]
        regions = dict(zip(names, space.alloc([tensors[name].nbytes for name in names])))
        for name, tensor in tensors.items():
            if name in shared:
                region = regions[name]
                views[name] = region.view(list(tensor.shape), DTYPES[tensor.dtype])
                own[name] = torch.from_dlpack(views[name])
                own[name].copy_(tensor)
                continue
            # A run tells tensors apart by where they were.
            if any(tensor.data_ptr() == other.data_ptr() for other in taken):
                tensor = tensor.clone()
            taken.append(tensor)
            views[name] = space.communicator.view_at(
                tensor.data_ptr(), list(tensor.shape), DTYPES[tensor.dtype]
            )
        made = plan(views)
        told = space.communicator.all_gather_bytes(",".join(made.replaceable).encode())
        free = set.intersection(*(set(names.decode().split(",")) for names in told))
        fixed = tensors.keys() - free
        if fixed <= shared:
            return FusedPlan(made, {name: own[name] for name in fixed})
        # This program exchanges more; and so does the next plan.
        del made
        return FusedPlan.make(space, tensors, shared | fixed, plan)

    def run(
        self,
        space: Workspace,
        inputs: dict[str, torch.Tensor],
        outputs: dict[str, tuple[int, ...]],
    ) -> list[torch.Tensor]:
        """New tensors of the sizes ``outputs``, in that order, computed from ``inputs``, all of one type on
        one device. Called where there are no gradients."""
        view_at = space.communicator.view_at
        memory: dict[str, warplink.View] = {}
        used: list[torch.Tensor] = []
        for name, tensor in inputs.items():
            own = self.own.get(name)
            if own is None:
                tensor = tensor.contiguous()
                memory[name] = view_at(tensor.data_ptr(), [tensor.nbytes], "u8")
                used.append(tensor)
            else:
                own.view(tensor.shape).copy_(tensor)
        results = {}
        for name, sizes in outputs.items():
            if name not in self.own:
                result = tensor.new_empty(sizes)
                memory[name] = view_at(result.data_ptr(), [result.nbytes], "u8")
                results[name] = result
        stream = space.stream
        self.plan.run(stream, memory)
        space.settle(stream)
        # The plan's memory is the next call's too.
        return [
            results[name] if name in results else self.own[name].clone() for name in outputs
        ]
