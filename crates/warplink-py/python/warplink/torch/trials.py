"""Whether a fused operation is faster than its collective and its matmul, by running both as calls run.

Members try both when they make the first call of some sizes, and go by the slowest of them, so that all decide alike. What
they measure is a call by itself, the host's time included, and its work on the device alone, which is what it takes in a
graph.
"""

from __future__ import annotations

import statistics
import struct
import time
from typing import Any, Callable, NamedTuple, TypeVar

import torch

from warplink.errors import OutOfMemoryError
from warplink.torch.workspace import Workspace, is_recording

T = TypeVar("T")

#: Runs of each way before any counts: a graph of a plan is recorded in the second.
_WARM = 3

#: Seconds that the runs of one measurement take together, and the least and most runs of each way.
_SECONDS, _RUNS = 0.05, (3, 15)

#: The share of the time of the collective and the matmul that the fused operation has to be below: it takes memory.
_ADVANTAGE = 0.98

#: How many cycles of a GPU its stream is held up, while the host enqueues a call.
_HELD_CYCLES = 1_000_000


class Decision(NamedTuple):
    """Whether to fuse a call."""

    eager: bool
    captured: bool


#: That no call is fused.
_PLAIN = Decision(False, False)


class Candidate(NamedTuple):
    """An implementation of a call."""

    #: The decision that makes later calls use it.
    decision: Decision
    run: Callable[[], Any]


def faster(
    space: Workspace,
    key: Any,
    fused: Callable[[], T],
    plain: Callable[[], T],
    again: Callable[[], T | None] = lambda: None,
) -> T:
    """``fused()`` or ``plain()``, which are the same call, whichever is faster for calls of ``key``. Members try both after the
    first one, which every member makes at the same time; where ``plain()`` is, they try a plan of the collective and the
    matmul, too, which takes the host less time. Later calls go by ``again()``, where that does not return None. Where a member
    lacks memory for a plan, all of them go by ``plain()`` from then on."""
    decision: Decision | None = space.decisions.get(key)
    try:
        if decision is None:
            return _first(space, key, fused, plain, again)
        fuses = decision.eager
        if fuses != decision.captured and is_recording(space.device):
            fuses = decision.captured
        if fuses:
            return fused()
        space.state.note(key)
    except OutOfMemoryError:
        # All members get it, where one lacks memory for a plan.
        space.decide(key, _PLAIN)
        space.forget(key)
    return plain()


def _first(
    space: Workspace, key: Any, fused: Callable[[], T], plain: Callable[[], T], again: Callable[[], T | None]
) -> T:
    """``fused()``, behind which members decide on later calls."""
    result = fused()
    if space.tries and not is_recording(space.device):
        decision = _compare(space, key, fused, plain, again)
        if not any(decision) and space.plan_without_overlap(key):
            fused()
            decision = _compare(space, key, fused, plain, again)
        space.decide(key, decision)
        if not any(decision):
            space.forget(key)
    return result


def _compare(
    space: Workspace,
    key: Any,
    fused: Callable[[], Any],
    plain: Callable[[], Any],
    again: Callable[[], Any],
) -> Decision:
    """Decides between two ways of a call, collectively. An error on one member alone ends the communicator; all get the
    OutOfMemoryError of one."""

    def later(run: Callable[[], Any]) -> Callable[[], Any]:
        """The path of later calls."""

        def call() -> Any:
            found = again()
            return run() if found is None else found

        return call

    candidates = [Candidate(Decision(True, True), later(fused)), Candidate(_PLAIN, later(plain))]
    with space.whole(OutOfMemoryError):
        for candidate in candidates:
            space.decide(key, candidate.decision)
            for _ in range(_WARM):
                candidate.run()
        measures = [_alone, _on_device] if space.device.type == "cuda" else [_alone]
        times = [_medians(space, key, candidates, measure) for measure in measures]
        verdicts = [fused <= _ADVANTAGE * plain for fused, plain in times]
    return Decision(verdicts[0], verdicts[-1])


def _medians(
    space: Workspace, key: Any, candidates: list[Candidate], measure: Callable[[Workspace, Callable[[], Any]], float]
) -> list[float]:
    """The median seconds of each candidate, of the slowest member."""

    def measured(candidate: Candidate) -> float:
        space.decide(key, candidate.decision)
        return measure(space, candidate.run)

    once = _slowest(space, [measured(candidate) for candidate in candidates])
    least, most = _RUNS
    runs = max(least, min(most, int(_SECONDS / max(sum(once), 1e-9))))
    # In turn, so that all see the same clock rates.
    samples = [[measured(candidate) for candidate in candidates] for _ in range(runs)]
    return _slowest(space, [statistics.median(column) for column in zip(*samples)])


def _slowest(space: Workspace, times: list[float]) -> list[float]:
    layout = struct.Struct(f"<{len(times)}d")
    told = space.communicator.all_gather_bytes(layout.pack(*times))
    return [max(column) for column in zip(*map(layout.unpack, told))]


def _alone(space: Workspace, way: Callable[[], Any]) -> float:
    """Seconds of a call by itself, which all members start together."""
    space.barrier()
    _synchronize(space)
    begin = time.perf_counter()
    way()
    _synchronize(space)
    return time.perf_counter() - begin


def _on_device(space: Workspace, way: Callable[[], Any]) -> float:
    """Seconds of a call's work, all of it enqueued before the measurement begins."""
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda._sleep(_HELD_CYCLES)
    space.barrier()
    begin.record()
    way()
    end.record()
    _synchronize(space)
    return float(begin.elapsed_time(end)) / 1e3


def _synchronize(space: Workspace) -> None:
    """Blocks until the caller's stream is done."""
    if space.device.type == "cuda":
        space.stream.synchronize()
