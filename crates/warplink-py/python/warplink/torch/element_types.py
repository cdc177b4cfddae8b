"""Warplink's names of PyTorch's element types."""

from __future__ import annotations

import torch

from warplink._warplink import element_types

#: The names, by the types.
DTYPES: dict[torch.dtype, str] = {
    getattr(torch, long_name): name
    for name, long_name, _ in element_types()
    if hasattr(torch, long_name)
}

#: The names of those that are reduced.
REDUCED = {name for name, _, computed in element_types() if computed}
