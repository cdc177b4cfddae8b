"""The fused operations that a member has called last.

Members compare a call when they make something for it, and not again: a later call costs no exchange. So a call that
differs from those of the others ends by the timeout, or when another member ends by it. Members then exchange their
last calls through PyTorch's store, and report the first difference.
"""

from __future__ import annotations

import json
import threading
import time

import warplink
from warplink.errors import WarplinkError
from warplink.torch.agreement import differing
from warplink.torch.joining import Members

#: Seconds for which a member that ran into the timeout waits until the others have, too.
REPORT_SECONDS = 2.0

#: Seconds for which the store may not answer.
ANSWER_SECONDS = 1.0


class History:
    """The last calls of a member on one device, which ``state`` notes. A member whose calls or order differ from the
    others' gets an error."""

    def __init__(self, members: Members, state: warplink.CallState) -> None:
        self._store, self._rank, self._size = members
        self._state = state

    def difference(self, limit: float) -> WarplinkError | None:
        """The MismatchError that names the first call which differs from that of another member, if one does. Blocks for
        ``limit`` seconds at most until the others have published their calls, which they do where they call this. To be
        called at the first failure alone: behind it, members may go on differently.

        Never raises: the original failure must be reported in any case."""
        found: list[WarplinkError | None] = []

        def compare() -> None:
            try:
                found.append(self._compare(limit))
            except (RuntimeError, ValueError):
                # The store has ended with the process that serves it.
                pass

        # A store whose process is stopped does not answer.
        thread = threading.Thread(target=compare, name="warplink-history", daemon=True)
        thread.start()
        thread.join(limit + ANSWER_SECONDS)
        return found[0] if found else None

    def _compare(self, limit: float) -> WarplinkError | None:
        count, calls = self._state.noted()
        own = [str(call) for call in calls]
        first = count - len(own)
        self._store.set(self._key(self._rank), json.dumps([first, own]))
        silent = [peer for peer in range(self._size) if peer != self._rank]
        end = time.monotonic() + limit
        while True:
            for peer in list(silent):
                if not self._store.check([self._key(peer)]):
                    continue
                silent.remove(peer)
                begin, theirs = json.loads(self._store.get(self._key(peer)))
                for number in range(max(first, begin), min(count, begin + len(theirs))):
                    call, other = own[number - first], theirs[number - begin]
                    if call != other:
                        return differing(self._rank, peer, call, other)
            if not silent or time.monotonic() >= end:
                return None
            time.sleep(0.02)

    def _key(self, rank: int) -> str:
        return f"warplink/calls/{rank}"
