"""The host device, as PyTorch's C++ knows it: a backend that serves CPU tensors."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

from torch._C._distributed_c10d import Backend as C10dBackend


class HostBackend(C10dBackend):
    """Calls do not come to it: the group takes them itself."""

    def getBackendName(self) -> str:
        return "warplink"


def _define_properties() -> None:
    """Gives ``HostBackend`` every property that a backend has.

    C++ reads a property of a backend in Python by its name, where PyTorch's own property asks C++ again: without
    one of our own, that recurses until the stack ends. New releases add properties, so all of them are defined.
    """
    for name, value in vars(C10dBackend).items():
        if isinstance(value, property) and "supports_" in name:
            setattr(HostBackend, name, property(lambda _: False))
    if isinstance(vars(C10dBackend).get("options"), property):
        setattr(HostBackend, "options", property(_options))


def _options(backend: Any) -> Any:
    return C10dBackend.Options("warplink", timedelta(minutes=30))


_define_properties()
