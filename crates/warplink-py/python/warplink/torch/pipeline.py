"""Parts of tensors that travel one by one while PyTorch computes on those that are there.

Both pipelines have memory of their own, which is exchanged when they are made, by all ranks at the same
time; tensors are copied into it. A run enqueues work on the caller's current stream and on a stream of the
workspace for sent data, without waiting on the host. On the host device, where PyTorch computes at
once, it waits for each part. A run that an exception ends in the middle ends the communicator too: transfers
that were posted on one side alone would have the next run wait for its timeout.
"""

from __future__ import annotations

from typing import Any, Callable

import torch

import warplink
from warplink.torch.workspace import Workspace


#: Receives are posted before sends, on the caller's stream; one that gets would wait there for the peer's send.
PROTOCOL = "put"


class _Parts:
    """Memory for a part of each rank: ``[ranks, nbytes]``."""

    def __init__(self, space: Workspace, nbytes: int) -> None:
        size = space.communicator.size
        self._nbytes = nbytes
        (self._region,) = space.alloc([size * nbytes])
        self.bytes = torch.from_dlpack(self._region.view([size, nbytes], "u8"))

    def region(self, rank: int) -> warplink.Region:
        return self._region.slice(rank * self._nbytes, (rank + 1) * self._nbytes)


class _Pipeline:
    """Transfers with every peer, in an order in which each step is a permutation of the ranks."""

    def __init__(self, space: Workspace) -> None:
        self._space = space
        self._size, self._rank = space.communicator.size, space.communicator.rank
        self._sending = space.communicator.create_stream(high_priority=True)
        self._computed = space.communicator.create_event()
        self._sends: list[warplink.Transfer] = []
        self._receives: list[warplink.Transfer] = []

    def _exchange(self, requests: list[Any]) -> None:
        """Sends and receives, in turn."""
        transfers = self._space.communicator.exchange(requests)
        self._sends, self._receives = list(transfers[::2]), list(transfers[1::2])

    def _post(self, sends: list[warplink.Transfer], stream: warplink.Stream) -> None:
        """Sends what ``stream`` has computed so far."""
        stream.record(self._computed)
        self._sending.wait_event(self._computed)
        warplink.post_all(sends, self._sending)

    def _finish(self, stream: warplink.Stream) -> None:
        """Behind this, sent buffers may be overwritten."""
        warplink.wait_all(self._sends, stream)
        self._space.settle(stream)


class GatherPipeline(_Pipeline):
    """Every rank's part goes to all ranks."""

    def __init__(self, space: Workspace, nbytes: int) -> None:
        super().__init__(space)
        self.parts = _Parts(space, nbytes)
        requests: list[Any] = []
        for step in range(1, self._size):
            before, after = (self._rank - step) % self._size, (self._rank + step) % self._size
            requests.append(warplink.Send(self.parts.region(self._rank), before, step, PROTOCOL))
            requests.append(warplink.Receive(self.parts.region(after), after, step, PROTOCOL))
        self._exchange(requests)

    def run(self, own: torch.Tensor, compute: Callable[[int, torch.Tensor], None]) -> None:
        """``compute(rank, bytes)`` gets the part of every rank, this rank's first, then as they arrive."""
        with self._space.whole():
            stream = self._space.stream
            self.parts.bytes[self._rank].copy_(own)
            warplink.post_all(self._receives, stream)
            self._post(self._sends, stream)
            compute(self._rank, self.parts.bytes[self._rank])
            for step, receive in enumerate(self._receives, 1):
                receive.wait(stream)
                self._space.settle(stream)
                source = (self._rank + step) % self._size
                compute(source, self.parts.bytes[source])
            self._finish(stream)


class ScatterPipeline(_Pipeline):
    """Every rank has a part for every rank."""

    def __init__(self, space: Workspace, nbytes: int) -> None:
        super().__init__(space)
        self._sent, self.received = _Parts(space, nbytes), _Parts(space, nbytes)
        requests: list[Any] = []
        for step in range(1, self._size):
            target, source = (self._rank + step) % self._size, (self._rank - step) % self._size
            requests.append(warplink.Send(self._sent.region(target), target, step, PROTOCOL))
            requests.append(warplink.Receive(self.received.region(source), source, step, PROTOCOL))
        self._exchange(requests)

    def run(self, compute: Callable[[int, torch.Tensor], None]) -> torch.Tensor:
        """``compute(rank, bytes)`` writes the part for a rank, this rank's last. Returns the bytes that
        all ranks have for this one, by rank, which are good until the next run."""
        with self._space.whole():
            stream = self._space.stream
            warplink.post_all(self._receives, stream)
            for step, send in enumerate(self._sends, 1):
                target = (self._rank + step) % self._size
                compute(target, self._sent.bytes[target])
                self._post([send], stream)
            compute(self._rank, self.received.bytes[self._rank])
            warplink.wait_all(self._receives, stream)
            self._finish(stream)
        return self.received.bytes
