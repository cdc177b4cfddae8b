"""Collectives of CPU tensors over the host device.

Bytes move in shared memory, by the communicator's engine on this thread. Sums and products of common types are
computed as they arrive; all else is computed by PyTorch, so that every type and reduction is there. Every collective
begins with a header to and from each peer (what it is, its number, and how many bytes either side sends), in front of
the data. Ranks that make different calls get an error that names the calls, instead of wrong data.
"""

from __future__ import annotations

import struct
from itertools import chain
from typing import Any, Callable, Iterable

import torch

import warplink
from warplink.errors import ClosedError, TimeoutError, UnsupportedError, WarplinkError, from_kind
from warplink.torch.arithmetic import (
    as_bytes,
    place_of,
    readable,
    reduce_parts,
    reduction_name,
    settle,
    writable,
)
from warplink.torch.element_types import DTYPES
from warplink.torch.shapes import check_alike, check_plain
from warplink.torch.works import HostWork, Result, Worker, Works, bare

#: Number, root, bytes to the peer, bytes from the peer, operation, element type.
HEADER = struct.Struct("<QqQQ56s24s")

#: Up to this many bytes, every rank sends all of a tensor to all others to reduce it.
ONE_SHOT_BYTES = 128 << 10

#: Reductions of the engine that are bit-identical to PyTorch's: types, and names of reductions.
SAME_BITS = (
    torch.float32,
    torch.float64,
    torch.float16,
    torch.bfloat16,
    torch.int32,
    torch.int64,
)
REDUCTIONS = {"sum": "sum", "product": "product", "avg": "average"}

Pieces = list[tuple[int, torch.Tensor]]

#: Operator, element type, and the addresses of what this rank has and of what is written.
Reduction = tuple[str, str, int, int]


class HostCollectives:
    """The collectives of one group, done one after another on a thread.

    Every member makes one at the same time. Methods return at once, with a handle; ranks are the
    group's. A failure ends the group: later operations raise it again.
    """

    def __init__(self, communicator: warplink.Communicator, works: Works, timeout: float) -> None:
        self.communicator = communicator
        self.rank, self.size = communicator.rank, communicator.size
        self._others = [peer for peer in range(self.size) if peer != self.rank]
        self.timeout = timeout
        self._engine = communicator.collective_engine()
        self._stream = communicator.create_stream()
        self._worker = Worker("warplink-collectives")
        self._number = 0
        #: Moves the data of all-to-alls; None where the engine does.
        self.direct: warplink.Collectives | None = None
        self._failure: BaseException | None = None
        self._works = works

    @property
    def sequence_number(self) -> int:
        """How many collectives were done."""
        return self._number

    def close(self, limit: float = 1.0) -> None:
        """Ends what is under way. Later operations raise ClosedError."""
        self._failure = self._failure or ClosedError("the process group was destroyed")
        if not self._worker.stop(limit):
            self._engine.abort()
            self._worker.stop(limit)

    def submit(
        self,
        name: str,
        body: Callable[[float], Result],
        timeout: float | None,
        inputs: Iterable[torch.Tensor] = (),
        outputs: Iterable[torch.Tensor] = (),
    ) -> HostWork:
        """Has ``body`` (given the limit in seconds) done in turn, which reads ``inputs`` and writes ``outputs``."""
        inputs, outputs = list(inputs), list(outputs)
        check_plain(inputs, outputs)
        limit = self.timeout if timeout is None else timeout
        work = self._works.start(name, limit, inputs, outputs)

        def failed(error: BaseException) -> BaseException:
            if isinstance(error, TimeoutError):
                error = self._timed_out(name, limit, error)
            # Peers are in the middle of something that this rank will not go on with.
            self._failure = bare(error)
            return error

        def run() -> None:
            if self._failure is not None:
                work.finish(error=self._failure)
            else:
                work.run(lambda: body(limit), failed)

        if not self._worker.submit(run):
            work.finish(error=self._failure or ClosedError("the process group was destroyed"))
        return work

    def _timed_out(self, name: str, limit: float, cause: TimeoutError) -> WarplinkError:
        message = (
            f"rank {self.rank}: {name}: not all ranks took part before the timeout of {limit} s "
            "passed; help: check that every rank calls it"
        )
        error = from_kind("timeout", message, rank=self.rank, operation=name)
        error.__cause__ = bare(cause)
        return error

    # Moving bytes

    def _exchange(
        self,
        name: str,
        dtype: torch.dtype,
        sends: Pieces,
        receives: Pieces,
        limit: float,
        root: int = -1,
        reduction: Reduction | None = None,
        direct: warplink.Collectives | None = None,
    ) -> None:
        """Agrees with every peer on what is done, then sends and receives, all at once; by ``direct`` if it is given.
        With a reduction, what is received is combined, and the receives only say how long it is.

        Raises MismatchError, which names the peer, where one does something else.
        """
        if self.size == 1:
            return
        outward = {peer: place_of(piece) for peer, piece in sends}
        inward = {peer: place_of(piece) for peer, piece in receives}
        what, kind = name.encode(), str(dtype).removeprefix("torch.").encode()
        number = self._number
        self._number += 1
        said = []
        for peer in self._others:
            to, back = (bytes_of.get(peer, (0, 0))[1] for bytes_of in (outward, inward))
            told = HEADER.pack(number, root, to, back, what, kind)
            said.append((peer, told, HEADER.pack(number, root, back, to, what, kind)))
        to_send, to_receive = (
            [(peer, at, count) for peer, (at, count) in ends.items() if count and direct is None]
            for ends in (outward, inward)
        )
        other = self._engine._call(said, to_send, to_receive, limit, reduction)
        if other is not None:
            peer, told = other
            expected = next(expected for at, _, expected in said if at == peer)
            raise _mismatch(self.rank, peer, HEADER.unpack(told), HEADER.unpack(expected))
        if direct is not None:
            outgoing, incoming = (
                [(peer, as_bytes(piece)) for peer, piece in ends if piece.numel()]
                for ends in (sends, receives)
            )
            direct.send_receive(self._stream, outgoing, incoming)
            self._stream.synchronize(limit)

    def _move(
        self,
        name: str,
        dtype: torch.dtype,
        sends: dict[int, torch.Tensor],
        receives: dict[int, torch.Tensor],
        limit: float,
        root: int = -1,
        direct: warplink.Collectives | None = None,
    ) -> None:
        """Sends contiguous tensors to ranks and receives tensors from ranks, as ``_exchange`` does. A tensor for this rank
        itself is copied."""
        own = sends.pop(self.rank, None)
        target = receives.pop(self.rank, None)
        written = [(peer, writable(tensor)) for peer, tensor in receives.items()]
        self._exchange(name, dtype, list(sends.items()), written, limit, root, direct=direct)
        if own is not None and target is not None:
            target.detach().copy_(own.view(target.shape))
        for (_, result), tensor in zip(written, receives.values()):
            settle(tensor, result)

    def _reduce_received(
        self,
        what: str,
        name: str,
        sends: Pieces,
        own: torch.Tensor,
        target: torch.Tensor | None,
        limit: float,
        root: int = -1,
    ) -> torch.Tensor:
        """The reduction of what each peer sends with ``own``, in the order of ranks; in ``target``, as long as ``own``, if
        that is given, which may be what is sent."""
        kind = DTYPES[own.dtype] if own.dtype in SAME_BITS else None
        exact = name != "avg" or own.is_floating_point()
        if kind is not None and name in REDUCTIONS and exact and self._others and own.numel():
            total = torch.empty_like(own) if target is None else target
            reduction = (REDUCTIONS[name], kind, own.data_ptr(), total.data_ptr())
            receives = [(peer, total) for peer in self._others]
            self._exchange(what, own.dtype, sends, receives, limit, root, reduction)
            return total
        parts = own.new_empty((self.size, *own.shape))
        self._exchange(what, own.dtype, sends, [(p, parts[p]) for p in self._others], limit, root)
        total = reduce_parts([own if p == self.rank else parts[p] for p in range(self.size)], name)
        return total if target is None else target.copy_(total)

    # Collectives; each gives the body of an operation

    def broadcast(self, tensors: list[torch.Tensor], root: int, timeout: float | None) -> HostWork:
        def body(limit: float) -> Result:
            for tensor in tensors:
                sends = dict.fromkeys(self._others, readable(tensor)) if self.rank == root else {}
                receives = {} if self.rank == root else {root: tensor}
                self._move("broadcast", tensor.dtype, sends, receives, limit, root)
            return tensors

        if self.rank == root:
            return self.submit("broadcast", body, timeout, inputs=tensors)
        return self.submit("broadcast", body, timeout, outputs=tensors)

    def all_reduce(self, tensors: list[torch.Tensor], op: object, timeout: float | None) -> HostWork:
        name = reduction_name(op, tensors)
        plain = [tensor for tensor in tensors if not tensor.is_sparse]
        if len(plain) != len(tensors) and name != "sum":
            raise UnsupportedError(f"sparse tensors are not reduced by {name}; expected sum")

        def body(limit: float) -> Result:
            for tensor in tensors:
                if tensor.is_sparse:
                    self._all_reduce_sparse(tensor, limit)
                    continue
                own = readable(tensor)
                self._all_reduced_in_place(own.view(-1), name, limit)
                settle(tensor, own)
            return tensors

        return self.submit("all_reduce", body, timeout, outputs=plain)

    def _all_reduced_in_place(self, flat: torch.Tensor, name: str, limit: float) -> None:
        """A flat tensor becomes its reduction over all ranks, the same bits on each."""
        what = f"all_reduce {name}"
        # Of two ranks, each sends as much in two shots.
        if self.size == 2 or flat.nbytes <= ONE_SHOT_BYTES:
            self._reduce_received(what, name, [(peer, flat) for peer in self._others], flat, flat, limit)
            return
        # Two shots: each rank reduces a piece, then all gather the pieces.
        bounds = [flat.numel() * peer // self.size for peer in range(self.size + 1)]
        pieces = [flat[bounds[peer] : bounds[peer + 1]] for peer in range(self.size)]
        own = pieces[self.rank]
        self._reduce_received(what, name, [(p, pieces[p]) for p in self._others], own, own, limit)
        self._gather_into(what, pieces, own, limit)

    def _gather_into(
        self, what: str, targets: list[torch.Tensor], own: torch.Tensor, limit: float
    ) -> None:
        """Rank p's ``own`` becomes ``targets[p]`` on every rank, but for this rank's."""
        sends = [(peer, own) for peer in self._others]
        self._exchange(what, own.dtype, sends, [(p, targets[p]) for p in self._others], limit)

    def _all_reduce_sparse(self, tensor: torch.Tensor, limit: float) -> None:
        own = tensor.detach().coalesce()
        indices, values = own.indices().contiguous(), readable(own.values())
        counts = [torch.empty(1, dtype=torch.int64) for _ in range(self.size)]
        count = torch.tensor([indices.shape[1]], dtype=torch.int64)
        self._gather_into("all_reduce sparse", counts, count, limit)
        counts[self.rank] = count
        lengths = [int(count) for count in counts]
        all_indices = [indices.new_empty((indices.shape[0], n)) for n in lengths]
        all_values = [values.new_empty((n, *values.shape[1:])) for n in lengths]
        self._gather_into("all_reduce indices", all_indices, indices, limit)
        self._gather_into("all_reduce values", all_values, values, limit)
        all_indices[self.rank], all_values[self.rank] = indices, values
        total = torch.sparse_coo_tensor(
            torch.cat(all_indices, 1), torch.cat(all_values), tensor.shape
        )
        # The tensor that `detach` returns has memory of its own once it is copied to.
        tensor.copy_(total.coalesce())

    def reduce(
        self, tensors: list[torch.Tensor], op: object, root: int, timeout: float | None
    ) -> HostWork:
        name = reduction_name(op, tensors)

        def body(limit: float) -> Result:
            for tensor in tensors:
                what, own = f"reduce {name}", readable(tensor)
                if self.rank != root:
                    self._exchange(what, tensor.dtype, [(root, own)], [], limit, root)
                    continue
                total = self._reduce_received(what, name, [], own, None, limit, root)
                tensor.detach().copy_(total)
            return tensors

        if self.rank != root:
            return self.submit("reduce", body, timeout, inputs=tensors)
        return self.submit("reduce", body, timeout, outputs=tensors)

    def all_gather(
        self, outputs: list[list[torch.Tensor]], inputs: list[torch.Tensor], timeout: float | None
    ) -> HostWork:
        """``outputs[i][p]`` becomes rank p's ``inputs[i]``."""

        def body(limit: float) -> Result:
            for targets, source in zip(outputs, inputs, strict=True):
                sends = dict.fromkeys(range(self.size), readable(source))
                self._move("all_gather", source.dtype, sends, dict(enumerate(targets)), limit)
            return outputs

        for targets, source in zip(outputs, inputs, strict=True):
            check_alike(targets[self.rank], source)
        return self.submit("all_gather", body, timeout, inputs, chain(*outputs))

    def all_gather_flat(
        self, outputs: list[torch.Tensor], inputs: list[torch.Tensor], timeout: float | None
    ) -> HostWork:
        """``outputs[i]`` becomes every rank's ``inputs[i]``, in rank order."""

        def body(limit: float) -> Result:
            for target, source in zip(outputs, inputs, strict=True):
                own, written = readable(source), writable(target)
                pieces = list(written.view(self.size, -1).unbind(0))
                self._gather_into("all_gather", pieces, own.reshape(-1), limit)
                pieces[self.rank].copy_(own.reshape(-1))
                settle(target, written)
            return outputs

        return self.submit("all_gather", body, timeout, inputs, outputs)

    def reduce_scatter(
        self,
        outputs: list[torch.Tensor],
        inputs: list[list[torch.Tensor]],
        op: object,
        timeout: float | None,
    ) -> HostWork:
        """``outputs[i]`` becomes the reduction of every rank's ``inputs[i][this rank]``."""
        name = reduction_name(op, outputs)

        def body(limit: float) -> Result:
            for target, sources in zip(outputs, inputs, strict=True):
                pieces = [readable(source) for source in sources]
                sends = [(peer, piece) for peer, piece in enumerate(pieces) if peer != self.rank]
                own, what = pieces[self.rank], f"reduce_scatter {name}"
                total = self._reduce_received(what, name, sends, own, None, limit)
                target.detach().copy_(total.view(target.shape))
            return outputs

        for target, sources in zip(outputs, inputs, strict=True):
            check_alike(target, sources[self.rank])
        return self.submit("reduce_scatter", body, timeout, chain(*inputs), outputs)

    def all_to_all(
        self, outputs: list[torch.Tensor], inputs: list[torch.Tensor], timeout: float | None
    ) -> HostWork:
        """``outputs[p]`` becomes rank p's ``inputs[this rank]``."""

        def body(limit: float) -> Result:
            sends = {peer: readable(source) for peer, source in enumerate(inputs)}
            # Different lengths are reported before data moves, with the names of the ranks' calls.
            self._move("all_to_all", inputs[0].dtype, sends, dict(enumerate(outputs)), limit, direct=self.direct)
            return outputs

        check_alike(outputs[self.rank], inputs[self.rank])
        return self.submit("all_to_all", body, timeout, inputs, outputs)

    def gather(
        self, outputs: list[torch.Tensor], source: torch.Tensor, root: int, timeout: float | None
    ) -> HostWork:
        """On ``root``, ``outputs[p]`` becomes rank p's ``source``."""

        def body(limit: float) -> Result:
            self._move("gather", source.dtype, {root: readable(source)}, dict(enumerate(written)), limit, root)
            return written

        written = outputs if self.rank == root else []
        if self.rank == root:
            check_alike(outputs[root], source)
        return self.submit("gather", body, timeout, [source], written)

    def scatter(
        self, target: torch.Tensor, inputs: list[torch.Tensor], root: int, timeout: float | None
    ) -> HostWork:
        """``target`` becomes the root's ``inputs[this rank]``."""

        def body(limit: float) -> Result:
            sends = {peer: readable(one) for peer, one in enumerate(sent)}
            self._move("scatter", target.dtype, sends, {root: target}, limit, root)
            return [target]

        sent = inputs if self.rank == root else []
        if self.rank == root:
            check_alike(target, inputs[root])
        return self.submit("scatter", body, timeout, sent, [target])

    def barrier(self, timeout: float | None) -> HostWork:
        def body(limit: float) -> Result:
            self._exchange("barrier", torch.uint8, [], [], limit)
            return []

        return self.submit("barrier", body, timeout)


def _mismatch(rank: int, peer: int, told: tuple[Any, ...], wanted: tuple[Any, ...]) -> WarplinkError:
    """Descriptions of the peer's call and of this rank's."""

    def say(header: tuple[Any, ...]) -> str:
        number, root, to, back, name, kind = header
        rooted = f" of rank {root}" if root >= 0 else ""
        return (
            f"{_text(name)}{rooted}, {_text(kind)}, "
            f"{to} bytes one way and {back} the other, as collective {number}"
        )

    message = (
        f"rank {rank}: the peer calls {say(told)}; expected {say(wanted)} (peer {peer}); "
        "help: call the same collectives in the same order with the same sizes on every rank"
    )
    return from_kind("mismatch", message, rank=rank, peer=peer)


def _text(name: bytes) -> str:
    return name.rstrip(b"\0").decode(errors="replace")
