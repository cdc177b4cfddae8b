"""The compile pass: collectives next to matmuls and norms become the fused operations of ``torch.ops.warplink``.

Switched on by :func:`enable_fusion`, or by ``WARPLINK_TORCH_FUSION=1`` in the environment when
``warplink.torch`` is imported. It runs in ``torch.compile``'s Inductor after the other passes over a
graph, and after what is in ``post_grad_custom_post_pass`` already.

Replaced are, on groups of Warplink whose members are on one machine:

- all-gather, then one or several matmuls, by ``fused_all_gather_matmul``; with fp8 matmuls, by
  ``fused_all_gather_scaled_matmul``;
- matmul, then reduce-scatter, by ``fused_matmul_reduce_scatter``; with an fp8 matmul, by
  ``fused_scaled_matmul_reduce_scatter``;
- all-reduce, then RMSNorm of the sum, or of the sum and a residual, and maybe a division by one scale, or a product with its
  reciprocal, as fp8, by ``fused_all_reduce``.

Tensors may be gathered and scattered along every dimension (for fp8, every one but the last), be reshaped to a
matrix and back, and be gathered as bytes; matmuls may add a bias.
"""

from __future__ import annotations

from typing import Any

from warplink.torch.fusion.report import Fusion, decisions

__all__ = ["Fusion", "disable_fusion", "enable_fusion", "fusion_report"]


def enable_fusion() -> None:
    """Enables the pass for later compilations. A second call changes nothing."""
    # Inductor takes long to import, and is not needed before.
    from torch._inductor import config

    from warplink.torch.fusion.graph_pass import FusionPass, passes_of

    present = config.post_grad_custom_post_pass
    passes = passes_of(present)
    if passes is None:
        if not isinstance(present, FusionPass):
            config.post_grad_custom_post_pass = FusionPass(present, present)
    elif not any(isinstance(one, FusionPass) for one in passes):
        # Releases that take several passes take a list of them.
        extended: Any = [*passes, FusionPass(restored=present)]
        config.post_grad_custom_post_pass = extended


def disable_fusion() -> None:
    """Disables the pass for later compilations, and restores the previous passes."""
    from torch._inductor import config

    from warplink.torch.fusion.graph_pass import FusionPass, passes_of

    present = config.post_grad_custom_post_pass
    passes = passes_of(present)
    own = [one for one in passes or (present,) if isinstance(one, FusionPass)]
    if not own:
        return
    others = tuple(one for one in passes or () if one not in own)
    restored = own[0].restored
    if passes is not None and others != passes_of(restored):
        # Somebody has added or removed passes since.
        restored = list(others)
    config.post_grad_custom_post_pass = restored


def fusion_report(clear: bool = False) -> list[Fusion]:
    """Findings of the pass in this process, in order: what it replaced and what it did not, and why.

    Graphs that Inductor takes from its cache on disk do not pass through here. With ``clear``, the
    report starts anew.
    """
    found = list(decisions)
    if clear:
        decisions.clear()
    return found
