"""Losses of single records from a criterion that takes a mean over the batch, for private training."""

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
    """`loss` with `reduction="none"`; None where it has no such option, or is no plain mean.

    Args:
        loss: a module with an attribute `reduction`, or a function with such a parameter, that is `"mean"`.
    """
    if isinstance(loss, nn.CTCLoss) or getattr(loss, "func", loss) is F.ctc_loss:  # its mean divides by lengths
        return None
    if isinstance(loss, nn.Module):
        if getattr(loss, "reduction", None) != "mean":
            return None
        copied = copy.copy(loss)  # which shares its parameters
        copied.__dict__["reduction"] = "none"
        return copied
    return functools.partial(loss, reduction="none") if _default(loss, "reduction") == "mean" else None


def own_means(losses: Any, target: Any, loss: Callable[..., Any]) -> Tensor | None:
    """The mean of each record over its own elements, `(records,)`, or None if `losses` has not one row a record.

    Elements whose target is the `ignore_index` of `loss` do not count. A record without others has the loss 0.
    """
    if not isinstance(losses, Tensor) or losses.dim() == 0 or not isinstance(target, Tensor) or target.dim() == 0:
        return None
    if losses.shape[0] != target.shape[0]:
        return None
    if losses.dim() == 1:  # that of an ignored target is 0
        return losses
    ignored = loss.ignore_index if hasattr(loss, "ignore_index") else _default(loss, "ignore_index")
    if isinstance(ignored, int) and not target.is_floating_point() and losses.shape == target.shape:
        kept = (target != ignored).reshape(len(target), -1).sum(1)
        return losses.reshape(len(losses), -1).sum(1) / torch.clamp(kept, min=1)
    return losses.reshape(len(losses), -1).mean(1)


def _default(function: Callable[..., Any], name: str) -> Any:
    try:
        parameter = inspect.signature(function).parameters.get(name)
    except (TypeError, ValueError):  # of a builtin
        return None
    return None if parameter is None else parameter.default
