"""All-gather, then matmuls."""

from __future__ import annotations

import operator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.fx import Graph, Node

from warplink.torch.fusion.nodes import (
    RESHAPES,
    Matmul,
    arguments,
    aten,
    check_group,
    descendants,
    erase,
    matmul_of,
    only_user,
    reshaped,
    shape,
)
from warplink.torch.fusion.report import Fusion, Unfit, source_of

KIND = "all-gather + matmul"


@dataclass
class Gather:
    """A gathered tensor in a graph."""

    collective: Node
    group: str
    #: What each rank brings.
    shard: Node
    #: The first node that is the gathered tensor.
    result: Node
    dim: int = 0
    #: Nodes from the collective to the result, the last first.
    chain: list[Node] = field(default_factory=list)


def find(graph: Graph) -> list[Gather]:
    """Every all-gather of a tensor in ``graph``."""
    target = torch.ops._c10d_functional.all_gather_into_tensor.default
    return [_gather(node) for node in graph.nodes if node.target is target]


def _gather(collective: Node) -> Gather:
    given = arguments(collective)
    gather = Gather(collective, given["group_name"], given["input"], collective, 0, [collective])
    wait = only_user(collective)
    if wait is not None and wait.target is torch.ops._c10d_functional.wait_tensor.default:
        _extend(gather, wait)
        _follow_dimension(gather)
        _follow_bytes(gather)
    return gather


def _extend(gather: Gather, node: Node) -> None:
    gather.result = node
    gather.chain.insert(0, node)


def _follow_dimension(gather: Gather) -> None:
    """Along another dimension than the first, the parts are split and joined again."""
    split = only_user(gather.result)
    if split is None or split.target is not aten.split.Tensor:
        return
    given = arguments(split)
    rows = shape(gather.shard)[0]
    if given["dim"] != 0 or given["split_size"] != rows:
        return
    parts = list(split.users)
    if any(part.target is not operator.getitem for part in parts):
        return
    parts.sort(key=lambda part: part.args[1])  # type: ignore[arg-type, return-value]
    ends = [_bytes_again(part) or part for part in parts]
    join = only_user(ends[0])
    if join is None or join.target is not aten.cat.default:
        return
    given = arguments(join)
    if list(given["tensors"]) != ends or len(parts) * rows != shape(gather.result)[0]:
        return
    gather.dim = given["dim"] % len(shape(join))
    gather.chain[:0] = [join, *(end for end in ends if end not in parts), *parts, split]
    gather.result = join


def _bytes_again(part: Node) -> Node | None:
    """The view of ``part`` as another element type, if that is all it is used for."""
    user = only_user(part)
    return user if user is not None and user.target is aten.view.dtype else None


def _follow_bytes(gather: Gather) -> None:
    """Types that the collective does not know travel as bytes: a view before, and one behind."""
    shard = gather.shard
    if shard.target is not aten.view.dtype or shard.meta["val"].dtype != torch.uint8:
        return
    origin = arguments(shard)["self"]
    wanted = origin.meta["val"].dtype
    if gather.result.meta["val"].dtype == wanted:
        gather.shard = origin
        return
    user = only_user(gather.result)
    if user is not None and user.target is aten.view.dtype and user.meta["val"].dtype == wanted:
        gather.shard = origin
        _extend(gather, user)


def fuse(gather: Gather) -> Fusion:
    """Replaces ``gather`` and its matmuls, if it can be done."""
    place = (KIND, gather.collective.name, str(gather.group))
    source = source_of(gather.collective)
    try:
        count = _replace(gather)
    except Unfit as unfit:
        return Fusion(*place, False, reason=str(unfit), source=source)
    return Fusion(*place, True, count, source=source)


def _replace(gather: Gather) -> int:
    check_group(gather.group)
    if gather.result is gather.collective:
        raise Unfit("the collective is not waited for in the graph")
    whole = shape(gather.result)
    if gather.dim == len(whole) - 1:
        raise Unfit("it gathers along the dimension that the matmul sums over")
    views = [
        user
        for user in gather.result.users
        if user.target in RESHAPES and len(shape(user)) == 2 and shape(user)[1] == whole[-1]
    ]
    lefts = [gather.result, *views]
    found = [matmul_of(user) for left in lefts for user in left.users]
    matmuls = [matmul for matmul in found if matmul is not None and matmul.a in lefts]
    if not matmuls:
        raise Unfit("no matmul uses the gathered tensor as its left operand")
    after = descendants(gather.collective)
    matmuls = [one for one in matmuls if not any(node in after for node in one.operands)]
    if not matmuls:
        raise Unfit("what the matmul multiplies with depends on the gathered tensor")
    order = {node: place for place, node in enumerate(gather.result.graph.nodes)}
    matmuls.sort(key=lambda one: order[one.node])
    matmuls = _alike(matmuls)
    users = {user for left in lefts for user in left.users}
    keep = bool(users - {one.node for one in matmuls} - set(views))
    graph = gather.result.graph
    with graph.inserting_before(matmuls[0].node):
        fused = _call(graph, gather, matmuls, whole, keep)
        results = graph.call_function(operator.getitem, (fused, 1))
        for place, matmul in enumerate(matmuls):
            result = graph.call_function(operator.getitem, (results, place))
            _substitute(graph, matmul, result, [*whole[:-1], shape(matmul.b)[1]])
        if keep:
            gathered = graph.call_function(operator.getitem, (fused, 0))
            gather.result.replace_all_uses_with(gathered)
    brought = arguments(gather.collective)["input"]
    for matmul in matmuls:
        erase([*matmul.node.users, matmul.node])
    erase([*views, *gather.chain])
    if brought is not gather.shard:
        erase([brought])
    return len(matmuls)


def _alike(matmuls: list[Matmul]) -> list[Matmul]:
    """Those that one fused operation does: as the first, scaled alike or not scaled."""

    def kind(matmul: Matmul) -> Any:
        return matmul.scaled and matmul.scaled["scale_a"]

    return [one for one in matmuls if kind(one) is kind(matmuls[0])]


def _call(
    graph: Graph, gather: Gather, matmuls: list[Matmul], whole: list[Any], keep: bool
) -> Node:
    rights = [matmul.b for matmul in matmuls]
    if matmuls[0].scaled is None:
        return graph.call_function(
            torch.ops.warplink.fused_all_gather_matmul.default,
            (gather.shard, rights, gather.dim, gather.group),
            {"return_A": keep},
        )
    scaled = [matmul.scaled or {} for matmul in matmuls]
    scale = scaled[0]["scale_a"]
    if scale.meta["val"].numel() != 1:
        # One scale for each row of the gathered matrix, which every rank has.
        scale = reshaped(graph, scale, [*whole[:-1], 1], shape(scale))
    return graph.call_function(
        torch.ops.warplink.fused_all_gather_scaled_matmul.default,
        (
            gather.shard,
            rights,
            scale,
            [given["scale_b"] for given in scaled],
            gather.dim,
            gather.group,
            [given["bias"] for given in scaled],
            [given["scale_result"] for given in scaled],
            [given["out_dtype"] for given in scaled],
            [given["use_fast_accum"] for given in scaled],
        ),
    )


def _substitute(graph: Graph, matmul: Matmul, result: Node, sizes: list[Any]) -> None:
    """Lets the users of ``matmul`` use ``result``, which has ``sizes``."""
    flat = shape(matmul.node)
    if matmul.bias is not None:
        if len(shape(matmul.bias)) > 1:
            result, sizes = reshaped(graph, result, flat, sizes), flat
        result = graph.call_function(aten.add.Tensor, (result, matmul.bias))
    for user in list(matmul.node.users):
        if user.target in RESHAPES and shape(user) == sizes:
            user.replace_all_uses_with(result)
        else:
            user.replace_input_with(matmul.node, reshaped(graph, result, flat, sizes))
