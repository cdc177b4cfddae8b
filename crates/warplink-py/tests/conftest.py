"""Running ranks as processes."""

from __future__ import annotations

import atexit
import multiprocessing
import os
import time
import traceback
from typing import Any, Callable

import pytest

#: Seconds after which ranks are ended; a hang is a failure.
LIMIT = 120.0


def _rank_main(body: Callable[..., Any], rank: int, world: int, meeting: str, arguments, results):
    os.environ.setdefault("WARPLINK_DEVICE", os.environ.get("WARPLINK_TEST_DEVICE", "host"))
    try:
        results.put((rank, body(rank, world, meeting, *arguments), None))
    except BaseException:
        results.put((rank, None, traceback.format_exc()))
        raise SystemExit(1) from None
    finally:
        # What the end of the interpreter does, which a process of the fork server does not come to.
        atexit._run_exitfuncs()


def run_ranks(
    body: Callable[..., Any],
    world: int,
    *arguments: Any,
    dies: tuple[int, ...] = (),
    limit: float = LIMIT,
):
    """Runs ``body(rank, world, meeting, *arguments)`` in a process for each rank, and gives the results
    in rank order. Fails where a rank fails or takes longer than ``limit`` seconds; ranks in ``dies`` may end
    in any way.

    ``meeting`` is a unique id; the port that it names is free when the ranks start.
    """
    import warplink

    identity = warplink.UniqueId.create()
    identity.release()
    # Ranks are forks of a process that has imported PyTorch and made nothing: that takes most of the time.
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["numpy", "torch", "torch.distributed", "warplink"])
    results = context.Queue()
    ranks = [
        context.Process(
            target=_rank_main, args=(body, rank, world, str(identity), arguments, results), daemon=True
        )
        for rank in range(world)
    ]
    for process in ranks:
        process.start()
    end = time.monotonic() + limit
    found: dict[int, Any] = {}
    failures: list[str] = []
    expected = world - len(dies)
    try:
        while len(found) + len(failures) < expected:
            left = end - time.monotonic()
            if left <= 0:
                failures.append(f"ranks {sorted(set(range(world)) - set(found))} took too long")
                break
            try:
                rank, value, failure = results.get(timeout=min(left, 1.0))
            except Exception:  # the queue is empty
                gone = [r for r, p in enumerate(ranks) if p.exitcode not in (None, 0) and r not in dies]
                if gone and results.empty():
                    failures.append(f"ranks {gone} ended without a result")
                    break
                continue
            if rank in dies:
                continue
            if failure is None:
                found[rank] = value
            else:
                failures.append(f"rank {rank}:\n{failure}")
    finally:
        for process in ranks:
            process.join(5 if not failures else 0.1)
            if process.is_alive():
                process.kill()
                process.join()
    if failures:
        pytest.fail("\n".join(failures), pytrace=False)
    return [found.get(rank) for rank in range(world)]
