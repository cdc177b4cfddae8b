"""Reading a graph: arguments, shapes, parts of tensors, and matmuls in all their forms."""

from __future__ import annotations

import operator
from dataclasses import dataclass
from typing import Any, Iterable, Sequence

import torch
from torch.distributed import distributed_c10d as c10d
from torch.fx import Graph, Node
from torch.fx.experimental.symbolic_shapes import statically_known_true

from warplink.torch.fusion.report import Unfit
from warplink.torch.group import ProcessGroupWarplink

aten = torch.ops.aten

RESHAPES = (aten.reshape.default, aten.view.default, aten._unsafe_view.default)

SPLITS = (aten.split.Tensor, aten.split.sizes, aten.split_with_sizes.default)

#: Marks a scaled matmul whose scale of the result denotes a multiplication, which the operation itself does not do
#: for every type (``FOLDED_SCALED_MM_OUTPUT_SCALE`` of Inductor).
FOLDED_SCALE = "inductor_folded_scaled_mm_output_scale"


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


def value(argument: Any) -> Any:
    """The known value of an argument that may be computed in the graph: sizes are symbols there."""
    return argument.meta["val"] if isinstance(argument, Node) else argument


def same(one: Any, other: Any) -> bool:
    """Whether two sizes are the same whatever the symbols in them stand for."""
    return bool(statically_known_true(one == other))


def same_sizes(one: Sequence[Any], other: Sequence[Any]) -> bool:
    """Whether two tensors have the same sizes, as :func:`same` compares them."""
    return len(one) == len(other) and all(same(left, right) for left, right in zip(one, other))


def size_readers(node: Node) -> list[Node]:
    """The users of ``node`` that read its sizes and not its elements."""
    return [user for user in node.users if user.target is aten.sym_size.int]


def users_of(node: Node) -> list[Node]:
    """The users of ``node`` that do more than read its sizes."""
    return [user for user in node.users if user.target is not aten.sym_size.int]


def only_user(node: Node) -> Node | None:
    """The single node that uses ``node``, but for readers of its sizes, or None."""
    users = users_of(node)
    return users[0] if len(users) == 1 else None


@dataclass(frozen=True)
class Split:
    """A tensor and the equal parts that it was split into."""

    source: Node
    dim: int
    #: The nodes that compute the parts, and those used only by them: users before their inputs.
    nodes: list[Node]


def split_of(parts: Sequence[Any]) -> Split | None:
    """The tensor that ``parts``, in their order, make up along a dimension, if it is used for nothing else
    that splits it alike."""
    if not parts or not all(isinstance(part, Node) for part in parts):
        return None
    if all(part.target is operator.getitem for part in parts):
        return _split_at_once(parts)
    if all(part.target is aten.slice.Tensor for part in parts):
        return _split_by_slices(parts)
    return None


def _split_at_once(parts: Sequence[Node]) -> Split | None:
    split = parts[0].args[0]
    if not isinstance(split, Node) or split.target not in SPLITS:
        return None
    places = [(split, place) for place in range(len(parts))]
    if [part.args for part in parts] != places or len(split.users) != len(parts):
        return None
    given = arguments(split)
    dim = given["dim"] % len(shape(given["self"]))
    if len(value(split)) != len(parts) or not _are_equal_parts(parts, given["self"], dim):
        return None
    return Split(given["self"], dim, [*parts, split])


def _split_by_slices(parts: Sequence[Node]) -> Split | None:
    each = [arguments(part) for part in parts]
    source, dim = each[0]["self"], each[0]["dim"] % len(shape(each[0]["self"]))
    if not _are_equal_parts(parts, source, dim):
        return None
    extent = shape(parts[0])[dim]
    for place, given in enumerate(each):
        if given["self"] is not source or given["dim"] % len(shape(source)) != dim:
            return None
        start = 0 if given["start"] is None else value(given["start"])
        if not same(start, place * extent) or given["step"] != 1:
            return None
    return Split(source, dim, list(dict.fromkeys(parts)))


def _are_equal_parts(parts: Sequence[Node], source: Node, dim: int) -> bool:
    extent, whole = shape(parts[0])[dim], shape(source)[dim]
    alike = all(same(shape(part)[dim], extent) for part in parts)
    return alike and same(extent * len(parts), whole)


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


def call(graph: Graph, target: Any, given: tuple[Any, ...], val: Any, **named: Any) -> Node:
    """A call whose result is as ``val``."""
    node = graph.call_function(target, given, named)
    node.meta["val"] = val
    return node


def reshaped(graph: Graph, node: Node, sizes: list[Any]) -> Node:
    """``node`` with ``sizes``."""
    if same_sizes(sizes, shape(node)):
        return node
    return call(graph, aten.reshape.default, (node, sizes), value(node).new_empty(sizes))


def check_gain(gains: bool) -> None:
    """Raises :class:`Unfit` unless a fused operation ``gains``."""
    if not gains:
        raise Unfit("the collective and the matmul were faster when the group's members tried both")


def check_group(name: str) -> None:
    """Raises :class:`Unfit` unless Warplink serves the group with this name directly."""
    group = c10d._resolve_process_group(name)  # type: ignore[arg-type]
    if not isinstance(group, ProcessGroupWarplink):
        raise Unfit("the group is not one of Warplink")
    if group.size() == 1:
        raise Unfit("the group has one rank")
    if not group.is_direct:
        raise Unfit("the group's members do not reach one another's memory")


@dataclass(frozen=True)
class Matmul:
    """A product of two matrices, with what is added to it and its scales."""

    node: Node
    a: Node
    b: Node
    #: Added to every row, or an element to every element.
    bias: Node | None = None
    #: The arguments of an fp8 matmul other than its matrices; None for an ordinary one.
    scaled: dict[str, Any] | None = None

    @property
    def operands(self) -> list[Node]:
        """Inputs that must exist before it is computed, except the left matrix."""
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


def check_scales(matmul: Matmul) -> None:
    """Raises :class:`Unfit` where ``matmul`` has scales that the fused operations do not take."""
    if matmul.scaled is None:
        return
    if matmul.node.meta.get(FOLDED_SCALE):
        raise Unfit("the compiler has moved a multiplication into the matmul's scale of the result")
    rows, columns = shape(matmul.node)
    for name, sizes, per in (("scale_a", [rows, 1], "row"), ("scale_b", [1, columns], "column")):
        scale = value(matmul.scaled[name])
        if not same(scale.numel(), 1) and not same_sizes(list(scale.shape), sizes):
            raise Unfit(
                f"the matmul's {name} has the sizes {list(scale.shape)}; expected one scale, or one for each {per}"
            )
