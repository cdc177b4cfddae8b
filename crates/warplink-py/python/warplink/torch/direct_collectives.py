"""Collectives of CUDA tensors by Warplink's own.

This is what ``Options(direct_collectives=True)`` asks for. Whether a reduction goes direct depends on its type and
operator alone, which are the same on every rank, and whether anything else does on nothing; so no call asks another rank.
"""

from __future__ import annotations

from typing import Any, Sequence

import torch

import warplink
from warplink.torch.arithmetic import plain_name
from warplink.torch.direct import GpuMessages
from warplink.torch.works import GpuWork
from warplink.torch.workspace import DTYPES

#: The types that are reduced, and the operators by PyTorch's names.
ELEMENTS = ("f64", "f32", "f16", "bf16", "i64", "i32", "i8", "u8")
OPERATORS = {"sum": "sum", "avg": "average", "product": "product", "min": "min", "max": "max"}


def reduction(op: Any, dtype: torch.dtype) -> tuple[str, str] | None:
    """Warplink's names of PyTorch's ``op`` and of the type; None where something else reduces by it. An average of
    integers is rounded as that likes."""
    element, name = DTYPES.get(dtype), OPERATORS.get(plain_name(op) or "")
    if element not in ELEMENTS or name is None or name == "average" and not dtype.is_floating_point:
        return None
    return name, element


class GpuCollectives(GpuMessages):
    """The collectives of a group, as well as its messages. Ranks are the group's."""

    def all_reduce(
        self, tensor: torch.Tensor, how: tuple[str, str], asynchronous: bool
    ) -> GpuWork:
        """``tensor`` becomes the reduction of every rank's, ``how`` being what ``reduction`` gives."""
        operator, element = how

        def call(stream: warplink.Stream, sources: list[Any], targets: list[Any]) -> None:
            if tensor.numel():
                self._collectives.all_reduce(stream, targets[0], sources[0], operator)

        return self._enqueue("all_reduce", [tensor], [tensor], call, asynchronous, element)

    def reduce(
        self, tensor: torch.Tensor, how: tuple[str, str], root: int, asynchronous: bool
    ) -> GpuWork:
        """``tensor`` of the root becomes the reduction of every rank's; the others' stay."""
        operator, element = how

        def call(stream: warplink.Stream, sources: list[Any], targets: list[Any]) -> None:
            if tensor.numel():
                self._collectives.reduce(stream, targets[0], sources[0], root, operator)

        return self._enqueue("reduce", [tensor], [tensor], call, asynchronous, element)

    def broadcast(self, tensor: torch.Tensor, root: int, asynchronous: bool) -> GpuWork:
        """``tensor`` becomes the root's."""

        def call(stream: warplink.Stream, sources: list[Any], targets: list[Any]) -> None:
            if tensor.numel():
                self._collectives.broadcast(stream, targets[0], sources[0], root)

        return self._enqueue("broadcast", [tensor], [tensor], call, asynchronous)

    def all_gather_flat(
        self, output: torch.Tensor, input: torch.Tensor, asynchronous: bool
    ) -> GpuWork:
        """``output`` becomes every rank's ``input``, in rank order."""

        def call(stream: warplink.Stream, sources: list[Any], targets: list[Any]) -> None:
            if input.numel():
                self._collectives.all_gather(stream, targets[0], sources[0])

        return self._enqueue("all_gather", [output], [input], call, asynchronous)

    def all_gather(
        self, outputs: Sequence[torch.Tensor], input: torch.Tensor, asynchronous: bool
    ) -> GpuWork:
        """``outputs[p]`` becomes rank p's ``input``."""

        def call(stream: warplink.Stream, sources: list[Any], _: list[Any]) -> None:
            if not input.numel():
                return
            flat = input.new_empty(len(outputs), input.numel())
            self._collectives.all_gather(stream, self._memory([flat])[0], sources[0])
            for output, part in zip(outputs, flat):
                output.detach().copy_(part.view(output.shape))

        return self._enqueue("all_gather", [], [input], call, asynchronous, further=outputs)

    def reduce_scatter_flat(
        self, output: torch.Tensor, input: torch.Tensor, how: tuple[str, str], asynchronous: bool
    ) -> GpuWork:
        """``output`` becomes this rank's part of the reduction of every rank's ``input``."""
        operator, element = how

        def call(stream: warplink.Stream, sources: list[Any], targets: list[Any]) -> None:
            if output.numel():
                self._collectives.reduce_scatter(stream, targets[0], sources[0], operator)

        return self._enqueue("reduce_scatter", [output], [input], call, asynchronous, element)

    def reduce_scatter(
        self,
        output: torch.Tensor,
        inputs: Sequence[torch.Tensor],
        how: tuple[str, str],
        asynchronous: bool,
    ) -> GpuWork:
        """``output`` becomes the reduction of every rank's ``inputs[this rank]``."""
        operator, element = how

        def call(stream: warplink.Stream, _: list[Any], targets: list[Any]) -> None:
            if not output.numel():
                return
            flat = torch.cat([one.detach().reshape(-1) for one in inputs])
            self._collectives.reduce_scatter(
                stream, targets[0], self._memory([flat], element)[0], operator
            )

        return self._enqueue("reduce_scatter", [output], list(inputs), call, asynchronous, element)
