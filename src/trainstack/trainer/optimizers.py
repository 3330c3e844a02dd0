"""`build_optimizer`, and the other ways in which an optimizer is given."""

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
    made: Optimizer = made_by(parameters, **options)
    return made


def optimizer_class(name: str) -> type[Any]:
    """The class in `torch.optim` called `name`, in any case.

    Raises:
        ConfigurationError: there is none.
    """
    known = {
        key.lower(): value
        for key, value in vars(optim).items()
        if isinstance(value, type) and issubclass(value, Optimizer) and value is not Optimizer
    }
    if name.lower() not in known:
        close = difflib.get_close_matches(name.lower(), known, n=1)
        hint = f"Did you mean {close[0]!r}?" if close else f"There are {', '.join(sorted(known))}."
        raise ConfigurationError(f"no optimizer is called {name!r}. {hint}")
    return known[name.lower()]


def named_scheduler(scheduler: Any, options: Mapping[str, Any] | None) -> Any:
    """`scheduler`, or what its name stands for, with `options`."""
    if isinstance(scheduler, str):
        return build_scheduler(scheduler, **(options or {}))
    if options:
        raise ConfigurationError(
            f"scheduler_kwargs={dict(options)} with a scheduler that is no name: put them into functools.partial."
        )
    return scheduler


def make_optimizers(source: Any, parameters: Iterable[Any], options: Mapping[str, Any]) -> list[Optimizer]:
    """What `source` makes over `parameters`: a name, a class or a function; an optimizer stays."""
    made = source
    if isinstance(source, str):
        made = build_optimizer(source, parameters, **options)
    elif not isinstance(source, Optimizer):
        made = source(parameters, **options)
    several = list(made) if isinstance(made, list | tuple) and made else [made]
    for one in several:
        if not isinstance(one, Optimizer):
            raise ModuleContractError(
                f"the optimizer factory returned a {type(one).__name__}. Return an optimizer over the parameters it "
                "is given: lambda parameters: torch.optim.AdamW(parameters, lr=1e-3)."
            )
    return several


def check_optimizer(optimizer: Any, options: Mapping[str, Any], scheduler: Any) -> None:
    """Refuse what is no optimizer, and options or a scheduler that do not go with it."""
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
                raise ConfigurationError(f"the optimizer {name!r} is made already. Give a name, a class or a function.")
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
            f"optimizer_kwargs={dict(options)} with an optimizer that is made already. Leave them out, or give "
            "its class."
        )
    inner = scheduler.scheduler if isinstance(scheduler, SchedulerConfig) else scheduler
    if is_scheduler(inner) and not made:
        raise ConfigurationError(
            f"scheduler is a {type(inner).__name__} that is made already, but the optimizer is still to be made. "
            "Give a function of the optimizer, or give the optimizer itself as well."
        )
