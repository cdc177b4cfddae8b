"""The process group: CPU tensors over the host device, CUDA tensors by Warplink's collectives or NCCL.

A thin layer: CPU tensors of a group on one machine go over Warplink's host device, those of a group that spans machines
to Gloo. CUDA tensors go to Warplink's collectives where all members can join those, and else to NCCL, to which Warplink
adds what NCCL does not have: buffers that the other ranks reach, and the fused operations.
"""

from __future__ import annotations

import atexit
import copy
import itertools
import os
import sys
import threading
import weakref
from datetime import timedelta
from typing import Any, Sequence

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

import warplink
from warplink.errors import InvalidArgumentError, WarplinkError
from warplink.torch import direct, joining, profiling, shortcuts
from warplink.torch.calls import GroupCalls
from warplink.torch.direct import HostBatches
from warplink.torch.host import HostCollectives
from warplink.torch.host_backend import HostBackend
from warplink.torch.messages import Messages
from warplink.torch.monitored import monitored_barrier
from warplink.torch.options import Options
from warplink.torch.works import Noted, Works, given_to

#: Seconds for which a process that ends waits for the others to leave too.
LEAVE_AT_EXIT_SECONDS = 1.0

_CPU = torch.device("cpu")
_CUDA = torch.device("cuda")

#: The groups of this process that are there, by their numbers in the order in which it made them.
_groups: weakref.WeakValueDictionary[int, ProcessGroupWarplink] = weakref.WeakValueDictionary()
_numbers = itertools.count()


class ProcessGroupWarplink(GroupCalls, dist.ProcessGroup):  # type: ignore[misc]
    """A process group of the backend ``warplink``; ``torch.distributed`` makes it.

    Every member makes one at the same time. Methods are those of ``ProcessGroup``.
    """

    def __init__(
        self,
        store: dist.Store,
        rank: int,
        size: int,
        timeout: timedelta,
        options: Options | None = None,
        *,
        devices: dict[str, str] | None = None,
        gloo: Any = None,
        parent: ProcessGroupWarplink | None = None,
        ranks_in_parent: list[int] | None = None,
        global_ranks: list[int] | None = None,
        name: str = "",
        split_from: Any = None,
    ) -> None:
        dist.ProcessGroup.__init__(self, rank, size)  # type: ignore[call-arg]
        self._rank, self._size = rank, size
        # A launcher's store outlives the group.
        self._members = joining.Members.of_this_time(store, rank, size)
        self._store = self._members.store
        self._timeout = timeout
        self._options = options or Options()
        self._devices = devices or {"cpu": "warplink", "cuda": "warplink"}
        self._process = os.getpid()
        # Held again by objects created below.
        self._lock = threading.RLock()
        self._closed = False
        self._monitored = self._barriers = 0
        self._job: warplink.Job | None = None
        self._communicator = None
        everyone = list(global_ranks or range(size))
        self._source = profiling.Source("warplink", rank, size, name, ranks=everyone)
        self._host_works = Works(self._source)
        self._direct_works = Noted()
        self._host = None
        self._messages = None
        self._batches = None
        self._on_gpu = None
        self._may_go_direct = False
        self._gloo = gloo
        self._nccl = None
        self._workspaces = {}
        self._workspaces_begun = 0
        self._apart = set()
        self._global_ranks = global_ranks or []
        self._group_name = name
        self._group_desc = "undefined"

        self._one_machine = self._members.on_one_machine(self._options.told, timeout.total_seconds())
        some_direct = self._options.direct_messages or self._options.direct_collectives
        self._may_go_direct = some_direct and self._one_machine and size > 1
        parent_communicator = parent._communicator if parent is not None else None
        if parent_communicator is not None and ranks_in_parent is not None:
            self._communicator = parent_communicator.subgroup(ranks_in_parent)
        if self._devices.get("cpu") == "warplink":
            self._start_host()
        elif self._devices.get("cpu") == "gloo":
            self._start_gloo()
        if self._devices.get("cuda") == "warplink" and torch.cuda.is_available():
            self._start_nccl(split_from)
        _groups[next(_numbers)] = self

    # Starting the parts

    def _start_host(self) -> None:
        if not self._one_machine:
            self._start_gloo()
            return
        limit = self._timeout.total_seconds()
        if self._communicator is None:
            self._job = self._members.join("host", None, limit)
            self._communicator = self._job.world()
        self._host = HostCollectives(self._communicator, self._host_works, limit)
        self._register_host()
        self._messages = Messages(self._communicator, self._host_works, limit)
        if self._size == 1 or not self._options.direct_host_messages:
            return
        # Two, since batches and collectives are done side by side.
        most = self._options.multiprocessors
        batches = direct.join(self._communicator, most)
        if batches is not None and (others := direct.join(self._communicator, most)) is not None:
            self._batches = HostBatches(self._communicator, batches, self._host_works, limit)
            self._host.direct = others

    def _register_host(self) -> None:
        """Registers a backend for CPU tensors with PyTorch's C++, which stores the group's name in the backend; newer
        releases query the name when the group is created."""
        try:
            backend = HostBackend(self._rank, self._size)
        except TypeError:
            # PyTorch 2.11 has no backends in Python, and does not ask.
            return
        self._register_default(_CPU, dist.ProcessGroup.BackendType.CUSTOM, backend)

    def _register_default(self, device: torch.device, kind: Any, backend: Any) -> None:
        """Registers what serves a device, and what PyTorch's C++ asks where it has no tensor to choose by."""
        self._register_backend(device, kind, backend)
        self._set_default_backend(kind)

    def _start_gloo(self) -> None:
        if self._gloo is None:
            store = dist.PrefixStore("gloo", self._store)
            self._gloo = c10d.ProcessGroupGloo(store, self._rank, self._size, timeout=self._timeout)
            self._gloo._set_sequence_number_for_group()
        self._register_default(_CPU, dist.ProcessGroup.BackendType.GLOO, self._gloo)

    def _start_nccl(self, split_from: Any) -> None:
        """Makes NCCL's group; from ``split_from``, if that is NCCL's of a group whose ranks all split it."""
        if not dist.is_nccl_available():
            return
        # The caller may make other groups with the same.
        options = copy.deepcopy(self._options.nccl_options) or c10d.ProcessGroupNCCL.Options()
        options._timeout = self._timeout
        options.global_ranks_in_group = self._global_ranks
        options.group_name = self._group_name
        if isinstance(split_from, c10d.ProcessGroupNCCL):
            options.split_from = split_from
            options.split_color = c10d._process_group_color(self._global_ranks)
        elif getattr(options, "split_from", None) is not None:
            # The group that another was split from: its ranks do not take part now.
            options.split_from = None
        store = dist.PrefixStore("nccl", self._store)
        self._nccl = c10d.ProcessGroupNCCL(store, self._rank, self._size, options)
        self._nccl._set_sequence_number_for_group()
        # PyTorch's C++ asks a group for the backend of a device.
        alone = self._host is None and self._gloo is None
        register = self._register_default if alone else self._register_backend
        register(_CUDA, dist.ProcessGroup.BackendType.NCCL, self._nccl)
        if not self._may_go_direct:
            self._enable_fast_paths()

    def monitored_barrier(
        self, timeout: timedelta | None = None, wait_all_ranks: bool = False
    ) -> None:
        """A barrier of the callers in which rank 0 reports missing ranks; see ``monitored``."""
        self._check()
        self._monitored += 1
        limit = (self._timeout if timeout is None else timeout).total_seconds()
        monitored_barrier(self._members, self._monitored, limit, wait_all_ranks)

    # Warplink's extensions

    @property
    def is_direct(self) -> bool:
        """Whether members reach one another's memory: they run on one machine, and did not find out otherwise when they
        first needed it, on GPUs where the group has NCCL."""
        return self._one_machine and ("cuda" if self._nccl else "cpu") not in self._apart

    def get_buffer_size(self) -> int:
        """Bytes of each rank's buffer; 0 where members cannot reach one another's memory."""
        return self._options.buffer_size if self.is_direct else 0

    def get_p2p_buffer(
        self,
        rank: int,
        shape: Any,
        dtype: torch.dtype,
        storage_offset: int = 0,
        device: str | torch.device | None = None,
        buffer: int = 0,
    ) -> torch.Tensor:
        """The buffer of ``rank``, mapped here, as a tensor of ``shape`` and ``dtype``.

        ``storage_offset`` is in elements. A group has as many buffers as numbers of a ``buffer`` are used, each of
        ``get_buffer_size`` bytes. Without ``device``, it is memory of the current GPU where the
        group has NCCL, else the host device's. Every member makes its first call for a buffer at the same time,
        which blocks until all have. Reads are ordered by ``intra_node_barrier``. Raises
        InvalidArgumentError where the tensor does not fit into ``get_buffer_size``.
        """
        if not isinstance(dtype, torch.dtype):
            raise TypeError(f"dtype is {dtype!r}; expected one of PyTorch's, such as torch.float32")
        shape = [shape] if isinstance(shape, int) else list(shape)
        if min(shape, default=0) < 0 or buffer < 0:
            raise InvalidArgumentError(f"shape {shape} in buffer {buffer}; expected sizes and a number of at least 0")
        return self.workspace(device).tensor(buffer, rank, shape, dtype, storage_offset)

    def intra_node_barrier(
        self, device: str | torch.device | None = None, ranks: Sequence[int] | None = None
    ) -> dist.Work:
        """A barrier of the current streams of ``ranks``, or of all members; on CPU, of the callers, and it is over when this
        returns. Only those in ``ranks`` call it, all of them with the same ones; the first call with some ranks blocks until
        all of them have made it. The first barrier of a group is one of all members, or comes after another call that
        makes what they share on ``device``."""
        space = self.workspace(device)
        space.barrier(ranks)
        return given_to(space)

    # Names, numbers and the end

    def name(self) -> str:
        return "warplink"

    def rank(self) -> int:
        return self._rank

    def size(self) -> int:
        return self._size

    # Other names of the same.
    getBackendName = _get_backend_name = name
    getRank, getSize = rank, size

    def get_group_store(self) -> dist.Store:
        return self._store

    def _set_group_name(self, name: Any) -> None:
        self._group_name = self._source.name = name
        super()._set_group_name(name)

    def _set_group_desc(self, desc: str) -> None:
        self._group_desc = self._source.description = desc
        super()._set_group_desc(desc)

    @property
    def group_name(self) -> Any:
        return self._group_name

    pg_name = group_name

    @property
    def group_desc(self) -> str:
        return self._group_desc

    @property
    def options(self) -> Options:
        """The group's options."""
        return self._options

    @property
    def _device_types(self) -> list[torch.device]:
        kinds = [_CPU] if self._host is not None or self._gloo is not None else []
        return kinds + ([_CUDA] if self._nccl is not None else [])

    def _get_backend(self, device: torch.device) -> Any:
        backend = self._backend_for(torch.device(device).type)
        return self if backend is None else backend

    @property
    def supports_splitting(self) -> bool:
        return True

    @property
    def supports_coalescing(self) -> bool:
        return False

    def eager_connect_single_device(self, device: torch.device) -> None:
        """Nothing: on CPU tensors, where PyTorch asks this of the group itself, its members are connected."""

    def _has_hooks(self) -> bool:
        return False

    def _wait_for_pending_works(self) -> None:
        pass

    def _set_default_timeout(self, timeout: timedelta) -> None:
        self.set_timeout(timeout)

    def set_timeout(self, timeout: timedelta) -> None:
        self._timeout = timeout
        if self._host is not None:
            self._host.timeout = timeout.total_seconds()
        for part in (self._messages, self._batches, self._on_gpu, *self._workspaces.values()):
            if part is not None:
                part.timeout = timeout.total_seconds()
        for backend in (self._gloo, self._nccl):
            if backend is not None:
                backend._set_default_timeout(timeout)

    def _set_sequence_number_for_group(self) -> None:
        pass

    def _get_sequence_number_for_group(self) -> int:
        for backend in (None if self._host else self._gloo, self._nccl):
            if backend is not None:
                return int(backend._get_sequence_number_for_group())
        return self._host.sequence_number if self._host is not None else 0

    def split_group(
        self,
        new_ranks: list[int],
        timeout: timedelta | None = None,
        opts: Any = None,
        group_name: Any = None,
        group_desc: str | None = None,
        device_types: list[torch.device] | None = None,
    ) -> ProcessGroupWarplink | None:
        """The group of ``new_ranks`` of this one, for ``device_types`` alone if they are given; None on ranks that are
        not listed."""
        self._check()
        if self._rank not in new_ranks:
            return None
        name = group_name or "split:" + ",".join(map(str, new_ranks))
        wanted = None if device_types is None else {device.type for device in device_types}
        made = ProcessGroupWarplink(
            dist.PrefixStore(f"{name}/", self._store),
            new_ranks.index(self._rank),
            len(new_ranks),
            timeout or self._timeout,
            self._options.updated(opts),
            devices={
                device: backend
                for device, backend in self._devices.items()
                if wanted is None or device in wanted
            },
            parent=self,
            ranks_in_parent=list(new_ranks),
            global_ranks=[self._global_ranks[r] for r in new_ranks] if self._global_ranks else new_ranks,
            name=name,
        )
        made._set_group_name(name)
        made._set_group_desc(group_desc or "undefined")
        return made

    def shutdown(self) -> None:
        """Ends the group. Blocks until the other members do so too, for some seconds at most. Raises the failure
        of a direct call that was not reported yet, once the group is ended."""
        if not self._begin_end():
            return
        failure = self._end_parts()
        if self._nccl is not None:
            self._nccl.shutdown()
        if self._job is not None:
            joining.leave(self._job)
        if failure is not None:
            raise failure

    def abort(self) -> None:
        """Aborts the group: operations that wait for this member fail on the others."""
        if not self._begin_end():
            return
        reason = "the process group was aborted"
        if self._nccl is not None:
            self._nccl.abort()
        if self._job is not None:
            self._job.abort(reason)
        for space in self._workspaces.values():
            space.abort(reason)
        self._end_parts()

    def _begin_end(self) -> bool:
        """Whether this is the first that ends the group, in the process that made it."""
        with self._lock:
            if self._closed or os.getpid() != self._process:
                return False
            self._closed = True
            shortcuts.close(self)
            return True

    def _end_parts(self) -> WarplinkError | None:
        """Ends the parts on the host. Returns the unreported failure of a call, if any."""
        failure = None
        direct_parts = (self._batches, self._on_gpu)
        for part in (self._host, self._messages, *direct_parts, *self._workspaces.values()):
            try:
                if part is not None:
                    part.close()
            except WarplinkError as error:
                failure = failure or error
        return failure

    def _leave_at_exit(self) -> None:
        """Closes the group if it was not destroyed."""
        if not self._begin_end():
            return
        jobs = []
        for space in self._workspaces.values():
            # It would wait longer for the others to leave.
            job, space._job = space._job, None
            jobs.append(job)
        jobs.append(self._job)

        def end(error: BaseException) -> None:
            for job in jobs:
                if job is not None:
                    job.abort(f"its process ended with {error!r}")

        failure = getattr(sys, "last_exc", None) or getattr(sys, "last_value", None)
        if failure is not None:
            # First, since parts may be waiting for peers, and those for this rank.
            end(failure)
        unheard = self._end_parts()
        if unheard is not None:
            end(unheard)
        for job in jobs:
            if job is not None:
                joining.leave(job, LEAVE_AT_EXIT_SECONDS)

    def __repr__(self) -> str:
        return f"ProcessGroupWarplink(rank={self._rank}, size={self._size})"


@atexit.register
def leave_at_exit() -> None:
    """At the interpreter's end: closes the groups that were not destroyed. A group comes before the one that it is a part of; so
    members of several leave them in one order, as they made them."""
    for _, group in sorted(_groups.items(), reverse=True):
        group._leave_at_exit()
