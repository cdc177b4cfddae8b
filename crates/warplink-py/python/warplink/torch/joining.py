"""How the members of a process group find one another, by PyTorch's store."""

from __future__ import annotations

import os
import pathlib
import socket
import time
from datetime import timedelta
from typing import NamedTuple

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


class Members(NamedTuple):
    """The members of a group, of which this process is ``rank``, and PyTorch's store in which they find one another."""

    store: dist.Store
    rank: int
    size: int

    @staticmethod
    def of_this_time(store: dist.Store, rank: int, size: int) -> Members:
        """The members, with a key prefix for each creation of the group, counted alike on all members, so that values
        of an earlier group are never read as current ones."""
        times = store.add(f"warplink/times/{rank}", 1)
        return Members(dist.PrefixStore(f"warplink/{times}", store), rank, size)

    def on_one_machine(self, options: str, limit: float) -> bool:
        """Whether all members run on this machine. Blocks until all have reported their machine.

        Raises MismatchError, which names the peer, where ``options`` differ, and TimeoutError, which names a member
        that has not reported within ``limit`` seconds."""
        told = self.all_gather("machine", f"{options}\n{machine()}", limit, _MAKE)
        for peer, (other, _, _) in enumerate(one.partition("\n") for one in told):
            if other != options:
                message = (
                    f"rank {self.rank}: {_MAKE}: the peer has {other!r}; expected {options!r} "
                    f"(peer {peer}); help: pass the same options on every rank"
                )
                raise from_kind("mismatch", message, rank=self.rank, peer=peer, operation=_MAKE)
        return len(set(told)) == 1

    def join(self, device: str, ordinal: int | None, timeout: float) -> warplink.Job:
        """Joins a job of the members, on one machine. Blocks until all have joined."""
        key = f"warplink/id/{device}"
        if self.rank == 0:
            made = warplink.UniqueId.create("127.0.0.1")
            self.store.set(key, str(made))
        # The id is served as long as the object lives, so rank 0 joins with its own.
        identity = made if self.rank == 0 else self._get(key, 0, timeout, _MAKE, timeout)
        return warplink.Job.join(self.rank, self.size, identity, device=device, ordinal=ordinal, timeout=timeout)

    def all_gather(self, key: str, word: str, limit: float, operation: str | None = None) -> list[str]:
        """Every member's value of ``key``, in rank order, for ``operation``. Blocks until all have set it.

        Raises TimeoutError, which names one that has not after ``limit`` seconds."""
        operation = operation or f"agree on {key}"
        self.store.set(f"warplink/{key}/{self.rank}", word)
        end = time.monotonic() + limit

        def word_of(peer: int) -> str:
            left = max(end - time.monotonic(), 0.001)
            return self._get(f"warplink/{key}/{peer}", peer, left, operation, limit)

        return [word_of(peer) for peer in range(self.size)]

    def _get(self, key: str, peer: int, left: float, operation: str, limit: float) -> str:
        """The value of ``key`` of ``peer``. Raises TimeoutError, which names it, after ``left`` seconds of ``limit``."""
        try:
            self.store.wait([key], timedelta(seconds=left))
        except RuntimeError as error:  # some stores raise no DistStoreError
            message = (
                f"rank {self.rank}: {operation}: the peer did not come in {limit:g} s; "
                f"expected every member of the group to make the same calls (peer {peer})"
            )
            raise from_kind("timeout", message, rank=self.rank, peer=peer, operation=operation) from error
        return self.store.get(key).decode()


def leave(job: warplink.Job, limit: float = LEAVE_SECONDS) -> bool:
    """Leaves ``job`` with the others; False where they do not leave within ``limit`` seconds.

    Never raises: a group that is destroyed owes nobody anything.
    """

    try:
        return job.close(limit)
    except warplink.WarplinkError:
        # A peer ended without leaving, which ends the job as well.
        return True
