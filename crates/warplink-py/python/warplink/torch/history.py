"""The fused operations that a member has called last.

Members compare a call when they make something for it, and not again: a later call costs no exchange. So a call that
differs from those of the others ends by the timeout. Then members tell one another by PyTorch's store what they called,
and find the first call that differs.
"""

from __future__ import annotations

import collections
import json
import time
from typing import Any

import torch.distributed as dist

from warplink.errors import WarplinkError
from warplink.torch.agreement import differing

#: How many calls are remembered.
MAX_CALLS = 64

#: Seconds for which a member that ran into the timeout waits until the others have, too.
TELLING_SECONDS = 2.0


class History:
    """The last calls of a member on one device. All members make the same ones in the same order, or one is told."""

    def __init__(self, store: dist.Store, rank: int, size: int) -> None:
        self._store = store
        self._rank, self._size = rank, size
        self._count = 0
        self._calls: collections.deque[Any] = collections.deque(maxlen=MAX_CALLS)

    def note(self, call: Any) -> None:
        """Notes that ``call`` is the next one."""
        self._count += 1
        self._calls.append(call)

    def difference(self) -> WarplinkError | None:
        """The MismatchError that names the first call which differs from that of another member, if one does. Blocks for
        some time until the others have told theirs, which they do where they call this. Raises nothing: that a call
        failed is to be told in any case."""
        own = [str(call) for call in self._calls]
        first = self._count - len(own)
        end = time.monotonic() + TELLING_SECONDS
        try:
            self._store.set(self._key(self._rank), json.dumps([first, own]))
            silent = [peer for peer in range(self._size) if peer != self._rank]
            while silent:
                for peer in list(silent):
                    if not self._store.check([self._key(peer)]):
                        continue
                    begin, theirs = json.loads(self._store.get(self._key(peer)))
                    for number in range(max(first, begin), min(self._count, begin + len(theirs))):
                        call, other = own[number - first], theirs[number - begin]
                        if call != other:
                            return differing(self._rank, peer, call, other)
                    if begin + len(theirs) >= self._count:
                        silent.remove(peer)
                if time.monotonic() >= end:
                    break
                time.sleep(0.02)
        except (RuntimeError, ValueError):  # the store has ended with its process, or is of another kind
            pass
        return None

    def _key(self, rank: int) -> str:
        return f"warplink/calls/{rank}"
