"""What metrics are fed with: predictions and targets, found in what a step returned and in its batch."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor

from trainstack.errors import ModuleContractError
from trainstack.trainer.supervised.mapping import as_named
from trainstack.trainer.supervised.matching import Parameters, parameters_of

PREDICTIONS = ("preds", "pred", "predictions", "prediction", "outputs", "logits")
TARGETS = ("target", "targets", "labels", "label")


def default_metric_inputs(outputs: Any, batch: Any) -> tuple[Any, ...] | dict[str, Any]:
    """Arguments for `update` of a metric.

    Args:
        outputs: what a step returned. Its loss, the first item of a tuple or the item `loss`, is left out.
        batch: what the loader gave. Its target is the last item of a tuple or list, or an item named as in `TARGETS`.

    Returns:
        For outputs with names, these and those of the batch, to be matched by name. For others `(prediction, target)`
        if there is one output and the batch has a target, else all outputs.

    Raises:
        ModuleContractError: there are no outputs but a loss.
    """
    names, target = as_named(batch), {}
    if names is None and isinstance(batch, tuple | list) and len(batch) > 1:
        target = {"target": batch[-1]}
    named = as_named(outputs)
    if named is not None:
        rest = {**target, **(names or {})}
        found = {name: value for name, value in named.items() if name != "loss"}
        if any(name in found for name in TARGETS):
            rest.pop("target", None)
        return found | {name: value for name, value in rest.items() if name not in found}
    items = list(outputs) if isinstance(outputs, tuple | list) else [outputs]
    if items and isinstance(items[0], Tensor) and items[0].dim() == 0:
        items = items[1:]  # the loss
    if not items:
        raise ModuleContractError(
            "there are metrics, and the step returned nothing but a loss, so nothing to feed them with. Return "
            "predictions as well, such as (loss, predictions), or define metric_inputs(self, outputs, batch)."
        )
    wanted = next((name for name in TARGETS if name in (names or {})), None)
    if wanted is not None and names is not None:
        target = {"target": names[wanted]}
    return (*items, *target.values()) if len(items) == 1 else tuple(items)


def feeder(update: Callable[..., Any]) -> Callable[[tuple[Any, ...] | Mapping[str, Any]], None]:
    """A function that calls `update` of a metric with a tuple by position, or with what it takes of a dict.

    A dict is matched by name; where that leaves a parameter without a value, the item that is named like a prediction
    and the one that is named like a target are given by position. The signature is read once, at the first dict.

    Raises:
        ModuleContractError: by that function: the dict has neither; the message names what there is.
    """
    takes: list[Parameters | None] = []

    def feed(inputs: tuple[Any, ...] | Mapping[str, Any]) -> None:
        if isinstance(inputs, tuple):
            update(*inputs)
            return
        if not takes:
            takes.append(None if _takes_anything(update) else parameters_of(update))
        pair = [next((inputs[name] for name in inputs if name in known), None) for known in (PREDICTIONS, TARGETS)]
        has_pair = all(item is not None and not isinstance(item, Mapping) for item in pair)
        named = takes[0]
        if has_pair and (named is None or any(name not in inputs for name in named.required)):
            update(*pair)
        else:
            update(**(inputs if named is None else named.pick(inputs)))

    return feed


def _takes_anything(update: Callable[..., Any]) -> bool:
    """Whether it hands on what it gets, as collections of metrics do."""
    kinds = [parameter.kind for parameter in inspect.signature(update).parameters.values()]
    return inspect.Parameter.VAR_POSITIONAL in kinds
