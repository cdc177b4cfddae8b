"""How a process group is made."""

from __future__ import annotations

import copy
import os
from typing import Any

#: Bytes of each rank's buffer that the other ranks access, by default.
DEFAULT_BUFFER_SIZE = 64 << 20


class Options:
    """Options of the backend ``warplink``, for ``pg_options`` of ``init_process_group``.

    ``nccl_options`` (a ``ProcessGroupNCCL.Options``) are NCCL's, which serves the calls of CUDA
    tensors that do not go direct. ``buffer_size`` is the length in bytes of each rank's buffer that the others reach; it is
    allocated when ``get_p2p_buffer`` is called first. Passing a ``ProcessGroupNCCL.Options`` itself is
    the same as passing ``Options(nccl_options=...)``.

    With ``direct_messages``, all-to-alls and batches of sends and receives of CUDA tensors go by Warplink's own collectives
    and not by NCCL, in a group on one machine whose members all can; with ``direct_collectives``, all-reduces, all-gathers,
    reduce-scatters, reductions, broadcasts, gathers, scatters and barriers do. Both are the same on every rank. None takes them from the
    environment, where ``WARPLINK_TORCH_DIRECT_MESSAGES=0`` and ``WARPLINK_TORCH_DIRECT_COLLECTIVES=0`` turn them off; else they
    are on. Messages of CPU tensors go the same way where ``direct_messages`` is True, or the variable 1.

    A direct call uses at most ``multiprocessors`` of a GPU, at least 2, the same on every rank; None lets Warplink choose.
    Asynchronous ones are on a stream of high priority where ``nccl_options`` ask for one.
    """

    def __init__(
        self,
        nccl_options: Any = None,
        buffer_size: int = DEFAULT_BUFFER_SIZE,
        direct_messages: bool | None = None,
        direct_collectives: bool | None = None,
        multiprocessors: int | None = None,
    ) -> None:
        if not isinstance(buffer_size, int) or buffer_size <= 0:
            raise ValueError(f"buffer_size is {buffer_size!r}; expected a number of bytes, at least 1")
        if nccl_options is not None and not _is_nccls(nccl_options):
            raise TypeError(f"nccl_options is a {type(nccl_options).__name__}; expected ProcessGroupNCCL.Options")
        if multiprocessors is not None and (not isinstance(multiprocessors, int) or multiprocessors < 2):
            raise ValueError(f"multiprocessors is {multiprocessors!r}; expected a number of at least 2")
        self.nccl_options = nccl_options
        self.buffer_size = buffer_size
        messages = from_environment("WARPLINK_TORCH_DIRECT_MESSAGES", direct_messages)
        collectives = from_environment("WARPLINK_TORCH_DIRECT_COLLECTIVES", direct_collectives)
        self.direct_messages = messages is not False
        self.direct_collectives = collectives is not False
        self.direct_host_messages = messages is True
        self.multiprocessors = multiprocessors

    @property
    def told(self) -> str:
        """Settings that must be equal on every rank."""
        return (
            f"direct_messages={self.direct_messages}, direct_collectives={self.direct_collectives}, "
            f"direct_host_messages={self.direct_host_messages}, multiprocessors={self.multiprocessors}"
        )

    @property
    def high_priority(self) -> bool:
        """Whether streams of CUDA tensors have a high priority."""
        return bool(getattr(self.nccl_options, "is_high_priority_stream", False))

    def updated(self, given: Any) -> Options:
        """The options of a group that is split from one with these, where ``pg_options`` is ``given``: PyTorch passes on
        NCCL's alone."""
        if given is None:
            return self
        if isinstance(given, Options):
            return given
        made = copy.copy(self)
        made.nccl_options = Options.read(given).nccl_options or self.nccl_options
        return made

    @staticmethod
    def read(given: Any) -> Options:
        """The options in ``pg_options``. Raises TypeError for something else."""
        if given is None:
            return Options()
        if isinstance(given, Options):
            return given
        if _is_nccls(given):
            return Options(nccl_options=given)
        # Options of no backend in particular, with a timeout only.
        if hasattr(given, "_timeout"):
            return Options()
        raise TypeError(
            f"pg_options is a {type(given).__name__}; "
            "expected warplink.torch.Options or ProcessGroupNCCL.Options"
        )


def _is_nccls(options: Any) -> bool:
    """Whether they are of NCCL's type, which PyTorch has only where it has NCCL."""
    return hasattr(options, "is_high_priority_stream")


def from_environment(name: str, given: bool | None = None) -> bool | None:
    """``given``, or the environment variable ``name`` if it is set."""
    value = os.environ.get(name) or None
    if given is not None or value is None:
        return given
    if value not in ("0", "1"):
        raise ValueError(f"{name} is {value!r}; expected 0 or 1, the same on every rank")
    return value == "1"
