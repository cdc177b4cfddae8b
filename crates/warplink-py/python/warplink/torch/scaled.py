"""Scaled (fp8) matmuls, fused with the communication that feeds or follows them.

They have the signatures, results and strides of ``torch.ops.symm_mem``. PyTorch multiplies part by part
while Warplink brings or sends the next one. Groups that Warplink does not serve directly run a collective
and one matmul.
"""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.distributed._functional_collectives as funcol

from warplink.torch.agreement import Call
from warplink.torch.ops import direct_group, group_size, library
from warplink.torch.pipeline import GatherPipeline, ScatterPipeline
from warplink.torch.plans import copied_back, moved_back, span, to_front

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

#: The dispatcher turns element types in lists into their numbers (c10/core/ScalarType.h).
_NUMBERED = {
    5: torch.float16,
    6: torch.float32,
    15: torch.bfloat16,
    23: torch.float8_e5m2,
    24: torch.float8_e4m3fn,
}


def _dtype(given: Any, default: torch.dtype) -> torch.dtype:
    """The element type of a result."""
    if given is None:
        return default
    if isinstance(given, torch.dtype):
        return given
    if given not in _NUMBERED:
        raise ValueError(f"the results' element type has number {given}; expected a float type")
    return _NUMBERED[given]


def _check_matrix(a: torch.Tensor, b: torch.Tensor, rows: int) -> None:
    if a.dim() < 2:
        raise ValueError(f"A has {a.dim()} dimensions; expected at least 2")
    if b.dim() != 2 or b.shape[0] != rows:
        raise ValueError(f"B has the sizes {list(b.shape)}; expected {rows} rows, the columns of A")
    if b.device != a.device:
        raise ValueError(f"B is on {b.device}; expected {a.device}, as A is")


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().view(torch.uint8).view(-1)


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


@torch.no_grad()
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
        _check_matrix(A, b, A.shape[-1] * (size if last else 1))
    kinds = [_dtype(given, A.dtype) for given in out_dtypes]
    if last:
        rests = list(zip(biases, result_scales, use_fast_accum))
        return _gather_columns(A, Bs, (A_scale, B_scales), kinds, rests, group_name)
    front = to_front(A, gather_dim)
    rows, k = math.prod(front.shape[:-1]), A.shape[-1]
    whole_rows = list(A.shape[:-1])
    whole_rows[gather_dim] *= size
    leading = [front.shape[0] * size, *front.shape[1:-1]]
    scales = _scales_of_rows(A, A_scale, gather_dim, whole_rows, group_name)
    outs = [A.new_empty([size * rows, b.shape[1]], dtype=kind) for b, kind in zip(Bs, kinds)]

    def multiply(first: int, part: torch.Tensor) -> None:
        last = first + part.shape[0]
        own = scales[first:last] if scales.numel() > 1 else scales
        for place, b in enumerate(Bs):
            rest = (biases[place], result_scales[place], use_fast_accum[place])
            _matmul(outs[place][first:last], part, b, own, B_scales[place], rest)

    group = direct_group(group_name)
    if group is None or A.numel() == 0:
        gathered = funcol.wait_tensor(
            torch.ops._c10d_functional.all_gather_into_tensor(front.contiguous(), size, group_name)
        ).view(-1, k)
        multiply(0, gathered)
    else:
        space = group.workspace(A.device)
        with span("warplink::fused_all_gather_scaled_matmul"), space.turn():
            nbytes = rows * k * A.element_size()
            call = Call("fused_all_gather_scaled_matmul", (rows, k), A.dtype)
            pipeline = space.plan(call, lambda: GatherPipeline(space, nbytes))
            for rank, part in pipeline.run(_bytes(front)):
                multiply(rank * rows, part.view(A.dtype).view(rows, k))
            # The pipeline's memory is the next call's too.
            gathered = pipeline.parts.bytes.clone().view(A.dtype).view(-1, k)
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
    size = group_size(group_name)
    gathered = funcol.wait_tensor(
        torch.ops._c10d_functional.all_gather_into_tensor(a.contiguous(), size, group_name)
    )
    # Not all types of fp8 can be concatenated.
    parts = gathered.view(torch.uint8).chunk(size) if a.element_size() == 1 else gathered.chunk(size)
    whole = torch.cat(parts, dim=-1).view(a.dtype)
    flat, a_scale = whole.flatten(0, -2), scales[0]
    if a_scale.numel() > 1:
        if a_scale.numel() != flat.shape[0]:
            raise ValueError(
                f"A_scale has {a_scale.numel()} elements; expected one, or one for each of "
                f"{flat.shape[0]} rows of A"
            )
        a_scale = a_scale.reshape(-1, 1).contiguous()
    results = []
    for b, b_scale, kind, rest in zip(bs, scales[1], kinds, rests):
        out = a.new_empty([flat.shape[0], b.shape[1]], dtype=kind)
        _matmul(out, flat, b, a_scale, b_scale, rest)
        results.append(out.view(*a.shape[:-1], b.shape[1]))
    return whole, results


def _scales_of_rows(
    a: torch.Tensor, scale: torch.Tensor, dim: int, whole_rows: list[int], group_name: str
) -> torch.Tensor:
    """One scale, or one for each row of the gathered A, with the gathered dimension in front."""
    if list(scale.shape) == [*a.shape[:-1], 1]:
        # As long as this rank's part, so it is gathered as well; it is small.
        front = scale.movedim(dim, 0).contiguous()
        size = group_size(group_name)
        started = torch.ops._c10d_functional.all_gather_into_tensor(front, size, group_name)
        gathered: torch.Tensor = funcol.wait_tensor(started)
        return gathered.view(-1, 1)
    if scale.numel() == 1:
        return scale
    if list(scale.shape[:-1]) == whole_rows:
        return scale.movedim(dim, 0).flatten(0, -2).contiguous()
    raise ValueError(
        f"A_scale has the sizes {list(scale.shape)}; expected one scale, {[*a.shape[:-1], 1]} or "
        f"{[*whole_rows, 1]}"
    )


@torch.no_grad()
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
    ``scatter_dim_after_maybe_reshape`` tells where the dimension is in A, which does not matter here.
    ``A_scale`` is one scale, or one for each row of A. The result is contiguous. Raises ValueError where
    sizes or devices do not fit.
    """
    sizes = _product_sizes(A, B, output_shape)
    size = group_size(group_name)
    _check_scatter(A, B, A_scale, reduce_op, orig_scatter_dim, sizes, size)
    dim, kind = orig_scatter_dim, _dtype(out_dtype, A.dtype)
    k, n = A.shape[-1], B.shape[1]
    rest = (bias, result_scale, use_fast_accum)
    group = direct_group(group_name)
    if group is None or A.numel() == 0 or dim == len(sizes) - 1:
        scaling = (A_scale, B_scale)
        return _unfused_scatter(A, B, scaling, kind, rest, reduce_op, (dim, sizes), group_name)
    front = to_front(A.reshape(*sizes[:-1], k), dim)
    rows = math.prod(front.shape[:-1]) // size
    parts = front.reshape(size, rows, k)
    scales = A_scale
    if A_scale.numel() > 1:
        scales = A_scale.reshape(*sizes[:-1], 1).movedim(dim, 0).reshape(size, rows, 1)

    def multiply(rank: int, out: torch.Tensor) -> None:
        own = scales[rank] if scales.numel() > 1 else scales
        _matmul(out.view(kind).view(rows, n), parts[rank], B, own, B_scale, rest)

    space = group.workspace(A.device)
    with span("warplink::fused_scaled_matmul_reduce_scatter"), space.turn():
        nbytes = rows * n * kind.itemsize
        call = Call("fused_scaled_matmul_reduce_scatter", (rows, n), kind)
        pipeline = space.plan(call, lambda: ScatterPipeline(space, nbytes))
        received = pipeline.run(multiply).view(kind).view(size, rows, n)
        result = (received.mean(0) if reduce_op == "avg" else received.sum(0)).to(kind)
    leading = [front.shape[0] // size, *front.shape[1:-1]]
    return copied_back(result, leading, dim)


def _product_sizes(a: torch.Tensor, b: torch.Tensor, output_shape: list[int] | None) -> list[int]:
    _check_matrix(a, b, a.shape[-1])
    sizes = [*(output_shape[:-1] if output_shape is not None else a.shape[:-1]), b.shape[1]]
    if math.prod(sizes[:-1]) != math.prod(a.shape[:-1]):
        raise ValueError(
            f"output_shape is {list(output_shape or [])}; expected as many rows as A of "
            f"{list(a.shape)} has"
        )
    return sizes


def _check_scatter(
    a: torch.Tensor,
    b: torch.Tensor,
    scale: torch.Tensor,
    reduce_op: str,
    dim: int,
    sizes: list[int],
    size: int,
) -> None:
    if reduce_op not in ("sum", "avg"):
        raise ValueError(f"reduce_op is '{reduce_op}'; expected sum or avg")
    if not 0 <= dim < len(sizes):
        raise ValueError(
            f"orig_scatter_dim is {dim}; expected a dimension of the result, from 0 to {len(sizes) - 1}"
        )
    if sizes[dim] % size:
        raise ValueError(
            f"dimension {dim} of the result is {sizes[dim]}; expected a multiple of {size} ranks"
        )
    if scale.numel() != 1 and scale.numel() != math.prod(a.shape[:-1]):
        raise ValueError(
            f"A_scale has {scale.numel()} elements; expected one, or one for each row of A"
        )


def _unfused_scatter(
    a: torch.Tensor,
    b: torch.Tensor,
    scales: tuple[torch.Tensor, torch.Tensor],
    kind: torch.dtype,
    rest: tuple[Any, Any, bool],
    reduce_op: str,
    place: tuple[int, list[int]],
    group_name: str,
) -> torch.Tensor:
    """The same as one matmul and a collective."""
    dim, sizes = place
    flat = a.reshape(-1, a.shape[-1]).contiguous()
    out = a.new_empty([flat.shape[0], b.shape[1]], dtype=kind)
    a_scale = scales[0].reshape(-1, 1) if scales[0].numel() > 1 else scales[0]
    _matmul(out, flat, b, a_scale, scales[1], rest)
    name: Any = group_name
    result: torch.Tensor = funcol.wait_tensor(funcol.reduce_scatter_tensor(out.view(sizes), reduce_op, dim, name))
    return result.contiguous()


def _meta_all_gather_scaled_matmul(
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
    """Shapes and strides only."""
    size = group_size(group_name)
    kinds = [_dtype(given, A.dtype) for given in out_dtypes]
    if gather_dim == A.dim() - 1:
        outs = [A.new_empty([*A.shape[:-1], b.shape[1]], dtype=kind) for b, kind in zip(Bs, kinds)]
        return A.new_empty([*A.shape[:-1], A.shape[-1] * size]), outs
    front = list(A.movedim(gather_dim, 0).shape)
    front[0] *= size
    results = [
        A.new_empty([*front[:-1], b.shape[1]], dtype=kind).movedim(0, gather_dim)
        for b, kind in zip(Bs, kinds)
    ]
    return A.new_empty(front).movedim(0, gather_dim), results


def _meta_scaled_matmul_reduce_scatter(
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
    """The shape only."""
    sizes = [*(output_shape[:-1] if output_shape is not None else A.shape[:-1]), B.shape[1]]
    sizes[orig_scatter_dim] //= group_size(group_name)
    return A.new_empty(sizes, dtype=_dtype(out_dtype, A.dtype))


for _key in ("CPU", "CUDA"):
    library.impl("fused_all_gather_scaled_matmul", all_gather_scaled_matmul, _key)
    library.impl("fused_scaled_matmul_reduce_scatter", scaled_matmul_reduce_scatter, _key)
library.impl("fused_all_gather_scaled_matmul", _meta_all_gather_scaled_matmul, "Meta")
library.impl("fused_scaled_matmul_reduce_scatter", _meta_scaled_matmul_reduce_scatter, "Meta")
