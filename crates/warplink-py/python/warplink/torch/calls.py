"""The calls of a process group, by the names that PyTorch has for them.

Each checks its arguments, and hands tensors to what serves their device.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.distributed import distributed_c10d as c10d

from warplink.errors import InvalidArgumentError
from warplink.torch.direct_collectives import reduction
from warplink.torch.modes import seen_as
from warplink.torch.routes import GroupRoutes
from warplink.torch.shapes import bytes_of_parts, check_alike, count, limit_of, root_of, share, split
from warplink.torch.works import WorkGroup


def _is_async(opts: Any) -> bool:
    """Whether the caller goes on before a call is done."""
    return getattr(opts, "asyncOp", True)


def _are_alike(lists: list[list[torch.Tensor]], ones: list[torch.Tensor]) -> bool:
    """Whether tensors in lists have the type and the length of the one tensor of each list."""
    return all(
        tensor.dtype == one.dtype and tensor.numel() == one.numel()
        for tensors, one in zip(lists, ones)
        for tensor in tensors
    )


class GroupCalls(GroupRoutes):
    """Collectives, sends and receives of a group whose parts its subclass makes."""

    def _past(self, backend: Any, tensor: torch.Tensor) -> Any:
        """Executor of an all-to-all of ``tensor`` past ``backend``; None where that, or the host, executes it."""
        return self.direct_messages(tensor.device) if backend is not None and tensor.is_cuda else None

    def _direct(self, tensors: list[torch.Tensor]) -> Any:
        """Executor of a collective of ``tensors`` past the backend; None where that executes it."""
        if not tensors or not tensors[0].is_cuda:
            return None
        direct = self.direct_collectives(tensors[0].device)
        if direct is None:
            return None
        for tensor in tensors:
            if tensor.is_sparse:
                return None
        return direct

    def _reduction(self, tensors: list[torch.Tensor], op: Any) -> tuple[Any, Any]:
        """The same of a reduction by ``op``, and how it is called."""
        direct = self._direct(tensors)
        how = reduction(op, tensors[0].dtype) if direct is not None else None
        return (direct, how) if how is not None else (None, None)

    def _done(self, works: list[Any]) -> Any:
        """The work of direct calls, noted where calls are coalesced."""
        self._direct_works.extend(works)
        return self._one(works)

    # Collectives

    @seen_as("broadcast_")
    def broadcast(self, tensors: Any, opts: Any = None, *rest: Any) -> Any:
        opts = opts if opts is not None else c10d.BroadcastOptions()
        tensors = [tensors] if isinstance(tensors, torch.Tensor) else tensors
        if isinstance(opts, int):
            root = opts
            opts = c10d.BroadcastOptions()
            opts.rootRank = root
        if (backend := self._backend_of(tensors)) is not None:
            if (direct := self._direct(tensors)) is None:
                return backend.broadcast(tensors, opts)
            root = root_of(self._size, opts)
            return self._done([direct.collective("broadcast", tensors, tensors, _is_async(opts), None, root)])
        return self._host.broadcast(tensors, root_of(self._size, opts), limit_of(opts))

    @seen_as("allreduce_")
    def allreduce(self, tensors: Any, opts: Any = None, *rest: Any) -> Any:
        tensors = [tensors] if isinstance(tensors, torch.Tensor) else tensors
        if opts is None or not hasattr(opts, "reduceOp"):
            op = opts
            opts = c10d.AllreduceOptions()
            if op is not None:
                opts.reduceOp = op
        if (backend := self._backend_of(tensors)) is not None:
            return self._all_reduce(backend.allreduce, tensors, opts)
        return self._host.all_reduce(tensors, opts.reduceOp, limit_of(opts))

    @seen_as("allreduce_coalesced_")
    def allreduce_coalesced(self, tensors: Any, opts: Any = None) -> Any:
        opts = opts if opts is not None else c10d.AllreduceCoalescedOptions()
        if (backend := self._backend_of(tensors)) is not None:
            return self._all_reduce(backend.allreduce_coalesced, tensors, opts)
        return self._host.all_reduce(tensors, opts.reduceOp, limit_of(opts))

    def _all_reduce(self, otherwise: Any, tensors: Any, opts: Any) -> Any:
        direct, how = self._reduction(tensors, opts.reduceOp)
        if direct is None:
            return otherwise(tensors, opts)
        for tensor in tensors[1:]:
            if tensor.dtype != tensors[0].dtype:
                return otherwise(tensors, opts)
        return self._done([direct.collective("all_reduce", tensors, tensors, _is_async(opts), how)])

    @seen_as("reduce_")
    def reduce(self, tensors: Any, opts: Any = None, *rest: Any) -> Any:
        tensors = [tensors] if isinstance(tensors, torch.Tensor) else tensors
        opts = opts if opts is not None else c10d.ReduceOptions()
        if (backend := self._backend_of(tensors)) is not None:
            direct, how = self._reduction(tensors, opts.reduceOp)
            if direct is None:
                return backend.reduce(tensors, opts)
            root = root_of(self._size, opts)
            return self._done([direct.collective("reduce", tensors, tensors, _is_async(opts), how, root)])
        return self._host.reduce(tensors, opts.reduceOp, root_of(self._size, opts), limit_of(opts))

    @seen_as("allgather_")
    def allgather(self, output_tensors: Any, input_tensors: Any, opts: Any = None) -> Any:
        opts = opts if opts is not None else c10d.AllgatherOptions()
        if isinstance(input_tensors, torch.Tensor):
            output_tensors, input_tensors = [output_tensors], [input_tensors]
        backend = self._backend_of(input_tensors)
        alike = backend is not None and _are_alike(output_tensors, input_tensors)
        direct = self._direct(input_tensors) if alike else None
        if backend is not None and direct is None:
            return backend.allgather(output_tensors, input_tensors, opts)
        for outputs in output_tensors:
            count(self._size, outputs, "outputs")
        if direct is not None:
            pairs = list(zip(output_tensors, input_tensors, strict=True))
            return self._done([direct.all_gather(o, i, _is_async(opts)) for o, i in pairs])
        return self._host.all_gather(output_tensors, input_tensors, limit_of(opts))

    @seen_as("_allgather_base_")
    def _allgather_base(self, output: Any, input: Any, opts: Any = None) -> Any:
        opts = opts if opts is not None else c10d.AllgatherOptions()
        backend = self._backend_of([output, input])
        direct = self._direct([input]) if backend is not None else None
        if backend is not None and direct is None:
            return backend._allgather_base(output, input, opts)
        share(self._size, output, input)
        if direct is not None:
            return self._done([direct.collective("all_gather", [output], [input], _is_async(opts))])
        return self._host.all_gather_flat([output], [input], limit_of(opts))

    @seen_as("allgather_coalesced_")
    def allgather_coalesced(self, output_lists: Any, input_list: Any, opts: Any = None) -> Any:
        opts = opts if opts is not None else c10d.AllgatherOptions()
        if (backend := self._backend_of(input_list)) is not None:
            return backend.allgather_coalesced(output_lists, input_list, opts)
        # Here the outputs are by rank, then by tensor.
        count(self._size, output_lists, "lists of outputs")
        outputs = [[one[index] for one in output_lists] for index in range(len(input_list))]
        return self._host.all_gather(outputs, input_list, limit_of(opts))

    @seen_as("allgather_into_tensor_coalesced_")
    def allgather_into_tensor_coalesced(
        self, outputs: Any, inputs: Any, opts: Any = None
    ) -> Any:
        opts = opts if opts is not None else c10d.AllgatherOptions()
        if (backend := self._backend_of(inputs)) is not None:
            direct = self._direct(inputs)
            if direct is None:
                return self._together(backend, backend._allgather_base, outputs, inputs, opts)
        for output, input in zip(outputs, inputs, strict=True):
            share(self._size, output, input)
        if backend is not None:
            return self._done([direct.collective("all_gather", outputs, inputs, _is_async(opts))])
        return self._host.all_gather_flat(outputs, inputs, limit_of(opts))

    @seen_as("reduce_scatter_")
    def reduce_scatter(self, output_tensors: Any, input_tensors: Any, opts: Any = None) -> Any:
        opts = opts if opts is not None else c10d.ReduceScatterOptions()
        if isinstance(output_tensors, torch.Tensor):
            output_tensors, input_tensors = [output_tensors], [input_tensors]
        if (backend := self._backend_of(output_tensors)) is not None:
            direct, how = self._reduction(output_tensors, opts.reduceOp)
            if direct is None or not _are_alike(input_tensors, output_tensors):
                return backend.reduce_scatter(output_tensors, input_tensors, opts)
        for inputs in input_tensors:
            count(self._size, inputs, "inputs")
        if backend is None:
            return self._host.reduce_scatter(output_tensors, input_tensors, opts.reduceOp, limit_of(opts))
        pairs = list(zip(output_tensors, input_tensors, strict=True))
        return self._done([direct.reduce_scatter(o, i, how, _is_async(opts)) for o, i in pairs])

    @seen_as("_reduce_scatter_base_")
    def _reduce_scatter_base(self, output: Any, input: Any, opts: Any = None) -> Any:
        opts = opts if opts is not None else c10d.ReduceScatterOptions()
        if (backend := self._backend_of([output, input])) is not None:
            direct, how = self._reduction([output], opts.reduceOp)
            if direct is None:
                return backend._reduce_scatter_base(output, input, opts)
            share(self._size, input, output)
            return self._done([direct.collective("reduce_scatter", [output], [input], _is_async(opts), how)])
        return self._host_reduce_scatter([output], [input], opts)

    @seen_as("reduce_scatter_tensor_coalesced_")
    def reduce_scatter_tensor_coalesced(
        self, outputs: Any, inputs: Any, opts: Any = None
    ) -> Any:
        opts = opts if opts is not None else c10d.ReduceScatterOptions()
        if (backend := self._backend_of(inputs)) is not None:
            direct, how = self._reduction(outputs, opts.reduceOp)
            if direct is None or len({output.dtype for output in outputs}) > 1:
                return self._together(backend, backend._reduce_scatter_base, outputs, inputs, opts)
            for output, input in zip(outputs, inputs, strict=True):
                share(self._size, input, output)
            return self._done([direct.collective("reduce_scatter", outputs, inputs, _is_async(opts), how)])
        return self._host_reduce_scatter(outputs, inputs, opts)

    def _host_reduce_scatter(self, outputs: Any, inputs: Any, opts: Any) -> Any:
        pieces = []
        for output, input in zip(outputs, inputs, strict=True):
            share(self._size, input, output)
            pieces.append(list(input.detach().reshape(self._size, -1).unbind(0)))
        return self._host.reduce_scatter(outputs, pieces, opts.reduceOp, limit_of(opts))

    @seen_as("alltoall_")
    def alltoall(self, output_tensors: Any, input_tensors: Any, opts: Any = None) -> Any:
        opts = opts if opts is not None else c10d.AllToAllOptions()
        backend = self._backend_of(input_tensors)
        direct = self._past(backend, input_tensors[0])
        if backend is not None and direct is None:
            return backend.alltoall(output_tensors, input_tensors, opts)
        count(self._size, output_tensors, "outputs")
        count(self._size, input_tensors, "inputs")
        if direct is not None:
            return self._done([direct.all_to_all(output_tensors, input_tensors, _is_async(opts))])
        return self._host.all_to_all(output_tensors, input_tensors, limit_of(opts))

    @seen_as("alltoall_base_")
    def alltoall_base(
        self,
        output: Any,
        input: Any,
        output_split_sizes: Any,
        input_split_sizes: Any,
        opts: Any = None,
    ) -> Any:
        opts = opts if opts is not None else c10d.AllToAllOptions()
        backend = self._backend_of([output, input])
        direct = self._past(backend, input)
        if backend is not None and direct is None:
            return backend.alltoall_base(
                output, input, output_split_sizes, input_split_sizes, opts
            )
        if direct is not None:
            received = bytes_of_parts(self._size, output, output_split_sizes, "output")
            sent = bytes_of_parts(self._size, input, input_split_sizes, "input")
            return self._done([direct.all_to_all_single(output, input, received, sent, _is_async(opts))])
        outputs = split(self._size, output, output_split_sizes, "output")
        inputs = split(self._size, input, input_split_sizes, "input")
        return self._host.all_to_all(outputs, inputs, limit_of(opts))

    @seen_as("gather_")
    def gather(self, output_tensors: Any, input_tensors: Any, opts: Any = None) -> Any:
        opts = opts if opts is not None else c10d.GatherOptions()
        backend = self._backend_of(input_tensors)
        direct = self._direct(input_tensors) if backend is not None else None
        if backend is not None and direct is None:
            return backend.gather(output_tensors, input_tensors, opts)
        outputs = output_tensors[0] if output_tensors else []
        return self._gather(direct, outputs, input_tensors[0], opts)

    @seen_as("gather_")
    def gather_single(self, output: Any, input: Any, opts: Any = None) -> Any:
        opts = opts if opts is not None else c10d.GatherOptions()
        backend = self._backend_of([input])
        direct = self._direct([input]) if backend is not None else None
        if backend is not None and direct is None:
            return backend.gather_single(output, input, opts)
        outputs = []
        if root_of(self._size, opts) == self._rank:
            share(self._size, output, input)
            if not output.is_contiguous():
                raise InvalidArgumentError("the output is not contiguous; expected the parts one behind another")
            outputs = list(output.detach().view(self._size, *input.shape).unbind(0))
        return self._gather(direct, outputs, input, opts)

    def _gather(self, direct: Any, outputs: Any, input: Any, opts: Any) -> Any:
        """Gathers past the backend, or on the host."""
        root = root_of(self._size, opts)
        if root == self._rank:
            count(self._size, outputs, "outputs")
        if direct is None:
            return self._host.gather(outputs, input, root, limit_of(opts))
        outputs = outputs if root == self._rank else []
        for output in outputs:
            check_alike(output, input)
        return self._done([direct.all_gather(outputs, input, _is_async(opts), root)])

    @seen_as("scatter_")
    def scatter(self, output_tensors: Any, input_tensors: Any, opts: Any = None) -> Any:
        opts = opts if opts is not None else c10d.ScatterOptions()
        backend = self._backend_of(output_tensors)
        direct = self._direct(output_tensors) if backend is not None else None
        if backend is not None and direct is None:
            return backend.scatter(output_tensors, input_tensors, opts)
        output, root = output_tensors[0], root_of(self._size, opts)
        inputs = input_tensors[0] if input_tensors else []
        if root == self._rank:
            count(self._size, inputs, "inputs")
        if direct is None:
            return self._host.scatter(output, inputs, root, limit_of(opts))
        inputs = inputs if root == self._rank else []
        for input in inputs:
            check_alike(output, input)
        return self._done([direct.reduce_scatter(output, inputs, None, _is_async(opts), root)])

    @seen_as("barrier")
    def barrier(self, opts: Any = None, *rest: Any) -> Any:
        self._check()
        opts = opts if opts is not None else c10d.BarrierOptions()
        device = getattr(opts, "device", None)
        self._join_in_barrier(device if device is not None and device.type == "cuda" else None)
        kind = device.type if device is not None else "cpu"
        if kind == "cpu" and self._host is None and self._gloo is None:
            kind = "cuda"
        if (backend := self._backend_for(kind)) is None:
            return self._host.barrier(limit_of(opts))
        if kind == "cuda" and (direct := self._joined_collectives()) is not None:
            return self._done([direct.barrier(_is_async(opts))])
        return backend.barrier(opts)

    # Sends and receives

    @seen_as("send")
    def send(self, tensors: Any, dst_rank: int, tag: int = 0) -> Any:
        if (backend := self._backend_of(tensors, by_all=False)) is not None:
            return backend.send(tensors, dst_rank, tag)
        return self._one([self._messages.send(t, dst_rank, tag) for t in tensors])

    @seen_as("recv_")
    def recv(self, tensors: Any, src_rank: int, tag: int = 0) -> Any:
        if (backend := self._backend_of(tensors, by_all=False)) is not None:
            return backend.recv(tensors, src_rank, tag)
        return self._one([self._messages.receive(t, src_rank, tag) for t in tensors])

    @seen_as("recv_any_source_")
    def recv_anysource(self, tensors: Any, tag: int = 0) -> Any:
        if (backend := self._backend_of(tensors, by_all=False)) is not None:
            return backend.recv_anysource(tensors, tag)
        return self._one([self._messages.receive(t, None, tag) for t in tensors])

    @staticmethod
    def _one(works: list[Any]) -> Any:
        return works[0] if len(works) == 1 else WorkGroup(works)

    def _together(self, backend: Any, call: Any, outputs: Any, inputs: Any, opts: Any) -> Any:
        """``call`` of ``backend`` for each of ``inputs``, as one work: PyTorch's own backends have no
        name in Python for the coalesced forms."""
        pairs = list(zip(outputs, inputs, strict=True))
        coalesces = len(pairs) > 1 and backend.supports_coalescing
        if coalesces:
            backend._start_coalescing()
        works = [call(output, input, opts) for output, input in pairs]
        return backend._end_coalescing() if coalesces else self._one(works)

    # Newer names of the same

    all_gather_single = _allgather_base
    reduce_scatter_single = _reduce_scatter_base
    all_to_all_single = alltoall_base
    all_gather_into_tensor_coalesced = allgather_into_tensor_coalesced
    gather_into_tensor = gather_single
    all_gather_single_coalesced = allgather_into_tensor_coalesced
    reduce_scatter_single_coalesced = reduce_scatter_tensor_coalesced

    # Coalescing: works on the host are noted and waited for together

    def _start_coalescing(self, device: torch.device) -> None:
        self._check()
        if (backend := self._backend_for(device.type)) is not None:
            backend._start_coalescing()
            self._direct_works.works = []
        else:
            self._host_works.noted.works = []

    def _end_coalescing(self, device: torch.device) -> Any:
        if (backend := self._backend_for(device.type)) is None:
            return WorkGroup(self._host_works.noted.take())
        work, direct = backend._end_coalescing(), self._direct_works.take()
        if not direct:
            return work
        return WorkGroup([*direct, work] if work is not None else direct)
