"""Custom operators and autograd functions under `torch.func.vmap`.

They may bring a rule for `vmap` with them. It is given all records at once, so it can mix them.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.autograd.function import custom_function_call  # type: ignore[attr-defined]
from torch.overrides import TorchFunctionMode

from trainstack.backends.dp.modes.base import Unsupported
from trainstack.backends.dp.random_functions import COMPOSED

OPERATORS = (type(torch.ops.aten.add.Tensor), type(torch.ops.aten.add))
"""The classes of operators, and of those with several overloads (torch 2.13.0)."""


class CustomOpGuard(TorchFunctionMode):
    """While it is active, raises `Unsupported` for functions that may mix records, in backward passes too."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if type(func) in OPERATORS:
            check_operator(func)
        elif func is custom_function_call:
            check_function(args[0])
        elif func is torch.autograd.grad:
            with self:  # the mode is switched off in this call
                return COMPOSED[func](*args, **(kwargs or {}))
        return func(*args, **kwargs) if kwargs else func(*args)


def check_operator(func: Any) -> None:
    """An operator that a program registers may have a rule for `vmap` that is given all records at once.

    Raises:
        Unsupported: `func` is not an operator of torch.
    """
    name = getattr(func, "_qualified_op_name", None) or getattr(func, "_name", "")
    if not str(name).startswith(("aten::", "prims::", "prim::")):
        raise Unsupported(
            f"train_step calls the operator {name}, which might mix records. Write grad_mode='loop', or compute it "
            "with functions of torch."
        )


def check_function(kind: Any) -> None:
    """`generate_vmap_rule` treats records separately in both directions; a method `vmap` is given all of them.

    Raises:
        Unsupported: the rule of this `torch.autograd.Function` is not generated.
    """
    if not getattr(kind, "generate_vmap_rule", False):
        raise Unsupported(
            f"the autograd function {kind.__name__} has no rule for records that torch generates. Write "
            "`generate_vmap_rule = True` in it, with a setup_context and without a method vmap, or grad_mode='loop'."
        )
