"""Sends and receives of CPU tensors between two ranks of a group, matched by tag.

Every ordered pair of ranks has a line of its own, in which messages arrive in the order in which they
were sent: a header with the tag, the length and the type, and with the bytes where they are few; else these follow.
A receiver reads a line only while a receive is posted that may match what comes (a header that none of them lived to
see is taken up by the next); what does not match yet is kept until something does. So tags may be received in any
order, and a receive from any rank takes the first message with its tag. A receive that times out ends alone; a line on
which something goes wrong in the middle of a message ends all messages of the group.
"""

from __future__ import annotations

import contextlib
import struct
import threading
import time
from dataclasses import dataclass
from typing import NamedTuple

import torch

import warplink
from warplink.errors import ClosedError, MismatchError, TimeoutError, WarplinkError, from_kind
from warplink.torch.arithmetic import as_bytes, readable, settle, writable
from warplink.torch.shapes import check_plain
from warplink.torch.works import HostWork, Result, Worker, Works, bare

#: Tag, length in bytes and element type.
HEADER = struct.Struct("<qQ24s")

#: Bytes of data that go with the header. Copying as many takes a small part of the time of another exchange.
INLINE = 4096


@dataclass
class _Posted:
    """A receive that waits for its message until ``end``; ``source`` is None where any rank will do."""

    work: HostWork
    tensor: torch.Tensor
    source: int | None
    tag: int
    limit: float
    end: float


class _Header(NamedTuple):
    """Header of a message."""

    tag: int
    nbytes: int
    kind: str

    @staticmethod
    def of(tensor: torch.Tensor, tag: int) -> _Header:
        return _Header(tag, tensor.numel() * tensor.element_size(), str(tensor.dtype).removeprefix("torch."))

    @staticmethod
    def unpack(data: torch.Tensor) -> _Header:
        tag, nbytes, kind = HEADER.unpack(bytes(data[: HEADER.size].tolist()))
        return _Header(tag, nbytes, kind.rstrip(b"\0").decode())

    def pack(self, data: torch.Tensor) -> torch.Tensor:
        """The header, with ``data`` if it is short."""
        packed = torch.empty(HEADER.size + INLINE, dtype=torch.uint8)
        header = HEADER.pack(self.tag, self.nbytes, self.kind.encode())
        packed[: HEADER.size] = torch.frombuffer(bytearray(header), dtype=torch.uint8)
        if self.nbytes <= INLINE:
            packed[HEADER.size :][: self.nbytes] = data
        return packed


class Messages:
    """The sends and receives of one group. Every member makes one at the same time."""

    def __init__(self, communicator: warplink.Communicator, works: Works, timeout: float) -> None:
        self.rank, self.size = communicator.rank, communicator.size
        self.timeout = timeout
        self._communicator = communicator
        # A separate engine, so that messages run concurrently with the group's collectives.
        own = communicator.subgroup(list(range(communicator.size)))
        self._engine = own.collective_engine()
        self._lock = threading.Lock()
        self._posted: list[_Posted] = []
        self._early: dict[int, list[tuple[_Header, torch.Tensor]]] = {}
        self._senders: dict[int, _Line] = {}
        self._readers: dict[int, _Line] = {}
        self._reading: set[int] = set()
        #: For each peer, sends that its line's thread has not ended.
        self._unsent: dict[int, int] = {}
        self._failure: BaseException | None = None
        self._works = works

    def send(self, tensor: torch.Tensor, peer: int, tag: int) -> HostWork:
        """Sends ``tensor`` to ``peer``. It is done when the peer has read it."""
        check_plain([tensor], [])
        limit = self.timeout
        work = self._works.start("send", limit, [tensor], peer=peer)
        with self._lock:
            if self._failure is not None:
                work.finish(error=self._failure)
                return work
            line = self._line(self._senders, peer, "send")
            # Now, unless another message is first: the thread then only waits for it to be read.
            posted = self._unsent.get(peer, 0) == 0 and line.post(peer, tensor, tag)
            self._unsent[peer] = self._unsent.get(peer, 0) + 1

        def body() -> Result:
            try:
                if not posted:
                    line.send(peer, tensor, tag)
                line.wait(limit)
            finally:
                with self._lock:
                    self._unsent[peer] -= 1
            return [tensor]

        def failed(error: BaseException) -> BaseException:
            if isinstance(error, TimeoutError):
                what = f"rank {peer} did not receive a message with tag {tag}"
                error = self._late("send", what, peer, limit, error)
            self._fail(error)
            return error

        if not line.worker.submit(lambda: work.run(body, failed)):
            work.finish(error=ClosedError("the process group was destroyed"))
        return work

    def receive(self, tensor: torch.Tensor, source: int | None, tag: int) -> HostWork:
        """Receives into ``tensor`` from ``source``, or from any rank."""
        check_plain([], [tensor])
        name = "recvAnySource" if source is None else "recv"
        limit = self.timeout
        work = self._works.start(name, limit, [], [tensor], source)
        posted = _Posted(work, tensor, source, tag, limit, time.monotonic() + limit)
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
            self._deliver(posted, *found)
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

    def _early_for(self, posted: _Posted) -> tuple[int, _Header, torch.Tensor] | None:
        """A message that came before its receive, taken out; under the lock."""
        for peer in self._sources(posted):
            messages = self._early.get(peer, [])
            for index, (header, data) in enumerate(messages):
                if header.tag == posted.tag:
                    del messages[index]
                    return peer, header, data
        return None

    def _wanted(self, peer: int) -> float | None:
        """When the first of the receives ends that wait for a message of ``peer``; None without one. Under the lock."""
        return min((p.end for p in self._posted if p.source in (None, peer)), default=None)

    def _take(self, peer: int, tag: int) -> _Posted | None:
        """The receive of a message, which waits no more; under the lock."""
        for posted in self._posted:
            if posted.source in (None, peer) and posted.tag == tag:
                self._posted.remove(posted)
                return posted
        return None

    def _read(self, peer: int) -> None:
        """Has the line from ``peer`` read as long as somebody waits for it; under the lock."""
        if peer in self._reading:
            return
        self._reading.add(peer)
        line = self._line(self._readers, peer, "receive")
        line.ask(peer)
        line.worker.submit(lambda: self._read_all(line, peer))

    def _read_all(self, line: _Line, peer: int) -> None:
        try:
            while True:
                with self._lock:
                    end = self._wanted(peer)
                    if self._failure is not None or end is None:
                        self._reading.discard(peer)
                        return
                header = line.header(peer, max(end - time.monotonic(), 0.0))
                if header is None:
                    self._expire()
                else:
                    self._read_one(line, peer, header)
        except BaseException as error:  # noqa: BLE001 - it is the callers', on another thread
            self._fail(error)

    def _expire(self) -> None:
        """Ends the receives whose time is over."""
        now = time.monotonic()
        with self._lock:
            late = [posted for posted in self._posted if posted.end <= now]
            self._posted = [posted for posted in self._posted if posted.end > now]
        for posted in late:
            who = "any rank" if posted.source is None else f"rank {posted.source}"
            what = f"no message of {who} with tag {posted.tag} came"
            posted.work.finish(error=self._late("recv", what, posted.source, posted.limit))

    def _read_one(self, line: _Line, peer: int, header: _Header) -> None:
        """Reads what follows a header."""
        with self._lock:
            posted = self._take(peer, header.tag)
        if posted is None:
            data = line.receive(peer, header, self.timeout)
            with self._lock:
                # One may have been posted meanwhile.
                posted = self._take(peer, header.tag)
                if posted is None:
                    self._early.setdefault(peer, []).append((header, data))
                    return
            self._deliver(posted, peer, header, data)
            return
        receive = posted

        def body() -> Result:
            if (wrong := self._mismatch(receive, peer, header)) is not None:
                line.receive(peer, header, self.timeout)
                raise wrong
            # In place.
            written = writable(receive.tensor)
            line.receive_into(peer, header, as_bytes(written), self.timeout)
            settle(receive.tensor, written)
            return [receive.tensor]

        def failed(error: BaseException) -> BaseException:
            # A mismatch leaves the line behind the message.
            if isinstance(error, MismatchError):
                return error
            if isinstance(error, TimeoutError):
                what = f"rank {peer} did not send the rest of a message with tag {header.tag}"
                error = self._late("recv", what, peer, self.timeout, error)
            self._fail(error)
            return error

        receive.work.run(body, failed, peer)

    def _deliver(self, posted: _Posted, peer: int, header: _Header, data: torch.Tensor) -> None:
        def body() -> Result:
            if (wrong := self._mismatch(posted, peer, header)) is not None:
                raise wrong
            written = writable(posted.tensor)
            as_bytes(written).copy_(data)
            settle(posted.tensor, written)
            return [posted.tensor]

        posted.work.run(body, source=peer)

    def _mismatch(self, posted: _Posted, peer: int, told: _Header) -> WarplinkError | None:
        """The error of a receive that does not fit the message; None where it fits."""
        wanted = _Header.of(posted.tensor, posted.tag)
        if told == wanted:
            return None
        message = (
            f"rank {self.rank}: recv: the peer sends {told.nbytes} bytes of {told.kind}; "
            f"expected {wanted.nbytes} of {wanted.kind} (peer {peer}, tag {posted.tag}); "
            "help: give the send and its receive the same type and size"
        )
        return from_kind("mismatch", message, rank=self.rank, peer=peer, operation="recv")

    def _late(
        self, name: str, what: str, peer: int | None, limit: float, cause: BaseException | None = None
    ) -> WarplinkError:
        """The error of a message that took too long."""
        message = (
            f"rank {self.rank}: {name}: {what} before the timeout of {limit} s passed; "
            "help: check that each message is sent and received, with the same tag"
        )
        error = from_kind("timeout", message, rank=self.rank, peer=peer, operation=name)
        error.__cause__ = None if cause is None else bare(cause)
        return error

    def _fail(self, error: BaseException) -> None:
        with self._lock:
            self._failure = self._failure or bare(error)
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
        #: A header that is being received.
        self._header: torch.Tensor | None = None
        #: The data that came with the last header.
        self._inline = torch.empty(0, dtype=torch.uint8)

    def send(self, peer: int, tensor: torch.Tensor, tag: int) -> None:
        """Begins to send a message. One thread at a time."""
        data = as_bytes(readable(tensor))
        header = _Header.of(tensor, tag)
        self._put(peer, header.pack(data))
        if header.nbytes > INLINE:
            self._put(peer, data)

    def _put(self, peer: int, data: torch.Tensor) -> None:
        self._engine.exchange(self._stream, [(peer, data)], [])

    def post(self, peer: int, tensor: torch.Tensor, tag: int) -> bool:
        """As ``send``; False if nothing was sent, and the line's thread is to find out why."""
        if tensor.numel() * tensor.element_size() > INLINE:
            # The second of two exchanges could fail alone.
            return False
        try:
            self.send(peer, tensor, tag)
        except Exception:  # noqa: BLE001 - it comes again
            return False
        return True

    def wait(self, limit: float) -> None:
        """Waits until the peer has read what was sent."""
        self._stream.synchronize(limit)

    def ask(self, peer: int) -> None:
        """Begins to receive the next header, unless it has; where that fails, ``header`` does."""
        if self._header is None:
            with contextlib.suppress(Exception):
                self._header = self._asked(peer)

    def _asked(self, peer: int) -> torch.Tensor:
        header = torch.empty(HEADER.size + INLINE, dtype=torch.uint8)
        self._engine.exchange(self._stream, [], [(peer, header)])
        return header

    def header(self, peer: int, limit: float) -> _Header | None:
        """The next message's; None if it does not come within ``limit`` seconds, until when it is asked for again."""
        if self._header is None:
            self._header = self._asked(peer)
        try:
            self._stream.synchronize(limit)
        except TimeoutError:
            return None
        came, self._header = self._header, None
        self._inline = came[HEADER.size :]
        return _Header.unpack(came)

    def receive(self, peer: int, header: _Header, limit: float) -> torch.Tensor:
        """The message's bytes."""
        data = torch.empty(header.nbytes, dtype=torch.uint8)
        self.receive_into(peer, header, data, limit)
        return data

    def receive_into(self, peer: int, header: _Header, data: torch.Tensor, limit: float) -> None:
        """The same, into ``data``."""
        if header.nbytes <= INLINE:
            data.copy_(self._inline[: header.nbytes])
            return
        self._engine.exchange(self._stream, [], [(peer, data)])
        self._stream.synchronize(limit)
