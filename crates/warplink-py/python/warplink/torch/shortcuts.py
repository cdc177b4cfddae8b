"""Short ways of calls on CUDA tensors: to NCCL where that does them, and past it where they go direct.

The checks that ``GroupCalls`` makes before each call have known results for these: one tensor or two, on a GPU, with
options of PyTorch's own.
Everything else takes the long way, as does every call that a dispatch mode is to see; of calls that go direct, also those
that need a work, as they are asynchronous or coalesced. An entry in a group's ``__dict__`` comes before the method of its class, so a short way costs a call nothing
but what is written here.
"""

from __future__ import annotations

import weakref
from typing import Any, Callable

from torch.distributed import distributed_c10d as c10d

from warplink.torch.direct_collectives import GpuCollectives, reduction
from warplink.torch.modes import active
from warplink.torch.works import Noted

#: Calls of a list of tensors, with the type of their options.
_OF_LISTS = {
    "allreduce": c10d.AllreduceOptions,
    "broadcast": c10d.BroadcastOptions,
    "reduce": c10d.ReduceOptions,
}

#: Calls of an output and an input, and their newer names.
_OF_PAIRS = {
    "_allgather_base": "all_gather_single",
    "_reduce_scatter_base": "reduce_scatter_single",
    "alltoall_base": "all_to_all_single",
}

#: Calls that follow the path of messages; all others follow the path of collectives.
_MESSAGES = ("alltoall_base",)

Way = Callable[..., Any]


def open_to(group: Any, backend: Any) -> None:
    """Has calls of ``group`` on CUDA tensors go to ``backend`` by the short way."""
    ways = vars(group)
    for name, options in _OF_LISTS.items():
        ways[name] = _of_list(getattr(backend, name), _long(group, name), options)
    for name, newer in _OF_PAIRS.items():
        ways[name] = _of_pair(getattr(backend, name), _long(group, name))
        ways[newer] = ways[name]


def open_past(
    group: Any, direct: GpuCollectives, works: Noted, messages: bool, collectives: bool
) -> None:
    """Has calls on CUDA tensors of ``group`` take the short way to ``direct``, and not to NCCL: those
    of messages, of collectives, or of both. ``works`` notes works where calls are coalesced."""
    for name in (*_OF_LISTS, *_OF_PAIRS):
        if messages if name in _MESSAGES else collectives:
            _close(group, name)
    ways = vars(group)
    made = {
        "allreduce": _all_reduce,
        "broadcast": _broadcast,
        "_allgather_base": _all_gather,
        "_reduce_scatter_base": _reduce_scatter,
        "alltoall_base": _all_to_all,
    }
    for name, make in made.items():
        if messages if name in _MESSAGES else collectives:
            ways[name] = make(direct, works, _long(group, name))
            if name in _OF_PAIRS:
                ways[_OF_PAIRS[name]] = ways[name]


def close(group: Any) -> None:
    """Takes the short ways of ``group`` away."""
    for name in (*_OF_LISTS, *_OF_PAIRS):
        _close(group, name)


def _close(group: Any, name: str) -> None:
    vars(group).pop(name, None)
    vars(group).pop(_OF_PAIRS.get(name), None)


# The long way is held weakly: it holds the group, which holds the short one.


def _long(group: Any, name: str) -> weakref.WeakMethod[Any]:
    return weakref.WeakMethod(getattr(group, name))


def _of_list(short: Way, long: weakref.WeakMethod[Any], options: type) -> Way:
    def call(tensors: Any, opts: Any = None, *rest: Any) -> Any:
        if type(opts) is options and type(tensors) is list and len(tensors) == 1 and tensors[0].is_cuda and not active():
            return short(tensors, opts)
        return _alive(long)(tensors, opts, *rest)

    return call


def _of_pair(short: Way, long: weakref.WeakMethod[Any]) -> Way:
    def call(output: Any, input: Any, *rest: Any, **named: Any) -> Any:
        if rest and not named and output.is_cuda and input.is_cuda and not active():
            return short(output, input, *rest)
        return _alive(long)(output, input, *rest, **named)

    return call


# Of calls that go direct and are done on the current stream, there is nothing to wait for: they give no work, as NCCL
# gives none.


def _all_reduce(direct: GpuCollectives, works: Noted, long: weakref.WeakMethod[Any]) -> Way:
    def call(tensors: Any, opts: Any = None, *rest: Any) -> Any:
        if type(opts) is c10d.AllreduceOptions and type(tensors) is list and len(tensors) == 1:
            tensor = tensors[0]
            if tensor.is_cuda and not opts.asyncOp and works.works is None and not active():
                how = reduction(opts.reduceOp, tensor.dtype)
                if how is not None and direct.now("all_reduce", tensor, tensor, how):
                    return None
        return _alive(long)(tensors, opts, *rest)

    return call


def _broadcast(direct: GpuCollectives, works: Noted, long: weakref.WeakMethod[Any]) -> Way:
    def call(tensors: Any, opts: Any = None, *rest: Any) -> Any:
        if type(opts) is c10d.BroadcastOptions and type(tensors) is list and len(tensors) == 1:
            tensor, root = tensors[0], opts.rootRank
            if tensor.is_cuda and not opts.asyncOp and works.works is None and not active():
                if direct.now("broadcast", tensor, tensor, None, root):
                    return None
        return _alive(long)(tensors, opts, *rest)

    return call


def _all_gather(direct: GpuCollectives, works: Noted, long: weakref.WeakMethod[Any]) -> Way:
    def call(output: Any, input: Any, opts: Any = None) -> Any:
        if type(opts) is c10d.AllgatherOptions and output.is_cuda and input.is_cuda:
            if not opts.asyncOp and works.works is None and not active():
                if direct.now("all_gather", output, input):
                    return None
        return _alive(long)(output, input, opts)

    return call


def _reduce_scatter(direct: GpuCollectives, works: Noted, long: weakref.WeakMethod[Any]) -> Way:
    def call(output: Any, input: Any, opts: Any = None) -> Any:
        if type(opts) is c10d.ReduceScatterOptions and output.is_cuda and input.is_cuda:
            if not opts.asyncOp and works.works is None and not active():
                how = reduction(opts.reduceOp, output.dtype)
                if how is not None and direct.now("reduce_scatter", output, input, how):
                    return None
        return _alive(long)(output, input, opts)

    return call


def _all_to_all(direct: GpuCollectives, works: Noted, long: weakref.WeakMethod[Any]) -> Way:
    def call(output: Any, input: Any, output_split_sizes: Any, input_split_sizes: Any, opts: Any = None) -> Any:
        if type(opts) is c10d.AllToAllOptions and output.is_cuda and input.is_cuda:
            if not opts.asyncOp and works.works is None and not active():
                if direct.all_to_all_single_now(output, input, output_split_sizes, input_split_sizes):
                    return None
        return _alive(long)(output, input, output_split_sizes, input_split_sizes, opts)

    return call


def _alive(long: weakref.WeakMethod[Any]) -> Way:
    method: Way | None = long()
    if method is None:
        raise RuntimeError("the process group is gone")
    return method
