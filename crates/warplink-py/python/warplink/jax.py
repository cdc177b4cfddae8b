"""Collectives in programs of JAX, inside ``jax.jit`` and ``shard_map``.

A rank is a device of JAX: a process has one, or several with a communicator each. XLA calls Warplink on its own stream, without
Python. Two data-parallel processes, started by a launcher::

    import jax
    import warplink
    import warplink.jax

    # On the host device, before JAX computes anything; see Group.
    jax.config.update("jax_cpu_enable_async_dispatch", False)

    with warplink.Job.from_env() as job:
        group = warplink.jax.Group(job.world())

        @jax.jit
        def step(weights, batch):
            gradients = jax.grad(loss)(weights, batch)
            return weights - 0.1 * group.all_reduce(gradients, "average")
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import get_opaque_trace_state

from warplink import Communicator, XlaGroup
from warplink.errors import from_kind

#: The name by which programs find the handler.
TARGET = "warplink_collective"

#: Seconds after which a process is ended that does not notice a failed call on a GPU.
GRACE_SECONDS = 10.0

#: For collectives with a sum or an average, and those without: the collective of the gradient.
ADJOINTS = {
    "all_reduce": "all_reduce",
    "all_gather": "reduce_scatter",
    "reduce_scatter": "all_gather",
    "all_to_all": "all_to_all",
}


class Group:
    """Collectives of a communicator's ranks, which every rank calls in the same order in its programs.

    A process with several devices gives a communicator for each, in the order of ``jax.local_devices()``; a program that runs on
    all of them, by ``shard_map`` with ``check_vma=False``, calls each device's. Creating a group is collective. ``timeout`` is how many
    seconds a call on a GPU may take; on the host device, it is that of the job.

    Arrays have the shapes that ``jax.lax`` has for tiled collectives along the first dimension. Gradients are those of the sum of all
    ranks' losses. Failures of calls on the host device are raised by JAX when the program runs, with Warplink's text; on GPUs,
    the next call raises what went wrong, and a process that makes none is ended.

    In one function, calls run in the order in which they were traced, but a call in a loop or a condition is only ordered behind
    a call around it if it uses that one's results, and likewise the other way round. JAX must run programs one
    after another: it does on GPUs, and on the host device with ``jax_cpu_enable_async_dispatch`` off, which is read when JAX is
    first used.
    """

    def __init__(self, communicators: Communicator | Sequence[Communicator], *, timeout: float = 600.0) -> None:
        if isinstance(communicators, Communicator):
            communicators = [communicators]
        if not communicators:
            raise from_kind("invalid_argument", "no communicators; expected one for each local device")
        first = communicators[0]
        on_host = first.device == "host"
        if on_host and jax.config.read("jax_cpu_enable_async_dispatch"):
            message = (
                "JAX runs programs on processors in any order; expected one after another; "
                "help: call jax.config.update('jax_cpu_enable_async_dispatch', False) before JAX is first used"
            )
            raise from_kind("invalid_argument", message)
        #: The number of ranks.
        self.size = first.size
        # Each blocks until all ranks have joined.
        with ThreadPoolExecutor(len(communicators)) as threads:
            joined = list(threads.map(lambda communicator: communicator.collectives(), communicators))
        self._native = XlaGroup(list(zip(communicators, joined, strict=True)))
        self._tickets = threading.local()
        if on_host:
            _register("cpu")
            return
        _register("CUDA")
        # No host thread waits for calls on GPUs.
        self._watches = [
            communicator.watch(collectives, timeout, GRACE_SECONDS)
            for communicator, collectives in zip(communicators, joined, strict=True)
        ]

    def all_reduce(self, x: Any, op: str = "sum") -> jax.Array:
        """The reduction of every rank's ``x``: "sum", "average", "product", "max" or "min", of which the first two have
        gradients."""
        return self._call("all_reduce", op, x)

    def all_gather(self, x: Any) -> jax.Array:
        """Every rank's ``x`` in rank order, one behind the other along the first dimension."""
        return self._call("all_gather", "", x)

    def reduce_scatter(self, x: Any, op: str = "sum") -> jax.Array:
        """This rank's part, along the first dimension, of the reduction of every rank's ``x``."""
        return self._call("reduce_scatter", op, x)

    def all_to_all(self, x: Any) -> jax.Array:
        """Part p is this rank's part of rank p's ``x``, along the first dimension."""
        return self._call("all_to_all", "", x)

    def _call(self, kind: str, op: str, x: Any) -> jax.Array:
        """A call behind the last one of the same trace."""
        x = jnp.asarray(x)
        self._check(kind, op, x.shape)
        trace = get_opaque_trace_state()
        last, ticket = getattr(self._tickets, "last", (None, None))
        if ticket is None or last != trace:
            ticket = jnp.zeros((), jnp.uint32)
        run = _differentiable if op in ("", "sum", "average") else _run
        result, ticket = run(self, kind, op, x, ticket)
        self._tickets.last = trace, ticket
        return result

    def _check(self, kind: str, op: str, shape: tuple[int, ...]) -> None:
        if op not in ("", "sum", "average", "product", "max", "min"):
            raise from_kind("invalid_argument", f"{kind}: the operator is {op!r}; expected sum, average, product, max or min")
        if kind == "all_reduce":
            return
        if not shape:
            raise from_kind("invalid_argument", f"{kind}: the array has no dimension; expected at least one")
        if kind != "all_gather" and shape[0] % self.size:
            message = f"{kind}: the first dimension is {shape[0]}; expected a multiple of the number of ranks, {self.size}"
            raise from_kind("invalid_argument", message)

    def _shape(self, kind: str, shape: tuple[int, ...]) -> tuple[int, ...]:
        """The result's shape."""
        if kind == "all_gather":
            return (shape[0] * self.size, *shape[1:])
        if kind == "reduce_scatter":
            return (shape[0] // self.size, *shape[1:])
        return shape

    def __repr__(self) -> str:
        return f"Group(size={self.size})"


@functools.cache
def _register(platform: str) -> None:
    """Registers the handler with XLA, once."""
    handler = jax.ffi.pycapsule(XlaGroup.handler())
    jax.ffi.register_ffi_target(TARGET, handler, platform=platform)


def _run(group: Group, kind: str, op: str, x: Any, ticket: Any) -> Any:
    """A call, and a ticket that makes the next one wait for it: XLA runs calls in any order that data allow."""
    results = (jax.ShapeDtypeStruct(group._shape(kind, x.shape), x.dtype), jax.ShapeDtypeStruct((), jnp.uint32))
    call = jax.ffi.ffi_call(TARGET, results, has_side_effect=True, vmap_method="sequential")
    return call(x, ticket, group=np.int64(group._native.number), kind=kind, op=op)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1, 2))
def _differentiable(group: Group, kind: str, op: str, x: Any, ticket: Any) -> Any:
    return _run(group, kind, op, x, ticket)


def _forward(group: Group, kind: str, op: str, x: Any, ticket: Any) -> Any:
    return _run(group, kind, op, x, ticket), None


def _backward(group: Group, kind: str, op: str, _: None, cotangents: Any) -> Any:
    cotangent, _ = cotangents
    if kind == "reduce_scatter" and op == "average":
        cotangent = cotangent / group.size
    operator = {"all_reduce": op, "all_gather": "sum"}.get(kind, "")
    return group._call(ADJOINTS[kind], operator, cotangent), None


_differentiable.defvjp(_forward, _backward)
