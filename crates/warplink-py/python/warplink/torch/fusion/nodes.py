"""Reading a graph: arguments, shapes, ancestors, and matmuls in all their forms."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Iterable

import torch
from torch.distributed import distributed_c10d as c10d
from torch.fx import Graph, Node

from warplink.torch.fusion.report import Unfit
from warplink.torch.group import ProcessGroupWarplink

aten = torch.ops.aten

RESHAPES = (aten.reshape.default, aten.view.default, aten._unsafe_view.default)


def arguments(node: Node) -> dict[str, Any]:
    """The arguments of a call by their names, with defaults."""
    schema = node.target._schema  # type: ignore[union-attr]
    found = {}
    for place, argument in enumerate(schema.arguments):
        if place < len(node.args):
            found[argument.name] = node.args[place]
        elif argument.name in node.kwargs:
            found[argument.name] = node.kwargs[argument.name]
        else:
            found[argument.name] = argument.default_value if argument.has_default_value() else None
    return found


def shape(node: Node) -> list[Any]:
    """The sizes of the tensor that ``node`` makes."""
    return list(node.meta["val"].shape)


def only_user(node: Node) -> Node | None:
    """The single node that uses ``node``, or None."""
    users = list(node.users)
    return users[0] if len(users) == 1 else None


def descendants(node: Node) -> set[Node]:
    """``node`` and all that is computed from it."""
    found, open_ = {node}, [node]
    while open_:
        for user in open_.pop().users:
            if user not in found:
                found.add(user)
                open_.append(user)
    return found


def erase(nodes: Iterable[Node]) -> None:
    """Removes those of ``nodes`` that nothing uses any more; users come before what they use."""
    for node in nodes:
        if not node.users and not node._erased:
            node.graph.erase_node(node)


def reshaped(graph: Graph, node: Node, sizes: list[Any], present: list[Any]) -> Node:
    """``node``, whose sizes are ``present``, with ``sizes``."""
    if sizes == present:
        return node
    return graph.call_function(aten.reshape.default, (node, sizes))


def check_group(name: str) -> None:
    """Raises :class:`Unfit` unless Warplink serves the group with this name directly."""
    group = c10d._resolve_process_group(name)  # type: ignore[arg-type]
    if not isinstance(group, ProcessGroupWarplink):
        raise Unfit("the group is not one of Warplink")
    if group.size() == 1:
        raise Unfit("the group has one rank")
    if not group.is_direct:
        raise Unfit("the group spans machines")


@dataclass(frozen=True)
class Matmul:
    """A product of two matrices, with what is added to it and its scales."""

    node: Node
    a: Node
    b: Node
    #: Added to every row, or an element to every element.
    bias: Node | None = None
    #: The arguments of an fp8 matmul beside its matrices; None for an ordinary one.
    scaled: dict[str, Any] | None = None

    @property
    def operands(self) -> list[Node]:
        """What must be there before it is computed, but for the left matrix."""
        scales = (self.scaled or {}).values()
        return [self.b, *(value for value in scales if isinstance(value, Node))]


def matmul_of(node: Any) -> Matmul | None:
    """The matmul that ``node`` is, if it is one."""
    if not isinstance(node, Node) or node.op != "call_function":
        return None
    if node.target is aten.mm.default:
        given = arguments(node)
        return Matmul(node, given["self"], given["mat2"])
    if node.target is aten.addmm.default:
        given = arguments(node)
        if given["beta"] != 1 or given["alpha"] != 1:
            return None
        return Matmul(node, given["mat1"], given["mat2"], given["self"])
    if node.target is aten._scaled_mm.default:
        given = arguments(node)
        left, right = given.pop("self"), given.pop("mat2")
        return Matmul(node, left, right, None, given)
    return None
