"""Collectives of CPU tensors over the host device.

Bytes move by the communicator's own collectives, in shared memory; what is computed is computed by
PyTorch, so that every type and reduction is there. Every collective begins with a packet of one length
to and from each peer: a header (what it is, its number, and how many bytes either side sends), and the
first of the data. Ranks that call something else get an error that says so, instead of one another's data.
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
    readable,
    reduce_parts,
    reduction_name,
    settle,
    writable,
)
from warplink.torch.shapes import check_alike, check_plain
from warplink.torch.works import HostWork, Result, Worker, Works, bare

#: Number, root, bytes to the peer, bytes from the peer, operation, element type.
HEADER = struct.Struct("<QqQQ56s24s")

#: Bytes of the packet that every collective begins with: the header, and the first of the data.
PACKET_BYTES = 4096

#: Up to this many bytes, every rank sends all of a tensor to all others to reduce it.
ONE_SHOT_BYTES = 128 << 10

Pieces = list[tuple[int, torch.Tensor]]


class HostCollectives:
    """The collectives of one group, done one after another on a thread.

    Every member makes one at the same time. Methods return at once, with a handle; ranks are the
    group's. A failure ends the group: later operations raise it again.
    """

    def __init__(self, communicator: warplink.Communicator, works: Works, timeout: float) -> None:
        self.communicator = communicator
        self.rank, self.size = communicator.rank, communicator.size
        self.timeout = timeout
        self._engine = communicator.collective_engine()
        self._stream = communicator.create_stream()
        self._worker = Worker("warplink-collectives")
        self._number = 0
        #: What moves the data of all-to-alls; None where the engine does.
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
        work = self._works.start(name, inputs, outputs)

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

    def _move(
        self,
        sends: Pieces,
        receives: Pieces,
        limit: float,
        direct: warplink.Collectives | None = None,
    ) -> None:
        """Sends and receives bytes, all at once; by the engine unless ``direct`` is given."""
        outward = [(peer, data) for peer, data in sends if data.numel()]
        inward = [(peer, data) for peer, data in receives if data.numel()]
        if not outward and not inward:
            return
        if direct is not None:
            direct.send_receive(self._stream, outward, inward)
        else:
            self._engine.exchange(self._stream, outward, inward)
        self._stream.synchronize(limit)

    def _exchange(
        self,
        name: str,
        dtype: torch.dtype,
        sends: Pieces,
        receives: Pieces,
        limit: float,
        root: int = -1,
        direct: warplink.Collectives | None = None,
    ) -> None:
        """Agrees with every peer on what is done, then moves what is to be moved.

        Raises MismatchError, which names the peer, where one does something else.
        """
        others = [peer for peer in range(self.size) if peer != self.rank]
        if not others:
            return
        outward = {peer: as_bytes(piece) for peer, piece in sends}
        inward = {peer: as_bytes(piece) for peer, piece in receives}
        kind = str(dtype).removeprefix("torch.").encode()
        number = self._number
        self._number += 1
        own = torch.zeros((self.size, PACKET_BYTES), dtype=torch.uint8)
        theirs = torch.empty((self.size, PACKET_BYTES), dtype=torch.uint8)
        for peer in others:
            to, back = _length(outward.get(peer)), _length(inward.get(peer))
            header = HEADER.pack(number, root, to, back, name.encode(), kind)
            own[peer, : HEADER.size] = torch.frombuffer(bytearray(header), dtype=torch.uint8)
            if to:
                inline, _ = _packed(outward[peer])
                own[peer, HEADER.size : HEADER.size + inline.numel()] = inline
        self._move([(p, own[p]) for p in others], [(p, theirs[p]) for p in others], limit)
        for peer in others:
            told_by = HEADER.unpack(bytes(theirs[peer, : HEADER.size].tolist()))
            sent, expected = _length(inward.get(peer)), _length(outward.get(peer))
            wanted = (number, root, sent, expected, name.encode(), kind)
            told = (*told_by[:4], told_by[4].rstrip(b"\0"), told_by[5].rstrip(b"\0"))
            if told != wanted:
                raise _mismatch(self.rank, peer, told, wanted)
            if sent:
                inline, _ = _packed(inward[peer])
                inline.copy_(theirs[peer, HEADER.size : HEADER.size + inline.numel()])
        self._move(
            [(peer, _packed(piece)[1]) for peer, piece in outward.items()],
            [(peer, _packed(piece)[1]) for peer, piece in inward.items()],
            limit,
            direct,
        )

    # Collectives; each gives the body of an operation

    def broadcast(self, tensors: list[torch.Tensor], root: int, timeout: float | None) -> HostWork:
        def body(limit: float) -> Result:
            for tensor in tensors:
                if self.rank == root:
                    source = readable(tensor)
                    sends = [(peer, source) for peer in range(self.size) if peer != root]
                    self._exchange("broadcast", tensor.dtype, sends, [], limit, root)
                else:
                    target = writable(tensor)
                    receives = [(root, target)]
                    self._exchange("broadcast", tensor.dtype, [], receives, limit, root)
                    settle(tensor, target)
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
                total = self._all_reduced(readable(tensor).reshape(-1), name, limit)
                tensor.detach().copy_(total.view(tensor.shape))
            return tensors

        return self.submit("all_reduce", body, timeout, outputs=plain)

    def _all_reduced(self, flat: torch.Tensor, name: str, limit: float) -> torch.Tensor:
        """The reduction of a flat tensor over all ranks, the same bits on each."""
        what = f"all_reduce {name}"
        # Of two ranks, each sends all of it in either way.
        if self.size == 2 or flat.numel() * flat.element_size() <= ONE_SHOT_BYTES:
            parts = flat.new_empty((self.size, flat.numel()))
            others = [peer for peer in range(self.size) if peer != self.rank]
            sends = [(peer, flat) for peer in others]
            self._exchange(what, flat.dtype, sends, [(p, parts[p]) for p in others], limit)
            pieces = [flat if peer == self.rank else parts[peer] for peer in range(self.size)]
            return reduce_parts(pieces, name)
        # Two shots: each rank reduces a piece, then all gather the pieces.
        bounds = [flat.numel() * peer // self.size for peer in range(self.size + 1)]
        pieces = [flat[bounds[peer] : bounds[peer + 1]] for peer in range(self.size)]
        own = self._reduced_piece(what, pieces, name, limit)
        total = torch.empty_like(flat)
        gathered = [total[bounds[peer] : bounds[peer + 1]] for peer in range(self.size)]
        gathered[self.rank].copy_(own)
        self._gather_into(what, gathered, gathered[self.rank], limit)
        return total

    def _reduced_piece(
        self, what: str, pieces: list[torch.Tensor], name: str, limit: float
    ) -> torch.Tensor:
        """This rank's piece, reduced over the ranks; ``pieces[p]`` goes to rank p."""
        own = pieces[self.rank]
        parts = own.new_empty((self.size, own.numel()))
        others = [peer for peer in range(self.size) if peer != self.rank]
        sends = [(peer, pieces[peer]) for peer in others]
        self._exchange(what, own.dtype, sends, [(p, parts[p]) for p in others], limit)
        flat = own.reshape(-1)
        return reduce_parts([flat if p == self.rank else parts[p] for p in range(self.size)], name)

    def _gather_into(
        self, what: str, targets: list[torch.Tensor], own: torch.Tensor, limit: float
    ) -> None:
        """Rank p's ``own`` becomes ``targets[p]`` on every rank, but for this rank's."""
        others = [peer for peer in range(self.size) if peer != self.rank]
        sends = [(peer, own) for peer in others]
        self._exchange(what, own.dtype, sends, [(p, targets[p]) for p in others], limit)

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
        # What `detach` gives has memory of its own once it is copied to.
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
                parts = own.new_empty((self.size, *own.shape))
                receives = [(peer, parts[peer]) for peer in range(self.size) if peer != root]
                self._exchange(what, tensor.dtype, [], receives, limit, root)
                pieces = [own if peer == root else parts[peer] for peer in range(self.size)]
                tensor.detach().copy_(reduce_parts(pieces, name))
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
                own = readable(source)
                written = [writable(target) for target in targets]
                self._gather_into("all_gather", written, own, limit)
                for peer, (target, result) in enumerate(zip(targets, written)):
                    if peer == self.rank:
                        target.detach().copy_(own.view(target.shape))
                    else:
                        settle(target, result)
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
                total = self._reduced_piece(f"reduce_scatter {name}", pieces, name, limit)
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
            pieces = [readable(source) for source in inputs]
            written = [writable(target) for target in outputs]
            others = [peer for peer in range(self.size) if peer != self.rank]
            sends = [(peer, pieces[peer]) for peer in others]
            receives = [(peer, written[peer]) for peer in others]
            # Ends of other lengths have been told of by now, with the names of what the ranks call.
            self._exchange("all_to_all", pieces[0].dtype, sends, receives, limit, direct=self.direct)
            own = pieces[self.rank]
            outputs[self.rank].detach().copy_(own.view(outputs[self.rank].shape))
            for peer in others:
                settle(outputs[peer], written[peer])
            return outputs

        check_alike(outputs[self.rank], inputs[self.rank])
        return self.submit("all_to_all", body, timeout, inputs, outputs)

    def gather(
        self, outputs: list[torch.Tensor], source: torch.Tensor, root: int, timeout: float | None
    ) -> HostWork:
        """On ``root``, ``outputs[p]`` becomes rank p's ``source``."""

        def body(limit: float) -> Result:
            own = readable(source)
            if self.rank != root:
                self._exchange("gather", own.dtype, [(root, own)], [], limit, root)
                return []
            written = [writable(target) for target in outputs]
            receives = [(peer, written[peer]) for peer in range(self.size) if peer != root]
            self._exchange("gather", own.dtype, [], receives, limit, root)
            for peer, target in enumerate(outputs):
                if peer == root:
                    target.detach().copy_(own.view(target.shape))
                else:
                    settle(target, written[peer])
            return outputs

        if self.rank == root:
            check_alike(outputs[root], source)
            return self.submit("gather", body, timeout, [source], outputs)
        return self.submit("gather", body, timeout, [source])

    def scatter(
        self, target: torch.Tensor, inputs: list[torch.Tensor], root: int, timeout: float | None
    ) -> HostWork:
        """``target`` becomes the root's ``inputs[this rank]``."""

        def body(limit: float) -> Result:
            if self.rank == root:
                pieces = [readable(source) for source in inputs]
                sends = [(peer, pieces[peer]) for peer in range(self.size) if peer != root]
                self._exchange("scatter", target.dtype, sends, [], limit, root)
                target.detach().copy_(pieces[root].view(target.shape))
            else:
                written = writable(target)
                self._exchange("scatter", target.dtype, [], [(root, written)], limit, root)
                settle(target, written)
            return [target]

        if self.rank == root:
            check_alike(target, inputs[root])
        return self.submit("scatter", body, timeout, inputs if self.rank == root else [], [target])

    def barrier(self, timeout: float | None) -> HostWork:
        def body(limit: float) -> Result:
            self._exchange("barrier", torch.uint8, [], [], limit)
            return []

        return self.submit("barrier", body, timeout)


def _length(data: torch.Tensor | None) -> int:
    return 0 if data is None else data.numel()


def _packed(data: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """What of ``data`` goes with the header, and what goes after it."""
    split = PACKET_BYTES - HEADER.size
    return data[:split], data[split:]


def _mismatch(rank: int, peer: int, told: tuple[Any, ...], wanted: tuple[Any, ...]) -> WarplinkError:
    """What the peer does, and what this rank does."""

    def say(header: tuple[Any, ...]) -> str:
        number, root, to, back, name, kind = header
        rooted = f" of rank {root}" if root >= 0 else ""
        return (
            f"{name.decode(errors='replace')}{rooted}, {kind.decode(errors='replace')}, "
            f"{to} bytes one way and {back} the other, as collective {number}"
        )

    message = (
        f"rank {rank}: the peer calls {say(told)}; expected {say(wanted)} (peer {peer}); "
        "help: call the same collectives in the same order with the same sizes on every rank"
    )
    return from_kind("mismatch", message, rank=rank, peer=peer)
