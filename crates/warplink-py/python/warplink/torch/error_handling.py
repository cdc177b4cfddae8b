"""The variables that configure PyTorch's NCCL backend for failed collectives, for calls that go without NCCL.

``TORCH_NCCL_ASYNC_ERROR_HANDLING`` is 0, 1, 2 or 3, the default: with 1 and 3, a failure ends the process, since what
follows on the GPU works with data that is not right. ``torchrun`` sets 1. With ``TORCH_NCCL_BLOCKING_WAIT``, ``wait()``
blocks until a call is done and raises what went wrong, and failures end no process.
"""

from __future__ import annotations

import os

#: Seconds in which an exception must report a failure to the application before the process is terminated.
GRACE_SECONDS = 10.0

#: Values of ``TORCH_NCCL_ASYNC_ERROR_HANDLING`` with which a failure does not end the process.
_KEEPING = ("0", "2")
_ENDING = ("1", "3")

_WORDS = {word: True for word in ("y", "yes", "1", "t", "true")}
_WORDS.update({word: False for word in ("n", "no", "0", "f", "false")})


def waits_block() -> bool:
    """Whether ``wait()`` of a call on CUDA tensors blocks until it is done."""
    value = _value("BLOCKING_WAIT", "0")
    if value.lower() not in _WORDS:
        raise ValueError(f"TORCH_NCCL_BLOCKING_WAIT is {value!r}; expected 0 or 1")
    return _WORDS[value.lower()]


def grace() -> float | None:
    """Seconds after which an unreported failure terminates the process; None for never."""
    value = _value("ASYNC_ERROR_HANDLING", "3")
    if value not in (*_KEEPING, *_ENDING):
        raise ValueError(f"TORCH_NCCL_ASYNC_ERROR_HANDLING is {value!r}; expected 0, 1, 2 or 3")
    return None if value in _KEEPING or waits_block() else GRACE_SECONDS


def _value(name: str, default: str) -> str:
    """The variable under its name, or its old one."""
    return os.environ.get(f"TORCH_NCCL_{name}") or os.environ.get(f"NCCL_{name}") or default
