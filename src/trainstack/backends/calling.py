"""Calling a module without what torch puts around its `forward`, where nobody would notice."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import nn
from torch._C import _get_tracing_state
from torch.nn.modules import module as modules

_USUAL = nn.Module.__call__


def bare_call(module: nn.Module) -> Callable[..., Any]:
    """`module.forward` where calling that is all that `module(...)` does, else `module`.

    That is so where no hook is registered on it or on all modules, nothing traces or compiles it, and its class has no
    `__call__` of its own. The modules within are called by the user's code as ever.
    """
    if (
        module._forward_hooks
        or module._forward_pre_hooks
        or module._backward_hooks
        or module._backward_pre_hooks
        or modules._global_forward_hooks
        or modules._global_forward_pre_hooks
        or modules._global_backward_hooks
        or modules._global_backward_pre_hooks
        or module._compiled_call_impl is not None
        or type(module).__call__ is not _USUAL
        or _get_tracing_state() is not None
    ):
        return module
    return module.forward
