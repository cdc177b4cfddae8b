"""Checks of what a collective is given."""

from __future__ import annotations

from datetime import timedelta
from typing import Any, Sequence

import torch

from warplink.errors import InvalidArgumentError


def limit_of(opts: Any) -> float | None:
    """The limit in seconds that a call's options set, or None for the group's."""
    timeout = getattr(opts, "timeout", None)
    if not isinstance(timeout, timedelta) or timeout <= timedelta(0):
        return None
    return timeout.total_seconds()


def root_of(size: int, opts: Any) -> int:
    """The root that a call's options name, in a group of ``size``."""
    root = int(opts.rootRank)
    if not 0 <= root < size:
        raise InvalidArgumentError(
            f"the root is rank {root}; expected a rank of the group's {size}"
        )
    return root


def count(size: int, tensors: Sequence[Any], what: str) -> None:
    """Fails unless there is one of ``tensors`` for each of ``size`` ranks."""
    if len(tensors) != size:
        raise InvalidArgumentError(
            f"there are {len(tensors)} {what}; expected one for each of {size} ranks"
        )


def share(size: int, whole: torch.Tensor, part: torch.Tensor) -> None:
    """Fails unless ``whole`` is ``size`` times as long as ``part``, of the same type."""
    if whole.dtype != part.dtype:
        raise InvalidArgumentError(
            f"the tensors are {whole.dtype} and {part.dtype}; expected one type"
        )
    if whole.numel() != part.numel() * size:
        raise InvalidArgumentError(
            f"the tensors have {whole.numel()} and {part.numel()} elements; "
            f"expected one to have {size} times the other's"
        )


def split(
    size: int, tensor: torch.Tensor, sizes: Sequence[int] | None, what: str
) -> list[torch.Tensor]:
    """The rows of ``tensor`` in parts of ``sizes``, or in equal ones, one for each rank."""
    rows = tensor.shape[0] if tensor.dim() else 0
    if not sizes:
        if rows % size:
            raise InvalidArgumentError(
                f"the {what} has {rows} rows; expected a multiple of {size} ranks"
            )
        sizes = [rows // size] * size
    count(size, sizes, f"sizes of the {what}'s parts")
    if sum(sizes) != rows:
        raise InvalidArgumentError(
            f"the parts of the {what} have {sum(sizes)} rows; expected its {rows}"
        )
    return list(tensor.detach().split(list(sizes), 0))
