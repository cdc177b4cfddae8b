"""Short ways to NCCL, for groups of which it does all calls on CUDA tensors.

What ``GroupCalls`` asks before each call is known for these: one tensor or two, on a GPU, with options of PyTorch's own.
Everything else takes the long way. An entry in a group's ``__dict__`` comes before the method of its class, so a short way
costs a call nothing but what is written here.
"""

from __future__ import annotations

import weakref
from typing import Any, Callable

from torch.distributed import distributed_c10d as c10d

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


def open_to(group: Any, backend: Any) -> None:
    """Has calls of ``group`` on CUDA tensors go to ``backend`` by the short way."""
    ways = vars(group)
    for name, options in _OF_LISTS.items():
        ways[name] = _of_list(getattr(backend, name), weakref.WeakMethod(getattr(group, name)), options)
    for name, newer in _OF_PAIRS.items():
        ways[name] = _of_pair(getattr(backend, name), weakref.WeakMethod(getattr(group, name)))
        ways[newer] = ways[name]


def close(group: Any) -> None:
    """Takes the short ways of ``group`` away."""
    for name in (*_OF_LISTS, *_OF_PAIRS, *_OF_PAIRS.values()):
        vars(group).pop(name, None)


# The long way is held weakly: it holds the group, which holds the short one.


def _of_list(short: Callable[..., Any], long: weakref.WeakMethod[Any], options: type) -> Callable[..., Any]:
    def call(tensors: Any, opts: Any = None, *rest: Any) -> Any:
        if type(opts) is options and type(tensors) is list and len(tensors) == 1 and tensors[0].is_cuda:
            return short(tensors, opts)
        return _alive(long)(tensors, opts, *rest)

    return call


def _of_pair(short: Callable[..., Any], long: weakref.WeakMethod[Any]) -> Callable[..., Any]:
    def call(output: Any, input: Any, *rest: Any, **named: Any) -> Any:
        if rest and not named and output.is_cuda and input.is_cuda:
            return short(output, input, *rest)
        return _alive(long)(output, input, *rest, **named)

    return call


def _alive(long: weakref.WeakMethod[Any]) -> Callable[..., Any]:
    method: Callable[..., Any] | None = long()
    if method is None:
        raise RuntimeError("the process group is gone")
    return method
