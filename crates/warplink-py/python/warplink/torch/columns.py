"""Matmuls fused with a gather or a scatter of columns, the last dimension.

A gathered part is some of the columns that the matmul sums over, so each part that arrives is multiplied with
its rows of B and added to the results. A scattered part is some of the result's columns, so each is a matmul
with columns of B, computed while the one before is sent. PyTorch multiplies; Warplink brings or sends.
"""

from __future__ import annotations

import math

import torch

from warplink.torch.agreement import Call
from warplink.torch.pipeline import GatherPipeline, ScatterPipeline
from warplink.torch.plans import span
from warplink.torch.workspace import Workspace


@torch.no_grad()
def gather_matmul(
    a: torch.Tensor, bs: list[torch.Tensor], space: Workspace, *, return_a: bool
) -> tuple[torch.Tensor | None, list[torch.Tensor]]:
    """``cat(A of all ranks, dim=-1) @ B`` for each of ``bs``, and the gathered A if ``return_a``, all contiguous.

    Sums of parts are kept in the results' type, as in ``torch.ops.symm_mem``, so that there is one rounding for
    each rank.
    """
    size, own_rank = space.communicator.size, space.communicator.rank
    leading, k = list(a.shape[:-1]), a.shape[-1]
    rows = math.prod(leading)
    results = [a.new_empty(rows, b.shape[1]) for b in bs]
    gathered = a.new_empty(rows, size * k) if return_a else None
    with span("warplink::fused_all_gather_matmul"), space.turn():
        nbytes = rows * k * a.element_size()
        call = Call("fused_all_gather_matmul along the last dimension", (rows, k), a.dtype)
        pipeline = space.plan(call, lambda: GatherPipeline(space, nbytes))

        def add(rank: int, received: torch.Tensor) -> None:
            part = received.view(a.dtype).view(rows, k)
            columns = slice(rank * k, (rank + 1) * k)
            for result, b in zip(results, bs):
                # This rank's part comes first.
                if rank == own_rank:
                    torch.mm(part, b[columns], out=result)
                else:
                    result.addmm_(part, b[columns])
            if gathered is not None:
                gathered[:, columns] = part

        pipeline.run(a.contiguous().view(torch.uint8).view(-1), add)

    def back(flat: torch.Tensor) -> torch.Tensor:
        return flat.view(*leading, flat.shape[1])

    return back(gathered) if gathered is not None else None, [back(result) for result in results]


@torch.no_grad()
def matmul_scatter(
    a: torch.Tensor, b: torch.Tensor, space: Workspace, *, average: bool
) -> torch.Tensor:
    """This rank's columns of the sum or average over the ranks of ``A @ B``, contiguous."""
    size = space.communicator.size
    flat = a.flatten(0, -2)
    rows, columns = flat.shape[0], b.shape[1] // size

    def multiply(rank: int, out: torch.Tensor) -> None:
        part = b[:, rank * columns : (rank + 1) * columns]
        torch.mm(flat, part, out=out.view(a.dtype).view(rows, columns))

    with span("warplink::fused_matmul_reduce_scatter"), space.turn():
        nbytes = rows * columns * a.element_size()
        call = Call("fused_matmul_reduce_scatter along the last dimension", (rows, columns), a.dtype)
        pipeline = space.plan(call, lambda: ScatterPipeline(space, nbytes))
        received = pipeline.run(multiply).view(a.dtype).view(size, rows, columns)
        result: torch.Tensor = received.mean(0) if average else received.sum(0)
    return result.view(*a.shape[:-1], columns)
