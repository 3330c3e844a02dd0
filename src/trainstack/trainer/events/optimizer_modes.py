"""Training and evaluation modes of optimizers, such as schedule-free optimizers."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from torch import Tensor

from trainstack.trainer.core.shards import kept_values, set_values

WITH_MODES = "optimizers_with_modes"
"""Key in a checkpoint's metadata for the classes of optimizers whose evaluated weights are not in the checkpoint."""


def trained_weights_of(metadata: Mapping[str, Any] | None) -> str | None:
    """Return a sentence on a checkpoint without the evaluated weights; None if it has them."""
    names = (metadata or {}).get(WITH_MODES)
    if not names:
        return None
    return (
        f"The checkpoint holds the weights that {' and '.join(map(str, names))} trains. The optimizer computes the "
        "evaluated weights from these and its state."
    )


class OptimizerModes:
    """Switches the optimizers that have both methods `train` and `eval`, and puts them into training mode.

    `eval` of a schedule-free optimizer writes the averaged weights into the parameters. `train` computes the trained
    weights from these, with rounding errors. Training must not depend on the number of evaluations, so both methods run
    on copies of the parameters, and the trained weights do not change.

    Args:
        optimizers: optimizers of the run; those without the two methods are ignored.

    Raises:
        Exception: the error of the `train` method of an optimizer.
    """

    def __init__(self, optimizers: Iterable[Any] = ()) -> None:
        self._optimizers = [
            one for one in optimizers if all(callable(getattr(one, name, None)) for name in ("train", "eval"))
        ]
        self._evaluates = False
        self._call("train")

    def _call(self, method: str) -> None:
        for optimizer in self._optimizers:
            getattr(optimizer, method)()

    def _parameters(self) -> list[Tensor]:
        return [p for optimizer in self._optimizers for group in optimizer.param_groups for p in group["params"]]

    @contextmanager
    def _on_copies(self) -> Iterator[None]:
        """Context manager in which the parameters have copied values, which are dropped at its end."""
        kept = [(parameter, kept_values(parameter)) for parameter in self._parameters()]
        for parameter, data in kept:
            set_values(parameter, data.clone())
        try:
            yield
        finally:
            for parameter, data in kept:
                set_values(parameter, data)

    @contextmanager
    def evaluation(self) -> Iterator[None]:
        """Context manager in which the optimizers are in evaluation mode."""
        if self._evaluates or not self._optimizers:
            yield
            return
        with self._on_copies():
            self._call("eval")
            self._evaluates = True
            try:
                yield
            finally:
                self._call("train")
                self._evaluates = False

    @contextmanager
    def training(self) -> Iterator[None]:
        """Context manager with the optimizers in training mode, for checkpoints; the caller restores the weights."""
        if not self._evaluates:
            yield
            return
        with self._on_copies():
            self._call("train")
        try:
            yield
        finally:
            with self._on_copies():
                self._call("eval")

    @property
    def is_used(self) -> bool:
        """Whether an optimizer has modes."""
        return bool(self._optimizers)

    @property
    def metadata(self) -> dict[str, list[str]]:
        """Entries for checkpoints: the classes of the optimizers that have modes; empty without any."""
        names = sorted({type(optimizer).__name__ for optimizer in self._optimizers})
        return {WITH_MODES: names} if names else {}

    def end_training(self) -> None:
        """Put the evaluated weights into the parameters; the caller keeps the trained weights."""
        self._call("eval")
        self._evaluates = True

    def begin_training(self) -> None:
        """Put the optimizers into training mode; the caller restores the trained weights."""
        if self._evaluates:
            with self._on_copies():
                self._call("train")
            self._evaluates = False
