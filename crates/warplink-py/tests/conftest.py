"""Running ranks as processes."""

from __future__ import annotations

import atexit
import inspect
import multiprocessing
import os
import tempfile
import time
import traceback
from datetime import timedelta
from typing import Any, Callable

import pytest
from gpus import prepare_sharing

# Before any process is started: NVLink multicast cannot be used on every machine that tests run on.
os.environ.update(NCCL_NVLS_ENABLE="0", TORCH_SYMM_MEM_DISABLE_MULTICAST="1", NVSHMEM_DISABLE_NVLS="1")

# Inductor would compile and load a program for each instruction set, in each process that compiles a graph, to see which work.
os.environ.setdefault("TORCHINDUCTOR_VEC_ISA_OK", "0")

#: Seconds after which ranks are ended; a hang is a failure.
LIMIT = 120.0


class Stopwatch:
    """Measures seconds, less those in which some task of the machine waited for a processor: what was late then
    may have been late for that."""

    def __init__(self):
        self._begin, self._stalled = time.monotonic(), _stalled()

    def elapsed(self) -> float:
        """A quarter of the time, where the kernel does not count those."""
        took, stalled = time.monotonic() - self._begin, _stalled()
        if self._stalled is None or stalled is None:
            return took / 4
        return took - (stalled - self._stalled)


def _stalled() -> float | None:
    """For how long some task has waited for a processor since the machine started."""
    try:
        with open("/proc/pressure/cpu") as lines:
            some = next(line for line in lines if line.startswith("some "))
        return int(some.rpartition("total=")[2]) / 1e6
    except (OSError, StopIteration):
        return None


def meet(place: str, name: str, rank: int, ranks) -> None:
    """Waits until all ``ranks`` have called this, without the library: any of them may be lost when it returns.
    ``place`` is a path beside which files can be made."""
    with open(f"{place}.{name}.{rank}", "w"):
        pass
    end = time.monotonic() + LIMIT / 2
    while not all(os.path.exists(f"{place}.{name}.{other}") for other in ranks):
        assert time.monotonic() < end, f"some of the ranks {ranks} did not come to {name!r}"
        time.sleep(0.01)


def resident_bytes() -> int:
    """How much of this process's memory is in RAM."""
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def compile_every_graph() -> None:
    """Has PyTorch take no graph from its caches, since reports tell only of those that are compiled. Machine code of the
    same C++ is still compiled once for all ranks."""
    import torch._functorch.config
    import torch._inductor.config

    torch._functorch.config.enable_autograd_cache = False
    torch._inductor.config.fx_graph_cache = False


def _rank_main(body: Callable[..., Any], rank: int, world: int, meeting: str, arguments, results):
    os.environ.setdefault("WARPLINK_DEVICE", os.environ.get("WARPLINK_TEST_DEVICE", "host"))
    prepare_sharing(rank)
    try:
        results.put((rank, body(rank, world, meeting, *arguments), None))
    except BaseException:
        results.put((rank, None, traceback.format_exc()))
        raise SystemExit(1) from None
    finally:
        # Exit handlers, which a process of the fork server does not run.
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
    if os.environ.get("WARPLINK_TEST_DEVICE") == "cuda":
        # JAX starts the driver when it is imported, and a fork cannot use that.
        context = multiprocessing.get_context("spawn")
    else:
        # Ranks are forks of a process that has imported PyTorch and made nothing: that takes most of the time.
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(
            ["numpy", "torch", "torch.distributed", "torch._inductor.compile_fx", "jax.numpy", "warplink"]
        )
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


def join(rank, world, meeting, **options):
    """Joins on the device that WARPLINK_TEST_DEVICE names, the host device if none."""
    import warplink

    return warplink.Job.join(rank, world, meeting, timeout=30.0, **options)


def start(rank, world, place, backend="warplink", **options):
    """PyTorch's process group of all ranks; gives ``torch.distributed``."""
    import torch
    import torch.distributed as dist

    import warplink.torch  # noqa: F401

    torch.set_num_threads(1)
    dist.init_process_group(
        backend,
        init_method=f"file://{place}",
        rank=rank,
        world_size=world,
        timeout=timedelta(seconds=options.pop("timeout", 60)),
        **options,
    )
    return dist


def on_ranks(body, world, *arguments, **options):
    """As :func:`run_ranks`, with a path before the arguments beside which files can be made."""
    with tempfile.TemporaryDirectory() as folder:
        return run_ranks(body, world, os.path.join(folder, "store"), *arguments, **options)


def as_ranks(
    world: int | None = None, *, dies: tuple[int, ...] = (), limit: float = LIMIT, starts: Any = start, **options: Any
):
    """Makes a test of a function that each rank calls, in a process of its own. By their names, its parameters are
    ``rank``, ``world``, ``meeting`` and ``place`` as of :func:`on_ranks`, ``job`` and ``comm`` for a job that is joined with
    ``options`` and the communicator of all its ranks, or ``dist`` for a process group of PyTorch that ``starts`` makes with them;
    pytest gives all others, and ``world`` where it is None."""

    def decorate(body: Callable[..., Any]):
        given = {"rank", "meeting", "place", "job", "comm", "dist"} | ({"world"} if world else set())

        def test(**others: Any):
            on_ranks(_run_body, others.get("world", world), test, starts, options, others, dies=dies, limit=limit)

        # Ranks find the test under its name, and pytest its parameters.
        test.__module__, test.__qualname__ = body.__module__, body.__qualname__
        test.__name__, test.__doc__ = body.__name__, body.__doc__
        parameters = inspect.signature(body).parameters
        test.__signature__ = inspect.Signature([it for name, it in parameters.items() if name not in given])
        test.body = body
        return test

    return decorate


def _run_body(rank, world, meeting, place, test, starts, options, others):
    """The function of a test of :func:`as_ranks`, on one rank."""
    known = {"rank": rank, "world": world, "meeting": meeting, "place": place, **others}
    names = inspect.signature(test.body).parameters
    if "job" in names or "comm" in names:
        with join(rank, world, meeting, **options) as job:
            known.update(job=job, comm=job.world())
            test.body(**{name: known[name] for name in names})
        return
    if "dist" in names:
        known["dist"] = starts(rank, world, place, **options)
    test.body(**{name: known[name] for name in names})
    if "dist" in names:
        known["dist"].destroy_process_group()
