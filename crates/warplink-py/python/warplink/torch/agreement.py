"""Objects that the members of a group make together: all of them have it, or none."""

from __future__ import annotations

import logging
from typing import Any, Callable, NamedTuple, TypeVar

import torch

import warplink
from warplink.errors import (
    ClosedError,
    GivenUpError,
    PeerLeftError,
    PeerLostError,
    TimeoutError,
    WarplinkError,
    from_kind,
)
from warplink.torch.joining import Members

#: Another member is gone, or this one to the others.
LOSSES = (PeerLostError, PeerLeftError, GivenUpError)

#: Seconds to wait for the report of a member that seems lost: a member that only failed reports it at once.
LOST_SECONDS = 10.0

#: Report of a member that has not failed.
_DONE = "done"

_log = logging.getLogger(__name__)

T = TypeVar("T")


class Call(NamedTuple):
    """A call of a fused operation, as far as what its members make for it depends on that."""

    operation: str
    #: Rows and columns of a rank's part, and of the right operands where they count.
    sizes: tuple[Any, ...]
    dtype: torch.dtype
    #: Other known calls, by name.
    options: tuple[tuple[str, Any], ...] = ()

    def __str__(self) -> str:
        options = "".join(f", {name} {value}" for name, value in self.options)
        return f"{self.operation} of the sizes {self.sizes} of {self.dtype}{options}"


def check_alike(communicator: warplink.Communicator, call: Any) -> None:
    """Blocks until every member has called this. Raises MismatchError, which names a peer, where their calls differ."""
    own = str(call)
    for peer, told in enumerate(communicator.all_gather_bytes(own.encode())):
        if (other := told.decode(errors="replace")) != own:
            raise differing(communicator.rank, peer, own, other)


def differing(rank: int, peer: int, own: str, other: str) -> WarplinkError:
    """The MismatchError of ``rank`` that calls ``own`` where ``peer`` calls ``other``."""
    message = (
        f"rank {rank}: the peer calls {other}; expected {own} (peer {peer}); "
        "help: call the same operations in the same order with the same sizes and types on every rank"
    )
    return from_kind("mismatch", message, rank=rank, peer=peer, operation="fused operation")


def new_in_a_graph(rank: int, what: str) -> WarplinkError:
    """The InvalidArgumentError of ``rank`` that cannot make ``what`` where its stream records a graph."""
    message = (
        f"rank {rank}: the stream records a graph; expected none at the first call of {what}, for which members exchange "
        "memory; help: call it once on every rank before capturing"
    )
    return from_kind("invalid_argument", message, rank=rank, operation="fused operation")


def made_by_all(communicator: warplink.Communicator, what: str, make: Callable[[], T]) -> T | None:
    """Result of ``make``, or None on all members if it fails on any of them. ``what`` names the operation in the log.
    Blocks until every member has called it.

    Raises what ends the communicator: the loss of a member, a timeout, and that it was closed."""
    made, failure = _tried(make, (*LOSSES, TimeoutError, ClosedError))
    told = communicator.all_gather_bytes(_word(failure).encode())
    return made if _all_done([word.decode() for word in told], what, failure) else None


def made_without_communicator(members: Members, what: str, make: Callable[[], T], limit: float) -> T | None:
    """The same where there is no communicator yet; once for each ``what``. ``make`` takes ``limit``
    seconds at most.

    Raises ClosedError, the loss of a member that reports nothing more, and TimeoutError, which names a member that does
    not come."""
    made, failure = _tried(make, (ClosedError,))
    # Members come to this after as long as what they make may take.
    limit = LOST_SECONDS if isinstance(failure, LOSSES) else 2 * limit
    try:
        told = members.all_gather(f"made/{what}", _word(failure), limit)
    except TimeoutError:
        if failure is not None:
            raise failure from None
        raise
    return made if _all_done(told, what, failure) else None


def _tried(
    make: Callable[[], T], fatal: tuple[type[WarplinkError], ...]
) -> tuple[T | None, WarplinkError | None]:
    """Result or failure of ``make``. Raises ``fatal`` exceptions."""
    try:
        return make(), None
    except fatal:
        raise
    except WarplinkError as error:
        return None, error


def _word(failure: WarplinkError | None) -> str:
    return _DONE if failure is None else f"failed: {failure}"


def _all_done(told: list[str], what: str, failure: WarplinkError | None) -> bool:
    """Whether no member failed; logs the reason if one did."""
    failed = [(rank, word) for rank, word in enumerate(told) if word != _DONE]
    if failure is not None:
        _log.warning("%s failed, so its members go on without: %s", what, failure)
    elif failed:
        _log.warning("%s failed on rank %d, so its members go on without: %s", what, *failed[0])
    return not failed
