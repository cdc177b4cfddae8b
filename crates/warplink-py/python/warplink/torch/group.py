"""The process group: CPU tensors over the host device, CUDA tensors by NCCL.

A thin layer: CPU tensors of a group on one machine go over Warplink's host device, those of a group
that spans machines to Gloo, and CUDA tensors to NCCL, to which Warplink adds what NCCL does not have:
buffers that the other ranks reach, and the fused operations.
"""

from __future__ import annotations

import os
import sys
import threading
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

import warplink
from warplink.errors import ClosedError, InvalidArgumentError, UnsupportedError
from warplink.torch import joining
from warplink.torch.host import HostCollectives
from warplink.torch.messages import Messages
from warplink.torch.options import Options
from warplink.torch.works import WorkGroup
from warplink.torch.workspace import Workspace

_CPU = torch.device("cpu")
_CUDA = torch.device("cuda")


def _limit(opts: Any) -> float | None:
    """The limit in seconds that a call's options set, or None for the group's."""
    timeout = getattr(opts, "timeout", None)
    if not isinstance(timeout, timedelta) or timeout <= timedelta(0):
        return None
    return timeout.total_seconds()


class ProcessGroupWarplink(dist.ProcessGroup):
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
    ) -> None:
        super().__init__(rank, size)
        self._rank, self._size = rank, size
        self._store, self._timeout = store, timeout
        self._options = options or Options()
        self._devices = devices or {"cpu": "warplink", "cuda": "warplink"}
        self._process = os.getpid()
        self._lock = threading.Lock()
        self._closed = False
        self._coalesced: list[Any] | None = None
        self._job: warplink.Job | None = None
        self._communicator: warplink.Communicator | None = None
        self._host: HostCollectives | None = None
        self._messages: Messages | None = None
        self._gloo = gloo
        self._nccl: Any = None
        self._workspaces: dict[str, Workspace] = {}
        self._group_name = ""
        self._group_desc = "undefined"

        parent_communicator = parent._communicator if parent is not None else None
        if parent_communicator is not None and ranks_in_parent is not None:
            self._one_machine = True
            self._communicator = parent_communicator.subgroup(ranks_in_parent)
        else:
            self._one_machine = joining.on_one_machine(store, rank, size)
        if self._devices.get("cpu") == "warplink":
            self._start_host()
        elif self._devices.get("cpu") == "gloo" and self._gloo is None:
            self._start_gloo()
        if self._devices.get("cuda") == "warplink" and torch.cuda.is_available():
            self._start_nccl()

    # Starting the parts

    def _start_host(self) -> None:
        if not self._one_machine:
            self._start_gloo()
            return
        limit = self._timeout.total_seconds()
        if self._communicator is None:
            self._job = joining.join(self._store, self._rank, self._size, "host", None, limit)
            self._communicator = self._job.world()
        self._host = HostCollectives(self._communicator, limit)
        self._messages = Messages(self._communicator, limit)

    def _start_gloo(self) -> None:
        store = dist.PrefixStore("gloo", self._store)
        self._gloo = c10d.ProcessGroupGloo(store, self._rank, self._size, timeout=self._timeout)
        self._gloo._set_sequence_number_for_group()

    def _start_nccl(self) -> None:
        if not dist.is_nccl_available():
            return
        options = self._options.nccl_options or c10d.ProcessGroupNCCL.Options()
        options._timeout = self._timeout
        store = dist.PrefixStore("nccl", self._store)
        self._nccl = c10d.ProcessGroupNCCL(store, self._rank, self._size, options)
        self._nccl._set_sequence_number_for_group()

    # What serves a tensor

    def _check(self) -> None:
        if self._closed:
            raise ClosedError("the process group was destroyed")
        if os.getpid() != self._process:
            raise UnsupportedError(
                "the process group was made in another process; "
                "expected no use of it after a fork; help: start ranks with spawn"
            )

    def _backend_of(self, tensors: list[torch.Tensor]) -> Any:
        """What serves ``tensors``: None for the host device, else NCCL or Gloo."""
        self._check()
        kinds = {tensor.device.type for tensor in tensors}
        if len(kinds) != 1:
            raise InvalidArgumentError(
                f"the tensors are on {sorted(kinds)}; expected tensors of one device"
            )
        return self._backend_for(kinds.pop())

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

    # Collectives

    def broadcast(self, tensors: Any, opts: Any = None, *rest: Any) -> Any:
        opts = opts if opts is not None else c10d.BroadcastOptions()
        tensors = [tensors] if isinstance(tensors, torch.Tensor) else tensors
        if isinstance(opts, int):
            root = opts
            opts = c10d.BroadcastOptions()
            opts.rootRank = root
        if (backend := self._backend_of(tensors)) is not None:
            return backend.broadcast(tensors, opts)
        return self._host.broadcast(tensors, self._root(opts), _limit(opts))

    def allreduce(self, tensors: Any, opts: Any = None, *rest: Any) -> Any:
        tensors = [tensors] if isinstance(tensors, torch.Tensor) else tensors
        if opts is None or not hasattr(opts, "reduceOp"):
            op = opts
            opts = c10d.AllreduceOptions()
            if op is not None:
                opts.reduceOp = op
        if (backend := self._backend_of(tensors)) is not None:
            return backend.allreduce(tensors, opts)
        return self._host.all_reduce(tensors, opts.reduceOp, _limit(opts))

    def allreduce_coalesced(self, tensors: Any, opts: Any = None) -> Any:
        opts = opts if opts is not None else c10d.AllreduceCoalescedOptions()
        if (backend := self._backend_of(tensors)) is not None:
            return backend.allreduce_coalesced(tensors, opts)
        return self._host.all_reduce(tensors, opts.reduceOp, _limit(opts))

    def reduce(self, tensors: Any, opts: Any = None, *rest: Any) -> Any:
        tensors = [tensors] if isinstance(tensors, torch.Tensor) else tensors
        opts = opts if opts is not None else c10d.ReduceOptions()
        if (backend := self._backend_of(tensors)) is not None:
            return backend.reduce(tensors, opts)
        return self._host.reduce(tensors, opts.reduceOp, self._root(opts), _limit(opts))

    def allgather(self, output_tensors: Any, input_tensors: Any, opts: Any = None) -> Any:
        opts = opts if opts is not None else c10d.AllgatherOptions()
        if isinstance(input_tensors, torch.Tensor):
            output_tensors, input_tensors = [output_tensors], [input_tensors]
        if (backend := self._backend_of(input_tensors)) is not None:
            return backend.allgather(output_tensors, input_tensors, opts)
        for outputs in output_tensors:
            self._count(outputs, "outputs")
        return self._host.all_gather(output_tensors, input_tensors, _limit(opts))

    def _allgather_base(self, output: Any, input: Any, opts: Any = None) -> Any:
        opts = opts if opts is not None else c10d.AllgatherOptions()
        if (backend := self._backend_of([output, input])) is not None:
            return backend._allgather_base(output, input, opts)
        self._share(output, input)
        return self._host.all_gather_flat([output], [input], _limit(opts))

    def allgather_coalesced(self, output_lists: Any, input_list: Any, opts: Any = None) -> Any:
        opts = opts if opts is not None else c10d.AllgatherOptions()
        if (backend := self._backend_of(input_list)) is not None:
            return backend.allgather_coalesced(output_lists, input_list, opts)
        # Here the outputs are by rank, then by tensor.
        self._count(output_lists, "lists of outputs")
        outputs = [[one[index] for one in output_lists] for index in range(len(input_list))]
        return self._host.all_gather(outputs, input_list, _limit(opts))

    def allgather_into_tensor_coalesced(
        self, outputs: Any, inputs: Any, opts: Any = None
    ) -> Any:
        opts = opts if opts is not None else c10d.AllgatherOptions()
        if (backend := self._backend_of(inputs)) is not None:
            return backend.allgather_into_tensor_coalesced(outputs, inputs, opts)
        for output, input in zip(outputs, inputs, strict=True):
            self._share(output, input)
        return self._host.all_gather_flat(outputs, inputs, _limit(opts))

    def reduce_scatter(self, output_tensors: Any, input_tensors: Any, opts: Any = None) -> Any:
        opts = opts if opts is not None else c10d.ReduceScatterOptions()
        if isinstance(output_tensors, torch.Tensor):
            output_tensors, input_tensors = [output_tensors], [input_tensors]
        if (backend := self._backend_of(output_tensors)) is not None:
            return backend.reduce_scatter(output_tensors, input_tensors, opts)
        for inputs in input_tensors:
            self._count(inputs, "inputs")
        return self._host.reduce_scatter(
            output_tensors, input_tensors, opts.reduceOp, _limit(opts)
        )

    def _reduce_scatter_base(self, output: Any, input: Any, opts: Any = None) -> Any:
        opts = opts if opts is not None else c10d.ReduceScatterOptions()
        if (backend := self._backend_of([output, input])) is not None:
            return backend._reduce_scatter_base(output, input, opts)
        return self._host_reduce_scatter([output], [input], opts)

    def reduce_scatter_tensor_coalesced(
        self, outputs: Any, inputs: Any, opts: Any = None
    ) -> Any:
        opts = opts if opts is not None else c10d.ReduceScatterOptions()
        if (backend := self._backend_of(inputs)) is not None:
            return backend.reduce_scatter_tensor_coalesced(outputs, inputs, opts)
        return self._host_reduce_scatter(outputs, inputs, opts)

    def _host_reduce_scatter(self, outputs: Any, inputs: Any, opts: Any) -> Any:
        pieces = []
        for output, input in zip(outputs, inputs, strict=True):
            self._share(input, output)
            pieces.append(list(input.detach().reshape(self._size, -1).unbind(0)))
        return self._host.reduce_scatter(outputs, pieces, opts.reduceOp, _limit(opts))

    def alltoall(self, output_tensors: Any, input_tensors: Any, opts: Any = None) -> Any:
        opts = opts if opts is not None else c10d.AllToAllOptions()
        if (backend := self._backend_of(input_tensors)) is not None:
            return backend.alltoall(output_tensors, input_tensors, opts)
        self._count(output_tensors, "outputs")
        self._count(input_tensors, "inputs")
        return self._host.all_to_all(output_tensors, input_tensors, _limit(opts))

    def alltoall_base(
        self,
        output: Any,
        input: Any,
        output_split_sizes: Any,
        input_split_sizes: Any,
        opts: Any = None,
    ) -> Any:
        opts = opts if opts is not None else c10d.AllToAllOptions()
        if (backend := self._backend_of([output, input])) is not None:
            return backend.alltoall_base(
                output, input, output_split_sizes, input_split_sizes, opts
            )
        outputs = self._split(output, output_split_sizes, "output")
        inputs = self._split(input, input_split_sizes, "input")
        return self._host.all_to_all(outputs, inputs, _limit(opts))

    def gather(self, output_tensors: Any, input_tensors: Any, opts: Any = None) -> Any:
        opts = opts if opts is not None else c10d.GatherOptions()
        if (backend := self._backend_of(input_tensors)) is not None:
            return backend.gather(output_tensors, input_tensors, opts)
        root = self._root(opts)
        outputs = output_tensors[0] if output_tensors else []
        if root == self._rank:
            self._count(outputs, "outputs")
        return self._host.gather(outputs, input_tensors[0], root, _limit(opts))

    def scatter(self, output_tensors: Any, input_tensors: Any, opts: Any = None) -> Any:
        opts = opts if opts is not None else c10d.ScatterOptions()
        if (backend := self._backend_of(output_tensors)) is not None:
            return backend.scatter(output_tensors, input_tensors, opts)
        root = self._root(opts)
        inputs = input_tensors[0] if input_tensors else []
        if root == self._rank:
            self._count(inputs, "inputs")
        return self._host.scatter(output_tensors[0], inputs, root, _limit(opts))

    def barrier(self, opts: Any = None, *rest: Any) -> Any:
        self._check()
        opts = opts if opts is not None else c10d.BarrierOptions()
        device = getattr(opts, "device", None)
        kind = device.type if device is not None else "cpu"
        if kind == "cpu" and self._host is None and self._gloo is None:
            kind = "cuda"
        if (backend := self._backend_for(kind)) is not None:
            return backend.barrier(opts)
        return self._host.barrier(_limit(opts))

    # Sends and receives

    def send(self, tensors: Any, dst_rank: int, tag: int = 0) -> Any:
        if (backend := self._backend_of(tensors)) is not None:
            return backend.send(tensors, dst_rank, tag)
        return self._one([self._messages.send(t, dst_rank, tag) for t in tensors])

    def recv(self, tensors: Any, src_rank: int, tag: int = 0) -> Any:
        if (backend := self._backend_of(tensors)) is not None:
            return backend.recv(tensors, src_rank, tag)
        return self._one([self._messages.receive(t, src_rank, tag) for t in tensors])

    def recv_anysource(self, tensors: Any, tag: int = 0) -> Any:
        if (backend := self._backend_of(tensors)) is not None:
            return backend.recv_anysource(tensors, tag)
        return self._one([self._messages.receive(t, None, tag) for t in tensors])

    @staticmethod
    def _one(works: list[Any]) -> Any:
        return works[0] if len(works) == 1 else WorkGroup(works)

    # Newer names of the same

    all_gather_single = _allgather_base
    reduce_scatter_single = _reduce_scatter_base
    all_to_all_single = alltoall_base
    all_gather_into_tensor_coalesced = allgather_into_tensor_coalesced

    # Coalescing: on CPU, works are collected and waited for together

    def _start_coalescing(self, device: torch.device) -> None:
        self._check()
        if (backend := self._backend_for(device.type)) is not None:
            backend._start_coalescing()

    def _end_coalescing(self, device: torch.device) -> Any:
        if (backend := self._backend_for(device.type)) is not None:
            return backend._end_coalescing()
        # Operations are done in order: the last is done when all are.
        return self._host.barrier(None)

    # Checks of shapes

    def _root(self, opts: Any) -> int:
        root = opts.rootRank
        if not 0 <= root < self._size:
            raise InvalidArgumentError(
                f"the root is rank {root}; expected a rank of the group's {self._size}"
            )
        return root

    def _count(self, tensors: Any, what: str) -> None:
        if len(tensors) != self._size:
            raise InvalidArgumentError(
                f"there are {len(tensors)} {what}; expected one for each of {self._size} ranks"
            )

    def _share(self, whole: torch.Tensor, part: torch.Tensor) -> None:
        if whole.dtype != part.dtype:
            raise InvalidArgumentError(
                f"the tensors are {whole.dtype} and {part.dtype}; expected one type"
            )
        if whole.numel() != part.numel() * self._size:
            raise InvalidArgumentError(
                f"the tensors have {whole.numel()} and {part.numel()} elements; "
                f"expected one to have {self._size} times the other's"
            )

    def _split(self, tensor: torch.Tensor, sizes: Any, what: str) -> list[torch.Tensor]:
        rows = tensor.shape[0] if tensor.dim() else 0
        if not sizes:
            if rows % self._size:
                raise InvalidArgumentError(
                    f"the {what} has {rows} rows; expected a multiple of {self._size} ranks"
                )
            sizes = [rows // self._size] * self._size
        self._count(sizes, f"sizes of the {what}'s parts")
        if sum(sizes) != rows:
            raise InvalidArgumentError(
                f"the parts of the {what} have {sum(sizes)} rows; expected its {rows}"
            )
        return list(tensor.detach().split(list(sizes), 0))

    # What Warplink adds

    @property
    def is_direct(self) -> bool:
        """Whether all members run on one machine, so that they reach one another's memory."""
        return self._one_machine

    def get_buffer_size(self) -> int:
        """Bytes of each rank's buffer; 0 where members cannot reach one another's memory."""
        return self._options.buffer_size if self._one_machine else 0

    def get_p2p_buffer(
        self,
        rank: int,
        shape: Any,
        dtype: torch.dtype,
        storage_offset: int = 0,
        device: str | torch.device | None = None,
    ) -> torch.Tensor:
        """The buffer of ``rank``, mapped here, as a tensor of ``shape`` and ``dtype``.

        ``storage_offset`` is in elements. Without ``device``, it is memory of the current GPU where the
        group has NCCL, else the host device's. Every member makes its first call at the same time,
        which blocks until all have. What is read is ordered by ``intra_node_barrier``. Raises
        InvalidArgumentError where the tensor does not fit into ``get_buffer_size``.
        """
        return self.workspace(device).tensor(rank, list(shape), dtype, storage_offset)

    def intra_node_barrier(self, device: str | torch.device | None = None) -> None:
        """A barrier of the members' current streams (on CPU, of the callers)."""
        self.workspace(device).barrier()

    def workspace(self, device: str | torch.device | None = None) -> Workspace:
        """What Warplink does directly on ``device``. The first call is made by every member at the
        same time."""
        self._check()
        kind = torch.device(device).type if device else ("cuda" if self._nccl else "cpu")
        if not self._one_machine:
            raise UnsupportedError(
                "the group spans machines; expected members that reach one another's memory"
            )
        with self._lock:
            if kind not in self._workspaces:
                self._workspaces[kind] = Workspace.make(self, kind)
            return self._workspaces[kind]

    # Names, numbers and the end

    def getBackendName(self) -> str:
        return "warplink"

    def _get_backend_name(self) -> str:
        return "warplink"

    def name(self) -> str:
        return "warplink"

    def rank(self) -> int:
        return self._rank

    def size(self) -> int:
        return self._size

    def getRank(self) -> int:
        return self._rank

    def getSize(self) -> int:
        return self._size

    def get_group_store(self) -> dist.Store:
        return self._store

    def _set_group_name(self, name: Any) -> None:
        self._group_name = name
        super()._set_group_name(name)

    def _set_group_desc(self, desc: str) -> None:
        self._group_desc = desc
        super()._set_group_desc(desc)

    @property
    def group_name(self) -> Any:
        return self._group_name

    @property
    def pg_name(self) -> Any:
        return self._group_name

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
        if self._messages is not None:
            self._messages.timeout = timeout.total_seconds()
        for backend in (self._gloo, self._nccl):
            if backend is not None:
                backend._set_default_timeout(timeout)

    def _set_sequence_number_for_group(self) -> None:
        pass

    def _get_sequence_number_for_group(self) -> int:
        for backend in (None if self._host else self._gloo, self._nccl):
            if backend is not None:
                return backend._get_sequence_number_for_group()
        return self._host.sequence_number if self._host is not None else 0

    def split_group(
        self,
        new_ranks: list[int],
        timeout: timedelta | None = None,
        opts: Any = None,
        group_name: Any = None,
        group_desc: str | None = None,
    ) -> ProcessGroupWarplink | None:
        """The group of ``new_ranks`` of this one; None on ranks that are not listed."""
        self._check()
        if self._rank not in new_ranks:
            return None
        name = group_name or "split:" + ",".join(map(str, new_ranks))
        made = ProcessGroupWarplink(
            dist.PrefixStore(f"{name}/", self._store),
            new_ranks.index(self._rank),
            len(new_ranks),
            timeout or self._timeout,
            Options.read(opts) if opts is not None else self._options,
            devices=self._devices,
            parent=self,
            ranks_in_parent=list(new_ranks),
        )
        made._set_group_name(name)
        made._set_group_desc(group_desc or "undefined")
        return made

    def shutdown(self) -> None:
        """Ends the group. Blocks until the other members do so too, for some seconds at most."""
        if not self._end():
            return
        if self._nccl is not None:
            self._nccl.shutdown()
        if self._job is not None:
            joining.leave(self._job)

    def abort(self) -> None:
        """Ends the group at once; what the other members wait for fails."""
        if not self._end():
            return
        if self._nccl is not None:
            self._nccl.abort()
        if self._job is not None:
            self._job.abort("the process group was aborted")

    def _end(self) -> bool:
        """Ends the parts on the host; False if they were ended before."""
        with self._lock:
            if self._closed or os.getpid() != self._process:
                return False
            self._closed = True
        for part in (self._host, self._messages, *self._workspaces.values()):
            if part is not None:
                part.close()
        return True

    def leave_at_exit(self) -> None:
        """What the end of the interpreter does with a group that was not destroyed."""
        if self._job is None or self._closed or os.getpid() != self._process:
            return
        failure = getattr(sys, "last_exc", None) or getattr(sys, "last_value", None)
        if failure is not None:
            self._job.abort(f"its process ended with {failure!r}")
        elif self._end():
            joining.leave(self._job, 5.0)

    def __repr__(self) -> str:
        return f"ProcessGroupWarplink(rank={self._rank}, size={self._size})"
