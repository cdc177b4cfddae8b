"""A matmul, then reduce-scatter."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch.fx import Graph, Node

from warplink.torch.fusion.nodes import (
    RESHAPES,
    Matmul,
    arguments,
    aten,
    call,
    check_gain,
    check_group,
    check_scales,
    erase,
    matmul_of,
    only_user,
    reshaped,
    same,
    same_sizes,
    shape,
    size_readers,
    split_of,
    users_of,
    value,
)
from warplink.torch.fusion.report import Unfit
from warplink.torch.ops import scatter_gains

KIND = "matmul + reduce-scatter"

c10d_functional = torch.ops._c10d_functional

TARGET = c10d_functional.reduce_scatter_tensor.default


@dataclass
class Scatter:
    """A reduce-scatter in a graph."""

    collective: Node
    group: str
    reduce_op: str
    #: The tensor that is summed over ranks; each rank gets a part of the sum.
    source: Node
    dim: int
    #: Nodes from the source to the collective, the last first.
    chain: list[Node] = field(default_factory=list)


@dataclass(frozen=True)
class Plan:
    """Plan for a reduce-scatter."""

    scatter: Scatter
    matmul: Matmul
    #: Nodes from the matmul to the source, the last first.
    inner: list[Node]
    wait: Node
    #: Sizes of the source.
    sizes: list[Any]


def read(collective: Node) -> Plan:
    """The plan for ``collective`` and its matmul. Raises :class:`Unfit` where there is none."""
    given = arguments(collective)
    scatter = Scatter(
        collective, given["group_name"], given["reduce_op"], given["input"], 0, [collective]
    )
    _follow_dimension(scatter, given["group_size"])
    return _plan(scatter)


def _follow_dimension(scatter: Scatter, size: int) -> None:
    """Along another dimension than the first, the parts are split off and joined along the first."""
    join = scatter.source
    if join.target is not aten.cat.default or only_user(join) is not scatter.collective:
        return
    given = arguments(join)
    parts = list(given["tensors"])
    split = split_of(parts)
    if given["dim"] % len(shape(join)) or split is None or len(parts) != size:
        return
    if all(only_user(part) is join for part in parts):
        scatter.source, scatter.dim = split.source, split.dim
        scatter.chain += [join, *split.nodes]


def _plan(scatter: Scatter) -> Plan:
    check_group(scatter.group)
    if scatter.reduce_op not in ("sum", "avg"):
        raise Unfit(f"the operator is {scatter.reduce_op}, not sum or avg")
    inner, node = [], scatter.source
    while node.target in RESHAPES:
        inner.append(node)
        node = arguments(node)["self"]
    matmul = matmul_of(node)
    if matmul is None:
        raise Unfit("what it reduces is not the result of a matmul")
    inner.append(matmul.node)
    if any(not same_sizes(shape(view)[-1:], shape(matmul.node)[-1:]) for view in inner):
        raise Unfit("the matmul's result is reshaped across its columns")
    sizes = shape(scatter.source)
    if matmul.scaled is not None and scatter.dim == len(sizes) - 1:
        raise Unfit("an fp8 matmul is not split along the columns of its result")
    alone = set(users_of(scatter.source)) <= set(scatter.chain)
    if not alone or any(only_user(node) is None for node in inner[1:]):
        raise Unfit("the matmul's result is used elsewhere too")
    if any(size_readers(node) for node in [*inner, *scatter.chain[1:]]):
        raise Unfit("sizes of the matmul's result are read elsewhere too")
    waits = [user for user in users_of(scatter.collective) if user.target != "output"]
    if len(waits) != 1 or waits[0].target is not c10d_functional.wait_tensor.default:
        raise Unfit("the collective is not waited for in the graph")
    if matmul.bias is not None and len(shape(matmul.bias)) != 1:
        raise Unfit("the matmul adds a matrix")
    check_scales(matmul)
    if matmul.scaled is None:
        left = value(matmul.a).new_empty([*sizes[:-1], shape(matmul.a)[1]])
        check_gain(scatter_gains(left, value(matmul.b), scatter.dim, scatter.group))
    return Plan(scatter, matmul, inner, waits[0], sizes)


def replace(plan: Plan) -> int:
    """Replaces the collective and its matmul. Returns the number of matmuls."""
    scatter, matmul, wait = plan.scatter, plan.matmul, plan.wait
    graph = scatter.collective.graph
    with graph.inserting_before(wait):
        result = _call(graph, plan)
        if matmul.bias is not None:
            result = call(graph, aten.add.Tensor, (result, _reduced_bias(graph, plan)), value(wait))
    wait.replace_all_uses_with(result)
    scatter.collective.replace_all_uses_with(result, delete_user_cb=lambda user: user is not wait)
    erase([wait, *scatter.chain, *plan.inner])
    return 1


def _reduced_bias(graph: Graph, plan: Plan) -> Node:
    """The sum of all ranks' biases, which each row of the result gets: every rank has its own."""
    scatter, bias = plan.scatter, plan.matmul.bias
    target, val = c10d_functional.all_reduce.default, value(bias)
    given = [bias, scatter.reduce_op, scatter.group]
    if scatter.dim == len(plan.sizes) - 1 and not same(val.numel(), 1):
        # One element per column; this rank has only some columns.
        target = c10d_functional.reduce_scatter_tensor.default
        given.insert(2, arguments(scatter.collective)["group_size"])
        val = val.new_empty([shape(plan.wait)[-1]])
    total = call(graph, target, tuple(given), val)
    return call(graph, c10d_functional.wait_tensor.default, (total,), val)


def _call(graph: Graph, plan: Plan) -> Node:
    scatter, matmul, sizes = plan.scatter, plan.matmul, plan.sizes
    if matmul.scaled is None:
        left = _left(graph, matmul, [*sizes[:-1], shape(matmul.a)[1]])
        return call(
            graph,
            torch.ops.warplink.fused_matmul_reduce_scatter.default,
            (left, matmul.b, scatter.reduce_op, scatter.dim, scatter.group),
            value(plan.wait),
        )
    given = matmul.scaled
    return call(
        graph,
        torch.ops.warplink.fused_scaled_matmul_reduce_scatter.default,
        (
            matmul.a,
            matmul.b,
            given["scale_a"],
            given["scale_b"],
            scatter.reduce_op,
            scatter.dim,
            0,
            scatter.group,
            sizes,
            given["bias"],
            given["scale_result"],
            given["out_dtype"],
            given["use_fast_accum"],
        ),
        value(plan.wait),
    )


def _left(graph: Graph, matmul: Matmul, sizes: list[Any]) -> Node:
    """The matmul's left operand with as many dimensions as its result has."""
    left = matmul.a
    if left.target in RESHAPES:
        whole: Node = arguments(left)["self"]
        if same_sizes(shape(whole), sizes):
            return whole
    return reshaped(graph, left, sizes)
