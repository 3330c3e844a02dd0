"""Metrics made of functions over all predictions and targets of an evaluation."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from trainstack.errors import ConfigurationError
from trainstack.trainer.core.samples import IGNORED_LABEL


def metric_of(
    function: Callable[..., Any], *, predictions: Callable[[Tensor], Tensor] | None = None, **options: Any
) -> FunctionMetric:
    """A metric for `metrics=` made of a function of scikit-learn, or another `function(targets, predictions)`.

    The function is called once, at the end of the evaluation, with all targets and predictions as arrays of numpy.
    They are kept in memory until then.

    Args:
        function: such as `sklearn.metrics.f1_score`; returns a number, or numbers by name.
        predictions: makes predictions of the outputs of one batch, such as `lambda logits: logits.softmax(-1)`. By
            default outputs of one dimension more than integer targets become the index of the largest value along
            dimension 1; then targets of -100 are left out, with their predictions.
        **options: of the function, such as `average="macro"`.

    Raises:
        ConfigurationError: `function` is not a function.
    """
    if not callable(function) or isinstance(function, type):
        raise ConfigurationError(
            f"metric_of({function!r}): give a function of targets and predictions, such as sklearn.metrics.f1_score. A "
            "metric with update, compute and reset goes into metrics= as it is."
        )

    def compute(outputs: Any, targets: Any) -> Any:
        return function(targets, outputs, **options)

    return FunctionMetric(compute, _classes if predictions is None else partial(_apply, predictions))


def with_computed(metrics: Any, compute_metrics: Callable[[Any], Mapping[str, Any]] | None) -> Any:
    """`metrics`, and those that `compute_metrics` returns by name, if it is given.

    Raises:
        ConfigurationError: it is not a function, or `metrics` is not a dict.
    """
    if compute_metrics is None:
        return metrics
    if not callable(compute_metrics):
        raise ConfigurationError(
            f"compute_metrics={compute_metrics!r}: write a function of an object with predictions and label_ids, which "
            "returns numbers by name."
        )
    if metrics is not None and not isinstance(metrics, Mapping):
        raise ConfigurationError("compute_metrics beside metrics: write metrics={'name': metric}, with names.")
    return {**(metrics or {}), "": FunctionMetric(partial(_call, compute_metrics))}


@dataclass(frozen=True)
class EvaluationArrays:
    """All that an evaluation has predicted, and the labels; may be unpacked as a pair.

    Attributes:
        predictions: arrays of numpy, `(samples, ...)`.
        label_ids: the same of the targets.
    """

    predictions: Any
    label_ids: Any

    def __iter__(self) -> Any:
        return iter((self.predictions, self.label_ids))


def _call(compute_metrics: Callable[[Any], Any], outputs: Any, targets: Any) -> Any:
    return compute_metrics(EvaluationArrays(outputs, targets))


_Prepare = Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]


class FunctionMetric:
    """Keeps predictions and targets, and calls a function with all of them.

    Batches of other lengths in further dimensions are filled up with -100.

    Args:
        function: of all predictions and all targets.
        prepare: makes what is kept of one batch; None keeps it as it is.
    """

    def __init__(self, function: Callable[[Any, Any], Any], prepare: _Prepare | None = None) -> None:
        self._function, self._prepare = function, prepare
        self._outputs: list[Tensor] = []
        self._targets: list[Tensor] = []

    def update(self, preds: Any, target: Any) -> None:
        """Keep one batch, on the CPU."""
        preds, target = torch.as_tensor(preds).detach().cpu(), torch.as_tensor(target).detach().cpu()
        if self._prepare is not None:
            preds, target = self._prepare(preds, target)
        self._outputs.append(preds)
        self._targets.append(target)

    def compute(self) -> Any:
        """What the function returns for all batches since `reset`."""
        return self._function(_joined(self._outputs), _joined(self._targets))

    def reset(self) -> None:
        """Forget all batches."""
        self._outputs, self._targets = [], []


def _apply(predictions: Callable[[Tensor], Tensor], preds: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
    return predictions(preds), target


def _classes(preds: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
    """Predicted classes and targets, one-dimensional, where `preds` has a value for each class."""
    if not preds.is_floating_point() or target.is_floating_point() or preds.dim() != target.dim() + 1:
        return preds, target
    preds = preds.argmax(1).flatten()
    kept = target.flatten() != IGNORED_LABEL
    return preds[kept], target.flatten()[kept]


def _joined(batches: list[Tensor]) -> Any:
    if not batches:
        return torch.empty(0).numpy()
    batches = [one.float() if one.dtype is torch.bfloat16 else one for one in batches]  # which numpy lacks
    longest = [max(sizes) for sizes in zip(*(one.shape[1:] for one in batches), strict=True)]
    filled = []
    for one in batches:
        missing = [size - own for size, own in zip(longest, one.shape[1:], strict=True)]
        amounts = [amount for size in reversed(missing) for amount in (0, size)]
        filled.append(pad(one, amounts, value=IGNORED_LABEL) if any(missing) else one)
    return torch.cat(filled).numpy()
