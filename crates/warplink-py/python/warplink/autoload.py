"""The name of the backend, known wherever PyTorch is imported.

PyTorch calls ``name_backend`` at the end of ``import torch``, since the wheel names it in the group ``torch.backends`` of
entry points. So programs that start others (Ray, ``accelerate``) find ``warplink`` without importing it.
``TORCH_DEVICE_BACKEND_AUTOLOAD=0`` turns that off.
"""

from __future__ import annotations

from typing import Any


def name_backend() -> None:
    """Registers the name; the rest of Warplink is imported when a group is created. An existing entry is kept."""
    import torch.distributed as dist

    # Some builds of PyTorch have no process groups.
    if dist.is_available() and not hasattr(dist.Backend, "WARPLINK"):
        dist.Backend.register_backend("warplink", _create, extended_api=True, devices=["cpu", "cuda"])


def _create(options: Any, backend_options: Any) -> Any:
    import warplink.torch.registration

    return warplink.torch.registration.create(options, backend_options)
