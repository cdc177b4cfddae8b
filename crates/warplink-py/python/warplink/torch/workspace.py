"""Direct operations of a group on one machine: buffers that peers reach, and overlap."""

from __future__ import annotations

import contextlib
import math
import threading
from typing import Any, Callable, Iterator, Sequence, TypeVar

import torch

import warplink
from warplink.errors import ClosedError, InvalidArgumentError, OutOfMemoryError, TimeoutError, WarplinkError
from warplink.torch import error_handling, joining
from warplink.torch.agreement import LOSSES, check_alike, made_by_all, new_in_a_graph
from warplink.torch.history import REPORT_SECONDS, History
from warplink.torch.joining import Members

#: How many plans of fused operations, each with memory of its own, a group keeps on a device.
MAX_PLANS = 64

#: How many calls a group remembers to have compared, of those without a plan, and to have tried.
MAX_COMPARED = 1024

T = TypeVar("T")

#: Bytes by which members find whether they reach one another's memory.
_PROBE_BYTES = 64

#: Aborts waits for other members.
_ENDS = (TimeoutError, *LOSSES)

#: The order among kernels of this process that wait for other ranks, of each device.
_orders: dict[torch.device, warplink.Order] = {}


def current_handle(device: torch.device) -> int:
    """The handle of the caller's current stream of a GPU; 0 on the host device, which has one."""
    # A fraction of what it takes to make PyTorch's object for it.
    return int(torch._C._cuda_getCurrentRawStream(device.index)) if device.type == "cuda" else 0


def is_recording(device: torch.device) -> bool:
    """Whether the caller's current stream of ``device`` records a graph; that of the host device never does."""
    if device.type != "cuda":
        return False
    if torch.cuda.current_device() == device.index:
        # Most often, and making a device the current one takes longer than all else of this.
        return torch.cuda.is_current_stream_capturing()
    with torch.cuda.device(device):
        return torch.cuda.is_current_stream_capturing()


def _keep(kept: dict[Any, Any], key: Any, value: Any) -> None:
    """Adds to ``kept``, which loses the oldest entry where there are too many."""
    if key not in kept and len(kept) == MAX_COMPARED:
        del kept[next(iter(kept))]
    kept[key] = value


class Workspace:
    """A group's communicator on one device, and what is made from it."""

    def __init__(
        self,
        communicator: warplink.Communicator,
        job: warplink.Job | None,
        buffer_size: int,
        device: torch.device = torch.device("cpu"),
        timeout: float = 0.0,
        members: Members | None = None,
    ) -> None:
        """``members``, if given, exchange their last calls after a failure, to report the first difference."""
        self.communicator = communicator
        #: The device as PyTorch names it.
        self.device = device
        self.executor = communicator.executor()
        #: Plans of fused operations by cache key, the most recently used last.
        self.plans: dict[Any, Any] = {}
        #: Calls whose plans do not overlap, by cache key.
        self.without_overlap: dict[Any, None] = {}
        #: Whether calls are fused, by cache key, and whether members time the alternatives.
        self.decisions: dict[Any, Any] = {}
        self.tries = device.type == "cuda"
        #: Calls without a plan that all members were found to make alike.
        self._compared: dict[Any, None] = {}
        self.lock = threading.Lock()
        self.turns = communicator.turns()
        self.order = _orders.setdefault(device, warplink.Order())
        #: Collectives with an epilogue; made at the first one.
        self._collectives: warplink.Collectives | None = None
        #: Background wait for work enqueued on GPU streams; None on the host device, where the caller waits.
        self.watch: warplink.Watch | None = None
        #: Whether a turn has raised what the watch found.
        self._told = False
        if device.type == "cuda":
            self.watch = communicator.watch(self.turns, timeout, error_handling.grace())
        #: The keys of plans that graphs of the application's have recorded.
        self._recorded: set[Any] = set()
        self._job = job
        self._buffer_size = buffer_size
        #: Every rank's buffer of each number.
        self._buffers: dict[int, list[Any]] = {}
        #: Barriers by the ranks that they are of.
        self._barriers: dict[tuple[int, ...], warplink.StreamBarrier] = {}
        #: Streams by their handles, which PyTorch never frees, as it knows them and as Warplink does. On the host device,
        #: there is one of the workspace's own, which PyTorch does not know.
        self.streams: dict[int, tuple[torch.cuda.Stream | None, warplink.Stream]] = {}
        #: State for calls that recur, which run in native code.
        self.state = warplink.CallState(
            self,
            device,
            self.lock,
            self.plans,
            self.decisions,
            self.streams,
            self.turns,
            self.order,
            self.watch,
            torch._C._cuda_getCurrentRawStream if device.type == "cuda" else None,
        )
        self._history = None if members is None else History(members, self.state)

    @contextlib.contextmanager
    def turn(self, kernels_wait: bool = False) -> Iterator[warplink.Stream]:
        """The caller's stream, for work on the workspace's memory: it is ordered after the work that other streams have
        enqueued on that memory, and before the work that they enqueue later. One thread at a time has a turn. With
        ``kernels_wait``, kernels of this turn wait for other ranks, and are ordered among those of all groups of the GPU.
        Raises the errors of earlier turns' work; MismatchError where that or this took too long, and ranks called other
        things."""
        with self.lock, self._explained():
            self.check()
            stream = self.stream
            if kernels_wait:
                self._order_behind_others(stream)
            self.turns.begin(stream)
            try:
                yield stream
            except BaseException:
                # Report the first failure, not that a communicator which has ended takes no turns.
                with contextlib.suppress(WarplinkError):
                    self.turns.end(stream)
                raise
            self.turns.end(stream)

    def launch(self, key: Any, make: Callable[[], Any], addresses: Sequence[int]) -> None:
        """Runs the plan for ``key``, which ``make`` makes if there is none, on tensors at ``addresses``, in a turn of the
        caller's stream. Raises what a turn and the making of a plan raise."""
        with self.lock:
            try:
                self.check()
                plan = self.plan(key, make)
                stream = self.stream
                if plan.has_collectives:
                    self._order_behind_others(stream)
                plan.launcher.launch(self.turns, stream, addresses)
                self.settle(stream)
            except _ENDS as error:
                self._explain(error)
                raise

    def _order_behind_others(self, stream: warplink.Stream) -> None:
        """Orders kernels that wait for other ranks, on ``stream``, among those of all groups of the GPU."""
        self.order.add(self.turns)
        self.order.follow(self.turns, stream)

    @contextlib.contextmanager
    def compared(self, call: Any) -> Iterator[None]:
        """For ``call``, which runs as a collective and a matmul. The first time, it blocks until every member has called
        this.

        Raises MismatchError where a member calls something else, with a plan or without."""
        with self.lock, self._explained():
            self.check()
            self.state.note(call)
            if call not in self._compared:
                check_alike(self.communicator, call)
                _keep(self._compared, call, None)
        with self._explained():
            yield

    @contextlib.contextmanager
    def _explained(self) -> Iterator[None]:
        """Explains what ends it."""
        try:
            yield
        except _ENDS as error:
            self._explain(error)
            raise

    def explain(self, error: BaseException) -> None:
        """Raises MismatchError if ``error`` comes of ranks that called other things."""
        if isinstance(error, _ENDS):
            self._explain(error)

    def _explain(self, error: WarplinkError) -> None:
        """Raises MismatchError for a timeout, or a loss that may come from that of another member, if ranks called other
        things."""
        # Behind the first failure, members may go on differently.
        history, self._history = self._history, None
        limit = REPORT_SECONDS if isinstance(error, TimeoutError) else 0.0
        if history is not None and (difference := history.difference(limit)) is not None:
            raise difference from error

    @contextlib.contextmanager
    def whole(self, *common: type[BaseException]) -> Iterator[None]:
        """Scope of a collective step. An exception on this member aborts the communicator with that reason, since the
        others would wait for it; except exceptions that every member gets: those that end the communicator anyway, and
        ``common``."""
        try:
            yield
        except BaseException as error:
            if not isinstance(error, (*_ENDS, ClosedError, *common)):
                reason = f"a fused operation was left in the middle: {type(error).__name__}: {error}"
                self.communicator.abort(reason)
            raise

    def plan(self, key: Any, make: Callable[[], Any]) -> Any:
        """The plan for ``key``, made by all ranks at the same time if there is none. Ranks use the same
        keys in the same order, and so drop the same ones. One that a graph has recorded stays: the graph may be
        launched as long as the group is there.

        Raises MismatchError where ranks that make a plan make others, and InvalidArgumentError where there is none and
        the stream records a graph."""
        recording = is_recording(self.device)
        if recording and key not in self.plans:
            raise new_in_a_graph(self.communicator.rank, str(key))
        self.state.note(key)
        found = self.plans.pop(key, None)
        if found is None:
            others = [other for other in self.plans if other not in self._recorded]
            for other in others[: max(0, len(others) + 1 - MAX_PLANS)]:
                del self.plans[other]
            check_alike(self.communicator, key)
            with self.whole(WarplinkError), torch.inference_mode(False), torch.no_grad():
                # The plan is used in every mode.
                found = make()
        self.plans[key] = found
        if recording:
            self._recorded.add(key)
        return found

    def decide(self, key: Any, decision: Any) -> None:
        """Keeps ``decision`` for calls of ``key``."""
        _keep(self.decisions, key, decision)

    def plan_without_overlap(self, key: Any) -> bool:
        """Has the next call of ``key`` make a plan of the collective and the matmul; not where there is one, or where a graph has
        recorded another, of which it returns False. Every member does, or none."""
        with self.lock:
            plan = self.plans.get(key)
            if plan is None or key in self._recorded or getattr(plan, "has_collectives", True):
                return False
            del self.plans[key]
            _keep(self.without_overlap, key, None)
            self.decisions.pop(key, None)
            return True

    def forget(self, key: Any) -> None:
        """Drops the plan for ``key``, unless a graph has recorded it. Every member does, or none."""
        with self.lock:
            if key not in self._recorded:
                self.plans.pop(key, None)

    def collectives(self) -> warplink.Collectives:
        """The members' collectives, for those with an epilogue; made by all members at the same time, at the first one.
        Within a turn."""
        if self._collectives is None:
            what = "the first fused collective"
            if is_recording(self.device):
                raise new_in_a_graph(self.communicator.rank, what)
            check_alike(self.communicator, what)
            with self.whole(WarplinkError):
                self._collectives = self.communicator.collectives(path="direct")
        return self._collectives

    def alloc(self, nbytes: Sequence[int]) -> list[warplink.Region]:
        """Memory that peers reach, of as many bytes each. All members call this at the same time; where one has no
        room, all of them fail."""

        def make() -> list[warplink.Region]:
            return [self.communicator.alloc(each) for each in nbytes]

        def make_with_room() -> list[warplink.Region]:
            try:
                return make()
            except OutOfMemoryError:
                if self.device.type != "cuda":
                    raise
                # PyTorch may keep what it does not use.
                torch.cuda.empty_cache()
                return make()

        made = made_by_all(self.communicator, "taking memory for a fused operation", make_with_room)
        if made is None:
            raise OutOfMemoryError(
                f"a member lacks memory for {sum(nbytes)} bytes that a fused operation shares; help: see the log of "
                "the members, and leave more memory to Warplink"
            )
        return made

    @property
    def stream(self) -> warplink.Stream:
        """The caller's current stream of a GPU; on the host device, one of the workspace's own."""
        return self.current_streams()[1]

    def current_streams(self) -> tuple[Any, warplink.Stream]:
        """The caller's current stream of the GPU, as PyTorch knows it and as Warplink does; on the host device, None and
        ``stream``."""
        handle = current_handle(self.device)
        found = self.streams.get(handle)
        if found is None:
            if self.device.type == "cuda":
                current = torch.cuda.current_stream(self.device)
                found = current, self.communicator.borrow_stream(handle, current)
            else:
                found = None, self.communicator.create_stream()
            self.streams[handle] = found
        return found

    def settle(self, stream: warplink.Stream) -> None:
        """On the host device, where PyTorch has no streams, blocks until ``stream`` is done."""
        if self.communicator.device == "host":
            stream.synchronize()

    def tensor(
        self, buffer: int, rank: int, shape: list[int], dtype: torch.dtype, storage_offset: int
    ) -> torch.Tensor:
        """A tensor in the buffer of ``rank`` with the number ``buffer``."""
        first = storage_offset * dtype.itemsize
        last = first + math.prod(shape) * dtype.itemsize
        if not 0 <= first < last <= self._buffer_size:
            raise InvalidArgumentError(
                f"{shape} of {dtype} at offset {storage_offset} takes bytes {first} to {last}; "
                f"expected some of the buffer's {self._buffer_size}"
            )
        buffers = self._exchange_buffers(buffer)
        if not 0 <= rank < len(buffers):
            raise InvalidArgumentError(f"there is no rank {rank}; expected one below {len(buffers)}")
        # As bytes, since not every element type of PyTorch has a name in Warplink.
        view = buffers[rank].slice(first, last).view([last - first], "u8")
        with torch.inference_mode(False):
            return torch.from_dlpack(view).view(dtype).view(shape)

    def _exchange_buffers(self, number: int) -> list[Any]:
        """Every rank's buffer of a number, mapped here; made at the first call, by all ranks at the same time."""
        with self.lock:
            if (known := self._buffers.get(number)) is not None:
                return known
            if is_recording(self.device):
                raise new_in_a_graph(self.communicator.rank, "get_p2p_buffer")
            check_alike(self.communicator, ("get_p2p_buffer", number))
            own = self.communicator.alloc(self._buffer_size)
            made = self._share(own)
            self._buffers[number] = made
            return made

    def reaches_all(self) -> bool:
        """Whether every member maps memory of every other one, the same on all of them; logs the reason if not. All
        members call this at the same time, and it blocks until they have."""
        what = "reaching the memory of the group's members"
        own = made_by_all(self.communicator, what, lambda: self.communicator.alloc(_PROBE_BYTES))
        return own is not None and made_by_all(self.communicator, what, lambda: self._share(own)) is not None

    def _share(self, own: warplink.Region) -> list[Any]:
        """Every member's region, mapped here; ``own`` for this one. All members call this at the same time."""
        return [own if region is None else region for region in self.communicator.share(own)]

    def barrier(self, ranks: Sequence[int] | None = None) -> None:
        """A barrier of the current streams of ``ranks``, this one among them, or of all members."""
        comm = self.communicator
        members = tuple(range(comm.size)) if ranks is None else tuple(sorted(ranks))
        others = set(members) - {comm.rank}
        if len(others) + 1 != len(members) or not others <= set(range(comm.size)):
            raise InvalidArgumentError(
                f"a barrier of ranks {list(members)} on rank {comm.rank}; expected different ones below {comm.size}, and "
                "this one"
            )
        with self.turn() as stream:
            barrier = self._barriers.get(members)
            if barrier is None and is_recording(self.device):
                raise new_in_a_graph(comm.rank, "intra_node_barrier")
            if len(members) == comm.size:
                # Of a part, the others make other calls meanwhile.
                self.state.note("intra_node_barrier")
            if barrier is None:
                of = comm if len(members) == comm.size else comm.subgroup(members)
                barrier = self._barriers[members] = of.stream_barrier()
            barrier.enqueue(stream)
        with self._explained():
            self.settle(stream)

    @property
    def timeout(self) -> float | None:
        """Seconds that the work of a turn may take; None on the host device."""
        return None if self.watch is None else self.watch.timeout

    @timeout.setter
    def timeout(self, timeout: float) -> None:
        if self.watch is not None:
            self.watch.timeout = timeout

    def check(self) -> None:
        """Raises what went wrong so far."""
        try:
            if self.watch is not None:
                self.watch.check()
        except WarplinkError:
            self._told = True
            raise

    def abort(self, reason: str) -> None:
        """Ends the members' waits for this one."""
        if self._job is not None:
            self._job.abort(reason)

    def close(self) -> None:
        """Releases all resources. Tensors of the buffers must not be used any more. Raises what went wrong with the
        work of turns, unless a turn has."""
        self.state.close()
        self.order.remove(self.turns)
        self.plans.clear()
        self._buffers.clear()
        self._barriers.clear()
        self._collectives = None
        try:
            if self.watch is not None:
                self.watch.close()
                if not self._told:
                    self.check()
        finally:
            if self._job is not None:
                joining.leave(self._job)
