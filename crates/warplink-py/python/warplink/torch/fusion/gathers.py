"""All-gather, then matmuls."""

from __future__ import annotations

import operator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.fx import Graph, Node
from torch.fx.experimental.symbolic_shapes import statically_known_true

from warplink.torch.fusion.nodes import (
    RESHAPES,
    SPLITS,
    Matmul,
    arguments,
    aten,
    call,
    check_gain,
    check_group,
    check_scales,
    descendants,
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
from warplink.torch.ops import gather_gains

KIND = "all-gather + matmul"

TARGET = torch.ops._c10d_functional.all_gather_into_tensor.default

#: The fewest columns of a rank's part, where columns are gathered, whose matmul is worth a call of its own; as in
#: PyTorch's own pass.
MIN_COLUMNS = 1024


@dataclass
class Gather:
    """A gathered tensor in a graph."""

    collective: Node
    group: str
    #: The group's ranks.
    size: int
    #: The input of each rank.
    shard: Node
    #: The first node that is the gathered tensor.
    result: Node
    dim: int = 0
    #: Nodes from the collective to the result, the last first, with the dimension in which each has all ranks' parts.
    chain: dict[Node, int | None] = field(default_factory=dict)
    #: Takes the first of what is gathered, whose parts were padded to one size.
    trim: Node | None = None

    @property
    def whole(self) -> list[Any]:
        """Sizes of the gathered tensor, as many as all ranks bring."""
        sizes = shape(self.result)
        if self.trim is not None:
            sizes[self.dim] = shape(arguments(self.trim)["self"])[self.dim]
        return sizes

    def trimmed(self, graph: Graph, node: Node) -> Node:
        """The part of ``node`` that the graph uses, with the rows of the gathered tensor."""
        if self.trim is None:
            return node
        sizes = shape(node)
        sizes[self.dim] = shape(self.trim)[self.dim]
        taken = (node, self.dim, 0, _end_of(self.trim, self.dim))
        return call(graph, aten.slice.Tensor, taken, value(node).new_empty(sizes))

    def follow(self, node: Node) -> None:
        """Goes on to ``node``, which is the gathered tensor too, or what is left of it."""
        self.result = node
        self.chain = {node: self.dim, **self.chain}


@dataclass(frozen=True)
class Plan:
    """Plan for a gathered tensor."""

    gather: Gather
    #: Matrices that are the gathered tensor, users before what they use.
    views: list[Node]
    matmuls: list[Matmul]
    #: Whether more than the matmuls uses it.
    keep: bool


def read(collective: Node) -> Plan:
    """The plan for ``collective`` and its matmuls. Raises :class:`Unfit` where there is none."""
    given = arguments(collective)
    gather = Gather(
        collective, given["group_name"], given["group_size"], given["input"], collective, 0
    )
    gather.chain[collective] = 0
    wait = only_user(collective)
    if wait is None or wait.target is not torch.ops._c10d_functional.wait_tensor.default:
        raise Unfit("the collective is not waited for in the graph")
    gather.follow(wait)
    _follow_dimension(gather)
    _follow_trim(gather)
    _follow_bytes(gather)
    _follow_trim(gather)
    return _plan(gather)


def _follow_dimension(gather: Gather) -> None:
    """Along another dimension than the first, the parts are split and joined again."""
    users = users_of(gather.result)
    part = users[0] if users else None
    if part is not None and part.target in SPLITS:
        part = next(iter(part.users), None)
    if part is None:
        return
    join = only_user(_bytes_again(part) or part)
    if join is None or join.target is not aten.cat.default:
        return
    given = arguments(join)
    ends = list(given["tensors"])
    parts = [arguments(end)["self"] if end.target is aten.view.dtype else end for end in ends]
    split = split_of(parts)
    if split is None or split.source is not gather.result or split.dim != 0:
        return
    between = dict.fromkeys([*(end for end in ends if end not in parts), *split.nodes])
    alone = all(only_user(node) is join for node in ends) and all(
        only_user(part) in (end, join) for part, end in zip(parts, ends)
    )
    if len(parts) != gather.size or not alone or not set(users) <= between.keys():
        return
    gather.dim = given["dim"] % len(shape(join))
    gather.result = join
    gather.chain = {join: gather.dim, **between, **gather.chain}


def _follow_trim(gather: Gather) -> None:
    """Where the gathered dimension has no equal parts, they were padded, and a slice takes the padding away."""
    trim = only_user(gather.result)
    if gather.trim is not None or trim is None or trim.target is not aten.slice.Tensor:
        return
    given = arguments(trim)
    start, extent = given["start"], shape(trim)[gather.dim]
    if given["dim"] % len(shape(trim)) != gather.dim or given["step"] != 1:
        return
    if start is not None and not same(value(start), 0):
        return
    if isinstance(extent, int) or same(value(given["end"]), extent):
        gather.trim = trim
        gather.follow(trim)


def _end_of(trim: Node, dim: int) -> Any:
    """How long ``trim`` is along ``dim``, as an argument: its own may count from the end, where sizes are known."""
    extent = shape(trim)[dim]
    return extent if isinstance(extent, int) else arguments(trim)["end"]


def _bytes_again(part: Node) -> Node | None:
    """The view of ``part`` as another element type, if that is all it is used for."""
    user = only_user(part)
    return user if user is not None and user.target is aten.view.dtype else None


def _follow_bytes(gather: Gather) -> None:
    """Types that the collective or the joining of parts does not know go through it as bytes: a view before, and one
    behind."""
    shard = gather.shard
    if shard.target is aten.view.dtype and value(shard).dtype == torch.uint8:
        shard = arguments(shard)["self"]
    wanted = value(shard).dtype
    user = only_user(gather.result)
    if user is not None and user.target is aten.view.dtype and value(user).dtype == wanted:
        gather.follow(user)
    if value(gather.result).dtype == wanted:
        gather.shard = shard


def _plan(gather: Gather) -> Plan:
    check_group(gather.group)
    views = _views(gather.result)
    lefts = [gather.result, *views]
    found = [matmul_of(user) for left in lefts for user in left.users]
    matmuls = [matmul for matmul in found if matmul is not None and matmul.a in lefts]
    if not matmuls:
        raise Unfit("no matmul uses the gathered tensor as its left operand")
    after = descendants(gather.collective)
    matmuls = [one for one in matmuls if not any(node in after for node in one.operands)]
    if not matmuls:
        raise Unfit("what the matmul multiplies with depends on the gathered tensor")
    matmuls = _scaled_well(matmuls)
    order = {node: place for place, node in enumerate(gather.result.graph.nodes)}
    matmuls.sort(key=lambda one: order[one.node])
    matmuls = _alike(matmuls)
    taken = {*(one.node for one in matmuls), *views, *size_readers(gather.result)}
    users = {user for left in lefts for user in left.users}
    plan = Plan(gather, views[::-1], matmuls, bool(users - taken))
    if gather.trim is not None:
        _check_trim(plan)
    if gather.dim == len(shape(gather.result)) - 1:
        _check_columns(plan)
    if matmuls[0].scaled is None:
        rights = [value(one.b) for one in matmuls]
        check_gain(gather_gains(value(gather.shard), rights, gather.dim, gather.group, return_a=plan.keep))
    return plan


def _check_trim(plan: Plan) -> None:
    """Raises :class:`Unfit` where the matmuls of some of what is gathered cannot be taken from those of all."""
    if plan.gather.dim == len(shape(plan.gather.result)) - 1:
        raise Unfit("a part of the columns that the matmul sums over is taken away")
    scaled = plan.matmuls[0].scaled
    if scaled is not None and not same(value(scaled["scale_a"]).numel(), 1):
        raise Unfit("the matmul has a scale for each row of the gathered tensor without its padding")


def _check_columns(plan: Plan) -> None:
    """Raises :class:`Unfit` where the matmuls over gathered columns are better left whole."""
    if plan.matmuls[0].scaled is not None:
        raise Unfit("an fp8 matmul is not split along the dimension that it sums over")
    columns = shape(plan.gather.shard)[-1]
    if not statically_known_true(columns >= MIN_COLUMNS):
        raise Unfit(
            f"each rank's part has {columns} of the columns that the matmul sums over; expected at least {MIN_COLUMNS}"
        )
    if plan.keep:
        raise Unfit("the columns that it gathers are used elsewhere too")


def _views(result: Node) -> list[Node]:
    """Those that have the rows of ``result`` in its order, whatever dimensions count the rows; the first first. A copy
    is made of a trimmed one before it is a matrix."""
    found: list[Node] = []
    open_ = [result]
    while open_:
        node = open_.pop(0)
        views = [
            user
            for user in node.users
            if user.target in (*RESHAPES, aten.clone.default) and same_sizes(shape(user)[-1:], shape(result)[-1:])
        ]
        found += views
        open_ += views
    return found


def _scaled_well(matmuls: list[Matmul]) -> list[Matmul]:
    """Those whose scales the fused operation takes. Raises :class:`Unfit` if none are left."""
    fit, reason = [], None
    for matmul in matmuls:
        try:
            check_scales(matmul)
            fit.append(matmul)
        except Unfit as unfit:
            reason = unfit
    if not fit and reason is not None:
        raise reason
    return fit


def _alike(matmuls: list[Matmul]) -> list[Matmul]:
    """Those that one fused operation does: as the first, scaled alike or not scaled."""

    def kind(matmul: Matmul) -> Any:
        return matmul.scaled and matmul.scaled["scale_a"]

    return [one for one in matmuls if kind(one) is kind(matmuls[0])]


def replace(plan: Plan) -> int:
    """Replaces the collective and its matmuls. Returns their number."""
    gather, matmuls = plan.gather, plan.matmuls
    brought = arguments(gather.collective)["input"]
    graph = gather.result.graph
    sizes = [[*gather.whole[:-1], shape(matmul.b)[1]] for matmul in matmuls]
    vals = [value(matmul.node).new_empty(each) for matmul, each in zip(matmuls, sizes)]
    with graph.inserting_before(gather.collective):
        _read_sizes_of_shard(graph, gather, brought)
    with graph.inserting_before(matmuls[0].node):
        whole = value(gather.result)
        if gather.trim is not None:
            whole = whole.new_empty(gather.whole)
        operation = _call(graph, plan, whole, vals)
        results = call(graph, operator.getitem, (operation, 1), vals)
        for place, matmul in enumerate(matmuls):
            result = call(graph, operator.getitem, (results, place), vals[place])
            _substitute(graph, matmul, gather.trimmed(graph, result))
        if plan.keep:
            gathered = gather.trimmed(graph, call(graph, operator.getitem, (operation, 0), whole))
            gather.result.replace_all_uses_with(gathered)
    for matmul in matmuls:
        erase([*matmul.node.users, matmul.node])
    erase([*plan.views, *gather.chain])
    if brought is not gather.shard:
        erase([brought])
    return len(matmuls)


def _read_sizes_of_shard(graph: Graph, gather: Gather, brought: Node) -> None:
    """Redirects reads of the sizes of erased nodes to each rank's shard."""
    trim = gather.trim
    for node, whole in gather.chain.items():
        for reader in size_readers(node):
            dim = arguments(reader)["dim"] % len(shape(node))
            if trim is not None and dim == whole:
                reader.replace_all_uses_with(_end_of(trim, dim))
                erase([reader])
                continue
            source = gather.shard if value(node).dtype == value(gather.shard).dtype else brought
            size = shape(source)[dim]
            read = call(graph, aten.sym_size.int, (source, dim), size)
            if dim == whole:
                read = call(graph, operator.mul, (read, gather.size), size * gather.size)
            reader.replace_all_uses_with(read)
            erase([reader])
        if node is trim:
            # Those before it are as long as all parts.
            trim = None


def _call(graph: Graph, plan: Plan, whole: Any, vals: list[Any]) -> Node:
    """The fused operation that gathers ``whole``, and whose products are as ``vals``."""
    gather, matmuls = plan.gather, plan.matmuls
    rights = [matmul.b for matmul in matmuls]
    if matmuls[0].scaled is None:
        return call(
            graph,
            torch.ops.warplink.fused_all_gather_matmul.default,
            (gather.shard, rights, gather.dim, gather.group),
            (whole if plan.keep else None, vals),
            return_A=plan.keep,
        )
    scaled = [matmul.scaled or {} for matmul in matmuls]
    scale = scaled[0]["scale_a"]
    if not same(value(scale).numel(), 1):
        # One scale for each row of the gathered matrix, which every rank has.
        scale = reshaped(graph, scale, [*gather.whole[:-1], 1])
    return call(
        graph,
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
        (whole, vals),
    )


def _substitute(graph: Graph, matmul: Matmul, result: Node) -> None:
    """Lets the users of ``matmul`` use ``result``."""
    flat = shape(matmul.node)
    if matmul.bias is not None:
        if len(shape(matmul.bias)) > 1:
            result = reshaped(graph, result, flat)
        result = call(graph, aten.add.Tensor, (result, matmul.bias), value(result))
    for user in list(matmul.node.users):
        if user.target in RESHAPES and same_sizes(shape(user), shape(result)):
            user.replace_all_uses_with(result)
        else:
            user.replace_input_with(matmul.node, reshaped(graph, result, flat))
