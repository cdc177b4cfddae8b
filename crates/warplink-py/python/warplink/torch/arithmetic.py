"""Tensors as bytes, and reductions of them."""

from __future__ import annotations

import functools
from collections.abc import Iterable
from typing import Any

import torch
import torch.distributed as dist

from warplink.errors import UnsupportedError

_KINDS: Any = dist.ReduceOp.RedOpType
#: Names of PyTorch's reductions, and how two elements are reduced.
_REDUCTIONS: dict[Any, tuple[str, Any]] = {
    _KINDS.SUM: ("sum", torch.add),
    _KINDS.AVG: ("avg", torch.add),
    _KINDS.PRODUCT: ("product", torch.mul),
    _KINDS.MIN: ("min", torch.minimum),
    _KINDS.MAX: ("max", torch.maximum),
    _KINDS.BAND: ("band", torch.bitwise_and),
    _KINDS.BOR: ("bor", torch.bitwise_or),
    _KINDS.BXOR: ("bxor", torch.bitwise_xor),
}
_COMBINED = dict(_REDUCTIONS.values())

#: Names by what PyTorch's reductions of these kinds hash to: comparing them with one another takes microseconds.
NAMES_BY_HASH = {hash(dist.ReduceOp(kind)): name for kind, (name, _) in _REDUCTIONS.items()}

#: The name of a sum of what is multiplied by a factor beforehand, which follows in parentheses.
_SCALED = "premul_sum"


def reduction_name(op: Any, tensors: Iterable[torch.Tensor]) -> str:
    """The name of PyTorch's reduction ``op`` of ``tensors``. Raises UnsupportedError for one of another kind, or that is
    not defined for their type."""
    if op == _KINDS.PREMUL_SUM:
        for tensor in tensors:
            if not (tensor.is_floating_point() or tensor.is_complex()):
                raise UnsupportedError(f"{_SCALED} of {tensor.dtype}; expected floats")
        # As it is pickled, which is the only way to read it.
        _, factor = op.__getstate__()
        return f"{_SCALED}({float(factor)!r})"
    if (name := NAMES_BY_HASH.get(hash(op))) is not None:
        for dtype in {tensor.dtype for tensor in tensors}:
            if not _is_reduced(name, dtype):
                raise UnsupportedError(f"{name} of {dtype}; expected a type for which PyTorch implements {name} on CPU")
        return name
    raise UnsupportedError(
        f"{op} is not reduced on CPU tensors; expected one of {', '.join(_COMBINED)}, {_SCALED}"
    )


@functools.lru_cache(maxsize=None)
def _is_reduced(name: str, dtype: torch.dtype) -> bool:
    """Whether elements of ``dtype`` can be reduced."""
    try:
        reduce_parts([torch.zeros(1, dtype=dtype) for _ in range(2)], name)
    except (RuntimeError, TypeError):
        return False
    return True


def as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """The bytes of a contiguous tensor, in place."""
    return tensor.detach().reshape(-1).view(torch.uint8)


def place_of(tensor: torch.Tensor) -> tuple[int, int]:
    """The address of a contiguous tensor and its length in bytes."""
    return tensor.data_ptr(), tensor.nbytes


def readable(tensor: torch.Tensor) -> torch.Tensor:
    """A contiguous tensor of the values of ``tensor``, itself if it is one."""
    return tensor.detach().resolve_conj().resolve_neg().contiguous()


def writable(tensor: torch.Tensor) -> torch.Tensor:
    """A contiguous tensor to be written for ``tensor``: itself, or memory to be copied from."""
    plain = tensor.is_contiguous() and not tensor.is_conj() and not tensor.is_neg()
    return tensor.detach() if plain else torch.empty_like(tensor, memory_format=torch.contiguous_format)


def settle(tensor: torch.Tensor, written: torch.Tensor) -> None:
    """Copies what was written for ``tensor`` into it, unless it was written in place."""
    if written.data_ptr() != tensor.data_ptr() or tensor.is_conj() or tensor.is_neg():
        tensor.detach().copy_(written)


def reduce_parts(parts: list[torch.Tensor], name: str) -> torch.Tensor:
    """The reduction of ``parts``, in their order. Half precision is summed in single precision, and shorter floats are
    reduced in it."""
    first = parts[0]
    name, _, factor = name.partition("(")
    half = first.dtype in (torch.float16, torch.bfloat16)
    # Nothing is computed in these.
    tiny = first.is_floating_point() and first.element_size() == 1
    wide = tiny or half and name in ("sum", "avg", "product", _SCALED)
    total = first.to(torch.float32) if wide else first.clone()
    if name == _SCALED:
        by = float(factor.rstrip(")"))
        total *= by
    for part in parts[1:]:
        if tiny:
            part = part.to(torch.float32)
        if name == _SCALED:
            total += part.to(total.dtype) * by
        else:
            _COMBINED[name](total, part, out=total)
    if name == "avg":
        exact = total.is_floating_point() or total.is_complex()
        total = total / len(parts) if exact else total.div_(len(parts), rounding_mode="trunc")
    return total.to(first.dtype)
