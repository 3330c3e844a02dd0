"""Metrics that call a function with all predictions and targets of an evaluation."""

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
    """Make a metric for `metrics=` from a function of scikit-learn, or another `function(targets, predictions)`.

    The function is called once, at the end of the evaluation, with all targets and predictions as NumPy arrays. They
    are kept in memory until then.

    Args:
        function: a function such as `sklearn.metrics.f1_score`. It returns a number, or numbers by name.
        predictions: computes predictions from the outputs of one batch, such as `lambda logits: logits.softmax(-1)`.
            By default, if the outputs have one dimension more than integer targets, the prediction is the index of the
            largest value along dimension 1. Targets of -100 are then omitted, with their predictions.
        **options: arguments of the function, such as `average="macro"`.

    Raises:
        ConfigurationError: `function` is not a function.

    Examples:
        >>> def worst(targets, predictions):
        ...     return abs(targets - predictions).max()
        >>> trainer = ts.Trainer(module, args, metrics={"worst": ts.metric_of(worst)})
        >>> trainer.train()
        >>> value = trainer.history.get_latest_metric("val/worst")
    """
    if not callable(function) or isinstance(function, type):
        raise ConfigurationError(
            f"metric_of({function!r}): give a function of targets and predictions, such as sklearn.metrics.f1_score. A "
            "metric with update, compute and reset needs no metric_of: give it to metrics=."
        )

    def compute(outputs: Any, targets: Any) -> Any:
        return function(targets, outputs, **options)

    return FunctionMetric(compute, _classes if predictions is None else partial(_apply, predictions))


def with_computed(metrics: Any, compute_metrics: Callable[[Any], Mapping[str, Any]] | None) -> Any:
    """Add the metrics of `compute_metrics`, if it is given, to `metrics`.

    Raises:
        ConfigurationError: `compute_metrics` is not a function, or `metrics` is not a dict.
    """
    if compute_metrics is None:
        return metrics
    if not callable(compute_metrics):
        raise ConfigurationError(
            f"compute_metrics={compute_metrics!r}: write a function of an object with predictions and label_ids, which "
            "returns numbers by name."
        )
    if metrics is not None and not isinstance(metrics, Mapping):
        raise ConfigurationError(
            "compute_metrics together with metrics: metrics needs names. Write metrics={'name': metric}."
        )
    return {**(metrics or {}), "": FunctionMetric(partial(_call, compute_metrics))}


@dataclass(frozen=True)
class EvaluationArrays:
    """All predictions and labels of an evaluation. They can be unpacked as a pair.

    Attributes:
        predictions: NumPy array of shape `(samples, ...)`.
        label_ids: NumPy array of the targets, of shape `(samples, ...)`.
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

    Batches that differ in other dimensions than the first are padded with -100.

    Args:
        function: called with all predictions and all targets.
        prepare: transforms the predictions and targets of one batch; None keeps them unchanged.
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
        """The result of the function for all batches since `reset`."""
        return self._function(_joined(self._outputs), _joined(self._targets))

    def reset(self) -> None:
        """Drop all batches."""
        self._outputs, self._targets = [], []


def _apply(predictions: Callable[[Tensor], Tensor], preds: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
    return predictions(preds), target


def _classes(preds: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
    """1-dim predicted classes and targets, if `preds` has a value for each class; else both unchanged."""
    if not preds.is_floating_point() or target.is_floating_point() or preds.dim() != target.dim() + 1:
        return preds, target
    preds = preds.argmax(1).flatten()
    kept = target.flatten() != IGNORED_LABEL
    return preds[kept], target.flatten()[kept]


def _joined(batches: list[Tensor]) -> Any:
    if not batches:
        return torch.empty(0).numpy()
    batches = [one.float() if one.dtype is torch.bfloat16 else one for one in batches]  # numpy lacks it
    longest = [max(sizes) for sizes in zip(*(one.shape[1:] for one in batches), strict=True)]
    filled = []
    for one in batches:
        missing = [size - own for size, own in zip(longest, one.shape[1:], strict=True)]
        amounts = [amount for size in reversed(missing) for amount in (0, size)]
        filled.append(pad(one, amounts, value=IGNORED_LABEL) if any(missing) else one)
    return torch.cat(filled).numpy()
