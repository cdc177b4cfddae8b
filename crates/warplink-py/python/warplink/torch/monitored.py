"""A barrier that reports missing ranks, through PyTorch's store."""

from __future__ import annotations

import time
from datetime import timedelta

from warplink.errors import WarplinkError, from_kind
from warplink.torch.joining import Members


def monitored_barrier(members: Members, number: int, limit: float, wait_all_ranks: bool) -> None:
    """Blocks until all ranks have called it with the same ``number``, ``limit`` seconds at most.

    Rank 0 raises TimeoutError that names the first rank that did not come, or all of them with
    ``wait_all_ranks``; the others then raise one that refers to rank 0. The texts are Gloo's.
    """
    store, rank, size = members
    key = f"monitored/{number}"
    if rank != 0:
        store.set(f"{key}/{rank}", "here")
        try:
            store.wait([f"{key}/end"], timedelta(seconds=limit))
            passed = store.get(f"{key}/end") == b"passed"
        except RuntimeError:  # some stores raise no DistStoreError
            passed = False
        if not passed:
            message = (
                f"Rank {rank} successfully reached monitoredBarrier, but received errors while "
                "waiting for send/recv from rank 0. Please check rank 0 logs for faulty rank."
            )
            raise _timed_out(message, rank, 0)
        store.delete_key(f"{key}/{rank}")
        return
    begin = time.monotonic()
    missing: list[int] = []
    for peer in range(1, size):
        if missing and not wait_all_ranks:
            break
        left = limit - (time.monotonic() - begin)
        if limit <= 0:
            store.set(f"{key}/end", "failed")
            raise _timed_out("Rank 0 timed out in monitoredBarrier after 0 ms.", 0, peer)
        if left <= 0:
            if not store.check([f"{key}/{peer}"]):
                missing.append(peer)
            continue
        try:
            store.wait([f"{key}/{peer}"], timedelta(seconds=left))
        except RuntimeError:  # some stores raise no DistStoreError
            missing.append(peer)
    store.set(f"{key}/end", "failed" if missing else "passed")
    if not missing:
        # Those that are here have read what the last one came to.
        store.delete_key(f"monitored/{number - 1}/end")
    else:
        names = ("Ranks " if len(missing) > 1 else "Rank ") + ", ".join(map(str, missing))
        message = f"{names} failed to pass monitoredBarrier in {int(limit * 1000)} ms"
        raise _timed_out(message, 0, missing[0])


def _timed_out(message: str, rank: int, peer: int) -> WarplinkError:
    return from_kind("timeout", message, rank=rank, peer=peer, operation="monitored_barrier")
