"""A matmul, then reduce-scatter."""

from __future__ import annotations

import operator
from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import Graph, Node

from warplink.torch.fusion.nodes import (
    RESHAPES,
    Matmul,
    arguments,
    aten,
    check_group,
    erase,
    matmul_of,
    only_user,
    reshaped,
    shape,
)
from warplink.torch.fusion.report import Fusion, Unfit, source_of

KIND = "matmul + reduce-scatter"

c10d_functional = torch.ops._c10d_functional


@dataclass
class Scatter:
    """A reduce-scatter in a graph."""

    collective: Node
    group: str
    reduce_op: str
    #: The tensor of which each rank gets a part of the sum.
    source: Node
    dim: int
    #: Nodes from the source to the collective, the last first.
    chain: list[Node]


def find(graph: Graph) -> list[Scatter]:
    """Every reduce-scatter of a tensor in ``graph``."""
    target = c10d_functional.reduce_scatter_tensor.default
    return [_scatter(node) for node in graph.nodes if node.target is target]


def _scatter(collective: Node) -> Scatter:
    given = arguments(collective)
    scatter = Scatter(
        collective, given["group_name"], given["reduce_op"], given["input"], 0, [collective]
    )
    _follow_dimension(scatter, given["group_size"])
    return scatter


def _follow_dimension(scatter: Scatter, size: int) -> None:
    """Along another dimension than the first, the parts are split off and joined along the first."""
    join = scatter.source
    if join.target is not aten.cat.default or only_user(join) is not scatter.collective:
        return
    given = arguments(join)
    parts = list(given["tensors"])
    if given["dim"] != 0 or any(part.target is not operator.getitem for part in parts):
        return
    split = parts[0].args[0]
    if split.target is not aten.split.Tensor or [part.args for part in parts] != [
        (split, place) for place in range(size)
    ]:
        return
    given = arguments(split)
    source = given["self"]
    dim = given["dim"] % len(shape(source))
    if given["split_size"] * size == shape(source)[dim] and len(split.users) == size:
        scatter.source, scatter.dim = source, dim
        scatter.chain += [join, *parts, split]


def fuse(scatter: Scatter) -> Fusion:
    """Replaces ``scatter`` and its matmul, if it can be done."""
    place = (KIND, scatter.collective.name, str(scatter.group))
    source = source_of(scatter.collective)
    try:
        _replace(scatter)
    except Unfit as unfit:
        return Fusion(*place, False, reason=str(unfit), source=source)
    return Fusion(*place, True, 1, source=source)


def _replace(scatter: Scatter) -> None:
    check_group(scatter.group)
    if scatter.reduce_op not in ("sum", "avg"):
        raise Unfit(f"the operator is {scatter.reduce_op}, not sum or avg")
    view = scatter.source if scatter.source.target in RESHAPES else None
    matmul = matmul_of(arguments(view)["self"] if view is not None else scatter.source)
    if matmul is None:
        raise Unfit("what it reduces is not the result of a matmul")
    if view is not None and shape(view)[-1] != shape(matmul.node)[-1]:
        raise Unfit("the matmul's result is reshaped across its columns")
    sizes = shape(scatter.source)
    if scatter.dim == len(sizes) - 1:
        raise Unfit("it scatters along the columns of the matmul's result")
    inner = [matmul.node] if view is None else [view, matmul.node]
    if any(only_user(node) is None for node in inner):
        raise Unfit("the matmul's result is used elsewhere too")
    waits = [user for user in scatter.collective.users if user.target != "output"]
    if len(waits) != 1 or waits[0].target is not c10d_functional.wait_tensor.default:
        raise Unfit("the collective is not waited for in the graph")
    if matmul.bias is not None and len(shape(matmul.bias)) != 1:
        raise Unfit("the matmul adds a matrix")
    graph, wait = scatter.collective.graph, waits[0]
    with graph.inserting_before(wait):
        result = _call(graph, scatter, matmul, sizes)
        if matmul.bias is not None:
            # Every rank adds its own bias to all rows: the rows' sum has the sum of them.
            total = graph.call_function(
                c10d_functional.all_reduce.default,
                (matmul.bias, scatter.reduce_op, scatter.group),
            )
            total = graph.call_function(c10d_functional.wait_tensor.default, (total,))
            result = graph.call_function(aten.add.Tensor, (result, total))
    wait.replace_all_uses_with(result)
    scatter.collective.replace_all_uses_with(result, delete_user_cb=lambda user: user is not wait)
    erase([wait, *scatter.chain, *inner])


def _call(graph: Graph, scatter: Scatter, matmul: Matmul, sizes: list[Any]) -> Node:
    if matmul.scaled is None:
        left = _left(graph, matmul, [*sizes[:-1], shape(matmul.a)[1]])
        return graph.call_function(
            torch.ops.warplink.fused_matmul_reduce_scatter.default,
            (left, matmul.b, scatter.reduce_op, scatter.dim, scatter.group),
        )
    given = matmul.scaled
    return graph.call_function(
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
    )


def _left(graph: Graph, matmul: Matmul, sizes: list[Any]) -> Node:
    """The matmul's left operand with as many dimensions as its result has."""
    left = matmul.a
    if left.target in RESHAPES and shape(arguments(left)["self"]) == sizes:
        return arguments(left)["self"]
    return reshaped(graph, left, sizes, shape(left))
