"""PyTorch's flight recorder, of the calls that Warplink does itself.

Where TORCH_FR_BUFFER_SIZE or TORCH_NCCL_TRACE_BUFFER_SIZE is set and not 0, the process keeps as many of its last calls, in the
format of PyTorch's dumps. The first failure of a group writes them to the file that PyTorch's dumps go to, for ``torchfrtrace``,
which compares those of all ranks. That accepts names of NCCL's calls alone, so ours have them. What NCCL and Gloo do is in
PyTorch's own recorder, which is on by default; ours is not, since a call of CUDA tensors that is recorded is slower.
"""

from __future__ import annotations

import collections
import functools
import itertools
import logging
import os
import pathlib
import pickle
import sys
import threading
import time
from collections.abc import Sequence
from typing import Any

import torch

from warplink import Event
from warplink.errors import ClosedError, WarplinkError
from warplink.torch.profiling import Source

#: The format: that of PyTorch 2.11.
VERSION = "2.10"

#: How many frames of the caller are kept.
MAX_FRAMES = 32

#: Calls by the names that the format has for them. A receive from any rank has none.
NAMES = {
    kind: kind
    for kind in ("all_reduce", "all_gather", "all_to_all", "broadcast", "gather", "reduce", "reduce_scatter", "scatter")
} | {"barrier": "all_reduce_barrier", "send": "send", "recv": "recv"}

#: Calls whose tensors are inputs and outputs in the format, on every rank.
IN_PLACE = ("all_reduce", "broadcast", "reduce", "send", "recv")

#: A message of a batch: "send" or "recv", the peer, and the tensor.
Message = tuple[str, int, torch.Tensor]

_log = logging.getLogger(__name__)
_package = os.path.join(os.path.dirname(os.path.dirname(__file__)), "")


class Call:
    """A call that was recorded: an entry, or one for each message of a batch."""

    def __init__(self, recorder: Recorder, source: Source, entries: list[dict[str, Any]]) -> None:
        self._recorder, self._source = recorder, source
        self._entries = entries

    def start(self) -> None:
        """Notes that it has begun."""
        self._set("started", time_discovered_started_ns=time.time_ns())

    def enqueue(self, end: Event) -> None:
        """Notes that a stream has it, whose event ``end`` is reached when it is over."""
        self._recorder.enqueued(self, end)

    def end(self, error: BaseException | None) -> None:
        """Notes that it is over. One that failed keeps its state; the first of a group has the calls written."""
        if error is None:
            self._set("completed", time_discovered_completed_ns=time.time_ns(), retired=True)
            return
        for entry in self._entries:
            entry["retired"] = True
        self._recorder.failed(self._source, error)

    def _set(self, state: str, **fields: Any) -> None:
        for entry in self._entries:
            entry.update(state=state, **fields)


class Recorder:
    """The last ``size`` calls of the process."""

    def __init__(self, size: int) -> None:
        self._lock = threading.Lock()
        self._entries: collections.deque[dict[str, Any]] = collections.deque(maxlen=size)
        #: Calls that streams have, and the events of their ends.
        self._enqueued: collections.deque[tuple[Call, Event]] = collections.deque(maxlen=size)
        self._ids = itertools.count()
        #: By the groups' names: the group, and how many collectives and messages it had.
        self._groups: dict[str, tuple[Source, list[int]]] = {}
        self._failed: set[str] = set()

    def record(
        self,
        source: Source,
        kind: str,
        inputs: Sequence[torch.Tensor],
        outputs: Sequence[torch.Tensor],
        limit: float,
        peer: int | None = None,
        messages: Sequence[Message] = (),
    ) -> Call | None:
        """Records a call of ``source``, with ``peer`` if it is a message, or with the ``messages`` of a batch; None where the
        format has no such call."""
        if messages:
            return self._add(source, [self._entry(source, kind, [one], [], limit, to) for kind, to, one in messages])
        if kind not in NAMES:
            return None
        return self._add(source, [self._entry(source, kind, inputs, outputs, limit, peer)])

    def _entry(
        self,
        source: Source,
        kind: str,
        inputs: Sequence[torch.Tensor],
        outputs: Sequence[torch.Tensor],
        limit: float,
        peer: int | None,
    ) -> dict[str, Any]:
        name, is_message = NAMES[kind], peer is not None
        if is_message:
            name += f" {source.rank}{'->' if kind == 'send' else '<-'}{peer}"
        if kind in IN_PLACE:
            inputs = outputs = inputs or outputs
        return {
            "process_group": (str(source.name), source.description),
            "is_p2p": is_message,
            "profiling_name": f"nccl:{name}",
            "time_created_ns": time.time_ns(),
            "input_sizes": _sizes(inputs),
            "input_dtypes": _types(inputs),
            "output_sizes": _sizes(outputs),
            "output_dtypes": _types(outputs),
            "state": "scheduled",
            "time_discovered_started_ns": None,
            "time_discovered_completed_ns": None,
            "retired": False,
            "timeout_ms": int(limit * 1000),
            "thread_id": str(threading.get_ident()),
            "thread_name": threading.current_thread().name,
            "frames": _frames(),
        }

    def _add(self, source: Source, entries: list[dict[str, Any]]) -> Call:
        group = str(source.name)
        with self._lock:
            known, counts = self._groups.get(group, (source, [0, 0]))
            if known is not source:
                # Another group may have the name of one that was destroyed.
                self._failed.discard(group)
            self._groups[group] = source, counts
            for entry in entries:
                counts[entry["is_p2p"]] += 1
                entry.update(
                    record_id=next(self._ids),
                    pg_id=list(self._groups).index(group),
                    collective_seq_id=counts[0],
                    p2p_seq_id=counts[1],
                    op_id=sum(counts),
                )
            self._entries.extend(entries)
        return Call(self, source, entries)

    def enqueued(self, call: Call, end: Event) -> None:
        """Notes that a stream has ``call``, and which of the calls before it are over."""
        with self._lock:
            self._enqueued.append((call, end))
            self._retire()

    def _retire(self) -> None:
        """Notes the ends of calls that streams have had; under the lock. Streams that failed have no ends."""
        try:
            while self._enqueued and self._enqueued[0][1].is_reached():
                self._enqueued.popleft()[0].end(None)
        except WarplinkError:
            self._enqueued.clear()

    def dump(self, only_active: bool = False) -> bytes:
        """The calls in the format of PyTorch's dumps; with ``only_active``, those that are not done."""
        with self._lock:
            self._retire()
            entries = [dict(entry) for entry in self._entries]
            groups = {
                name: {"name": name, "desc": source.description, "ranks": str(source.ranks)}
                for name, (source, _) in self._groups.items()
            }
        chosen = [entry for entry in entries if not (only_active and entry["state"] == "completed")]
        return pickle.dumps({"version": VERSION, "entries": chosen, "pg_config": groups, "pg_status": {}})

    def failed(self, source: Source, error: BaseException) -> None:
        """Writes the calls where ``source`` fails for the first time, unless that is because it was closed."""
        if not isinstance(error, WarplinkError) or isinstance(error, ClosedError):
            return
        with self._lock:
            if str(source.name) in self._failed:
                return
            self._failed.add(str(source.name))
        file = _file(source.ranks[source.rank])
        unfinished = f"{file}.{os.getpid()}.part"
        try:
            os.makedirs(os.path.dirname(file) or ".", exist_ok=True)
            pathlib.Path(unfinished).write_bytes(self.dump())
            os.replace(unfinished, file)
        except Exception as error:  # noqa: BLE001 - the call's own error must reach its caller
            _log.warning("the flight recorder cannot write %s: %s", file, error)
        else:
            _log.warning("the group %r failed: its last calls are in %s", source.name, file)


@functools.cache
def recorder() -> Recorder | None:
    """The process's recorder; None where it is not turned on."""
    given = os.environ.get("TORCH_FR_BUFFER_SIZE") or os.environ.get("TORCH_NCCL_TRACE_BUFFER_SIZE") or "0"
    size = int(given) if given.isdigit() else 0
    return Recorder(size) if size > 0 else None


def dump_flight_recorder(only_active: bool = False) -> bytes:
    """The last calls of this process that Warplink executed, in the format of PyTorch's dumps, which ``pickle`` and ``torchfrtrace``
    read. There are none unless TORCH_FR_BUFFER_SIZE or TORCH_NCCL_TRACE_BUFFER_SIZE sets how many are kept."""
    return (recorder() or Recorder(0)).dump(only_active)


def _file(rank: int) -> str:
    """Where PyTorch writes the dump of ``rank``."""
    names = ("TORCH_FR_DUMP_TEMP_FILE", "TORCH_NCCL_DEBUG_INFO_TEMP_FILE")
    given = next(filter(None, map(os.environ.get, names)), None)
    if given is None:
        cache = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
        given = os.path.join(cache, "torch", "comm_lib_trace_rank_")
    return f"{given}{rank}"


def _sizes(tensors: Sequence[torch.Tensor]) -> list[list[int]]:
    """The sizes of ``tensors``, which the format has of one tensor: a list of them is as one in which they are rows."""
    if not tensors:
        return [[1]]
    shapes = [list(tensor.shape) for tensor in tensors]
    if len(shapes) == 1:
        return shapes
    if all(shape == shapes[0] for shape in shapes):
        return [[len(shapes), *shapes[0]]]
    return [[sum(tensor.numel() for tensor in tensors)]]


def _types(tensors: Sequence[torch.Tensor]) -> list[str]:
    if not tensors:
        return ["Float"]
    return [tensors[0].type().rpartition(".")[2].removesuffix("Tensor")]


def _frames() -> list[dict[str, Any]]:
    """Where the call was made, the innermost frame first, without Warplink's own."""
    frames: list[dict[str, Any]] = []
    frame = sys._getframe()
    while frame is not None and len(frames) < MAX_FRAMES:
        code = frame.f_code
        if not code.co_filename.startswith(_package):
            frames.append({"name": code.co_name, "filename": code.co_filename, "line": frame.f_lineno})
        frame = frame.f_back  # type: ignore[assignment]
    return frames
