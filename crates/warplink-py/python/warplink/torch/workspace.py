"""What the members of a group on one machine do directly: buffers that peers reach, and overlap."""

from __future__ import annotations

import math
import threading
from typing import Any, Callable

import torch

import warplink
from warplink.errors import InvalidArgumentError
from warplink.torch import joining

#: How many plans of fused operations, each with memory of its own, a group keeps on a device.
MAX_PLANS = 64

#: Warplink's names of PyTorch's element types.
DTYPES = {
    torch.float16: "f16",
    torch.bfloat16: "bf16",
    torch.float32: "f32",
    torch.float64: "f64",
    torch.int8: "i8",
    torch.int16: "i16",
    torch.int32: "i32",
    torch.int64: "i64",
    torch.uint8: "u8",
    torch.bool: "bool",
    torch.complex64: "c64",
    torch.complex128: "c128",
}


def current_handle(device: torch.device) -> int:
    """The handle of the caller's current stream of a GPU."""
    # A fraction of what it takes to make PyTorch's object for it.
    return int(torch._C._cuda_getCurrentRawStream(device.index))


class Workspace:
    """A group's communicator on one device, and what is made from it."""

    def __init__(
        self,
        communicator: warplink.Communicator,
        job: warplink.Job | None,
        buffer_size: int,
        device: torch.device = torch.device("cpu"),
    ) -> None:
        self.communicator = communicator
        #: The device as PyTorch names it.
        self.device = device
        self.executor = communicator.executor()
        #: Plans of fused operations by what they are for, the one that was used last at the end.
        self.plans: dict[Any, Any] = {}
        self.lock = threading.Lock()
        self._job = job
        self._buffer_size = buffer_size
        self._buffers: list[Any] | None = None
        self._barrier: warplink.StreamBarrier | None = None
        self._own_stream: warplink.Stream | None = None
        #: Streams of PyTorch's by their handles, which PyTorch never frees, as it knows them and as Warplink does.
        self._borrowed: dict[int, tuple[torch.cuda.Stream, warplink.Stream]] = {}

    def plan(self, key: Any, make: Callable[[], Any]) -> Any:
        """The plan for ``key``, made by all ranks at the same time if there is none. Ranks use the same
        keys in the same order, and so let go of the same ones."""
        found = self.plans.pop(key, None)
        if found is None:
            while len(self.plans) >= MAX_PLANS:
                del self.plans[next(iter(self.plans))]
            found = make()
        self.plans[key] = found
        return found

    @property
    def stream(self) -> warplink.Stream:
        """The caller's current stream of a GPU; on the host device, one of the workspace's own."""
        if self.device.type == "cuda":
            return self.current_streams()[1]
        if self._own_stream is None:
            self._own_stream = self.communicator.create_stream()
        return self._own_stream

    def current_streams(self) -> tuple[torch.cuda.Stream, warplink.Stream]:
        """The caller's current stream of the GPU, as PyTorch knows it and as Warplink does."""
        found = self._borrowed.get(current_handle(self.device))
        if found is None:
            current = torch.cuda.current_stream(self.device)
            raw = current.cuda_stream
            found = current, self.communicator.borrow_stream(raw, current)
            self._borrowed[raw] = found
        return found

    def settle(self, stream: warplink.Stream) -> None:
        """On the host device, where PyTorch has no streams, blocks until ``stream`` is done."""
        if self.communicator.device == "host":
            stream.synchronize()

    def tensor(
        self, rank: int, shape: list[int], dtype: torch.dtype, storage_offset: int
    ) -> torch.Tensor:
        """A tensor in the buffer of ``rank``."""
        first = storage_offset * dtype.itemsize
        last = first + math.prod(shape) * dtype.itemsize
        if not 0 <= first < last <= self._buffer_size:
            raise InvalidArgumentError(
                f"{shape} of {dtype} at offset {storage_offset} takes bytes {first} to {last}; "
                f"expected some of the buffer's {self._buffer_size}"
            )
        buffers = self._exchange_buffers()
        if not 0 <= rank < len(buffers):
            raise InvalidArgumentError(f"there is no rank {rank}; expected one below {len(buffers)}")
        # As bytes, since not every element type of PyTorch has a name in Warplink.
        view = buffers[rank].slice(first, last).view([last - first], "u8")
        return torch.from_dlpack(view).view(dtype).view(shape)

    def _exchange_buffers(self) -> list[Any]:
        """Every rank's buffer, mapped here; made at the first call, by all ranks at the same time."""
        with self.lock:
            if self._buffers is not None:
                return self._buffers
            comm = self.communicator
            own = comm.alloc(self._buffer_size)
            handles = [
                b"" if peer == comm.rank else comm.export_handle(own, peer)
                for peer in range(comm.size)
            ]
            told = comm.all_gather_bytes(b"".join(handle.ljust(512, b"\0") for handle in handles))
            length = max((len(handle) for handle in handles), default=0)
            self._buffers = []
            for peer, told_by in enumerate(told):
                if peer == comm.rank:
                    self._buffers.append(own)
                else:
                    start = 512 * comm.rank
                    self._buffers.append(comm.open_handle(peer, told_by[start : start + length]))
            return self._buffers

    def barrier(self) -> None:
        """A barrier of the members' current streams."""
        with self.lock:
            if self._barrier is None:
                self._barrier = self.communicator.stream_barrier()
        stream = self.stream
        self._barrier.enqueue(stream)
        self.settle(stream)

    def close(self) -> None:
        """Lets go of everything. Tensors of the buffers must not be used any more."""
        self.plans.clear()
        self._buffers, self._barrier = None, None
        if self._job is not None:
            joining.leave(self._job)
