"""The pass over a graph, as Inductor runs it."""

from __future__ import annotations

import dataclasses
import pathlib
from typing import Any

import torch
from torch._inductor import custom_graph_pass
from torch._inductor.custom_graph_pass import CustomGraphPass, get_hash_for_files
from torch._inductor.pattern_matcher import stable_topological_sort

from warplink.torch.fusion import gathers, norms, scatters
from warplink.torch.fusion.nodes import arguments
from warplink.torch.fusion.report import Fusion, Unfit, decisions, source_of

_SEVERAL = "it is coalesced with others"
_OUT = "it writes into a tensor that it is given"

#: Collectives of other forms, and why they stay.
_LEFT: dict[Any, tuple[str, str]] = {
    torch.ops._c10d_functional.all_gather_into_tensor_coalesced.default: (gathers.KIND, _SEVERAL),
    torch.ops._c10d_functional.reduce_scatter_tensor_coalesced.default: (scatters.KIND, _SEVERAL),
    torch.ops._c10d_functional.all_gather_into_tensor_out.default: (gathers.KIND, _OUT),
    torch.ops._c10d_functional.all_reduce_coalesced.default: (norms.KIND, _SEVERAL),
}


def passes_of(configured: Any) -> tuple[Any, ...] | None:
    """The passes in ``configured``; None in releases of PyTorch that take one pass only."""
    separate = getattr(custom_graph_pass, "get_custom_graph_passes", None)
    return None if separate is None else tuple(separate(configured))


def _reported(kind: str, node: torch.fx.Node, replaced: bool, **found: Any) -> Fusion:
    group = str(arguments(node)["group_name"])
    return Fusion(kind, node.name, group, replaced, **found, source=source_of(node))


def _fuse(part: Any, node: torch.fx.Node) -> Fusion:
    """Has ``part`` read what is around a collective and replace it.

    Reading changes nothing, so whatever goes wrong there leaves a program as it was.
    """
    try:
        found = part.read(node)
    except Unfit as unfit:
        return _reported(part.KIND, node, False, reason=str(unfit))
    except Exception as failure:
        reason = f"its surroundings were not understood ({type(failure).__name__}: {failure})"
        return _reported(part.KIND, node, False, reason=reason)
    # Replacing erases the node, and what names it.
    report = _reported(part.KIND, node, True)
    return dataclasses.replace(report, matmuls=part.replace(found))


def _left(node: torch.fx.Node) -> Fusion:
    """The report on a collective that is not considered."""
    kind, reason = _LEFT[node.target]
    return _reported(kind, node, False, reason=reason)


class FusionPass(CustomGraphPass):
    """Fuses collectives with matmuls and norms. ``before`` is a pass that runs first, on the same graph; ``restored`` is
    what is to be in the configuration when this is taken out."""

    def __init__(self, before: Any | None = None, restored: Any | None = None) -> None:
        self.before = before
        self.restored = restored

    def __call__(self, graph: torch.fx.Graph) -> None:
        if self.before is not None:
            self.before(graph)
        # A replacement may contain collectives, which are not the caller's.
        given = set(graph.nodes)
        # Replacing one collective changes what is around others: each is read when its turn comes.
        made = [
            _fuse(part, node)
            for part in (gathers, scatters, norms)
            for node in [node for node in graph.nodes if node.target is part.TARGET and node in given]
        ]
        decisions.extend(made)
        decisions.extend(_left(node) for node in graph.nodes if node.target in _LEFT)
        if any(decision.replaced for decision in made):
            stable_topological_sort(graph)
            graph.lint()

    def uuid(self) -> Any | None:
        """The pass's key in the compile cache; None, if the pass before it cannot be cached."""
        files = sorted(str(file) for file in pathlib.Path(__file__).parent.glob("*.py"))
        own = get_hash_for_files(tuple(files))
        if self.before is None:
            return own
        uuid = getattr(self.before, "uuid", None)
        before = uuid() if uuid is not None else None
        return None if before is None else (own, before)
