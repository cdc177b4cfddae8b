"""Arguments and results of layers of experts."""

from __future__ import annotations

from typing import Any, NamedTuple


class Dispatched(NamedTuple):
    """The rows for the experts of this rank, by the rank that they come from.

    :meth:`warplink.Experts.allocate` makes one; any arrays of these shapes on the device will do. ``rows[p]`` and
    ``experts[p]`` hold what came from rank p in their first ``counts[p]`` entries; what is behind them is undefined.
    """

    #: The rows, of the layer's type and ``[size, max_rows, elements]``.
    rows: Any
    #: For each row, which of this rank's experts it is for, from 0 on: i32 of ``[size, max_rows]``.
    experts: Any
    #: How many rows came from each rank: i32 of ``[size]``.
    counts: Any
