"""The pass's report on one collective."""

from __future__ import annotations

from dataclasses import dataclass
from torch.fx import Node


class Unfit(Exception):
    """Why a collective stays as it is."""


@dataclass(frozen=True)
class Fusion:
    """A collective next to matmuls or a norm, and what became of it."""

    #: ``"all-gather + matmul"``, ``"matmul + reduce-scatter"`` or ``"all-reduce + norm"``.
    kind: str
    #: The name of the collective's node in the graph.
    node: str
    #: The name of the process group.
    group: str
    #: Whether a fused operation replaced it.
    replaced: bool
    #: The matmuls that are part of the fused operation.
    matmuls: int = 0
    #: Why it stayed, if it was not replaced.
    reason: str | None = None
    #: The line of the model that it comes from, if it is known.
    source: str | None = None

    def __str__(self) -> str:
        fused = f"fused with {self.matmuls} matmul(s)" if self.matmuls else "fused"
        what = fused if self.replaced else f"left: {self.reason}"
        where = f", from {self.source}" if self.source else ""
        return f"{self.kind} {self.node} in group {self.group}: {what}{where}"


def source_of(node: Node) -> str | None:
    """The innermost line outside of PyTorch that made ``node``."""
    lines = [line.strip() for line in (node.stack_trace or "").splitlines()]
    places = [line for line in lines if line.startswith("File ") and "/torch/" not in line]
    return places[-1] if places else None


#: Decisions of the pass in this process, in order.
decisions: list[Fusion] = []
