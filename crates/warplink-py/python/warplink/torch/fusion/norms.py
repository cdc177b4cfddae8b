"""An all-reduce, then what is added to the sum, and RMSNorm, and a quantisation to fp8."""

from __future__ import annotations

import operator
from dataclasses import dataclass, field
from typing import Any, Callable

import torch
from torch.fx import Node

from warplink.torch.fused import ROW_DTYPES
from warplink.torch.fusion.nodes import (
    RESHAPES,
    arguments,
    aten,
    call,
    check_group,
    descendants,
    erase,
    same,
    same_sizes,
    shape,
    users_of,
    value,
)
from warplink.torch.fusion.report import Unfit

KIND = "all-reduce + norm"

c10d_functional = torch.ops._c10d_functional

TARGET = c10d_functional.all_reduce.default

_CONVERT = torch.ops.prims.convert_element_type.default
_LARGEST = 448.0


@dataclass
class Norm:
    """Operations after an all-reduce in a graph."""

    collective: Node
    group: str
    wait: Node
    #: The sum, as it is added to and normalised.
    total: Node
    residual: Node | None
    #: The input of the norm.
    added: Node
    eps: float
    weight: Node
    weight_bias: bool
    output: Node
    #: The divisor, and the result.
    scale: Node | None = None
    quantized: Node | None = None
    #: All that the fused operation computes.
    inner: set[Node] = field(default_factory=set)


def _users(node: Node, fits: Callable[[Node], bool]) -> list[Node]:
    return [user for user in users_of(node) if user.op == "call_function" and fits(user)]


def _one(node: Node, fits: Callable[[Node], bool]) -> Node | None:
    found = _users(node, fits)
    return found[0] if len(found) == 1 else None


def _is_convert(node: Node, dtype: torch.dtype) -> bool:
    if node.target is _CONVERT:
        return bool(node.args[1] is dtype)
    return node.target is aten._to_copy.default and node.kwargs.get("dtype") is dtype


def _plain(node: Any) -> Any:
    """The node that ``node`` converts or reshapes, from the widest on."""
    while isinstance(node, Node) and (node.target is _CONVERT or node.target in RESHAPES):
        node = node.args[0]
    return node


def _other(node: Node, one: Node) -> Any:
    """The other operand of a sum or product."""
    a, b = node.args[:2]
    return b if a is one else a


def _is_number(node: Any, number: float) -> bool:
    return isinstance(node, (int, float)) and float(node) == number


def _plain_add(node: Node) -> bool:
    sums = node.target in (aten.add.Tensor, aten.add.Scalar)
    return sums and _is_number(node.kwargs.get("alpha", 1), 1)


def read(collective: Node) -> Norm:
    """The norm behind ``collective``. Raises :class:`Unfit` where there is none that can be fused."""
    given = arguments(collective)
    check_group(given["group_name"])
    if given["reduce_op"] != "sum":
        raise Unfit(f"the operator is {given['reduce_op']}, not sum")
    dtype = value(collective).dtype
    if dtype not in ROW_DTYPES:
        raise Unfit(f"the elements are {dtype}")
    waits = users_of(collective)
    if len(waits) != 1 or waits[0].target is not c10d_functional.wait_tensor.default:
        raise Unfit("the collective is not waited for in the graph")
    total = waits[0]
    while (view := _one(total, lambda user: user.target in RESHAPES)) and len(users_of(total)) == 1:
        if not same(shape(view)[-1], shape(total)[-1]):
            break
        total = view
    candidates: list[tuple[Node | None, Node]] = [(None, total)]
    for added in _users(total, _plain_add):
        other = _other(added, total)
        if isinstance(other, Node) and other is not total and value(other).dtype == dtype:
            if same_sizes(shape(other), shape(total)) and value(added).dtype == dtype:
                candidates.insert(0, (other, added))
    for residual, added in candidates:
        norm = _normalised(collective, waits[0], (total, residual, added), dtype)
        if norm is not None:
            _check_order(norm)
            return norm
    raise Unfit("no RMSNorm follows it")


def _wide(node: Node, dtype: torch.dtype) -> list[Node]:
    """``node`` in single precision."""
    if dtype == torch.float32:
        return [node]
    return _users(node, lambda user: _is_convert(user, torch.float32))


def _normalised(
    collective: Node, wait: Node, of: tuple[Node, Node | None, Node], dtype: torch.dtype
) -> Norm | None:
    total, residual, added = of
    wide = _wide(added, dtype)
    for row in wide:
        found = _root(row, wide)
        if found is None:
            continue
        root, eps = found
        for scaled in _users(root, lambda user: user.target is aten.mul.Tensor):
            if _other(scaled, root) not in wide:
                continue
            weighted = _weighted(scaled, dtype, value(added).shape[-1])
            if weighted is None:
                continue
            output, weight, bias = weighted
            group = arguments(collective)["group_name"]
            norm = Norm(collective, group, wait, total, residual, added, eps, weight, bias, output)
            _quantised(norm, dtype)
            norm.inner = _between(collective, {norm.output, norm.quantized or norm.output})
            return norm
    return None


def _root(row: Node, wide: list[Node]) -> tuple[Node, float] | None:
    """1 / sqrt(mean(row²) + eps), and eps."""
    for square in users_of(row):
        squares = square.target is aten.pow.Tensor_Scalar and _is_number(square.args[1], 2)
        if square.target is aten.mul.Tensor:
            squares = square.args[0] in wide and square.args[1] in wide
        mean = _one(square, lambda user: user.target is aten.mean.dim) if squares else None
        if mean is None:
            continue
        given = arguments(mean)
        last = len(shape(row)) - 1
        if [dim % (last + 1) for dim in given["dim"]] != [last] or not given["keepdim"]:
            continue
        added = _one(mean, lambda user: _plain_add(user) and isinstance(user.args[1], (int, float)))
        root = added and _one(added, lambda user: user.target is aten.rsqrt.default)
        if added and root:
            return root, float(added.args[1])  # type: ignore[arg-type]
    return None


def _weighted(scaled: Node, dtype: torch.dtype, width: Any) -> tuple[Node, Node, bool] | None:
    """The final product of ``scaled`` and a weight, the weight, and whether 1 is added to it."""
    heads = [scaled]
    heads += _users(scaled, lambda user: _is_convert(user, dtype))
    for head in heads:
        for product in _users(head, lambda user: user.target is aten.mul.Tensor):
            weight, bias = _plain(_other(product, head)), False
            if isinstance(weight, Node) and _plain_add(weight):
                ones = [arg for arg in weight.args[:2] if _is_number(arg, 1)]
                others = [arg for arg in weight.args[:2] if isinstance(arg, Node)]
                if len(ones) != 1 or len(others) != 1:
                    continue
                weight, bias = _plain(others[0]), True
            if not isinstance(weight, Node) or not isinstance(value(weight), torch.Tensor):
                continue
            if value(weight).dtype != dtype or not same_sizes(shape(weight), [width]):
                continue
            if value(product).dtype == dtype:
                return product, weight, bias
            output = _one(product, lambda user: _is_convert(user, dtype))
            if output is not None:
                return output, weight, bias
    return None


def _quantised(norm: Norm, dtype: torch.dtype) -> None:
    """Notes a division by one scale, and the conversion to fp8 of what that limits."""
    for row in _wide(norm.output, dtype):
        for divided in _users(row, lambda user: user.target is aten.div.Tensor):
            scale = divided.args[1]
            if divided.args[0] is not row or not isinstance(scale, Node):
                continue
            if value(scale).dtype != torch.float32 or not same(value(scale).numel(), 1):
                continue
            limited = _limited(divided)
            stored = limited and _one(limited, lambda user: _is_convert(user, torch.float8_e4m3fn))
            if stored:
                norm.scale, norm.quantized = scale, stored
                return


def _limited(node: Node) -> Node | None:
    """``node`` between the least and the largest number of fp8, if that is computed."""
    whole = (-_LARGEST, _LARGEST)
    if at_once := _one(node, lambda user: user.target is aten.clamp.default and user.args[1:3] == whole):
        return at_once
    lower = _one(node, lambda user: user.target is aten.clamp_min.default and _is_number(user.args[1], -_LARGEST))
    if lower is None:
        return None
    return _one(lower, lambda user: user.target is aten.clamp_max.default and _is_number(user.args[1], _LARGEST))


def _between(start: Node, ends: set[Node]) -> set[Node]:
    """``start``, ``ends`` and all on the paths between them."""
    below = descendants(start)
    found, above = set(ends), list(ends)
    while above:
        for node in above.pop().all_input_nodes:
            if node in below and node not in found:
                found.add(node)
                above.append(node)
    return found


def _check_order(norm: Norm) -> None:
    """Raises Unfit where what the operation reads comes of what it computes."""
    for node in (norm.residual, norm.weight, norm.scale):
        if node is not None and norm.collective in _between(norm.collective, {node}):
            raise Unfit("what is added, or a weight or scale, depends on the sum")


def _outside(node: Node, norm: Norm) -> bool:
    """Whether something uses ``node`` that the operation does not compute."""
    return any(user not in norm.inner for user in node.users)


def replace(norm: Norm) -> int:
    """Replaces the collective and the norm. Returns the number of matmuls that are replaced with them."""
    graph = norm.collective.graph
    wanted: list[tuple[str, Node]] = []
    if norm.added is not norm.total and _outside(norm.total, norm):
        wanted.append(("sum", norm.total))
    if _outside(norm.added, norm):
        wanted.append(("residual_out", norm.added))
    if norm.quantized is None or _outside(norm.output, norm):
        wanted.append(("output", norm.output))
    if norm.quantized is not None:
        wanted.append(("quantized", norm.quantized))
    # Behind all that it reads; what uses its results is sorted behind it afterwards.
    reads = [node for node in (norm.residual, norm.weight, norm.scale, norm.collective) if node is not None]
    order = {node: place for place, node in enumerate(graph.nodes)}
    last = max(reads, key=lambda node: order[node])
    rows, previous = arguments(norm.collective)["input"], last
    sizes = shape(norm.added)
    if not same_sizes(shape(rows), sizes):
        with graph.inserting_after(previous):
            rows = call(graph, aten.reshape.default, (rows, sizes), value(rows).new_empty(sizes))
        previous = rows
    target = torch.ops.warplink.fused_all_reduce.default
    with graph.inserting_after(previous):
        made = call(
            graph,
            target,
            (rows, norm.residual, norm.weight, None, norm.scale, [name for name, _ in wanted], norm.group),
            [value(node) for _, node in wanted],
            norm="rms",
            eps=norm.eps,
            weight_bias=norm.weight_bias,
            quantization=None if norm.quantized is None else "static",
        )
    previous = made
    for place, (_, node) in enumerate(wanted):
        with graph.inserting_after(previous):
            result = call(graph, operator.getitem, (made, place), value(node))
        previous = result
        node.replace_all_uses_with(result, delete_user_cb=lambda user: user not in norm.inner)
    erase(reversed([node for node in graph.nodes if node in norm.inner]))
    return 0
