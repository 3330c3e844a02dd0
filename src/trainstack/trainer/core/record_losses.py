"""Losses of single records from a criterion with a mean over the batch, for private training."""

from __future__ import annotations

import copy
import functools
import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F


def without_reduction(loss: Callable[..., Any]) -> Callable[..., Any] | None:
    """Return `loss` with `reduction="none"`; None if it has no such option or its mean is not a mean over records.

    Args:
        loss: module with an attribute `reduction`, or function with a parameter `reduction`; the value is `"mean"`.
    """
    # The mean of the CTC loss also divides each loss by the length of its target.
    if isinstance(loss, nn.CTCLoss) or getattr(loss, "func", loss) is F.ctc_loss:
        return None
    if isinstance(loss, nn.Module):
        if getattr(loss, "reduction", None) != "mean":
            return None
        copied = copy.copy(loss)  # a shallow copy shares the parameters
        copied.__dict__["reduction"] = "none"
        return copied
    return functools.partial(loss, reduction="none") if _default(loss, "reduction") == "mean" else None


def own_means(losses: Any, target: Any, loss: Callable[..., Any]) -> Tensor | None:
    """Return the mean loss of each record over its elements, `(records,)`; None if `losses` has not one row a record.

    Elements whose target is the `ignore_index` of `loss` do not count. A record with only such elements has the loss 0.

    The mean over the records can differ from torch's `reduction="mean"`. With class weights in `cross_entropy` or
    `nll_loss`, torch divides by the sum of the weights of all targets. With `ignore_index` it divides by the number of
    targets of the whole batch that count. Then the loss of a record would depend on the other records, which private
    training cannot allow.
    """
    if not isinstance(losses, Tensor) or losses.dim() == 0 or not isinstance(target, Tensor) or target.dim() == 0:
        return None
    if losses.shape[0] != target.shape[0]:
        return None
    if losses.dim() == 1:  # one loss a record; it is 0 if the target is ignored
        return losses
    ignored = loss.ignore_index if hasattr(loss, "ignore_index") else _default(loss, "ignore_index")
    if isinstance(ignored, int) and not target.is_floating_point() and losses.shape == target.shape:
        kept = (target != ignored).reshape(len(target), -1).sum(1)
        return losses.reshape(len(losses), -1).sum(1) / torch.clamp(kept, min=1)
    return losses.reshape(len(losses), -1).mean(1)


def _default(function: Callable[..., Any], name: str) -> Any:
    try:
        parameter = inspect.signature(function).parameters.get(name)
    except (TypeError, ValueError):  # a builtin without a signature
        return None
    return None if parameter is None else parameter.default
