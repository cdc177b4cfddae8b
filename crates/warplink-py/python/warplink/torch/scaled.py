"""Scaled (fp8) matmuls, fused with the communication that feeds or follows them.

They have the signatures, results and strides of ``torch.ops.symm_mem``. PyTorch multiplies part by part
while Warplink brings or sends the next one. Groups that Warplink does not serve directly run a collective
and one matmul.
"""

from __future__ import annotations

import math
from typing import Any

import torch

from warplink.torch.agreement import Call
from warplink.torch.ops import compared, direct_workspace, library, like_gathered
from warplink.torch.pipeline import GatherPipeline, ScatterPipeline
from warplink.torch.plans import copied_back, moved_back, span, to_front
from warplink.torch.scaled_checks import (
    check_matrix,
    check_scaling,
    check_scatter,
    done_once,
    product_sizes,
    result_dtype,
)
from warplink.torch.trials import faster
from warplink.torch.unfused import all_gathered, group_size, reduce_scattered
from warplink.torch.workspace import Workspace

library.define(
    "fused_all_gather_scaled_matmul(Tensor A, Tensor[] Bs, Tensor A_scale, Tensor[] B_scales, "
    "int gather_dim, str group_name, Tensor?[] biases, Tensor?[] result_scales, "
    "ScalarType?[] out_dtypes, bool[] use_fast_accum) -> (Tensor, Tensor[])",
    tags=[torch._C.Tag.needs_fixed_stride_order],
)
library.define(
    "fused_scaled_matmul_reduce_scatter(Tensor A, Tensor B, Tensor A_scale, Tensor B_scale, "
    "str reduce_op, int orig_scatter_dim, int scatter_dim_after_maybe_reshape, str group_name, "
    "SymInt[]? output_shape, Tensor? bias = None, Tensor? result_scale = None, "
    "ScalarType? out_dtype = None, bool use_fast_accum = False) -> Tensor",
    tags=[torch._C.Tag.needs_fixed_stride_order],
)


def _matmul(
    out: torch.Tensor,
    a: torch.Tensor,
    b: torch.Tensor,
    a_scale: torch.Tensor,
    b_scale: torch.Tensor,
    rest: tuple[Any, Any, bool],
) -> None:
    """``out`` = the scaled product; ``rest`` are bias, scale of the result and fast accumulation."""
    bias, result_scale, fast = rest
    if a_scale.numel() > 1 and a_scale.data_ptr() % 16:
        # cuBLAS wants the scales of rows aligned.
        a_scale = a_scale.clone()
    torch._scaled_mm(
        a, b, a_scale, b_scale, bias, result_scale, out_dtype=out.dtype, use_fast_accum=fast, out=out
    )


def _try(
    kind: torch.dtype,
    a: torch.Tensor,
    b: torch.Tensor,
    a_scale: torch.Tensor,
    b_scale: torch.Tensor,
    rest: tuple[Any, Any, bool],
) -> None:
    """Has PyTorch compute such a product, of element type ``kind``, unless it has: it raises what it refuses."""

    def multiply() -> None:
        _matmul(a.new_empty([a.shape[0], b.shape[1]], dtype=kind), a, b, a_scale, b_scale, rest)

    done_once((kind, a, b, a_scale, b_scale, *rest), multiply)


def all_gather_scaled_matmul(
    A: torch.Tensor,
    Bs: list[torch.Tensor],
    A_scale: torch.Tensor,
    B_scales: list[torch.Tensor],
    gather_dim: int,
    group_name: str,
    biases: list[torch.Tensor | None],
    result_scales: list[torch.Tensor | None],
    out_dtypes: list[torch.dtype | None],
    use_fast_accum: list[bool],
) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """The gathered A, and its scaled product with each of ``Bs``.

    ``A_scale`` is one scale, one for each row of this rank's part, which is gathered too, or one for each
    row of the gathered A. Results are contiguous with ``gather_dim`` in front. Along the last dimension,
    which runs as a collective and a matmul, rows are whole ones, and results are contiguous. Raises
    ValueError where sizes or devices do not fit.
    """
    kinds = [result_dtype(given, A.dtype) for given in out_dtypes]
    if A.is_meta:
        # Of the compiler, which asks for shapes and strides only.
        return like_gathered(A, Bs, kinds, gather_dim, group_name)
    for name, given in (
        ("B_scales", B_scales),
        ("biases", biases),
        ("result_scales", result_scales),
        ("out_dtypes", out_dtypes),
        ("use_fast_accum", use_fast_accum),
    ):
        if len(given) != len(Bs):
            raise ValueError(f"{name} has {len(given)} entries; expected {len(Bs)}, one for each B")
    if not 0 <= gather_dim < A.dim():
        raise ValueError(
            f"gather_dim is {gather_dim}; expected a dimension of A, from 0 to {A.dim() - 1}"
        )
    size = group_size(group_name)
    last = gather_dim == A.dim() - 1
    for b in Bs:
        check_matrix(A, b, A.shape[-1] * (size if last else 1))
    for b, b_scale, bias, result_scale in zip(Bs, B_scales, biases, result_scales):
        check_scaling(A, b, (A_scale, b_scale), bias, result_scale)
    rests = list(zip(biases, result_scales, use_fast_accum))
    fuses = not last and A.numel() > 0
    space = direct_workspace(group_name, A.device, fuses=fuses)
    rows, k = math.prod(A.shape[:-1]), A.shape[-1]
    if last:
        call = Call("fused_all_gather_scaled_matmul along the last dimension", (rows, k), A.dtype)
        with compared(space, call):
            return _gather_columns(A, Bs, (A_scale, B_scales), kinds, rests, group_name)
    front = to_front(A, gather_dim)
    whole_rows = list(A.shape[:-1])
    whole_rows[gather_dim] *= size
    leading = [front.shape[0] * size, *front.shape[1:-1]]
    own_scales = _own_scales(A, A_scale, gather_dim, whole_rows, 0 if space is None else space.communicator.rank)
    call = Call("fused_all_gather_scaled_matmul", (rows, k), A.dtype)
    # A collective of its own.
    gathers_scales = list(A_scale.shape) == [*A.shape[:-1], 1]
    of_scales = call._replace(options=(("A_scale", "of this part"),)) if gathers_scales else call

    def results() -> list[torch.Tensor]:
        return [A.new_empty([size * rows, b.shape[1]], dtype=kind) for b, kind in zip(Bs, kinds)]

    def unfused() -> tuple[torch.Tensor, list[torch.Tensor]]:
        outs, scales = results(), _scales_of_rows(A, A_scale, gather_dim, group_name)
        gathered = all_gathered(front.contiguous(), group_name).view(-1, k)
        for out, b, b_scale, rest in zip(outs, Bs, B_scales, rests):
            _matmul(out, gathered, b, scales, b_scale, rest)
        return gathered, outs

    def fused(space: Workspace) -> tuple[torch.Tensor, list[torch.Tensor]]:
        outs, brought = results(), front.reshape(rows, k).contiguous()
        for kind, b, b_scale, rest in zip(kinds, Bs, B_scales, rests):
            _try(kind, brought, b, own_scales, b_scale, rest)
        with compared(space if gathers_scales else None, of_scales):
            scales = _scales_of_rows(A, A_scale, gather_dim, group_name)

        def multiply(rank: int, received: torch.Tensor) -> None:
            part, of_rank = received.view(A.dtype).view(rows, k), slice(rank * rows, (rank + 1) * rows)
            own = scales[of_rank] if scales.numel() > 1 else scales
            for out, b, b_scale, rest in zip(outs, Bs, B_scales, rests):
                _matmul(out[of_rank], part, b, own, b_scale, rest)

        with span("warplink::fused_all_gather_scaled_matmul"), space.turn():
            nbytes = rows * k * A.element_size()
            pipeline = space.plan(call, lambda: GatherPipeline(space, nbytes))
            pipeline.run(brought.view(torch.uint8).view(-1), multiply)
            # The pipeline's memory is the next call's too.
            return pipeline.parts.bytes.clone().view(A.dtype).view(-1, k), outs

    if space is None or not fuses:
        with compared(space, of_scales):
            gathered, outs = unfused()
    else:
        sizes = (rows, k, *(b.shape[1] for b in Bs))
        key = of_scales._replace(sizes=sizes, options=(*of_scales.options, ("of types", tuple(kinds))))
        gathered, outs = faster(space, key, lambda: fused(space), unfused)
    return moved_back(gathered, leading, gather_dim), [moved_back(out, leading, gather_dim) for out in outs]


def _gather_columns(
    a: torch.Tensor,
    bs: list[torch.Tensor],
    scales: tuple[torch.Tensor, list[torch.Tensor]],
    kinds: list[torch.dtype],
    rests: list[tuple[Any, Any, bool]],
    group_name: str,
) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """The same along the last dimension, as a collective and matmuls."""
    size, rows, a_scale = group_size(group_name), math.prod(a.shape[:-1]), scales[0]
    if a_scale.numel() > 1:
        if a_scale.numel() != rows:
            raise ValueError(
                f"A_scale has {a_scale.numel()} elements; expected one, or one for each of {rows} rows of A"
            )
        a_scale = a_scale.reshape(-1, 1).contiguous()
    gathered = all_gathered(a.contiguous(), group_name)
    # Not all types of fp8 can be concatenated.
    parts = gathered.view(torch.uint8).chunk(size) if a.element_size() == 1 else gathered.chunk(size)
    whole = torch.cat(parts, dim=-1).view(a.dtype)
    flat = whole.flatten(0, -2)
    results = []
    for b, b_scale, kind, rest in zip(bs, scales[1], kinds, rests):
        out = a.new_empty([flat.shape[0], b.shape[1]], dtype=kind)
        _matmul(out, flat, b, a_scale, b_scale, rest)
        results.append(out.view(*a.shape[:-1], b.shape[1]))
    return whole, results


def _own_scales(
    a: torch.Tensor, scale: torch.Tensor, dim: int, whole_rows: list[int], rank: int
) -> torch.Tensor:
    """One scale, or one for each row of this rank's part of A, as ``_scales_of_rows`` has them. Raises ValueError where
    the sizes are others."""
    if list(scale.shape) == [*a.shape[:-1], 1]:
        return scale.movedim(dim, 0).reshape(-1, 1).contiguous()
    if scale.numel() == 1:
        return scale
    if list(scale.shape) == [*whole_rows, 1]:
        rows = math.prod(a.shape[:-1])
        return scale.movedim(dim, 0).reshape(-1, 1).contiguous()[rank * rows : (rank + 1) * rows]
    raise ValueError(
        f"A_scale has the sizes {list(scale.shape)}; expected one scale, {[*a.shape[:-1], 1]} or {[*whole_rows, 1]}"
    )


def _scales_of_rows(a: torch.Tensor, scale: torch.Tensor, dim: int, group_name: str) -> torch.Tensor:
    """One scale, or one for each row of the gathered A, with the gathered dimension in front."""
    if list(scale.shape) == [*a.shape[:-1], 1]:
        # As long as this rank's part, so it is gathered as well; it is small.
        return all_gathered(scale.movedim(dim, 0).contiguous(), group_name).view(-1, 1)
    return scale if scale.numel() == 1 else scale.movedim(dim, 0).reshape(-1, 1).contiguous()


def scaled_matmul_reduce_scatter(
    A: torch.Tensor,
    B: torch.Tensor,
    A_scale: torch.Tensor,
    B_scale: torch.Tensor,
    reduce_op: str,
    orig_scatter_dim: int,
    scatter_dim_after_maybe_reshape: int,
    group_name: str,
    output_shape: list[int] | None,
    bias: torch.Tensor | None = None,
    result_scale: torch.Tensor | None = None,
    out_dtype: torch.dtype | None = None,
    use_fast_accum: bool = False,
) -> torch.Tensor:
    """This rank's part, along ``orig_scatter_dim``, of the sum or average over the ranks of the scaled
    product of A and B.

    The product has ``output_shape``, or the sizes of A with B's columns in the place of its own.
    ``scatter_dim_after_maybe_reshape`` is the dimension's index in A, which does not matter here.
    ``A_scale`` is one scale, or one for each row of A. The result is contiguous. Raises ValueError where
    sizes or devices do not fit.
    """
    size, dim, kind = group_size(group_name), orig_scatter_dim, result_dtype(out_dtype, A.dtype)
    if A.is_meta:
        # Of the compiler, which asks for the shape only.
        shape = [*(output_shape[:-1] if output_shape is not None else A.shape[:-1]), B.shape[1]]
        shape[dim] //= size
        return A.new_empty(shape, dtype=kind)
    sizes = product_sizes(A, B, output_shape)
    check_scatter(A, A_scale, reduce_op, dim, sizes, size)
    check_scaling(A, B, (A_scale, B_scale), bias, result_scale)
    k, n = A.shape[-1], B.shape[1]
    rest = (bias, result_scale, use_fast_accum)
    last = dim == len(sizes) - 1
    # Types of 8 bits have no sums in PyTorch.
    fuses = not last and A.numel() > 0 and kind.itemsize > 1
    space = direct_workspace(group_name, A.device, fuses=fuses)
    rows = math.prod(sizes[:-1]) // (1 if last else size)

    def unfused() -> torch.Tensor:
        """The same as one matmul and a collective."""
        flat = A.reshape(-1, k).contiguous()
        out = A.new_empty([flat.shape[0], n], dtype=kind)
        _matmul(out, flat, B, A_scale.reshape(-1, 1) if A_scale.numel() > 1 else A_scale, B_scale, rest)
        part = reduce_scattered(to_front(out.view(sizes), dim).contiguous(), reduce_op, group_name)
        return copied_back(part.flatten(0, -2), list(part.shape[:-1]), dim)

    if space is None or not fuses:
        along = " along the last dimension" if last else ""
        call = Call("fused_scaled_matmul_reduce_scatter" + along, (rows, n), kind)
        with compared(space, call):
            return unfused()
    front = to_front(A.reshape(*sizes[:-1], k), dim)
    parts = front.reshape(size, rows, k)
    scales = A_scale
    if A_scale.numel() > 1:
        scales = A_scale.reshape(*sizes[:-1], 1).movedim(dim, 0).reshape(size, rows, 1)

    def multiply(rank: int, out: torch.Tensor) -> None:
        own = scales[rank] if scales.numel() > 1 else scales
        _matmul(out.view(kind).view(rows, n), parts[rank], B, own, B_scale, rest)

    call = Call("fused_scaled_matmul_reduce_scatter", (rows, n), kind)
    leading = [front.shape[0] // size, *front.shape[1:-1]]

    def fused(space: Workspace) -> torch.Tensor:
        own = scales[0] if scales.numel() > 1 else scales
        _try(kind, parts[0], B, own, B_scale, rest)
        with span("warplink::fused_scaled_matmul_reduce_scatter"), space.turn():
            nbytes = rows * n * kind.itemsize
            pipeline = space.plan(call, lambda: ScatterPipeline(space, nbytes))
            received = pipeline.run(multiply).view(kind).view(size, rows, n)
            result = (received.mean(0) if reduce_op == "avg" else received.sum(0)).to(kind)
        return copied_back(result, leading, dim)

    return faster(space, call._replace(sizes=(rows, k, n)), lambda: fused(space), unfused)


for _key in ("CPU", "CUDA"):
    library.impl("fused_all_gather_scaled_matmul", torch.no_grad()(all_gather_scaled_matmul), _key)
    library.impl("fused_scaled_matmul_reduce_scatter", torch.no_grad()(scaled_matmul_reduce_scatter), _key)
library.impl("fused_all_gather_scaled_matmul", all_gather_scaled_matmul, "Meta")
library.impl("fused_scaled_matmul_reduce_scatter", scaled_matmul_reduce_scatter, "Meta")
