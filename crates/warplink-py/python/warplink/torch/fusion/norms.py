"""An all-reduce, then what is added to the sum, and RMSNorm, and a quantisation to fp8."""

from __future__ import annotations

import math
import operator
from dataclasses import dataclass, field
from typing import Any, Callable

import torch
from torch.fx import Node

from warplink.torch.fused import OUTPUTS, ROW_DTYPES
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
    #: The input of the norm: of the rows' type, or in single precision and rounded to that.
    added: Node
    rounded: list[Node]
    eps: float
    weight: Node
    weight_bias: bool
    output: Node
    #: The divisor, and the result.
    scale: Node | None = None
    quantized: Node | None = None
    #: All that the fused operation computes.
    inner: set[Node] = field(default_factory=set)
    #: The results that anything else needs, in order.
    wanted: list[str] = field(default_factory=list)

    @property
    def results(self) -> dict[Node, str]:
        """The nodes that a result of the fused operation replaces, and its name."""
        found = {self.total: "sum"}
        found |= {node: "residual_out" for node in (*self.rounded, self.added)}
        found[self.output] = "output"
        if self.quantized is not None:
            found[self.quantized] = "quantized"
        return found


def _users(node: Node, fits: Callable[[Node], bool]) -> list[Node]:
    return [user for user in users_of(node) if user.op == "call_function" and fits(user)]


def _one(node: Node, fits: Callable[[Node], bool]) -> Node | None:
    found = _users(node, fits)
    return found[0] if len(found) == 1 else None


def _is_convert(node: Node, dtype: torch.dtype) -> bool:
    if node.target is _CONVERT:
        return bool(node.args[1] is dtype)
    return node.target is aten._to_copy.default and node.kwargs.get("dtype") is dtype


def _is_tensor(node: Any) -> bool:
    return isinstance(node, Node) and isinstance(value(node), torch.Tensor)


def _before_widening(node: Any, dtype: torch.dtype) -> Any:
    """The operand that ``node`` converts from ``dtype`` to single precision, or ``node``."""
    widens = isinstance(node, Node) and _is_convert(node, torch.float32) and value(node.args[0]).dtype == dtype
    return node.args[0] if widens else node


def _vector(node: Any, dtype: torch.dtype, width: Any) -> Any:
    """``node``, or what it converts from ``dtype`` to single precision, without leading dimensions of one element."""
    node = _before_widening(node, dtype)
    while _is_tensor(node) and node.target in RESHAPES:
        *leading, last = shape(node)
        if not leading or not same(last, width) or not all(same(size, 1) for size in leading):
            break
        node = _before_widening(node.args[0], dtype)
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
    totals = dict.fromkeys((total, *_wide(total)))
    for whole in totals:
        for added in _users(whole, _plain_add):
            other = _before_widening(_other(added, whole), dtype)
            if not _is_tensor(other) or other is total or value(other).dtype != dtype:
                continue
            if same_sizes(shape(other), shape(total)) and value(added).dtype in (dtype, torch.float32):
                candidates.insert(0, (other, added))
    for residual, added in candidates:
        norm = _normalised(collective, waits[0], (total, residual, added), dtype)
        if norm is not None:
            _check_order(norm)
            norm.wanted = _wanted(norm)
            return norm
    raise Unfit("no RMSNorm follows it")


def _wide(node: Node) -> list[Node]:
    """``node`` in single precision."""
    if value(node).dtype == torch.float32:
        return [node]
    return _users(node, lambda user: _is_convert(user, torch.float32))


def _normalised(
    collective: Node, wait: Node, of: tuple[Node, Node | None, Node], dtype: torch.dtype
) -> Norm | None:
    total, residual, added = of
    rounded = [added]
    if value(added).dtype != dtype:
        rounded = _users(added, lambda user: _is_convert(user, dtype))
    wide = list(dict.fromkeys(row for node in (added, *rounded) for row in _wide(node)))
    for row in wide:
        found = _root(row, wide)
        if found is None:
            continue
        root, eps = found
        for scaled in _users(root, lambda user: _is_scaled(user, root, wide)):
            weighted = _weighted(scaled, dtype, shape(added))
            if weighted is None:
                continue
            output, weight, bias = weighted
            group = arguments(collective)["group_name"]
            norm = Norm(collective, group, wait, total, residual, added, rounded, eps, weight, bias, output)
            _quantised(norm)
            ends = {*rounded, norm.output, norm.quantized or norm.output}
            norm.inner = _between(collective, ends)
            return norm
    return None


def _is_scaled(node: Node, root: Node, wide: list[Node]) -> bool:
    """Whether ``node`` is one of ``wide`` times or divided by ``root``."""
    if root.target is aten.sqrt.default:
        return node.target is aten.div.Tensor and node.args[0] in wide
    return node.target is aten.mul.Tensor and _other(node, root) in wide


def _root(row: Node, wide: list[Node]) -> tuple[Node, float] | None:
    """sqrt(mean(row²) + eps) or 1 / that, and eps."""
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
        root = added and _one(added, lambda user: user.target in (aten.rsqrt.default, aten.sqrt.default))
        if added and root and 0 <= (eps := float(added.args[1])) < math.inf:  # type: ignore[arg-type]
            return root, eps
    return None


def _weighted(scaled: Node, dtype: torch.dtype, sizes: list[Any]) -> tuple[Node, Node, bool] | None:
    """The final product of ``scaled`` and a weight, the weight, and whether 1 is added to it."""
    width = sizes[-1]
    heads = [scaled]
    heads += _users(scaled, lambda user: _is_convert(user, dtype))
    for head in heads:
        for product in _users(head, lambda user: user.target is aten.mul.Tensor):
            weight, bias = _vector(_other(product, head), dtype, width), False
            if isinstance(weight, Node) and _plain_add(weight):
                ones = [arg for arg in weight.args[:2] if _is_number(arg, 1)]
                others = [arg for arg in weight.args[:2] if isinstance(arg, Node)]
                if len(ones) != 1 or len(others) != 1:
                    continue
                weight, bias = _vector(others[0], dtype, width), True
            if not _is_tensor(weight) or not same_sizes(shape(product), sizes):
                continue
            if value(weight).dtype != dtype or not same_sizes(shape(weight), [width]):
                continue
            if value(product).dtype == dtype:
                return product, weight, bias
            output = _one(product, lambda user: _is_convert(user, dtype))
            if output is not None:
                return output, weight, bias
    return None


def _quantised(norm: Norm) -> None:
    """Notes a division by one scale, or a product with its reciprocal, and the conversion to fp8 of what that limits."""
    below = descendants(norm.collective)
    for row in _wide(norm.output):
        for divided in _users(row, lambda user: user.target in (aten.div.Tensor, aten.mul.Tensor)):
            scale = _divisor(divided, row)
            # The kernel reads the scale, before there is a sum.
            if not _is_tensor(scale) or scale in below or value(scale).device != value(row).device:
                continue
            if value(scale).dtype != torch.float32 or not same(value(scale).numel(), 1):
                continue
            if not same_sizes(shape(divided), shape(row)):
                continue
            limited = _limited(divided)
            stored = limited and _one(limited, lambda user: _is_convert(user, torch.float8_e4m3fn))
            if stored:
                norm.scale, norm.quantized = scale, stored
                return


def _divisor(node: Node, row: Node) -> Any:
    """The divisor of ``row`` in the quotient or product ``node``, if it is one."""
    if node.target is aten.div.Tensor:
        return node.args[1] if node.args[0] is row else None
    factor = _other(node, row)
    if isinstance(factor, Node) and factor.target is aten.mul.Tensor and _is_number(factor.args[1], 1):
        # As 1 / scale is written there.
        factor = factor.args[0]
    reciprocal = isinstance(factor, Node) and factor.target is aten.reciprocal.default
    return factor.args[0] if reciprocal else None


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
    """Raises Unfit if an input of the fused operation depends on its results."""
    below = descendants(norm.collective)
    if any(node in below for node in (norm.residual, norm.weight, norm.scale)):
        raise Unfit("what is added, or a weight or scale, depends on the sum")


def _wanted(norm: Norm) -> list[str]:
    """The results that anything else needs, also in order to compute other inner nodes again. Raises Unfit where the
    collective would have to stay."""
    results = norm.results
    used = [node for node in norm.inner if any(user not in norm.inner for user in node.users)]
    if norm.added in used and norm.added not in norm.rounded:
        raise Unfit("what is normalised is used in single precision elsewhere too")
    wanted = {results[node] for node in (*used, norm.quantized or norm.output) if node in results}
    again = [node for node in used if node not in results]
    for node in again:
        if node in (norm.collective, norm.wait):
            raise Unfit("sizes of the sum are read elsewhere too")
        for source in node.all_input_nodes:
            if source in results:
                wanted.add(results[source])
            elif source in norm.inner and source not in again:
                again.append(source)
    return [name for name in OUTPUTS if name in wanted]


def replace(norm: Norm) -> int:
    """Replaces the collective and the norm. Returns the number of matmuls that are replaced with them."""
    graph, results = norm.collective.graph, norm.results
    # Of these, the sum and what is added to it have the same form.
    forms = {name: value(node) for node, name in reversed(results.items())}
    forms |= {name: value(norm.total) for name in ("sum", "residual_out")}
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
            (rows, norm.residual, norm.weight, None, norm.scale, norm.wanted, norm.group),
            [forms[name] for name in norm.wanted],
            norm="rms",
            eps=norm.eps,
            weight_bias=norm.weight_bias,
            quantization=None if norm.quantized is None else "static",
        )
    previous, widened = made, []
    for place, name in enumerate(norm.wanted):
        with graph.inserting_after(previous):
            result = call(graph, operator.getitem, (made, place), forms[name])
        previous = result
        for node in (node for node, replaced in results.items() if replaced == name):
            if value(node).dtype == forms[name].dtype:
                node.replace_all_uses_with(result)
                continue
            with graph.inserting_after(previous):
                previous = call(graph, _CONVERT, (result, value(node).dtype), value(node))
            node.replace_all_uses_with(previous)
            widened.append(previous)
    erase([*reversed([node for node in graph.nodes if node in norm.inner]), *widened])
    if not norm.collective._erased:
        raise RuntimeError(f"{norm.collective} is still used; expected that the fused operation replaces what follows it")
    return 0
