"""The workspaces of a group, one for each kind of device, which its members make together or not at all."""

from __future__ import annotations

import os
import threading
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

import warplink
from warplink.errors import ClosedError, InvalidArgumentError, UnsupportedError
from warplink.torch.agreement import made_without_communicator, new_in_a_graph
from warplink.torch.joining import Members
from warplink.torch.options import Options
from warplink.torch.workspace import Workspace, is_recording


class GroupWorkspaces:
    """The direct operations of a group, whose parts its subclass makes."""

    _closed: bool
    #: The process that made the group.
    _process: int
    _rank: int
    _size: int
    _store: dist.Store
    _members: Members
    _timeout: timedelta
    _options: Options
    _lock: threading.RLock
    _one_machine: bool
    #: NCCL's group, if there is one.
    _nccl: Any
    #: The group's on the host device, if there is one.
    _communicator: warplink.Communicator | None
    #: The GPU that the group is bound to, if it is.
    bound_device_id: torch.device | None
    _workspaces: dict[str, Workspace]
    #: How often the members tried to make one.
    _workspaces_begun: int
    #: Kinds of devices on which a member could not.
    _apart: set[str]

    def _check(self) -> None:
        """Raises where the group cannot be used any more."""
        if self._closed:
            raise ClosedError("the process group was destroyed")
        if os.getpid() != self._process:
            raise UnsupportedError(
                "the process group was made in another process; "
                "expected no use of it after a fork; help: start ranks with spawn"
            )

    def workspace(self, device: str | torch.device | None = None) -> Workspace:
        """Warplink's direct operations on ``device``. The first call is made by every member at the
        same time."""
        device = torch.device(device or ("cuda" if self._nccl else "cpu"))
        space = self.direct_workspace(device)
        if space is None:
            what = f"a member could not share memory on {device.type}" if self._one_machine else "the group spans machines"
            raise UnsupportedError(f"{what}; expected members that reach one another's memory")
        return space

    def direct_workspace(self, device: torch.device) -> Workspace | None:
        """The same; None, on all members alike, where they do not reach one another's memory. It is the first call that
        decides."""
        self._check()
        if not self._one_machine:
            return None
        with self._lock:
            space = self._workspaces.get(device.type)
            if space is None:
                if device.type in self._apart:
                    return None
                if is_recording(self._with_index(device)):
                    raise new_in_a_graph(self._rank, "what needs memory of other members")
                space = self._agree_on_workspace(device)
                if space is None:
                    self._apart.add(device.type)
                    return None
                self._workspaces[device.type] = space
        if device.index not in (None, space.device.index):
            raise InvalidArgumentError(
                f"the device is {device}; expected {space.device}, as in the group's first call"
            )
        return space

    def decision(self, device: torch.device, key: Any) -> Any:
        """The members' decision on calls of ``key`` on ``device``, if they have one; see ``trials``."""
        space = self._workspaces.get(device.type)
        return None if space is None else space.decisions.get(key)

    def _agree_on_workspace(self, device: torch.device) -> Workspace | None:
        """A workspace whose members reach one another's memory; None, on all of them alike, where one cannot make it."""
        limit = self._timeout.total_seconds()
        made: list[Workspace] = []

        def make() -> Workspace:
            made.append(self._make_workspace(device))
            return made[0]

        # A second attempt must not read what the first one left in the store.
        self._workspaces_begun += 1
        what = f"workspace {self._workspaces_begun} on {device.type}"
        if device.type == "cpu" and self._communicator is not None:
            # Members make it from what they have, which takes no time.
            limit /= 2
        space = made_without_communicator(self._members, what, make, limit)
        if space is not None and space.reaches_all():
            return space
        for alone in made:
            alone.close()
        return None

    def _with_index(self, device: torch.device) -> torch.device:
        """``device`` with its number: by default, that of the GPU that the group is bound to, or of the current one."""
        if device.type != "cuda" or device.index is not None:
            return device
        bound = self.bound_device_id
        return torch.device("cuda", torch.cuda.current_device() if bound is None else bound.index)

    def _make_workspace(self, device: torch.device) -> Workspace:
        size, on_gpu = self._options.buffer_size, device.type == "cuda"
        limit = self._timeout.total_seconds()
        # Members report their calls separately from other attempts and devices.
        members = Members(
            dist.PrefixStore(f"workspace/{self._workspaces_begun}", self._store), self._rank, self._size
        )
        if not on_gpu and self._communicator is not None:
            everyone = list(range(self._size))
            return Workspace(self._communicator.subgroup(everyone), None, size, members=members)
        device = self._with_index(device)
        job = members.join("cuda" if on_gpu else "host", device.index if on_gpu else None, limit)
        return Workspace(job.world(), job, size, device, limit, members)
