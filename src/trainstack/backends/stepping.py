"""Stepping an optimizer without what torch wraps around its `step`, where nobody would notice."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch._C._autograd import _profiler_enabled
from torch.optim import SGD, Adadelta, Adagrad, Adam, Adamax, AdamW, NAdam, Optimizer, RAdam, RMSprop
from torch.optim import optimizer as optimizers

Step = Callable[..., Any]

_KNOWN = frozenset({SGD, Adadelta, Adagrad, Adam, Adamax, AdamW, NAdam, RAdam, RMSprop})
_WRAPPERS = ["wrapper", "_use_grad"]
_updates: dict[Step, Step | None] = {}


def step_optimizer(optimizer: Optimizer) -> None:
    """`optimizer.step()`, to the bit.

    torch wraps each `step` in a range for the profiler, calls of hooks and two graph breaks, which cost as much as the
    update of a small model itself. An optimizer of its own classes is stepped without them, unless there is something
    for them to do: a profiler runs, a hook is registered, `step` was replaced, or the optimizer is differentiable.
    """
    update = bare_update(optimizer)
    if update is None:
        optimizer.step()
        return
    with torch.no_grad():
        update(optimizer)


def bare_update(optimizer: Optimizer) -> Step | None:
    """The update alone, called with the optimizer; None where the wrappers have something to do."""
    kind = type(optimizer)
    if kind not in _KNOWN or optimizer._optimizer_step_pre_hooks or optimizer._optimizer_step_post_hooks:
        return None
    if optimizers._global_optimizer_pre_hooks or optimizers._global_optimizer_post_hooks:
        return None
    if _profiler_enabled() or optimizer.defaults["differentiable"]:
        return None
    usual: Step = kind.step
    mine: Any = optimizer.__dict__.get("step")
    if mine is not None:
        if getattr(mine, "__wrapped__", None) is not usual or not getattr(mine, "_wrapped_by_lr_sched", False):
            return None
        optimizer._opt_called = True  # type: ignore[attr-defined]  # all that a scheduler wraps `step` for
    if usual not in _updates:
        _updates[usual] = _unwrapped(usual)
    return _updates[usual]


def _unwrapped(step: Step) -> Step | None:
    """What the wrappers of torch's stand around; None where these are not the wrappers that are known."""
    found = []
    while (inner := getattr(step, "__wrapped__", None)) is not None:
        found.append(step.__code__.co_name)
        step = inner
    return step if found == _WRAPPERS else None
