"""Optimizers by name, class or factory."""

from __future__ import annotations

import difflib
import inspect
from collections.abc import Callable, Iterable
from typing import Any

from torch import optim

from trainstack.errors import ConfigurationError, ModuleContractError

OptimizerSource = optim.Optimizer | Callable[..., optim.Optimizer] | str


def build_optimizer(
    name: str, parameters: Iterable[Any], *, lr: float | None = None, weight_decay: float | None = None, **options: Any
) -> optim.Optimizer:
    """Make the optimizer called `name` over `parameters`.

    Args:
        name: of a class in `torch.optim`, in any case: "adamw", "sgd", ...
        parameters: parameters or parameter groups.
        lr: the learning rate; torch's default if None.
        weight_decay: likewise.
        **options: what else the class takes.

    Raises:
        ConfigurationError: there is no such optimizer, or it does not take these options.
    """
    made_by = optimizer_class(name)
    given = {"lr": lr, "weight_decay": weight_decay}
    options |= {key: value for key, value in given.items() if value is not None}
    unknown = set(options) - set(inspect.signature(made_by).parameters)
    if unknown:
        takes = ", ".join(list(inspect.signature(made_by).parameters)[1:])
        raise ConfigurationError(f"optimizer {name!r} takes no {', '.join(sorted(unknown))}. It takes {takes}.")
    made: optim.Optimizer = made_by(parameters, **options)
    return made


def optimizer_class(name: str) -> type[Any]:
    """The class in `torch.optim` called `name`, in any case.

    Raises:
        ConfigurationError: there is none.
    """
    known = {
        key.lower(): value
        for key, value in vars(optim).items()
        if isinstance(value, type) and issubclass(value, optim.Optimizer) and value is not optim.Optimizer
    }
    if name.lower() not in known:
        close = difflib.get_close_matches(name.lower(), known, n=1)
        hint = f"Did you mean {close[0]!r}?" if close else f"There are {', '.join(sorted(known))}."
        raise ConfigurationError(f"no optimizer is called {name!r}. {hint}")
    return known[name.lower()]


def make_optimizer(source: OptimizerSource, parameters: Iterable[Any], options: dict[str, Any]) -> optim.Optimizer:
    """An optimizer from an instance, a name, a class, or a function of the parameters.

    Raises:
        ModuleContractError: the function made something else.
    """
    if isinstance(source, optim.Optimizer):
        return source
    if isinstance(source, str):
        return build_optimizer(source, parameters, **options)
    made = source(parameters, **options)
    if not isinstance(made, optim.Optimizer):
        raise ModuleContractError(
            f"the optimizer factory returned a {type(made).__name__}. Return an optimizer over the parameters it is "
            "given: lambda parameters: torch.optim.AdamW(parameters, lr=1e-3)."
        )
    return made
