"""Sends and receives of CPU tensors between two ranks of a group, matched by tag.

Every ordered pair of ranks has a line of its own, in which messages arrive in the order in which they
were sent: a header with the tag and the length, then the bytes. A receiver reads a line only while a
receive is posted that may match what comes; what does not match yet is kept until something does. So
tags may be received in any order, and a receive from any rank takes the first message with its tag.
"""

from __future__ import annotations

import struct
import threading
from dataclasses import dataclass

import torch

import warplink
from warplink.errors import ClosedError, from_kind
from warplink.torch.arithmetic import as_bytes, readable, settle, writable
from warplink.torch.works import HostWork, Worker

#: Tag and length in bytes.
HEADER = struct.Struct("<qQ")


@dataclass
class _Posted:
    """A receive that waits for its message; ``source`` is None where any rank will do."""

    work: HostWork
    tensor: torch.Tensor
    source: int | None
    tag: int


class Messages:
    """The sends and receives of one group. Every member makes one at the same time."""

    def __init__(self, communicator: warplink.Communicator, timeout: float) -> None:
        self.rank, self.size = communicator.rank, communicator.size
        self.timeout = timeout
        self._communicator = communicator
        # Lines of their own, beside those of the group's collectives.
        own = communicator.subgroup(list(range(communicator.size)))
        self._engine = own.collective_engine()
        self._lock = threading.Lock()
        self._posted: list[_Posted] = []
        self._early: dict[int, list[tuple[int, torch.Tensor]]] = {}
        self._senders: dict[int, _Line] = {}
        self._readers: dict[int, _Line] = {}
        self._reading: set[int] = set()
        self._failure: BaseException | None = None
        #: Where the works that are started are noted, while they are coalesced.
        self.started: list[HostWork] | None = None

    def send(self, tensor: torch.Tensor, peer: int, tag: int) -> HostWork:
        """Sends ``tensor`` to ``peer``. It is done when the peer has read it."""
        work = self._start("send")
        with self._lock:
            if self._failure is not None:
                work.finish(error=self._failure)
                return work
            line = self._line(self._senders, peer, "send")

        def run() -> None:
            try:
                data = as_bytes(readable(tensor))
                header = HEADER.pack(tag, data.numel())
                line.send(peer, torch.frombuffer(bytearray(header), dtype=torch.uint8), self.timeout)
                if data.numel():
                    line.send(peer, data, self.timeout)
            except BaseException as error:  # noqa: BLE001 - it is the caller's, on another thread
                self._fail(error)
                work.finish(error=error)
            else:
                work.finish([tensor])

        if not line.worker.submit(run):
            work.finish(error=ClosedError("the process group was destroyed"))
        return work

    def receive(self, tensor: torch.Tensor, source: int | None, tag: int) -> HostWork:
        """Receives into ``tensor`` from ``source``, or from any rank."""
        work = self._start("recv")
        posted = _Posted(work, tensor, source, tag)
        with self._lock:
            if self._failure is not None:
                work.finish(error=self._failure)
                return work
            found = self._early_for(posted)
            if found is None:
                self._posted.append(posted)
                for peer in self._sources(posted):
                    self._read(peer)
        if found is not None:
            peer, data = found
            self._deliver(posted, peer, data)
        return work

    def _start(self, name: str) -> HostWork:
        work = HostWork(name)
        if self.started is not None:
            self.started.append(work)
        return work

    def close(self, limit: float = 1.0) -> None:
        """Ends what is under way. Later operations raise ClosedError."""
        self._fail(ClosedError("the process group was destroyed"))
        with self._lock:
            lines = [*self._senders.values(), *self._readers.values()]
        # A line that waits for a peer would wait for ever.
        self._engine.abort()
        for line in lines:
            line.worker.stop(limit)

    def _sources(self, posted: _Posted) -> list[int]:
        if posted.source is not None:
            return [posted.source]
        return [peer for peer in range(self.size) if peer != self.rank]

    def _line(self, lines: dict[int, _Line], peer: int, name: str) -> _Line:
        """The line with ``peer``; under the lock."""
        if peer not in lines:
            stream = self._communicator.create_stream()
            lines[peer] = _Line(self._engine, stream, Worker(f"warplink-{name}-{peer}"))
        return lines[peer]

    def _early_for(self, posted: _Posted) -> tuple[int, torch.Tensor] | None:
        """A message that came before its receive, taken out; under the lock."""
        for peer in self._sources(posted):
            messages = self._early.get(peer, [])
            for index, (tag, data) in enumerate(messages):
                if tag == posted.tag:
                    del messages[index]
                    return peer, data
        return None

    def _wanted(self, peer: int) -> bool:
        """Whether a receive waits for a message of ``peer``; under the lock."""
        return any(posted.source in (None, peer) for posted in self._posted)

    def _read(self, peer: int) -> None:
        """Has the line from ``peer`` read as long as somebody waits for it; under the lock."""
        if peer in self._reading:
            return
        self._reading.add(peer)
        line = self._line(self._readers, peer, "receive")
        line.worker.submit(lambda: self._read_all(line, peer))

    def _read_all(self, line: _Line, peer: int) -> None:
        try:
            while True:
                with self._lock:
                    if self._failure is not None or not self._wanted(peer):
                        self._reading.discard(peer)
                        return
                self._read_one(line, peer)
        except BaseException as error:  # noqa: BLE001 - it is the callers', on another thread
            self._fail(error)

    def _read_one(self, line: _Line, peer: int) -> None:
        header = torch.empty(HEADER.size, dtype=torch.uint8)
        line.receive(peer, header, self.timeout)
        tag, length = HEADER.unpack(bytes(header.tolist()))
        with self._lock:
            posted = next(
                (p for p in self._posted if p.source in (None, peer) and p.tag == tag), None
            )
            if posted is not None:
                self._posted.remove(posted)
        if posted is not None and posted.tensor.numel() * posted.tensor.element_size() == length:
            # In place.
            written = writable(posted.tensor)
            if length:
                line.receive(peer, as_bytes(written), self.timeout)
            settle(posted.tensor, written)
            posted.work.finish([posted.tensor], source=peer)
            return
        data = torch.empty(length, dtype=torch.uint8)
        if length:
            line.receive(peer, data, self.timeout)
        if posted is None:
            with self._lock:
                # One may have been posted meanwhile.
                posted = next(
                    (p for p in self._posted if p.source in (None, peer) and p.tag == tag), None
                )
                if posted is None:
                    self._early.setdefault(peer, []).append((tag, data))
                    return
                self._posted.remove(posted)
        self._deliver(posted, peer, data)

    def _deliver(self, posted: _Posted, peer: int, data: torch.Tensor) -> None:
        expected = posted.tensor.numel() * posted.tensor.element_size()
        if expected != data.numel():
            message = (
                f"rank {self.rank}: recv: the peer sends {data.numel()} bytes; expected {expected} "
                f"(peer {peer}, tag {posted.tag}); help: give the send and its receive the same size"
            )
            error = from_kind("mismatch", message, rank=self.rank, peer=peer, operation="recv")
            posted.work.finish(error=error)
            return
        with torch.no_grad():
            written = writable(posted.tensor)
            as_bytes(written).copy_(data)
            settle(posted.tensor, written)
        posted.work.finish([posted.tensor], source=peer)

    def _fail(self, error: BaseException) -> None:
        with self._lock:
            self._failure = self._failure or error
            waiting, self._posted = self._posted, []
        for posted in waiting:
            posted.work.finish(error=self._failure)


class _Line:
    """One direction between this rank and a peer: a stream, and the thread that waits for it."""

    def __init__(
        self, engine: warplink.CollectiveEngine, stream: warplink.Stream, worker: Worker
    ) -> None:
        self.worker = worker
        self._engine = engine
        self._stream = stream

    def send(self, peer: int, data: torch.Tensor, limit: float) -> None:
        self._engine.exchange(self._stream, [(peer, data)], [])
        self._stream.synchronize(limit)

    def receive(self, peer: int, data: torch.Tensor, limit: float) -> None:
        self._engine.exchange(self._stream, [], [(peer, data)])
        self._stream.synchronize(limit)
