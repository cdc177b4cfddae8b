"""``torch.ops.warplink``: matmuls fused with the communication that feeds or follows them.

They have the signatures, results and strides of ``torch.ops.symm_mem``. Groups of Warplink on one
machine run them as overlapped host programs, one for each combination of sizes, or along the last dimension as
parts that PyTorch multiplies (``columns.py``); all else (other groups, element types without a matmul) runs as a
collective and a matmul. Every rank of the group calls them in the same order with the same sizes, types and layouts
of the right operands. Like the originals they have no gradients, whatever runs them.
"""

from __future__ import annotations

import contextlib
import math
from contextlib import AbstractContextManager
from typing import Any, Callable, NamedTuple

import torch
from torch.autograd import profiler
from torch.distributed import distributed_c10d as c10d

import warplink
from warplink.torch import columns
from warplink.torch.agreement import Call
from warplink.torch.group import ProcessGroupWarplink
from warplink.torch.plans import FusedPlan, are_transposed, copied_back, family, in_memory, moved_back, span, to_front
from warplink.torch.direct_collectives import reduction
from warplink.torch.trials import faster
from warplink.torch.unfused import all_gathered, group_size, reduce_scattered
from warplink.torch.workspace import Workspace, is_recording

#: Element types that have a matmul in Warplink.
FUSED_DTYPES = (torch.bfloat16, torch.float16, torch.float32)

_ALONE: AbstractContextManager[None] = contextlib.nullcontext()

#: Calls that were made before, which take one call of native code.
_RECENT = warplink.RecentCalls(profiler)

library = torch.library.Library("warplink", "DEF")
library.define(
    "fused_all_gather_matmul(Tensor A, Tensor[] Bs, int gather_dim, str group_name, *, "
    "bool return_A = True) -> (Tensor?, Tensor[])",
    tags=[torch._C.Tag.needs_fixed_stride_order],
)
library.define(
    "fused_matmul_reduce_scatter(Tensor A, Tensor B, str reduce_op, int scatter_dim, "
    "str group_name) -> Tensor",
    tags=[torch._C.Tag.needs_fixed_stride_order],
)


def _check(a: torch.Tensor, bs: list[torch.Tensor], dim: int, name: str) -> None:
    if a.dim() < 2:
        raise ValueError(f"A has {a.dim()} dimensions; expected at least 2")
    if not bs:
        raise ValueError("Bs is empty; expected at least one matrix")
    for b in bs:
        if b.dim() != 2:
            raise ValueError(f"B has {b.dim()} dimensions; expected 2")
        if b.dtype != a.dtype or b.device != a.device:
            raise ValueError(
                f"B is {b.dtype} on {b.device}; expected {a.dtype} on {a.device}, as A is"
            )
    if not 0 <= dim < a.dim():
        raise ValueError(f"{name} is {dim}; expected a dimension of A, from 0 to {a.dim() - 1}")


def direct_workspace(group_name: str, device: torch.device, *, fuses: bool) -> Workspace | None:
    """Workspace for direct calls of the group on ``device``; None, on all ranks alike, without direct calls, or if the
    group has one rank. Where a call that does not fuse is recorded, it is not needed."""
    group = c10d._resolve_process_group(group_name)  # type: ignore[arg-type]
    if not isinstance(group, ProcessGroupWarplink) or group.size() == 1:
        return None
    if not fuses and is_recording(device):
        return None
    return group.direct_workspace(device)


def compared(space: Workspace | None, call: Call) -> AbstractContextManager[None]:
    """For ``call`` as a collective and a matmul: ranks that have a plan for theirs learn of it, if there is ``space``."""
    return _ALONE if space is None else space.compared(call)


def _fuses(a: torch.Tensor, bs: list[torch.Tensor]) -> bool:
    """Whether Warplink overlaps the matmuls of ``a`` and ``bs`` with communication."""
    return a.dtype in FUSED_DTYPES and all(matrix.numel() for matrix in (a, *bs))


class _Product(NamedTuple):
    """Cached facts of calls with one key: the plan's call, and sizes."""

    call: Call
    #: Of A as the plan has it, and of its results.
    left: tuple[int, int]
    outputs: dict[str, tuple[int, int]]
    #: Of the results, without the columns; the dimension that is shared comes first.
    leading: list[int]
    transposed: bool


def _keep(
    operation: str,
    dim: int,
    group_name: str,
    a: torch.Tensor,
    bs: list[torch.Tensor],
    space: Workspace,
    known: _Product,
    pair: warplink.RecentPair,
    finish: Callable[[list[torch.Tensor]], Any] | None,
) -> None:
    """Has native code run calls like this one: ``finish`` makes the operation's result of the plan's, if they are not the
    same, and ``pair`` does the same as a direct collective and matmuls. Nothing of these holds the group."""
    if not (known.transposed or all(b.is_contiguous() for b in bs)):
        # Copies of right operands are made for each call.
        return
    in_place = not dim and a.is_contiguous()
    prepare = None if in_place else lambda a: to_front(a, dim).contiguous()
    recent = warplink.RecentCall(space.state, known.call, list(known.outputs.values()), pair, prepare, finish)
    _RECENT.keep(operation, dim, group_name, a, bs, recent)


def all_gather_matmul(
    A: torch.Tensor,
    Bs: list[torch.Tensor],
    gather_dim: int,
    group_name: str,
    *,
    return_A: bool = True,
) -> tuple[torch.Tensor | None, list[torch.Tensor]]:
    """``all_gather(A, gather_dim) @ B`` for each of ``Bs``, and the gathered A if ``return_A``.

    A is ``[.., k]``, each B ``[k, n]``. Results have the strides that they have in
    ``torch.ops.symm_mem.fused_all_gather_matmul``: contiguous with ``gather_dim`` in front. Raises
    ValueError where sizes, types or devices do not fit.
    """
    _check(A, Bs, gather_dim, "gather_dim")
    if A.is_meta:
        # Of the compiler, which asks for shapes and strides only.
        whole, products = like_gathered(A, Bs, [A.dtype] * len(Bs), gather_dim, group_name)
        return whole if return_A else None, products
    operation = "gather and keep" if return_A else "gather"
    last = gather_dim == A.dim() - 1

    def again() -> tuple[torch.Tensor | None, list[torch.Tensor]] | None:
        return _RECENT.call(operation, gather_dim, group_name, A, Bs)  # type: ignore[no-any-return]

    def unfused() -> tuple[torch.Tensor | None, list[torch.Tensor]]:
        """The same as a collective and matmuls."""
        with torch.no_grad():
            gathered = all_gathered((A if last else to_front(A, gather_dim)).contiguous(), group_name)
            if last:
                gathered = torch.cat(gathered.chunk(group_size(group_name)), dim=-1)
            results = [torch.matmul(gathered, b) for b in Bs]
            if gather_dim and not last:
                gathered, results = gathered.movedim(0, gather_dim), [each.movedim(0, gather_dim) for each in results]
        return gathered if return_A else None, results

    for b in Bs:
        rows = A.shape[-1] * (group_size(group_name) if last else 1)
        if b.shape[0] != rows:
            raise ValueError(f"B has {b.shape[0]} rows; expected {rows}, the columns of A")
    fuses = _fuses(A, Bs)
    space = direct_workspace(group_name, A.device, fuses=fuses)
    if space is None or not fuses:
        sizes = (math.prod(A.shape[:-1]), A.shape[-1], *(b.shape[1] for b in Bs))
        along = " along the last dimension" if last else ""
        call = Call("fused_all_gather_matmul" + along, sizes, A.dtype)
        with compared(space, call):
            return unfused()
    direct = space
    product = _gather_product(A, Bs, gather_dim, space.communicator.size, return_a=return_A)
    if last:
        return faster(space, product.call, lambda: columns.gather_matmul(A, Bs, direct, return_a=return_A), unfused)
    finish = _keep_gather(operation, A, Bs, gather_dim, group_name, space, product)

    def fused() -> tuple[torch.Tensor | None, list[torch.Tensor]]:
        return finish(_gather(A, Bs, gather_dim, direct, product))

    return faster(space, product.call, fused, unfused, again)


def _keep_gather(
    operation: str,
    a: torch.Tensor,
    bs: list[torch.Tensor],
    dim: int,
    group_name: str,
    space: Workspace,
    known: _Product,
) -> Callable[[list[torch.Tensor]], tuple[torch.Tensor | None, list[torch.Tensor]]]:
    """Returns what makes the operation's results of the plan's."""
    leading, keeps = known.leading, "G" in known.outputs
    moves = dim or len(leading) > 1
    group = c10d._resolve_process_group(group_name)  # type: ignore[arg-type]
    matrix, whole = known.left if a.dim() > 2 else None, (math.prod(leading), a.shape[-1])

    def finish(results: list[torch.Tensor]) -> tuple[torch.Tensor | None, list[torch.Tensor]]:
        results = [moved_back(result, leading, dim) for result in results]
        return (results.pop() if keeps else None), results

    pair = warplink.RecentPair(group, "all_gather", a.nbytes, None, matrix, whole, keeps, finish if moves else None)
    _keep(operation, dim, group_name, a, bs, space, known, pair, finish if moves else None)
    return finish


def _gather_product(
    a: torch.Tensor, bs: list[torch.Tensor], dim: int, size: int, *, return_a: bool
) -> _Product:
    rows, k = math.prod(a.shape[:-1]), a.shape[-1]
    widths = tuple(b.shape[1] for b in bs)
    outputs = {f"C[{index}]": (rows * size, n) for index, n in enumerate(widths)}
    if return_a:
        outputs["G"] = (rows * size, k)
    transposed = are_transposed(bs)
    options = (("return_A", return_a), ("transposed", transposed))
    along = " along the last dimension" if dim == a.dim() - 1 else ""
    call = Call("fused_all_gather_matmul" + along, (rows, k, *widths), a.dtype, options)
    front = to_front(a, dim).shape
    return _Product(call, (rows, k), outputs, [front[0] * size, *front[1:-1]], transposed)


def _gather(
    a: torch.Tensor, bs: list[torch.Tensor], dim: int, space: Workspace, known: _Product
) -> list[torch.Tensor]:
    inputs = [to_front(a, dim).contiguous(), *in_memory(bs, known.transposed)]
    results = [a.new_empty(sizes) for sizes in known.outputs.values()]

    def make() -> FusedPlan:
        left = inputs[0].reshape(known.left)
        tensors = {"A": left, **family("B", inputs[1:]), **dict(zip(known.outputs, results))}

        def plan(views: dict[str, Any], lowering: str | None) -> warplink.OverlapPlan:
            return space.executor.all_gather_matmul(
                views["A"],
                [views[f"B[{index}]"] for index in range(len(bs))],
                [views[f"C[{index}]"] for index in range(len(bs))],
                gathered=views.get("G"),
                transposed_b=known.transposed,
                lowering=lowering,
            )

        # Peers read this rank's part of A, and put theirs into the gathered one.
        return FusedPlan.make(space, known.call, tensors, {"A", "G"} & tensors.keys(), plan)

    with span("warplink::fused_all_gather_matmul"):
        space.launch(known.call, make, [tensor.data_ptr() for tensor in (*inputs, *results)])
    return results


def matmul_reduce_scatter(
    A: torch.Tensor, B: torch.Tensor, reduce_op: str, scatter_dim: int, group_name: str
) -> torch.Tensor:
    """This rank's part, along ``scatter_dim``, of the sum or average over the ranks of ``A @ B``.

    A is ``[.., k]``, B is ``[k, n]``. The result is contiguous. Raises ValueError where sizes, types or
    devices do not fit, or ``reduce_op`` is neither "sum" nor "avg".
    """
    _check(A, [B], scatter_dim, "scatter_dim")
    if A.is_meta:
        # Of the compiler, which asks for the shape only.
        shape = [*A.shape[:-1], B.shape[1]]
        shape[scatter_dim] //= group_size(group_name)
        return A.new_empty(shape)
    operation = "scatter " + reduce_op

    def again() -> torch.Tensor | None:
        return _RECENT.call(operation, scatter_dim, group_name, A, [B])  # type: ignore[no-any-return]

    def unfused() -> torch.Tensor:
        """The same as a matmul and a collective."""
        with torch.no_grad():
            front = to_front(torch.matmul(A, B), scatter_dim).contiguous()
            part = reduce_scattered(front, reduce_op, group_name)
            return copied_back(part.flatten(0, -2), list(part.shape[:-1]), scatter_dim)

    _check_scatter(A, B, reduce_op, scatter_dim, group_size(group_name))
    fuses = _fuses(A, [B])
    last = scatter_dim == A.dim() - 1
    space = direct_workspace(group_name, A.device, fuses=fuses)
    if space is None or not fuses:
        along = " along the last dimension" if last else ""
        sizes = (math.prod(A.shape[:-1]), A.shape[-1], B.shape[1])
        call = Call("fused_matmul_reduce_scatter" + along, sizes, A.dtype)
        with compared(space, call):
            return unfused()
    direct, average = space, reduce_op == "avg"
    product = _scatter_product(A, B, scatter_dim, space.communicator.size)
    if last:
        return faster(space, product.call, lambda: columns.matmul_scatter(A, B, direct, average=average), unfused)
    finish = _keep_scatter(operation, A, B, scatter_dim, group_name, space, product)

    def fused() -> torch.Tensor:
        return finish([_scatter(A, B, scatter_dim, direct, product)])

    return faster(space, product.call, fused, unfused, again)


def _keep_scatter(
    operation: str,
    a: torch.Tensor,
    b: torch.Tensor,
    dim: int,
    group_name: str,
    space: Workspace,
    known: _Product,
) -> Callable[[list[torch.Tensor]], torch.Tensor]:
    """Returns what makes the operation's result of the plan's."""
    size, leading, average = space.communicator.size, known.leading, operation == "scatter avg"
    (part,) = known.outputs.values()
    in_order = not dim and len(leading) == 1 and 1 not in part
    group = c10d._resolve_process_group(group_name)  # type: ignore[arg-type]
    matrix = known.left if a.dim() > 2 else None
    how = reduction(c10d.ReduceOp(c10d.ReduceOp.AVG if average else c10d.ReduceOp.SUM), a.dtype)

    def ordered(results: list[torch.Tensor]) -> torch.Tensor:
        (result,) = results
        return result if in_order else copied_back(result, leading, dim)

    def finish(results: list[torch.Tensor]) -> torch.Tensor:
        if average:
            results[0] /= size
        return ordered(results)

    count, moved = math.prod(part), None if in_order else ordered
    pair = warplink.RecentPair(group, "reduce_scatter", count, how, matrix, part, False, moved)
    _keep(operation, dim, group_name, a, [b], space, known, pair, finish if average else moved)
    return finish


def _check_scatter(a: torch.Tensor, b: torch.Tensor, reduce_op: str, dim: int, size: int) -> None:
    if reduce_op not in ("sum", "avg"):
        raise ValueError(f"reduce_op is '{reduce_op}'; expected sum or avg")
    if b.shape[0] != a.shape[-1]:
        raise ValueError(f"B has {b.shape[0]} rows; expected {a.shape[-1]}, the columns of A")
    shared = b.shape[1] if dim == a.dim() - 1 else a.shape[dim]
    if shared % size:
        raise ValueError(f"dimension {dim} of the result is {shared}; expected a multiple of {size} ranks")


def _scatter_product(a: torch.Tensor, b: torch.Tensor, dim: int, size: int) -> _Product:
    m, k, n = math.prod(a.shape[:-1]), a.shape[-1], b.shape[1]
    transposed = are_transposed([b])
    along = " along the last dimension" if dim == a.dim() - 1 else ""
    call = Call("fused_matmul_reduce_scatter" + along, (m, k, n), a.dtype, (("transposed", transposed),))
    front = to_front(a, dim).shape
    return _Product(call, (m, k), {"C": (m // size, n)}, [front[0] // size, *front[1:-1]], transposed)


def _scatter(a: torch.Tensor, b: torch.Tensor, dim: int, space: Workspace, known: _Product) -> torch.Tensor:
    left, (right,) = to_front(a, dim).contiguous(), in_memory([b], known.transposed)
    result = a.new_empty(known.outputs["C"])

    def plan(views: dict[str, Any], lowering: str | None) -> warplink.OverlapPlan:
        return space.executor.matmul_reduce_scatter(
            views["A"], views["B"], views["C"], transposed_b=known.transposed, lowering=lowering
        )

    def make() -> FusedPlan:
        # Some programs receive sums in the result.
        tensors = {"A": left.reshape(known.left), "B": right, "C": result}
        return FusedPlan.make(space, known.call, tensors, {"C"}, plan)

    with span("warplink::fused_matmul_reduce_scatter"):
        space.launch(known.call, make, [left.data_ptr(), right.data_ptr(), result.data_ptr()])
    return result


def gather_gains(a: torch.Tensor, bs: list[torch.Tensor], dim: int, group_name: str, *, return_a: bool) -> bool:
    """Whether ``fused_all_gather_matmul`` of tensors like these may be faster than the collective and the matmuls: not where
    the group's members have tried both and found otherwise."""
    return _gains(group_name, (a, *bs), lambda size: _gather_product(a, bs, dim, size, return_a=return_a).call)


def scatter_gains(a: torch.Tensor, b: torch.Tensor, dim: int, group_name: str) -> bool:
    """The same of ``fused_matmul_reduce_scatter``."""
    return _gains(group_name, (a, b), lambda size: _scatter_product(a, b, dim, size).call)


def _gains(group_name: str, tensors: tuple[torch.Tensor, ...], call: Callable[[int], Call]) -> bool:
    if not all(isinstance(extent, int) for tensor in tensors for extent in tensor.shape):
        # Sizes that are not known were not tried.
        return True
    group = c10d._resolve_process_group(group_name)  # type: ignore[arg-type]
    if not isinstance(group, ProcessGroupWarplink):
        return True
    decision = group.decision(tensors[0].device, call(group.size()))
    return decision is None or any(decision)


def like_gathered(
    a: torch.Tensor, bs: list[torch.Tensor], kinds: list[torch.dtype], dim: int, group_name: str
) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """Memory with the shapes and strides of the gathered ``a``, and of its product of an element type with each of ``bs``."""
    size = group_size(group_name)
    if dim == a.dim() - 1:
        leading, columns, dim = list(a.shape[:-1]), a.shape[-1] * size, 0
    else:
        first, *others, columns = a.movedim(dim, 0).shape
        leading = [first * size, *others]

    def made(columns: int, kind: torch.dtype) -> torch.Tensor:
        return a.new_empty([*leading, columns], dtype=kind).movedim(0, dim)

    return made(columns, a.dtype), [made(b.shape[1], kind) for b, kind in zip(bs, kinds)]


_GATHER = warplink.GatherOperator(_RECENT, all_gather_matmul)
_SCATTER = warplink.ScatterOperator(_RECENT, matmul_reduce_scatter)
for _key in ("CPU", "CUDA"):
    library.impl("fused_all_gather_matmul", _GATHER, _key)
    library.impl("fused_matmul_reduce_scatter", _SCATTER, _key)
library.impl("fused_all_gather_matmul", all_gather_matmul, "Meta")
library.impl("fused_matmul_reduce_scatter", matmul_reduce_scatter, "Meta")
