"""Routes of a group's calls: its parts on the host device, Warplink's collectives on GPUs, NCCL or Gloo."""

from __future__ import annotations

import functools
from typing import Any

import torch

from warplink.errors import InvalidArgumentError
from warplink.torch import agreement, direct, profiling, shortcuts
from warplink.torch.direct import GpuMessages, HostBatches
from warplink.torch.direct_collectives import GpuCollectives
from warplink.torch.workspace import Workspace, is_recording
from warplink.torch.workspaces import GroupWorkspaces
from warplink.torch.works import Noted, Works


class GroupRoutes(GroupWorkspaces):
    """The parts of a group that serve calls, which its subclass makes, and the choice among them."""

    _source: profiling.Source
    #: Serve CPU tensors on the host device; ``HostCollectives`` and ``Messages`` if that does, else None.
    _host: Any
    _messages: Any
    #: Serves batches of messages of CPU tensors, if members have joined for that.
    _batches: HostBatches | None
    #: Serves direct calls of CUDA tensors, if members have joined for that.
    _on_gpu: GpuCollectives | None
    #: Whether they may still join.
    _may_go_direct: bool
    _gloo: Any
    #: Creates the works of CPU tensors.
    _host_works: Works
    #: Where those of direct calls are noted.
    _direct_works: Noted
    #: How many barriers members had before they joined.
    _barriers: int

    def _backend_of(self, tensors: list[torch.Tensor], by_all: bool = True) -> Any:
        """Backend of ``tensors``: None for the host device, else NCCL or Gloo. ``by_all`` is whether all members make
        this call, whose first one they join in for messages that go direct."""
        self._check()
        kind = tensors[0].device.type if len(tensors) == 1 else _common_kind(tensors)
        backend = self._backend_for(kind)
        if kind == "cuda" and by_all:
            self._direct_on(tensors[0].device)
        return backend

    def _backend_for(self, kind: str) -> Any:
        if kind == "cpu":
            if self._host is not None:
                return None
            if self._gloo is not None:
                return self._gloo
            raise InvalidArgumentError(
                "the group has no backend for CPU tensors; "
                "help: name one, such as 'cpu:gloo,cuda:warplink'"
            )
        if kind == "cuda" and self._nccl is not None:
            return self._nccl
        raise InvalidArgumentError(
            f"the group has no backend for {kind} tensors; "
            "expected CPU tensors, or CUDA tensors where PyTorch has NCCL"
        )

    def direct_messages(self, device: torch.device, by_all: bool = True) -> HostBatches | GpuMessages | None:
        """Warplink's executor of batches of tensors on ``device``; None where a backend executes them, on
        all members alike. On GPUs, every member makes the group's first call at the same time, as PyTorch asks for
        batches, and not in a graph. It is the call that decides, whatever comes of it. A call that is not surely
        ``by_all`` does not decide where a barrier was before it."""
        if device.type != "cuda":
            return self._batches
        if not self._options.direct_messages or self._may_go_direct and self._barriers and not by_all:
            return None
        return self._direct_on(device)

    def direct_collectives(self, device: torch.device) -> GpuCollectives | None:
        """Executor of collectives of tensors on ``device``, likewise."""
        if device.type != "cuda" or not self._options.direct_collectives:
            return None
        return self._direct_on(device)

    def _joined_collectives(self) -> GpuCollectives | None:
        return self._on_gpu if self._options.direct_collectives else None

    def _direct_on(self, device: torch.device) -> GpuCollectives | None:
        """Direct executor on a GPU; the first call decides."""
        if self._on_gpu is not None:
            return self._on_gpu
        if not self._may_go_direct or self._nccl is None or is_recording(device):
            return None
        with self._lock:
            if self._may_go_direct:
                # Members that tried again would wait for those that do not.
                self._may_go_direct = False
                self._on_gpu = self._join_on_gpu(device)
                self._enable_fast_paths()
            return self._on_gpu

    def _join_in_barrier(self, device: torch.device | None) -> None:
        """Has members join for direct calls in a barrier, which all of them make: after it, a few of them may exchange messages
        alone. They join on ``device``, or on their current GPUs where all have one that is in use and no two the same,
        unless there are too few."""
        if not self._may_go_direct or self._nccl is None:
            return
        if device is None and torch.cuda.is_initialized():
            device = torch.device("cuda", torch.cuda.current_device())
        if device is not None and is_recording(device):
            return
        known = "" if device is None else f"{device.index or 0} {torch.cuda.device_count()}"
        self._barriers += 1
        limit = self._timeout.total_seconds()
        told = self._members.all_gather(f"barrier/{self._barriers}", known, limit, "barrier")
        if device is None or not all(told):
            return
        devices, counts = zip(*(map(int, one.split()) for one in told), strict=True)
        if len(set(devices)) == self._size or min(counts) < self._size:
            self._direct_on(device)

    def _enable_fast_paths(self) -> None:
        """Enables the fast paths of calls on CUDA tensors, once it is decided which calls are direct; under the
        lock."""
        if self._closed:
            return
        shortcuts.open_to(self, self._nccl)
        if (made := self._on_gpu) is not None:
            messages, collectives = self._options.direct_messages, self._options.direct_collectives
            shortcuts.open_past(self, made, self._direct_works, messages, collectives)

    def _join_on_gpu(self, device: torch.device) -> GpuCollectives | None:
        """Direct executor on ``device``; None, on all members alike, where one of them cannot."""
        limit = self._timeout.total_seconds()

        def make() -> Workspace:
            return self.workspace(device)

        # It may be there, and be on another GPU of this member.
        space = agreement.made_without_communicator(self._members, "joining for direct calls", make, limit / 2)
        if space is None:
            return None
        joined = direct.join(space.communicator, self._options.multiprocessors)
        if joined is None:
            return None
        made = functools.partial(GpuCollectives, space, joined, limit, self._source, self._options.high_priority)
        return agreement.made_by_all(space.communicator, "making direct calls", made)

    @property
    def messages_path(self) -> str:
        """Path of all-to-alls and batches of sends and receives: "direct", or "backend" where the group does not let
        Warplink do them, or nothing has been called yet."""
        on_gpu = self._on_gpu is not None and self._options.direct_messages
        return "direct" if self._batches is not None or on_gpu else "backend"

    @property
    def collectives_path(self) -> str:
        """Path of the collectives of CUDA tensors, likewise."""
        on_gpu = self._on_gpu is not None and self._options.direct_collectives
        return "direct" if on_gpu else "backend"


def _common_kind(tensors: list[torch.Tensor]) -> str:
    """The kind of device that all ``tensors`` are on."""
    kinds = {tensor.device.type for tensor in tensors}
    if len(kinds) != 1:
        raise InvalidArgumentError(
            f"the tensors are on {sorted(kinds)}; expected tensors of one device"
        )
    return kinds.pop()
