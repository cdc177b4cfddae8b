"""Checks of what a collective is given."""

from __future__ import annotations

from datetime import timedelta
from typing import Any, Iterable, Sequence

import torch

from warplink.errors import InvalidArgumentError, UnsupportedError


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


def rows_of_parts(
    size: int, tensor: torch.Tensor, sizes: Sequence[int] | None, what: str
) -> list[int]:
    """How many rows of ``tensor`` each rank's part has: ``sizes``, or equal ones."""
    if not tensor.dim():
        raise InvalidArgumentError(f"the {what} has no dimension; expected rows")
    rows = tensor.shape[0]
    if not sizes:
        if rows % size:
            raise InvalidArgumentError(
                f"the {what} has {rows} rows; expected a multiple of {size} ranks"
            )
        return [rows // size] * size
    count(size, sizes, f"sizes of the {what}'s parts")
    if min(sizes) < 0:
        raise InvalidArgumentError(f"a part of the {what} has {min(sizes)} rows; expected 0 or more")
    if sum(sizes) != rows:
        raise InvalidArgumentError(
            f"the parts of the {what} have {sum(sizes)} rows; expected its {rows}"
        )
    return list(sizes)


def split(
    size: int, tensor: torch.Tensor, sizes: Sequence[int] | None, what: str
) -> list[torch.Tensor]:
    """The parts themselves."""
    return list(tensor.detach().split(rows_of_parts(size, tensor, sizes, what), 0))


def bytes_of_parts(
    size: int, tensor: torch.Tensor, sizes: Sequence[int] | None, what: str
) -> list[int]:
    """How many bytes each rank's part has."""
    parts = rows_of_parts(size, tensor, sizes, what)
    row = tensor.nbytes // tensor.shape[0] if tensor.shape[0] else 0
    return [row * rows for rows in parts]


def check_plain(inputs: Iterable[torch.Tensor], outputs: Iterable[torch.Tensor]) -> None:
    """Fails unless the host device can read ``inputs`` and write ``outputs``, so that errors are raised before other ranks
    wait."""
    written = list(outputs)
    for tensor in (*inputs, *written):
        if tensor.layout is not torch.strided:
            raise UnsupportedError(f"a tensor is {tensor.layout}; expected torch.strided")
        if tensor.device.type != "cpu":
            raise InvalidArgumentError(f"a tensor is on {tensor.device}; expected cpu, as the others")
    for tensor in written:
        # 1 says that it has, 2 that it is not known.
        if torch._debug_has_internal_overlap(tensor) == 1:
            raise InvalidArgumentError(
                f"elements of an output of strides {tensor.stride()} share memory; "
                "expected memory of its own for each; help: receive into a copy, such as tensor.clone()"
            )


def check_alike(one: torch.Tensor, other: torch.Tensor) -> None:
    """Fails unless ``one`` and ``other``, one of which is copied to the other, have the same type and length."""
    if one.dtype != other.dtype or one.numel() != other.numel():
        raise InvalidArgumentError(
            f"the output is {one.numel()} elements of {one.dtype}; expected the input's {other.numel()} of {other.dtype}"
        )
