"""Calls as PyTorch's dispatch modes see them, such as ``CommDebugMode``, which counts collectives.

A process group in Python takes calls before they become operators. Where a mode is active, it gets the operator that a group
of PyTorch's own calls, which does the call when the mode calls it.
"""

from __future__ import annotations

import functools
from typing import Any, Callable, TypeVar

import torch
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack, _pop_mode_temporarily

Method = TypeVar("Method", bound=Callable[..., Any])

#: How many modes are active: mostly none.
active = torch._C._len_torch_dispatch_stack


class _Operator:
    """An overload of an operator, which does something else when it is called."""

    def __init__(self, overload: Any, call: Callable[..., Any]) -> None:
        self._overload, self._call = overload, call

    def __call__(self, *_: Any, **__: Any) -> Any:
        return self._call()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._overload, name)

    def __str__(self) -> str:
        return str(self._overload)


def seen_as(name: str) -> Callable[[Method], Method]:
    """Has modes see a method of a group as the operator ``c10d::name`` of the method's arguments, in releases that have it."""
    operator = getattr(torch.ops.c10d, name, None)

    def decorate(method: Method) -> Method:
        @functools.wraps(method)
        def call(self: Any, *arguments: Any, **named: Any) -> Any:
            if operator is None or not active():
                return method(self, *arguments, **named)
            return _shown(operator.default, functools.partial(method, self, *arguments, **named), arguments)

        return call  # type: ignore[return-value]

    return decorate


def _shown(overload: Any, call: Callable[[], Any], arguments: tuple[Any, ...]) -> Any:
    """Result of ``call``, dispatched through the active modes; called directly if any of them is one of PyTorch's own,
    which replace tensors."""
    modes = _get_current_dispatch_mode_stack()
    if not modes or any(getattr(mode, "_mode_key", None) is not None for mode in modes):
        return call()
    with _pop_mode_temporarily() as mode:
        operator = _Operator(overload, lambda: _shown(overload, call, arguments))
        return mode.__torch_dispatch__(operator, (), arguments, {})
