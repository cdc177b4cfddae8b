"""Checks of the arguments of scaled matmuls, before other ranks wait for them."""

from __future__ import annotations

import math
from typing import Any, Callable

import torch

#: How many kinds of matmuls are remembered.
_MAX_DONE = 4096

#: Kinds of matmuls that PyTorch has done.
_done: set[Any] = set()

#: The dispatcher turns element types in lists into their numbers (c10/core/ScalarType.h).
_NUMBERED = {
    5: torch.float16,
    6: torch.float32,
    15: torch.bfloat16,
    23: torch.float8_e5m2,
    24: torch.float8_e4m3fn,
}


def result_dtype(given: Any, default: torch.dtype) -> torch.dtype:
    """The element type of a result."""
    if given is None:
        return default
    if isinstance(given, torch.dtype):
        if not given.is_floating_point:
            raise ValueError(f"the results' element type is {given}; expected a float type")
        return given
    if given not in _NUMBERED:
        raise ValueError(f"the results' element type has number {given}; expected a float type")
    return _NUMBERED[given]


def check_matrix(a: torch.Tensor, b: torch.Tensor, rows: int) -> None:
    """Raises ValueError where ``b`` is no right operand of ``rows`` rows for ``a``."""
    if a.dim() < 2:
        raise ValueError(f"A has {a.dim()} dimensions; expected at least 2")
    if b.dim() != 2 or b.shape[0] != rows:
        raise ValueError(f"B has the sizes {list(b.shape)}; expected {rows} rows, the columns of A")
    for name, matrix in (("A", a), ("B", b)):
        if matrix.element_size() != 1 or not matrix.is_floating_point():
            raise ValueError(f"{name} is {matrix.dtype}; expected a float type of 8 bits")
    _check_device("B", b, a)


def check_scaling(
    a: torch.Tensor,
    b: torch.Tensor,
    scales: tuple[torch.Tensor, torch.Tensor],
    bias: torch.Tensor | None,
    result_scale: torch.Tensor | None,
) -> None:
    """Raises ValueError where the scales of ``a`` and ``b``, what is added, or the scale of the result do not fit to
    the product; the sizes of the scale of ``a`` aside."""
    _check_device("A_scale", scales[0], a)
    _check_device("B_scale", scales[1], a)
    columns = b.shape[1]
    if scales[1].numel() not in (1, columns):
        raise ValueError(
            f"B_scale has {scales[1].numel()} elements; expected one, or one for each of {columns} columns of B"
        )
    if bias is not None:
        _check_device("bias", bias, a)
        if bias.element_size() == 1 or not bias.is_floating_point():
            raise ValueError(f"bias is {bias.dtype}; expected a float type of 16 bits or more")
        if bias.numel() != columns:
            raise ValueError(f"bias has {bias.numel()} elements; expected {columns}, the columns of B")
    if result_scale is not None:
        _check_device("result_scale", result_scale, a)
        if result_scale.numel() != 1:
            raise ValueError(f"result_scale has {result_scale.numel()} elements; expected one")


def _check_device(name: str, tensor: torch.Tensor, a: torch.Tensor) -> None:
    if tensor.device != a.device:
        raise ValueError(f"{name} is on {tensor.device}; expected {a.device}, as A is")


def product_sizes(a: torch.Tensor, b: torch.Tensor, output_shape: list[int] | None) -> list[int]:
    """The sizes of the product of ``a`` and ``b``. Raises ValueError where they do not fit."""
    check_matrix(a, b, a.shape[-1])
    sizes = [*(output_shape[:-1] if output_shape is not None else a.shape[:-1]), b.shape[1]]
    if math.prod(sizes[:-1]) != math.prod(a.shape[:-1]):
        raise ValueError(
            f"output_shape is {list(output_shape or [])}; expected as many rows as A of "
            f"{list(a.shape)} has"
        )
    return sizes


def check_scatter(
    a: torch.Tensor,
    scale: torch.Tensor,
    reduce_op: str,
    dim: int,
    sizes: list[int],
    size: int,
) -> None:
    """Raises ValueError where a product of ``sizes`` cannot be scattered along ``dim`` over ``size`` ranks."""
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


def done_once(kind: tuple[Any, ...], multiply: Callable[[], None]) -> None:
    """Calls ``multiply`` once for each ``kind``, in which tensors count by shape, strides, type and device. Which
    arguments PyTorch rejects depends on device, release and layout, so this finds rejections before other ranks wait.
    Raises what ``multiply`` raises."""
    looks = tuple(
        (one.shape, one.stride(), one.dtype, one.device) if isinstance(one, torch.Tensor) else one for one in kind
    )
    if looks in _done:
        return
    multiply()
    if len(_done) == _MAX_DONE:
        _done.clear()
    _done.add(looks)
