"""Steps of several updates: whether a module makes them, and `NextPart`, which a module runs for each."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

from torch.optim import Optimizer

from trainstack.backends import Workload
from trainstack.errors import ConfigurationError


class NextPart:
    """What a module runs in the place of `train_step`, within the same layers.

    Args:
        run: the part, such as the code between two `yield`.
    """

    run: Callable[[], Any]
    __slots__ = ("run",)

    def __init__(self, run: Callable[[], Any]) -> None:
        self.run = run


class PartResult(NamedTuple):
    """Whether `train_step` has ended, and what it returned or yielded."""

    ended: bool
    value: Any

    def split(self) -> tuple[Any, Any]:
        """Of what was yielded: the loss, and the optimizers; None for all of them."""
        return self.value if isinstance(self.value, tuple) and len(self.value) == 2 else (self.value, None)


def yields_updates(module: Any) -> bool:
    """Whether `train_step` of `module` is a generator function."""
    return inspect.isgeneratorfunction(inspect.unwrap(module.train_step))


def needs_closure(optimizer: Optimizer) -> bool:
    """Whether `step` of `optimizer` cannot be called without a closure."""
    closure = inspect.signature(type(optimizer).step).parameters.get("closure")
    return closure is not None and closure.default is inspect.Parameter.empty


def check_updates(work: Workload, layers: Sequence[Any]) -> bool:
    """Whether the steps of `work` make several updates or evaluate a closure.

    Raises:
        ConfigurationError: they do, and a layer refuses it.
    """
    closures = [type(one).__name__ for one in work.optimizers if needs_closure(one)]
    yields = yields_updates(work.module)
    if closures and not yields and len(work.optimizers) > 1:
        raise ConfigurationError(
            f"{closures[0]} evaluates the loss several times a step, beside {len(work.optimizers) - 1} other "
            "optimizers. Let train_step say which loss is whose: `yield compute_loss, optimizer` for each, where "
            "compute_loss is a function without parameters."
        )
    for layer in layers:
        if yields and layer.refuses_updates:
            raise ConfigurationError(
                f"train_step yields, for several updates in a step; {layer.name!r} takes one: {layer.refuses_updates}."
            )
    if closures:
        check_closures(closures[0], layers)
    return bool(closures) or yields


def check_closures(optimizer: str, layers: Iterable[Any]) -> None:
    """Refuse a closure that a layer cannot evaluate."""
    for layer in layers:
        if layer.refuses_closures:
            raise ConfigurationError(
                f"{optimizer} evaluates a closure, which {layer.name!r} cannot: {layer.refuses_closures}."
            )
