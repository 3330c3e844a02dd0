"""Training steps with several updates: checks of a module, and `NextPart`, the code for one update."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

from torch.optim import Optimizer

from trainstack.backends import Workload
from trainstack.errors import ConfigurationError, ModuleContractError
from trainstack.stage import Stage

HOW_TO_YIELD = "Write `yield loss, optimizer`, or `yield loss` for all optimizers"


class NextPart:
    """Code that a module runs in place of `train_step`, inside the same layers.

    Args:
        run: function for this part, such as the code between two `yield`.
    """

    run: Callable[[], Any]
    __slots__ = ("run",)

    def __init__(self, run: Callable[[], Any]) -> None:
        self.run = run


class PartResult(NamedTuple):
    """Whether `train_step` has ended, and the value that it returned or yielded."""

    ended: bool
    value: Any

    def split(self) -> tuple[Any, Any]:
        """Split a yielded value into the loss and the optimizers; None for all optimizers.

        Raises:
            ModuleContractError: the value is neither a loss nor a pair.
        """
        given = self.value
        if isinstance(given, tuple | list):
            chosen = given[1] if type(given) is tuple and len(given) == 2 else None
            if chosen is not None and not (isinstance(chosen, tuple | list) and not chosen):
                return given[0], chosen
            kinds = ", ".join("None" if one is None else type(one).__name__ for one in given)
            raise ModuleContractError(f"train_step yielded a {type(given).__name__} of ({kinds}). {HOW_TO_YIELD}.")
        named = [key for key in given if "optim" in str(key).lower()] if isinstance(given, dict) else []
        if named:
            raise ModuleContractError(
                f"train_step yielded a dict with the key {named[0]!r}, which is not used. {HOW_TO_YIELD}."
            )
        return given, None


def yields_updates(module: Any) -> bool:
    """Whether the training step of `module` is a generator function: its `train_step` or that of the trainer."""
    step = module._given_step(Stage.TRAIN) or module.train_step
    return inspect.isgeneratorfunction(inspect.unwrap(step))


def needs_closure(optimizer: Optimizer) -> bool:
    """Whether the `step` method of `optimizer` requires a closure."""
    closure = inspect.signature(type(optimizer).step).parameters.get("closure")
    return closure is not None and closure.default is inspect.Parameter.empty


def check_updates(work: Workload, layers: Sequence[Any], skip_nonfinite: bool = False) -> bool:
    """Return whether the steps of `work` make several updates or evaluate a closure.

    Args:
        work: has the module and the optimizers.
        layers: layers of the backend.
        skip_nonfinite: whether `nonfinite="skip"` is set.

    Raises:
        ConfigurationError: they do, and a layer or `skip_nonfinite` does not support it.
    """
    closures = [type(one).__name__ for one in work.optimizers if needs_closure(one)]
    yields = yields_updates(work.module)
    if closures and not yields and len(work.optimizers) > 1:
        raise ConfigurationError(
            f"{closures[0]} evaluates the loss several times a step, and the number of other optimizers is "
            f"{len(work.optimizers) - 1}. train_step must assign a loss to each: `yield compute_loss, optimizer` for "
            "each, where compute_loss is a function without parameters."
        )
    for layer in layers:
        if yields and layer.refuses_updates:
            raise ConfigurationError(
                f"train_step yields, for several updates a step; {layer.name!r} supports one: {layer.refuses_updates}."
            )
    if closures:
        check_closures(closures[0], layers, skip_nonfinite)
    return bool(closures) or yields


def check_closures(optimizer: str, layers: Iterable[Any], skip_nonfinite: bool = False) -> None:
    """Raise an error if a layer cannot evaluate closures, or if updates with a closure would have to be skipped."""
    if skip_nonfinite:
        raise ConfigurationError(
            f"nonfinite='skip' with {optimizer}, which evaluates a closure: it has changed the weights before a loss "
            "is known to be inf or nan, so the update cannot be skipped. Write nonfinite='raise'."
        )
    for layer in layers:
        if layer.refuses_closures:
            raise ConfigurationError(
                f"{optimizer} evaluates a closure, which {layer.name!r} cannot: {layer.refuses_closures}."
            )
