"""Arguments and results of layers of experts, and calls with the conventions of other libraries."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from warplink._warplink import Experts, Routing, Stream


class _Arrays(NamedTuple):
    rows: Any
    experts: Any
    counts: Any


class Dispatched(_Arrays):
    """The rows for the experts of this rank.

    :meth:`warplink.Experts.allocate` makes one; any arrays of these shapes on the device will do. It is a tuple of the
    first three; the others are None where the layer has no use for them.

    By source rank, ``rows[p]`` and what describes them hold what came from rank p in their first ``counts[p]`` entries. By
    expert, the first ``counts[0]`` rows are those of the first of this rank's experts, the next ``counts[1]`` those of the
    second, and so on. Entries that no row came for are undefined.

    - ``rows``: of the layer's type, or, if it quantises, the bytes of f8e4m3 as u8 (``.view(torch.float8_e4m3fn)``), and
      ``[size, max_rows, elements]``; by expert ``[size * max_rows, elements]``.
    - ``experts``: for each row, which of this rank's experts it is for, from 0 on: i32 of ``[size, max_rows]``, by expert
      ``[size * max_rows]``. Once per rank, for each slot of the token, -1 for experts of other ranks and unused slots:
      ``[size, max_rows, top_k]``.
    - ``counts``: how many rows came from each rank, i32 of ``[size]``; by expert, how many each of this rank's experts has,
      ``[experts / size]``.
    - ``scales``: with a quantisation, f32 of ``[size, max_rows, scales]``, by expert ``[size * max_rows, scales]``: one for
      each row, or for each 128 elements.
    - ``weights``: once per rank, the token's weights in all slots: f32 of ``[size, max_rows, top_k]``.
    - ``dropped``: where rows may be dropped, how many rows of this rank's tokens were, for each of all experts: i32 of
      ``[experts]``, or None if that is of no interest. Expert e is one of rank ``e // (experts // size)``.
    """

    scales: Any
    weights: Any
    dropped: Any

    def __new__(
        cls, rows: Any, experts: Any, counts: Any, scales: Any = None, weights: Any = None, dropped: Any = None
    ) -> Dispatched:
        made = super().__new__(cls, rows, experts, counts)
        made.scales, made.weights, made.dropped = scales, weights, dropped
        return made

    def _replace(self, **changes: Any) -> Dispatched:
        own = {**self._asdict(), **vars(self)}
        unknown = changes.keys() - own.keys()
        if unknown:
            raise TypeError(f"unknown arrays of a dispatch: {sorted(unknown)}")
        return Dispatched(**{**own, **changes})


class Handle(NamedTuple):
    """What :meth:`ExpertBuffer.dispatch` returns for :meth:`ExpertBuffer.combine`, with what else is known of the rows."""

    routing: Routing
    #: See :class:`Dispatched`.
    experts: Any
    weights: Any
    dropped: Any


class ExpertBuffer:
    """Dispatch and combine of a layer as users of DeepEP call them: results are new memory, and a handle connects the calls.

    Results are arrays that PyTorch and other libraries take without a copy (``torch.from_dlpack``). All calls are
    enqueued on one stream and block nowhere, so sizes are those of the options: ``counts`` says on the device how many rows
    there are. Calls that are given a target, such as those that a graph records, allocate nothing.
    """

    def __init__(self, layer: Experts, stream: Stream) -> None:
        self.layer, self.stream = layer, stream

    def dispatch(
        self, tokens: Any, experts: Any, weights: Any = None, scales: Any = None, *, target: Dispatched | None = None
    ) -> tuple[Any, Any, Handle]:
        """Sends tokens to the ranks of their experts.

        With a ``target``, as of :meth:`warplink.Experts.allocate`, results are in its arrays. Returns the received rows, or ``(rows, scales)`` if the layer quantises; how many there are (by expert with the layout
        "by_expert", else by source rank); and the handle for :meth:`combine`.
        """
        if target is None:
            target = self.layer.allocate()
        routing = self.layer.dispatch(self.stream, target, tokens, experts, scales=scales, weights=weights)
        rows = target.rows if target.scales is None else (target.rows, target.scales)
        return rows, target.counts, Handle(routing, target.experts, target.weights, target.dropped)

    def combine(self, results: Any, handle: Handle, weights: Any = None, *, target: Any = None) -> Any:
        """Returns the sums of the experts' results, which have taken the place of the rows of a dispatch.

        With a ``target``, as of :meth:`warplink.Experts.allocate_output`, they are there.
        """
        if target is None:
            target = self.layer.allocate_output(handle.routing.tokens)
        self.layer.combine(self.stream, target, results, weights, routing=handle.routing)
        return target
