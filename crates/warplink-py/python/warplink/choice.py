"""Description of how a collective is executed."""

from __future__ import annotations

from typing import NamedTuple


class Choice(NamedTuple):
    """How a call is done on the direct path; :meth:`warplink.Collectives.choice` gives it."""

    #: The algorithm, such as "one-shot".
    algorithm: str
    #: Lanes that move data: groups of threads of the kernel.
    lanes: int
    #: Threads of each.
    threads: int
    #: Into how many chunks a lane cuts its data.
    chunks: int
