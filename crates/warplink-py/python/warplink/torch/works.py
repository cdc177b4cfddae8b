"""Handles of operations that run on a thread, and the thread that runs them in order."""

from __future__ import annotations

import contextlib
import copy
import queue
import threading
from datetime import timedelta
from typing import Any, Callable, Sequence

import torch
import torch.distributed as dist

import warplink
from warplink.errors import WarplinkError, from_kind
from warplink.torch import flight_recorder, profiling
from warplink.torch.workspace import Workspace, is_recording

#: Result of an operation: the tensors that its future holds.
Result = Any

#: Seconds for which a thread of a completer waits for more.
IDLE_SECONDS = 5.0


def again(error: BaseException) -> BaseException:
    """A copy of ``error`` to raise, which lengthens the copy's traceback alone; itself where it has no copies."""
    try:
        made = copy.copy(error)
    except Exception:  # noqa: BLE001 - exceptions of others are made in any way
        return error
    if type(made) is not type(error):
        return error
    made.__cause__ = error.__cause__
    return made.with_traceback(error.__traceback__)


def bare(error: BaseException) -> BaseException:
    """A copy of ``error`` to keep: without the traceback, which holds tensors."""
    made = again(error)
    return made if made is error else made.with_traceback(None)


class _Work(dist.Work):
    """Methods of a work that follow from others."""

    _result: Result = None

    def synchronize(self) -> None:
        self.wait()

    def is_success(self) -> bool:
        return self.is_completed() and self.exception() is None

    def result(self) -> Result:
        self.wait()
        return self._result


class HostWork(_Work):
    """An operation on CPU tensors under way; what works on it does so in the mode of the thread that made it."""

    def __init__(
        self,
        name: str,
        rank: int,
        completer: Completer,
        event: profiling.Event | None = None,
        recorded: flight_recorder.Call | None = None,
    ) -> None:
        super().__init__()
        self._name, self._rank = name, rank
        self._completer = completer
        self._event = event
        self._recorded = recorded
        self._is_inference = torch.is_inference_mode_enabled()
        self._lock = threading.Lock()
        self._has_ended = False
        #: Set once it has ended and its future, if there is one, has its value.
        self._done = threading.Event()
        self._error: BaseException | None = None
        self._source = -1
        self._future: torch.futures.Future[Any] | None = None

    def run(
        self,
        body: Callable[[], Result],
        failed: Callable[[BaseException], BaseException] | None = None,
        source: int = -1,
    ) -> None:
        """Completes the work with the result of ``body``, or with its error, converted by ``failed`` if given."""
        if self._recorded is not None:
            self._recorded.start()
        try:
            with self._mode():
                result = body()
        except BaseException as error:  # noqa: BLE001 - it is the caller's, on another thread
            self.finish(error=error if failed is None else failed(error))
        else:
            self.finish(result, source=source)

    def finish(
        self, result: Result = None, error: BaseException | None = None, source: int = -1
    ) -> None:
        """Ends it, with its result or its error; ``source`` is the rank that was received from."""
        with self._lock:
            if self._has_ended:
                return
            self._result, self._error, self._source = result, error, source
            self._has_ended = True
            future = self._future
        if self._event is not None:
            self._event.end()
        if self._recorded is not None:
            self._recorded.end(error)
        if future is None:
            self._done.set()
        else:
            # Callbacks may wait for later work of this thread.
            self._completer.submit(lambda: self._tell(future))

    def _mode(self) -> contextlib.AbstractContextManager[Any]:
        return torch.inference_mode() if self._is_inference else contextlib.nullcontext()

    def _tell(self, future: torch.futures.Future[Any]) -> None:
        with self._mode():
            if self._error is None:
                future.set_result(self._result)
            else:
                future.set_exception(again(self._error))

    def wait(self, timeout: timedelta = timedelta(0)) -> bool:
        """Blocks until it is done, its future too. Raises its error, and TimeoutError after ``timeout`` if that is
        not 0."""
        limit = timeout.total_seconds() if timeout else 0.0
        # An operation ends by itself at the group's timeout; the rest is for operations queued before it.
        if not self._done.wait(limit if limit > 0 else None):
            message = f"rank {self._rank}: {self._name}: timed out after {limit} s waiting for its end"
            raise from_kind("timeout", message, rank=self._rank, operation=self._name)
        if self._error is not None:
            raise again(self._error)
        return True

    def is_completed(self) -> bool:
        return self._done.is_set()

    def exception(self) -> BaseException | None:
        return self._error

    def source_rank(self) -> int:
        self.wait()
        return self._source

    def _source_rank(self) -> int:
        return self.source_rank()

    def get_future(self) -> torch.futures.Future[Any]:
        with self._lock:
            if self._future is not None:
                return self._future
            future: torch.futures.Future[Any] = torch.futures.Future()
            # The first of its callbacks, which are called in order when it has its value.
            future.add_done_callback(lambda _: self._done.set())
            self._future = future
            has_ended = self._has_ended
        if has_ended:
            self._tell(future)
        return future


class GpuWork(_Work):
    """An operation of ``space`` that was enqueued on a stream, which PyTorch and Warplink know as ``streams``.

    ``event`` marks its end; None where the caller's own stream did it, which is asked only if need be. ``check`` raises
    what has gone wrong so far. With a ``limit``, every wait blocks until the stream is done, for so many seconds, and raises
    what went wrong on it, but where the caller records a graph.
    """

    def __init__(
        self,
        result: Result,
        space: Workspace,
        streams: tuple[torch.cuda.Stream, warplink.Stream],
        event: warplink.Event | None,
        check: Callable[[], None],
        limit: float | None = None,
    ) -> None:
        super().__init__()
        self._result = result
        self._space = space
        self._stream, self._borrowed = streams
        self._event = event
        self._check = check
        self._limit = limit
        self._future: torch.futures.Future[Any] | None = None

    def blocks(self, limit: float) -> None:
        """From now on, every wait blocks until it is done, for ``limit`` seconds."""
        self._limit = limit

    def _done(self) -> warplink.Event:
        """An event that is reached when it is done, or later."""
        if self._event is None:
            self._event = self._borrowed.mark()
        return self._event

    def wait(self, timeout: timedelta = timedelta(0)) -> bool:
        """Has the caller's current stream wait for it. With a ``timeout``, blocks until it is done, and raises what
        another rank did wrong, or TimeoutError after that time."""
        self._check()
        if timeout:
            self._borrowed.synchronize(timeout.total_seconds())
        elif self._limit is not None and not is_recording(self._space.device):
            self._borrowed.synchronize(self._limit)
        self.block_current_stream()
        return True

    def block_current_stream(self) -> None:
        """Has the caller's current stream wait for it. The host never waits, and nothing is raised."""
        current = self._space.stream
        if current.raw != self._borrowed.raw:
            current.wait_event(self._done())

    def is_completed(self) -> bool:
        try:
            return self._done().is_reached()
        except WarplinkError:
            # A failure ends the stream's waits, too.
            return self.exception() is not None

    def exception(self) -> BaseException | None:
        try:
            self._check()
        except WarplinkError as error:
            return error
        return None

    def get_future(self) -> torch.futures.Future[Any]:
        if self._future is None:
            self._future = torch.futures.Future(devices=[self._stream.device])
            # Callbacks of the future are ordered behind the stream's work so far.
            with torch.cuda.stream(self._stream):
                self._future.set_result(self._result)
        return self._future


class WorkGroup(dist.Work):
    """Several operations as one."""

    def __init__(self, works: list[Any]) -> None:
        super().__init__()
        self._works = works

    def wait(self, timeout: timedelta = timedelta(0)) -> bool:
        for work in self._works:
            work.wait(timeout) if timeout else work.wait()
        return True

    def synchronize(self) -> None:
        for work in self._works:
            work.synchronize()

    def block_current_stream(self) -> None:
        for work in self._works:
            work.block_current_stream()

    def is_completed(self) -> bool:
        return all(work.is_completed() for work in self._works)

    def is_success(self) -> bool:
        return all(work.is_success() for work in self._works)

    def exception(self) -> BaseException | None:
        return next((error for error in (w.exception() for w in self._works) if error), None)

    def result(self) -> Result:
        return [tensor for work in self._works for tensor in work.result()]

    def get_future(self) -> torch.futures.Future[Any]:
        futures = torch.futures.collect_all([work.get_future() for work in self._works])
        return futures.then(
            lambda all_of_them: [t for one in all_of_them.value() for t in (one.value() or [])]
        )


def given_to(space: Workspace) -> dist.Work:
    """Work that the caller's current stream has of ``space`` so far; on the host device, it is done."""
    if space.device.type != "cuda":
        return WorkGroup([])
    return GpuWork([], space, space.current_streams(), None, space.check)


class Worker:
    """A thread that does one thing after another. It starts with the first and holds nothing."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._queue: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None
        self._stopped = False

    def submit(self, job: Callable[[], None]) -> bool:
        """Has ``job`` done after what was submitted before; False once it was stopped."""
        with self._lock:
            if self._stopped:
                return False
            if self._thread is None:
                thread = threading.Thread(
                    target=_serve, args=(self._queue,), name=self._name, daemon=True
                )
                thread.start()
                self._thread = thread
            self._queue.put(job)
            return True

    def stop(self, limit: float) -> bool:
        """Ends the thread after what was submitted; False if it is not done within ``limit`` seconds."""
        with self._lock:
            self._stopped = True
            thread = self._thread
            if thread is None:
                return True
            self._queue.put(None)
        if thread is not threading.current_thread():
            thread.join(limit)
        return not thread.is_alive()


class Completer:
    """Threads that give futures their values and run the callbacks: as many as there are callbacks that wait for
    something. They start when they are needed and end when they are not."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._jobs: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        #: Threads that no job was put for.
        self._idle = 0

    def submit(self, job: Callable[[], None]) -> None:
        """Has ``job`` done at once."""
        with self._lock:
            self._jobs.put(job)
            if self._idle:
                self._idle -= 1
                return
        try:
            threading.Thread(target=self._serve, name="warplink-futures", daemon=True).start()
        except RuntimeError:
            # The interpreter ends, and starts no thread any more.
            self._jobs.get_nowait()()

    def _serve(self) -> None:
        torch.set_grad_enabled(False)
        while (job := self._next()) is not None:
            job()
            # Tensors of a job that is done are not kept until the next.
            del job
            with self._lock:
                self._idle += 1

    def _next(self) -> Callable[[], None] | None:
        """The next job; None after a while without one."""
        try:
            return self._jobs.get(timeout=IDLE_SECONDS)
        except queue.Empty:
            with self._lock:
                # Threads that are not idle are as many as there are jobs.
                if not self._idle:
                    return self._jobs.get()
                self._idle -= 1
                return None


class Works:
    """Makes the works of one group's CPU tensors."""

    def __init__(self, source: profiling.Source) -> None:
        self.source = source
        self.noted = Noted()
        self._completer = Completer()
        self._recorder = flight_recorder.recorder()

    def start(
        self,
        name: str,
        limit: float,
        inputs: Sequence[torch.Tensor] = (),
        outputs: Sequence[torch.Tensor] = (),
        peer: int | None = None,
        messages: Sequence[flight_recorder.Message] = (),
    ) -> HostWork:
        """A work of an operation that begins, with ``peer`` if it is a message, or with the ``messages`` of a batch, and may
        take ``limit`` seconds; noted where calls are coalesced."""
        event = profiling.begin(self.source, name, inputs, outputs)
        recorded = None
        if self._recorder is not None:
            recorded = self._recorder.record(self.source, name, inputs, outputs, limit, peer, messages)
        work = HostWork(name, self.source.rank, self._completer, event, recorded)
        self.noted.extend([work])
        return work


class Noted(threading.local):
    """The works that a thread has started since it began to coalesce calls; None where it does not."""

    works: list[Any] | None = None

    def extend(self, works: list[Any]) -> None:
        """Notes ``works``, if calls are coalesced."""
        if self.works is not None:
            self.works.extend(works)

    def take(self) -> list[Any]:
        """Returns the noted works and stops noting."""
        works, self.works = self.works or [], None
        return works


def _serve(jobs: queue.SimpleQueue[Callable[[], None] | None]) -> None:
    torch.set_grad_enabled(False)
    while (job := jobs.get()) is not None:
        job()
        # Tensors of a job that is done are not kept until the next.
        del job
