"""How the members of a process group find one another, by PyTorch's store."""

from __future__ import annotations

import os
import pathlib
import socket
import time
from datetime import timedelta

import torch.distributed as dist

import warplink
from warplink.errors import from_kind

#: Seconds that leaving waits for the other ranks.
LEAVE_SECONDS = 10.0

#: Operation of joining members, for messages.
_MAKE = "make a process group"


def machine() -> str:
    """Identity of this machine, and of containers that share no memory with one another."""
    try:
        boot = pathlib.Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        processes = os.readlink("/proc/self/ns/pid")
    except OSError:
        return socket.gethostname()
    return f"{boot} {processes}"


def store_of_this_time(store: dist.Store, rank: int) -> dist.Store:
    """A part of ``store`` of its own for each time that the members make the group, all of them equally often. What was
    said the last time is not taken for what is said now."""
    return dist.PrefixStore(f"warplink/{store.add(f'warplink/times/{rank}', 1)}", store)


def on_one_machine(store: dist.Store, rank: int, size: int, options: str, limit: float) -> bool:
    """Whether all ``size`` members run on this machine. Blocks until all have reported their machine.

    Raises MismatchError, which names the peer, where ``options`` differ, and TimeoutError, which names one that has not
    said it after ``limit`` seconds."""
    told = all_gather(store, rank, size, "machine", f"{options}\n{machine()}", limit, _MAKE)
    for peer, (other, _, _) in enumerate(one.partition("\n") for one in told):
        if other != options:
            message = (
                f"rank {rank}: {_MAKE}: the peer has {other!r}; expected {options!r} "
                f"(peer {peer}); help: pass the same options on every rank"
            )
            raise from_kind("mismatch", message, rank=rank, peer=peer, operation=_MAKE)
    return len(set(told)) == 1


def join(
    store: dist.Store, rank: int, size: int, device: str, ordinal: int | None, timeout: float
) -> warplink.Job:
    """Joins the members of a group on one machine. Blocks until all have joined."""
    key = f"warplink/id/{device}"
    if rank == 0:
        made = warplink.UniqueId.create("127.0.0.1")
        store.set(key, str(made))
    # The id is served as long as the object lives, so rank 0 joins with its own.
    identity = made if rank == 0 else _get(store, key, rank, 0, timeout, _MAKE)
    return warplink.Job.join(
        rank, size, identity, device=device, ordinal=ordinal, timeout=timeout
    )


def all_gather(
    store: dist.Store,
    rank: int,
    size: int,
    key: str,
    word: str,
    limit: float,
    operation: str | None = None,
) -> list[str]:
    """Every member's value of ``key``, in rank order, for ``operation``. Blocks until all have set it.

    Raises TimeoutError, which names one that has not after ``limit`` seconds."""
    operation = operation or f"agree on {key}"
    store.set(f"warplink/{key}/{rank}", word)
    end = time.monotonic() + limit

    def word_of(peer: int) -> str:
        left = max(end - time.monotonic(), 0.001)
        return _get(store, f"warplink/{key}/{peer}", rank, peer, left, operation, limit)

    return [word_of(peer) for peer in range(size)]


def _get(
    store: dist.Store,
    key: str,
    rank: int,
    peer: int,
    left: float,
    operation: str,
    limit: float | None = None,
) -> str:
    """The value of ``key`` of ``peer``. Raises TimeoutError, which names it, after ``left`` seconds of ``limit``."""
    try:
        store.wait([key], timedelta(seconds=left))
    except RuntimeError as error:  # some stores raise no DistStoreError
        message = (
            f"rank {rank}: {operation}: the peer did not come in {limit or left:g} s; "
            f"expected every member of the group to make the same calls (peer {peer})"
        )
        raise from_kind("timeout", message, rank=rank, peer=peer, operation=operation) from error
    return store.get(key).decode()


def leave(job: warplink.Job, limit: float = LEAVE_SECONDS) -> bool:
    """Leaves ``job`` with the others; False where they do not leave within ``limit`` seconds.

    Never raises: a group that is destroyed owes nobody anything.
    """

    try:
        return job.close(limit)
    except warplink.WarplinkError:
        # A peer ended without leaving, which ends the job as well.
        return True
