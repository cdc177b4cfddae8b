"""All-to-alls and batches of sends and receives by Warplink's own collectives; ``direct_collectives`` has the others.

``Options(direct_messages=False)`` turns them off. Whether a call goes direct never depends on the call: members
agree on it once, when they join the collectives, so that no call asks another rank which way it goes. Tensors of every
type, length and layout are served. As with NCCL, messages of a batch are matched by their order and not by tags, and
both ends of a message are in batches.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Callable, Sequence

import torch
from torch.autograd import profiler

import warplink
from warplink.errors import ClosedError, InvalidArgumentError, UnsupportedError, WarplinkError
from warplink.torch import error_handling, flight_recorder, profiling
from warplink.torch.agreement import made_by_all
from warplink.torch.arithmetic import place_of, readable, settle, writable
from warplink.torch.shapes import check_plain
from warplink.torch.works import GpuWork, HostWork, Worker, Works
from warplink.torch.workspace import Workspace, is_recording

#: Enqueues an operation on a stream, for contiguous sources and targets.
Call = Callable[[warplink.Stream, list[torch.Tensor], list[torch.Tensor]], None]

#: Sends and receives of one call, ``(peer, array)`` each.
Round = tuple[list[tuple[int, Any]], list[tuple[int, Any]]]


@dataclass
class Message:
    """A send to ``peer``, or a receive from it."""

    peer: int
    sends: bool
    tensor: torch.Tensor

    @property
    def recorded(self) -> tuple[str, int, torch.Tensor]:
        """As the flight recorder has it."""
        return "send" if self.sends else "recv", self.peer, self.tensor


def join(communicator: warplink.Communicator, multiprocessors: int | None = None) -> warplink.Collectives | None:
    """Collectives of all members, whose calls use at most ``multiprocessors``; None, on all of them alike, where one cannot
    join, or where not all reach one another's memory, by links of their own. Blocks until every member has called it.

    Raises what ends the communicator: the loss of a member, a timeout, and that it was closed."""

    def make() -> warplink.Collectives:
        joined = communicator.collectives(path="direct", multiprocessors=multiprocessors)
        if joined.serves_messages:
            return joined
        raise UnsupportedError("not every two members have a link; expected one between any two")

    return made_by_all(communicator, "joining for direct messages", make)


def rounds(messages: Sequence[tuple[int, bool, Any]], size: int, most: int) -> list[Round]:
    """Cuts a batch into calls of at most ``most`` messages. The n-th message of one rank to another is in the same call
    at both ends, whatever else the two have in their batches: so no call waits for one behind it."""
    each = max(1, most // (2 * size))
    if 0 < len(messages) <= each:
        sent = [(peer, data) for peer, sends, data in messages if sends]
        return [(sent, [(peer, data) for peer, sends, data in messages if not sends])]
    counts: dict[tuple[int, bool], int] = {}
    calls: list[Round] = []
    for peer, sends, data in messages:
        number = counts.get((peer, sends), 0)
        counts[peer, sends] = number + 1
        if number // each == len(calls):
            calls.append(([], []))
        calls[number // each][0 if sends else 1].append((peer, data))
    return calls


class HostBatches:
    """Batches of CPU tensors, done one after another on a thread. Every member makes one at the same time."""

    def __init__(
        self,
        communicator: warplink.Communicator,
        collectives: warplink.Collectives,
        works: Works,
        timeout: float,
    ) -> None:
        self.timeout = timeout
        self._collectives = collectives
        self._stream = communicator.create_stream()
        self._works = works
        self._worker = Worker("warplink-batches")

    def exchange(self, messages: Sequence[Message]) -> HostWork:
        """Does all ``messages`` at the same time."""
        sent = [m.tensor for m in messages if m.sends]
        received = [m.tensor for m in messages if not m.sends]
        check_plain(sent, received)
        limit = self.timeout
        recorded = [message.recorded for message in messages]
        work = self._works.start("batch_isend_irecv", limit, sent, received, messages=recorded)

        def body() -> list[torch.Tensor]:
            held = [readable(m.tensor) if m.sends else writable(m.tensor) for m in messages]
            batch = [(m.peer, m.sends, place_of(data)) for m, data in zip(messages, held)]
            collectives = self._collectives
            for sends, receives in rounds(batch, collectives.size, collectives.max_messages):
                collectives.send_receive_at(self._stream, sends, receives)
            self._stream.synchronize(limit)
            for message, data in zip(messages, held):
                if not message.sends:
                    settle(message.tensor, data)
            return received

        if not self._worker.submit(lambda: work.run(body)):
            work.finish(error=ClosedError("the process group was destroyed"))
        return work

    def close(self, limit: float = 1.0) -> None:
        """Ends the thread. Later batches raise ClosedError."""
        self._worker.stop(limit)


class GpuMessages:
    """All-to-alls and batches of CUDA tensors. Every member makes one at the same time.

    They are enqueued on the caller's current stream, or on one of the group's, of ``high_priority`` or not, behind it where the
    caller goes on meanwhile. Those of all groups of the process are done one after another, in the order of the calls: kernels of two
    groups that wait for one another's multiprocessors would never end. Failures are raised by a later call or wait;
    what takes longer than ``timeout`` is ended, and nothing goes direct any more.
    """

    def __init__(
        self,
        space: Workspace,
        collectives: warplink.Collectives,
        timeout: float,
        source: profiling.Source,
        high_priority: bool = False,
    ) -> None:
        self._space = space
        self._source = source
        self._recorder = flight_recorder.recorder()
        self._watch = space.communicator.watch(collectives, timeout, error_handling.grace())
        self._waits_block = error_handling.waits_block()
        #: Whether a call or a wait has raised what the watch found.
        self._told = False
        self._collectives = collectives
        self._device, self._rank = space.device, space.communicator.rank
        with torch.cuda.stream(torch.cuda.Stream(self._device, priority=-1 if high_priority else 0)):
            self._side = space.current_streams()
        self._order = space.order
        self._order.add(collectives)
        #: Fast path of calls that need only a launch; None if waits block or the flight recorder sees every call.
        self._quick: warplink.DirectCalls | None = None
        if not self._waits_block and self._recorder is None:
            self._quick = warplink.DirectCalls(
                collectives,
                space.order,
                self._watch,
                space.device.index,
                space.streams,
                torch._C._cuda_getCurrentRawStream,
                profiler,
                torch.strided,
            )

    def exchange(self, messages: Sequence[Message], asynchronous: bool = True) -> GpuWork:
        """Does all ``messages`` at the same time."""
        if asynchronous and (quick := self._quick) is not None:
            try:
                event = quick.exchange([(m.peer, m.sends, m.tensor) for m in messages], self._side)
            except WarplinkError:
                # Raises the first failure, if that is why.
                self._check()
                raise
            if event is not None:
                received = [m.tensor for m in messages if not m.sends]
                return GpuWork(received, self._space, self._side, event, self._check)

        def call(stream: warplink.Stream, sources: list[torch.Tensor], targets: list[torch.Tensor]) -> None:
            sent, received = iter(sources), iter(targets)
            batch = [(m.peer, m.sends, place_of(next(sent if m.sends else received))) for m in messages]
            collectives = self._collectives
            for sends, receives in rounds(batch, collectives.size, collectives.max_messages):
                collectives.send_receive_at(stream, sends, receives)

        sends = [m.tensor for m in messages if m.sends]
        receives = [m.tensor for m in messages if not m.sends]
        return self._enqueue("batch_isend_irecv", receives, sends, call, asynchronous, messages=messages)

    def all_to_all(
        self, outputs: list[torch.Tensor], inputs: list[torch.Tensor], asynchronous: bool
    ) -> GpuWork:
        """``outputs[p]`` becomes rank p's ``inputs[this rank]``."""

        def call(stream: warplink.Stream, sources: list[torch.Tensor], targets: list[torch.Tensor]) -> None:
            sends, receives = enumerate(map(place_of, sources)), enumerate(map(place_of, targets))
            self._collectives.send_receive_at(stream, list(sends), list(receives))

        return self._enqueue("all_to_all", outputs, inputs, call, asynchronous)

    def all_to_all_single(
        self,
        output: torch.Tensor,
        input: torch.Tensor,
        received: list[int],
        sent: list[int],
        asynchronous: bool,
    ) -> GpuWork:
        """As above, for consecutive parts of one tensor, whose lengths ``received`` and ``sent`` are in bytes."""

        def call(stream: warplink.Stream, sources: list[torch.Tensor], targets: list[torch.Tensor]) -> None:
            # PyTorch keeps their memory until the stream is past it.
            memory = targets[0].data_ptr(), sources[0].data_ptr()
            self._collectives.all_to_all_v_at(stream, *memory, received, sent)

        return self._enqueue("all_to_all", [output], [input], call, asynchronous)

    def all_to_all_single_now(
        self, output: torch.Tensor, input: torch.Tensor, output_rows: Sequence[int], input_rows: Sequence[int]
    ) -> bool:
        """As above, of rows, on the current stream without a work: equally many for each rank without sizes. False, with nothing
        done, for calls that ``DirectCalls`` leaves to others."""
        quick = self._quick
        try:
            return quick is not None and quick.all_to_all(output, input, output_rows, input_rows)
        except WarplinkError:
            # Raises the first failure, if that is why.
            self._check()
            raise

    def _enqueue(
        self,
        name: str,
        outputs: list[torch.Tensor],
        inputs: list[torch.Tensor],
        call: Call,
        asynchronous: bool,
        further: Sequence[torch.Tensor] = (),
        computes: bool = False,
        messages: Sequence[Message] = (),
    ) -> GpuWork:
        """Enqueues ``call`` on ``inputs`` and ``outputs``. ``further`` outputs are for the call to write. ``computes`` is whether
        the call has operations of PyTorch, too. ``messages`` are those of a batch."""
        every, device = (*outputs, *inputs, *further), self._device
        for tensor in every:
            if tensor.device != device:
                raise InvalidArgumentError(
                    f"{name}: a tensor is on {tensor.device}; expected {self._device}, as in the group's first call"
                )
        result, check = [*outputs, *further], self._check
        call = profiling.recorded(self._source, name, call, inputs, result)
        recorded = None
        # A call that a graph records runs when nobody sees it.
        if self._recorder is not None and not is_recording(device):
            batch = [one.recorded for one in messages]
            recorded = self._recorder.record(self._source, name, inputs, result, self.timeout, messages=batch)
        limit = self.timeout if self._waits_block else None
        if not asynchronous:
            streams = self._space.current_streams()
            self._run(streams[1], outputs, inputs, call)
            if recorded is not None:
                recorded.enqueue(streams[1].mark())
            return GpuWork(result, self._space, streams, None, check, limit)
        stream, borrowed = self._side
        borrowed.follow(self._space.stream)
        if not computes and all(map(_is_plain, (*outputs, *inputs))):
            # Making it PyTorch's current stream would take the host longer than all else of this.
            self._call_on(borrowed, outputs, inputs, call)
        else:
            with torch.cuda.stream(stream):
                self._run(borrowed, outputs, inputs, call)
        event = borrowed.mark()
        if recorded is not None:
            recorded.enqueue(event)
        # Memory of the current stream is not reused before this stream is past it.
        for tensor in every:
            tensor.record_stream(stream)
        return GpuWork(result, self._space, self._side, event, check, limit)

    def _run(
        self,
        stream: warplink.Stream,
        outputs: list[torch.Tensor],
        inputs: list[torch.Tensor],
        call: Call,
    ) -> None:
        """Enqueues ``call`` on ``stream``, the current one, and gives it contiguous tensors."""
        sources = [t if _is_plain(t) else readable(t) for t in inputs]
        targets = [t if _is_plain(t) else writable(t) for t in outputs]
        self._call_on(stream, targets, sources, call)
        for tensor, target in zip(outputs, targets):
            if target is not tensor:
                settle(tensor, target)

    def _call_on(
        self,
        stream: warplink.Stream,
        targets: list[torch.Tensor],
        sources: list[torch.Tensor],
        call: Call,
    ) -> None:
        """Enqueues ``call`` of contiguous tensors on ``stream``."""
        self._order.follow(self._collectives, stream)
        try:
            call(stream, sources, targets)
        except WarplinkError:
            # Raises the first failure, if that is why.
            self._check()
            raise

    @property
    def timeout(self) -> float:
        """Seconds that a call may take."""
        return self._watch.timeout

    @timeout.setter
    def timeout(self, timeout: float) -> None:
        self._watch.timeout = timeout

    def close(self) -> None:
        """Ends what watches the calls. They are done all the same. Raises what went wrong with them, unless a call or a
        wait has."""
        self._order.remove(self._collectives)
        self._watch.close()
        if not self._told:
            self._check()

    def _check(self) -> None:
        """Raises what went wrong so far."""
        try:
            self._watch.check()
        except WarplinkError as error:
            self._told = True
            if self._recorder is not None:
                self._recorder.failed(self._source, error)
            raise


def _is_plain(tensor: torch.Tensor) -> bool:
    """Whether the elements of ``tensor`` are one after another in memory, as they are."""
    return tensor.layout is torch.strided and tensor.is_contiguous() and not (tensor.is_conj() or tensor.is_neg())
