"""Events of calls in PyTorch's profilers, as its own backends have them.

A call that goes on after it returns is an event with the shapes of its tensors, from when it was made to its end, such as
``warplink:all_reduce``; within it, an operator of the same name records what NCCL's ``record_param_comms`` does: the
collective, the group and the sizes. PyTorch adds that event for C++ alone, and 2.15 crashes when Python does. With
``torch.autograd.profiler.emit_nvtx``, the events are ranges of NVTX.

Without a profiler, a call costs one look at ``profiler._is_profiler_enabled``.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch._C._profiler import _RecordFunctionFast
from torch.autograd import profiler

_begin: Any = torch._C._autograd._record_function_with_args_enter


@dataclass
class Source:
    """Whose calls are recorded."""

    #: Prefix of event names.
    backend: str
    rank: int
    size: int
    #: The group's name and description, and its ranks in the world.
    name: str = ""
    description: str = ""
    ranks: list[int] = field(default_factory=list)

    def arguments(self, kind: str, inputs: Sequence[torch.Tensor], outputs: Sequence[torch.Tensor]) -> dict[str, Any]:
        """Metadata of a call, by the names that ``record_param_comms`` has for it."""
        some = next(iter((*inputs, *outputs)), None)
        return {
            "Collective name": kind,
            "dtype": "" if some is None else str(some.dtype).removeprefix("torch."),
            "In msg nelems": sum(tensor.numel() for tensor in inputs or outputs),
            "Out msg nelems": sum(tensor.numel() for tensor in outputs),
            "Group size": self.size,
            "Rank": self.rank,
            "Process Group Name": str(self.name),
            "Process Group Description": self.description,
            "Process Group Ranks": str(self.ranks),
        }


class Event:
    """An event that began."""

    def __init__(self, source: Source, kind: str, tensors: Sequence[torch.Tensor]) -> None:
        record = _begin(f"{source.backend}:{kind}", *tensors)
        self._thread = threading.get_ident()
        self._ended: torch.futures.Future[None] = torch.futures.Future()
        # The end is recorded by the profiler of the thread that made the call.
        torch.ops.profiler._call_end_callbacks_on_jit_fut._RecordFunction(record, self._ended)

    def end(self) -> None:
        """Ends it, once. Profilers take an event for asynchronous that another thread ends."""
        if threading.get_ident() != self._thread:
            self._ended.set_result(None)
            return
        thread = threading.Thread(target=self._ended.set_result, args=(None,), name="warplink-profile")
        try:
            thread.start()
        except RuntimeError:
            # The interpreter ends, and starts no thread any more.
            self._ended.set_result(None)
        else:
            thread.join()


def begin(
    source: Source, kind: str, inputs: Sequence[torch.Tensor], outputs: Sequence[torch.Tensor]
) -> Event | None:
    """The event of a call of ``source`` that begins; None where no profiler runs."""
    if not profiler._is_profiler_enabled:
        return None
    with _operator(source, kind, inputs, outputs):
        return Event(source, kind, inputs or outputs)


def recorded(
    source: Source,
    kind: str,
    call: Callable[..., None],
    inputs: Sequence[torch.Tensor],
    outputs: Sequence[torch.Tensor],
) -> Callable[..., None]:
    """``call``, which enqueues a call of ``source`` on a stream, as an operator with an event; itself where no profiler runs."""
    if not profiler._is_profiler_enabled:
        return call

    def run(*arguments: Any) -> None:
        with _operator(source, kind, inputs, outputs):
            event = Event(source, kind, inputs or outputs)
            try:
                call(*arguments)
            finally:
                event.end()

    return run


def _operator(
    source: Source, kind: str, inputs: Sequence[torch.Tensor], outputs: Sequence[torch.Tensor]
) -> _RecordFunctionFast:
    said = source.arguments(kind, inputs, outputs)
    return _RecordFunctionFast(f"{source.backend}::{kind}", list(inputs or outputs), said)
