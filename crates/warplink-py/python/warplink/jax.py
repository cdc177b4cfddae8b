"""Collectives in programs of JAX, inside ``jax.jit`` and ``shard_map``.

A rank is a device of JAX: a process has one, or several with a communicator each. XLA calls Warplink on its own stream, without
Python. Data-parallel processes, started by a launcher::

    import jax
    import warplink
    import warplink.jax

    with warplink.Job.from_env() as job:
        group = warplink.jax.Group(job.world())

        @jax.jit
        def step(weights, batch):
            gradients = jax.grad(loss)(weights, batch)
            return weights - 0.1 * group.all_reduce(gradients, "average")

XLA runs calls on processors in any order that data allow, where ranks need one order. So a call on the host device reads and
writes a reference of its group, by which JAX orders calls in programs, in loops and across programs. ``shard_map`` takes no
references: there, a call gets a ticket from the one traced before.
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

if not hasattr(jax, "new_ref"):
    raise ImportError(f"JAX {jax.__version__} has no jax.new_ref; help: install JAX 0.8 or newer")

#: The name by which programs find the handler.
TARGET = "warplink_collective"

#: Seconds after which a process is ended that does not notice a failed call on a GPU.
GRACE_SECONDS = 10.0

#: Operators of reductions, by all of their names.
OPERATORS = {name: name for name in ("sum", "average", "product", "max", "min")} | {"avg": "average"}

#: For collectives with a sum or an average, and those without: the collective of the gradient.
ADJOINTS = {
    "all_reduce": "all_reduce",
    "all_gather": "reduce_scatter",
    "reduce_scatter": "all_gather",
    "all_to_all": "all_to_all",
}


class Group:
    """Collectives of a communicator's ranks, which all run the same programs in the same order.

    A process with several devices gives a communicator for each, in the order of ``jax.local_devices()``; a program that runs on
    all of them, by ``shard_map`` with ``check_vma=False``, calls each device's. Creating a group is collective. ``timeout`` is how
    many seconds a call on a GPU may take; on the host device, it is that of the job.

    Arrays have the shapes that ``jax.lax`` has for tiled collectives along the first dimension. Gradients are those of the sum of
    all ranks' losses. Failures of calls on the host device are raised by JAX when the program runs, with Warplink's text; on GPUs,
    the next call raises what went wrong, and a process that makes none is ended.

    JAX has no ``vmap`` of calls on the host device, and no gradient of those in ``cond``. In ``shard_map``, a call in a loop is
    ordered behind calls around it only where it uses their results, and the other way round; and the host device needs
    ``jax_cpu_enable_async_dispatch`` off, which JAX reads when it is first used.
    """

    def __init__(self, communicators: Communicator | Sequence[Communicator], *, timeout: float = 600.0) -> None:
        if isinstance(communicators, Communicator):
            communicators = [communicators]
        if not communicators:
            raise from_kind("invalid_argument", "no communicators; expected one for each local device")
        first = communicators[0]
        on_host = first.device == "host"
        #: The number of ranks.
        self.size = first.size
        # Each blocks until all ranks have joined.
        with ThreadPoolExecutor(len(communicators)) as threads:
            joined = list(threads.map(lambda communicator: communicator.collectives(), communicators))
        self._native = XlaGroup(list(zip(communicators, joined, strict=True)))
        self._tickets = threading.local()
        #: Reference that every call on the host device reads and writes, which orders the calls; None on GPUs, where
        #: XLA has one order for all ranks.
        self._turn = jax.new_ref(jnp.zeros((), jnp.uint32)) if on_host else None
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
        return self._call("all_reduce", _operator("all_reduce", op), x)

    def all_gather(self, x: Any) -> jax.Array:
        """Every rank's ``x`` in rank order, one behind the other along the first dimension."""
        return self._call("all_gather", "", x)

    def reduce_scatter(self, x: Any, op: str = "sum") -> jax.Array:
        """This rank's part, along the first dimension, of the reduction of every rank's ``x``."""
        return self._call("reduce_scatter", _operator("reduce_scatter", op), x)

    def all_to_all(self, x: Any) -> jax.Array:
        """Part p is this rank's part of rank p's ``x``, along the first dimension."""
        return self._call("all_to_all", "", x)

    def _call(self, kind: str, op: str, x: Any) -> jax.Array:
        x = jnp.asarray(x)
        self._check(kind, x.shape)
        is_linear = op in ("", "sum", "average")
        if self._turn is not None and not jax.sharding.get_abstract_mesh().manual_axes:
            result: jax.Array = (_in_turn if is_linear else _take_turn)(self, kind, op, self._turn, x)
            return result
        if self._turn is not None and jax.config.read("jax_cpu_enable_async_dispatch"):
            message = (
                f"{kind} in shard_map: JAX runs programs on processors in any order; expected one after another; "
                "help: call jax.config.update('jax_cpu_enable_async_dispatch', False) before JAX is first used"
            )
            raise from_kind("unsupported", message)
        return self._behind(_with_ticket if is_linear else _run, kind, op, x, jnp.zeros((), jnp.uint32))

    def _behind(self, run: Any, kind: str, op: str, x: Any, ticket: Any) -> jax.Array:
        """A call behind the last one of the same trace, and behind the one that ``ticket`` is of."""
        trace = get_opaque_trace_state()
        last_trace, last = getattr(self._tickets, "last", (None, None))
        if last is not None and last_trace == trace:
            ticket = ticket + last
        result: jax.Array
        result, ticket = run(self, kind, op, x, ticket)
        self._tickets.last = trace, ticket
        return result

    def _check(self, kind: str, shape: tuple[int, ...]) -> None:
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


def _operator(kind: str, op: str) -> str:
    if op not in OPERATORS:
        raise from_kind("invalid_argument", f"{kind}: the operator is {op!r}; expected one of {', '.join(OPERATORS)}")
    return OPERATORS[op]


@functools.cache
def _register(platform: str) -> None:
    """Registers the handler with XLA, once."""
    handler = jax.ffi.pycapsule(XlaGroup.handler())
    jax.ffi.register_ffi_target(TARGET, handler, platform=platform)


def _run(group: Group, kind: str, op: str, x: Any, ticket: Any) -> Any:
    """A call, and a ticket that makes the next one wait for it. As in ``jax.lax``, nothing else keeps a call whose results
    no rank uses: one with an effect could not be recomputed by ``jax.checkpoint``."""
    results = (jax.ShapeDtypeStruct(group._shape(kind, x.shape), x.dtype), jax.ShapeDtypeStruct((), jnp.uint32))
    call = jax.ffi.ffi_call(TARGET, results, vmap_method="sequential")
    return call(x, ticket, group=np.int64(group._native.number), kind=kind, op=op)


def _adjoint(group: Group, kind: str, op: str, cotangent: Any) -> tuple[str, str, Any]:
    """The call that gives the gradient of another."""
    if kind == "reduce_scatter" and op == "average":
        cotangent = cotangent / group.size
    return ADJOINTS[kind], {"all_reduce": op, "all_gather": "sum"}.get(kind, ""), cotangent


def _take_turn(group: Group, kind: str, op: str, turn: Any, x: Any) -> Any:
    result, ticket = _run(group, kind, op, x, turn[...])
    turn[...] = ticket
    return result


_in_turn = jax.custom_vjp(_take_turn, nondiff_argnums=(0, 1, 2))
_in_turn.defvjp(
    lambda group, kind, op, turn, x: (_take_turn(group, kind, op, turn, x), turn),
    lambda group, kind, op, turn, cotangent: (None, _turn_back(group, kind, op, turn, cotangent)),
)


def _turn_back(group: Group, kind: str, op: str, turn: Any, cotangent: Any) -> Any:
    kind, op, cotangent = _adjoint(group, kind, op, cotangent)
    return _in_turn(group, kind, op, turn, cotangent)


_with_ticket = jax.custom_vjp(_run, nondiff_argnums=(0, 1, 2))


def _keep_ticket(group: Group, kind: str, op: str, x: Any, ticket: Any) -> Any:
    result, ticket = _run(group, kind, op, x, ticket)
    return (result, ticket), ticket


def _ticket_back(group: Group, kind: str, op: str, ticket: Any, cotangents: Any) -> Any:
    kind, op, cotangent = _adjoint(group, kind, op, cotangents[0])
    return group._behind(_with_ticket, kind, op, cotangent, ticket), None


_with_ticket.defvjp(_keep_ticket, _ticket_back)
