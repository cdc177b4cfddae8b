"""Learning what goes wrong with calls on streams for which no host waits."""

from __future__ import annotations

import threading

import warplink
from warplink.errors import TimeoutError, WarplinkError
from warplink.torch.works import Worker


class Watch:
    """A thread that waits for what was enqueued last, since the application may never do so by Warplink.

    Calls that it follows are done one after another, on any streams, so the last one is enough. It asks only a stream of
    its own, and events, which a graph that others record meanwhile does not mind.
    """

    def __init__(self, communicator: warplink.Communicator, timeout: float) -> None:
        #: Seconds that a call may take, with what its stream was given before it.
        self.timeout = timeout
        self._communicator = communicator
        self._stream = communicator.create_stream()
        self._worker = Worker("warplink-watch")
        self._lock = threading.Lock()
        self._last: warplink.Event | None = None
        self._failure: WarplinkError | None = None

    def check(self) -> None:
        """Raises what went wrong so far."""
        if self._failure is not None:
            raise self._failure
        self._communicator.check()

    def follow(self, stream: warplink.Stream) -> None:
        """Waits for what ``stream``, which is not recording a graph, was given so far. Does not block."""
        event = self._communicator.create_event()
        stream.record(event)
        with self._lock:
            waits, self._last = self._last is not None, event
        if not waits:
            self._worker.submit(self._wait)

    def _wait(self) -> None:
        """Waits until nothing is left to wait for."""
        while True:
            event = self._last
            try:
                self._stream.wait_event(event)
                self._stream.synchronize(self.timeout)
            except WarplinkError as error:
                self._failure = self._failure or error
                if isinstance(error, TimeoutError):
                    # Kernels would wait for ever, and the host for them.
                    self._communicator.abort(f"a call took longer than {self.timeout} s: {error}")
                return
            with self._lock:
                if self._last is event:
                    self._last = None
                    return

    def close(self, limit: float = 1.0) -> None:
        """Ends the thread, when it is done or in ``limit`` seconds."""
        self._worker.stop(limit)
