"""The name of the backend, known wherever PyTorch is imported.

PyTorch calls ``name_backend`` at the end of ``import torch``, since the wheel names it in the group ``torch.backends`` of
entry points. So programs that start others (Ray, ``accelerate``) find ``warplink`` without importing it.
``TORCH_DEVICE_BACKEND_AUTOLOAD=0`` turns that off.
"""

from __future__ import annotations

import functools
import sys
from typing import Any


def name_backend() -> None:
    """Registers the name, and takes the place of ``batch_isend_irecv`` before any program has imported that; the rest of
    Warplink is imported when a group is created. An existing entry is kept."""
    import torch.distributed as dist

    # Some builds of PyTorch have no process groups.
    if dist.is_available() and not hasattr(dist.Backend, "WARPLINK"):
        dist.Backend.register_backend("warplink", _create, extended_api=True, devices=["cpu", "cuda"])
        _take_batches(dist)


def _take_batches(dist: Any) -> None:
    """Has batches of Warplink's groups done by ``registration.batch_isend_irecv``."""
    original = dist.batch_isend_irecv

    @functools.wraps(original)
    def batch_isend_irecv(p2p_op_list: list[Any]) -> list[Any]:
        # Without this module, there are no groups of Warplink.
        ours: Any = getattr(sys.modules.get("warplink.torch.registration"), "batch_isend_irecv", None)
        works: list[Any] = original(p2p_op_list) if ours is None else ours(original, p2p_op_list)
        return works

    dist.batch_isend_irecv = dist.distributed_c10d.batch_isend_irecv = batch_isend_irecv


def _create(options: Any, backend_options: Any) -> Any:
    import warplink.torch.registration

    return warplink.torch.registration.create(options, backend_options)
