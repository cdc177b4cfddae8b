"""The exceptions of Warplink: one class for each kind of failure.

Every one derives from :class:`WarplinkError`; some also derive from the built-in exception that means
the same, so that ``except TimeoutError`` works.
"""

from __future__ import annotations

import builtins
import re
from typing import NamedTuple


class Diagnostic(NamedTuple):
    """A finding of the verifier in a program."""

    #: The kind, such as ``race`` or ``deadlock``.
    kind: str
    #: Description, in a sentence.
    message: str
    #: The lines of the program that take part, from 1; the one where it shows first.
    lines: list[int]
    #: The ranks that take part.
    ranks: list[int]


class WarplinkError(RuntimeError):
    """A failure: what happened, to whom, what was expected, what to do. ``str`` contains all of it."""

    #: The kind, such as ``"peer_lost"``; the name of the class in small letters.
    kind: str = "error"
    #: The rank that the failure concerns, in the communicator that was called, or None.
    peer: int | None = None
    #: The same rank in the job, or None.
    job_peer: int | None = None
    #: The rank on which it happened, or None.
    rank: int | None = None
    #: The operation that failed, or None.
    operation: str | None = None
    #: The store key, signal or connection that it concerns, or None.
    key: str | None = None
    #: The code that a driver, a library or the system returned, or None.
    code: int | None = None
    #: Suggested remedy, or None.
    help: str | None = None
    #: A finding of the verifier in a program.
    diagnostics: tuple[Diagnostic, ...] = ()


class InvalidArgumentError(WarplinkError, ValueError):
    """An argument is wrong: a length, a rank, an alignment, a combination of options."""


class InvalidHandleError(WarplinkError, ValueError):
    """A handle or an id is truncated, altered, of another version or stale."""


class MismatchError(WarplinkError):
    """Two ranks disagree: world sizes, lengths of a send and its receive, protocols."""


class TimeoutError(WarplinkError, builtins.TimeoutError):
    """A wait passed its deadline."""


class PeerLostError(WarplinkError, ConnectionError):
    """A rank died, aborted or was dropped without being closed."""


class PeerLeftError(WarplinkError, ConnectionError):
    """A rank left in order while something still depended on it."""


class GivenUpError(WarplinkError, ConnectionError):
    """The other ranks went on without this one, which was silent or cut off for too long."""


class PeerFailedError(WarplinkError):
    """A rank failed before its part in what this rank does with it."""


class AuthenticationError(WarplinkError, PermissionError):
    """A process that joins does not hold the secret."""


class ProtocolError(WarplinkError):
    """Data from a socket violates the protocol."""


class AddressInUseError(WarplinkError, OSError):
    """The address to listen on is taken."""


class ClosedError(WarplinkError):
    """The object was closed, or the resource behind it was freed."""


class DriverError(WarplinkError):
    """A call of a driver or a vendor library failed; ``code`` is what it returned."""


class LibraryMissingError(WarplinkError, ImportError):
    """A library that is loaded at run time is missing, or lacks a symbol."""


class UnsupportedError(WarplinkError, NotImplementedError):
    """The device, the driver or the allocation cannot do this."""


class OutOfMemoryError(WarplinkError, MemoryError):
    """Device or shared memory is exhausted."""


class ParseError(WarplinkError, ValueError):
    """Text could not be parsed."""


class VerificationError(WarplinkError):
    """A program failed verification; ``diagnostics`` lists the reasons."""


class IoError(WarplinkError, OSError):
    """An operating-system call failed."""


class InternalError(WarplinkError):
    """A bug in the library; please report it."""


def from_kind(
    kind: str,
    message: str,
    *,
    peer: int | None = None,
    job_peer: int | None = None,
    rank: int | None = None,
    operation: str | None = None,
    key: str | None = None,
    code: int | None = None,
    help: str | None = None,
    diagnostics: list[tuple[str, str, list[int], list[int]]] | None = None,
) -> WarplinkError:
    """The exception for a failure of ``kind``; what the extension module raises."""
    error = _CLASSES.get(kind, WarplinkError)(message)
    error.kind = kind
    error.peer = peer
    error.job_peer = job_peer
    error.rank = rank
    error.operation = operation
    error.key = key
    error.code = code
    error.help = help
    error.diagnostics = tuple(Diagnostic(*found) for found in diagnostics or ())
    return error


def _kind_of(name: str) -> str:
    """The kind for a name of a class: ``PeerLostError`` is for ``peer_lost``."""
    return re.sub("(?<=[a-z])(?=[A-Z])", "_", name.removesuffix("Error")).lower()


_CLASSES: dict[str, type[WarplinkError]] = {}

for _class in WarplinkError.__subclasses__():
    _class.kind = _kind_of(_class.__name__)
    _CLASSES[_class.kind] = _class
