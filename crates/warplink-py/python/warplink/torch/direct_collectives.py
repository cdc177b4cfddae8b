"""Collectives of CUDA tensors by Warplink's own.

``Options(direct_collectives=False)`` turns them off. Whether a reduction goes direct depends on its type and
operator alone, which are the same on every rank, and whether anything else does on nothing; so no call asks another rank.
"""

from __future__ import annotations

import functools
from typing import Any, Sequence

import torch
import torch.distributed as dist

import warplink
from warplink.errors import WarplinkError
from warplink.torch.arithmetic import NAMES_BY_HASH
from warplink.torch.direct import GpuMessages
from warplink.torch.element_types import DTYPES, REDUCED
from warplink.torch.works import GpuWork

#: The operators by PyTorch's names.
OPERATORS = {"sum": "sum", "avg": "average", "product": "product", "min": "min", "max": "max"}
_kinds: Any = dist.ReduceOp
_PREMUL_SUM = hash(_kinds.PREMUL_SUM)


def reduction(op: Any, dtype: torch.dtype) -> tuple[str, str] | None:
    """Warplink's names of PyTorch's ``op`` and of the type; None if another backend performs the reduction, as for
    averages of integers, whose rounding is that backend's."""
    # An attribute of PyTorch's reduction takes longer than its hash.
    kind = hash(op)
    return _scaled_sum(op, dtype) if kind == _PREMUL_SUM else _reduction(kind, dtype)


def _scaled_sum(op: Any, dtype: torch.dtype) -> tuple[str, str] | None:
    """The same of a PREMUL_SUM of floats, whose factor is the same on all ranks. One in memory of a GPU is left to something else."""
    element = DTYPES.get(dtype)
    # As it is pickled, which is the only way to read it.
    _, factor = op.__getstate__()
    if element not in REDUCED or not dtype.is_floating_point or not isinstance(factor, float):
        return None
    return f"scaled_sum({factor!r})", element


@functools.lru_cache(maxsize=None)
def _reduction(op: int, dtype: torch.dtype) -> tuple[str, str] | None:
    element, name = DTYPES.get(dtype), OPERATORS.get(NAMES_BY_HASH.get(op, ""))
    if element not in REDUCED or name is None or name == "average" and not dtype.is_floating_point:
        return None
    return name, element


class GpuCollectives(GpuMessages):
    """The collectives of a group, as well as its messages. Ranks are the group's."""

    def collective(
        self,
        kind: str,
        outputs: list[torch.Tensor],
        inputs: list[torch.Tensor],
        asynchronous: bool,
        how: tuple[str, str] | None = None,
        root: int | None = None,
    ) -> GpuWork:
        """The collective ``kind`` from each of ``inputs`` to its one of ``outputs``, as one work; a reduction has ``how``, which
        ``reduction`` gives for all of them. At ranks that are not the root of a "reduce", ``outputs`` stay as they are."""
        stays = kind == "reduce" and root != self._rank

        def call(stream: warplink.Stream, sources: list[torch.Tensor], targets: list[torch.Tensor]) -> None:
            for target, source in zip(sources if stays else targets, sources, strict=True):
                self._call(kind, stream, target, source, how, root)

        written, further = ([], outputs) if stays else (outputs, [])
        return self._enqueue(kind, written, inputs, call, asynchronous, further)

    def barrier(self, asynchronous: bool) -> GpuWork:
        """A barrier of the members' streams, behind which the host waits, too, as in NCCL's."""
        # The summed value does not matter.
        token = torch.empty(1, device=self._device)
        work = self._enqueue(
            "barrier",
            [token],
            [token],
            lambda stream, sources, targets: self._call("all_reduce", stream, targets[0], sources[0], ("sum", "f32")),
            asynchronous,
        )
        work.blocks(self.timeout)
        return work

    def all_gather(
        self,
        outputs: Sequence[torch.Tensor],
        input: torch.Tensor,
        asynchronous: bool,
        root: int | None = None,
    ) -> GpuWork:
        """``outputs[p]`` becomes rank p's ``input``; of a gather, on rank ``root`` alone, and others have no outputs."""
        kind = "all_gather" if root is None else "gather"

        def call(stream: warplink.Stream, sources: list[torch.Tensor], _: list[torch.Tensor]) -> None:
            flat = input.new_empty(len(outputs), input.numel()) if outputs else sources[0]
            self._call(kind, stream, flat, sources[0], None, root)
            for output, part in zip(outputs, flat):
                output.detach().copy_(part.view(output.shape))

        return self._enqueue(kind, [], [input], call, asynchronous, further=outputs, computes=True)

    def reduce_scatter(
        self,
        output: torch.Tensor,
        inputs: Sequence[torch.Tensor],
        how: tuple[str, str] | None,
        asynchronous: bool,
        root: int | None = None,
    ) -> GpuWork:
        """``output`` becomes the reduction of every rank's ``inputs[this rank]``; of a scatter, which has no ``how``, it becomes
        that of rank ``root``, and others have no inputs."""
        kind = "reduce_scatter" if root is None else "scatter"

        def call(stream: warplink.Stream, _: list[torch.Tensor], targets: list[torch.Tensor]) -> None:
            flat = torch.cat([one.detach().reshape(-1) for one in inputs]) if inputs else targets[0]
            self._call(kind, stream, targets[0], flat, how, root)

        return self._enqueue(kind, [output], list(inputs), call, asynchronous, computes=True)

    def now(
        self,
        kind: str,
        output: torch.Tensor,
        input: torch.Tensor,
        how: tuple[str, str] | None = None,
        root: int | None = None,
    ) -> bool:
        """The collective ``kind`` from ``input`` to ``output`` on the current stream without a work. False, with nothing done, for
        calls that ``DirectCalls`` leaves to others."""
        quick = self._quick
        try:
            return quick is not None and quick.collective(kind, output, input, how, root)
        except WarplinkError:
            # Raises the first failure, if that is why.
            self._check()
            raise

    def _call(
        self,
        kind: str,
        stream: warplink.Stream,
        target: torch.Tensor,
        source: torch.Tensor,
        how: tuple[str, str] | None = None,
        root: int | None = None,
    ) -> None:
        """As above for contiguous tensors, on a stream. Calls without a reduction move bytes. The longer tensor of a gather or a
        scatter is not looked at on ranks that are not the root."""
        operator, element = (None, "u8") if how is None else how
        # The shorter one.
        part = target if kind in ("reduce_scatter", "scatter") else source
        count = part.nbytes if how is None else part.numel()
        # PyTorch keeps their memory until the stream is past it.
        memory = target.data_ptr(), source.data_ptr()
        if count:
            self._collectives.call_at(kind, stream, *memory, count, element, operator, root)
