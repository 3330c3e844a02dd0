"""`build_optimizer`, and checks of the ways to specify an optimizer."""

from __future__ import annotations

import difflib
import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from torch import optim
from torch.optim import Optimizer

from trainstack.errors import ConfigurationError, ModuleContractError
from trainstack.trainer.schedulers.building import build_scheduler, is_scheduler
from trainstack.trainer.schedulers.stepping import SchedulerConfig

OneOptimizer = Optimizer | Callable[..., Optimizer | Sequence[Optimizer]] | str
OptimizerSource = OneOptimizer | Mapping[str, OneOptimizer]


def build_optimizer(
    name: str, parameters: Iterable[Any], *, lr: float | None = None, weight_decay: float | None = None, **options: Any
) -> Optimizer:
    """Make the optimizer `name` over `parameters`.

    Args:
        name: name of a class in `torch.optim`, in upper or lower case: "adamw", "sgd", ...
        parameters: parameters or parameter groups.
        lr: the learning rate; None for torch's default.
        weight_decay: the weight decay; None for torch's default.
        **options: further arguments of the class.

    Raises:
        ConfigurationError: there is no such optimizer, or it does not have these options.

    Examples:
        >>> optimizer = ts.build_optimizer(
        ...     "adamw", module.parameters(), lr=1e-3, weight_decay=0.1
        ... )
        >>> type(optimizer).__name__
        'AdamW'
    """
    made_by = optimizer_class(name)
    given = {"lr": lr, "weight_decay": weight_decay}
    options |= {key: value for key, value in given.items() if value is not None}
    unknown = set(options) - set(inspect.signature(made_by).parameters)
    if unknown:
        takes = ", ".join(list(inspect.signature(made_by).parameters)[1:])
        raise ConfigurationError(f"optimizer {name!r} has no option {', '.join(sorted(unknown))}. It takes {takes}.")
    made: Optimizer = made_by(parameters, **options)
    return made


def optimizer_class(name: str) -> type[Any]:
    """Return the class `name` in `torch.optim`; upper and lower case are equal.

    Raises:
        ConfigurationError: there is no such class.
    """
    known = {
        key.lower(): value
        for key, value in vars(optim).items()
        if isinstance(value, type) and issubclass(value, Optimizer) and value is not Optimizer
    }
    if name.lower() not in known:
        close = difflib.get_close_matches(name.lower(), known, n=1)
        hint = f"Did you mean {close[0]!r}?" if close else f"There are {', '.join(sorted(known))}."
        raise ConfigurationError(f"there is no optimizer {name!r}. {hint}")
    return known[name.lower()]


def named_scheduler(scheduler: Any, options: Mapping[str, Any] | None) -> Any:
    """Return `scheduler`, or if it is a name, a factory with `options`."""
    if isinstance(scheduler, str):
        return build_scheduler(scheduler, **(options or {}))
    if options:
        raise ConfigurationError(
            f"scheduler_kwargs={dict(options)} with a scheduler that is not a name: put them into functools.partial."
        )
    return scheduler


def make_optimizers(source: Any, parameters: Iterable[Any], options: Mapping[str, Any]) -> list[Optimizer]:
    """Make optimizers over `parameters` from a name, a class or a function; an optimizer is returned unchanged."""
    made = source
    if isinstance(source, str):
        made = build_optimizer(source, parameters, **options)
    elif not isinstance(source, Optimizer):
        made = source(parameters, **options)
    several = list(made) if isinstance(made, list | tuple) and made else [made]
    for one in several:
        if not isinstance(one, Optimizer):
            raise ModuleContractError(
                f"the optimizer factory returned a {type(one).__name__}. Return an optimizer of the parameters that it "
                "gets: lambda parameters: torch.optim.AdamW(parameters, lr=1e-3)."
            )
    return several


def check_optimizer(optimizer: Any, options: Mapping[str, Any], scheduler: Any) -> None:
    """Check that `optimizer` specifies an optimizer, and that the options and the scheduler fit it."""
    made = isinstance(optimizer, Optimizer)
    if isinstance(optimizer, Mapping):
        unknown = sorted(set(options) - set(optimizer))
        if unknown or not all(isinstance(own, Mapping) for own in options.values()):
            raise ConfigurationError(
                f"optimizer_kwargs={dict(options)} with optimizers {', '.join(map(repr, optimizer))}: write a dict of "
                "options for each of these names."
            )
        for name, one in optimizer.items():
            check_optimizer(one, options.get(name, {}), None)
            if isinstance(one, Optimizer):
                raise ConfigurationError(f"the optimizer {name!r} exists already. Write a name, a class or a function.")
        made = False
    elif isinstance(optimizer, str):
        optimizer_class(optimizer)
    elif not made and not callable(optimizer) and optimizer is not None:
        raise ConfigurationError(
            f"optimizer={optimizer!r}: write a name such as 'adamw', a class, a function of the parameters, or an "
            "optimizer."
        )
    if made and options:
        raise ConfigurationError(
            f"optimizer_kwargs={dict(options)} with an optimizer that exists already. Remove them, or write its class."
        )
    inner = scheduler.scheduler if isinstance(scheduler, SchedulerConfig) else scheduler
    if is_scheduler(inner) and not made:
        raise ConfigurationError(
            f"scheduler is a {type(inner).__name__} that exists already, but the optimizer does not exist yet. "
            "Write a function of the optimizer, or pass an existing optimizer too."
        )
