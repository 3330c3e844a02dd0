"""Lookup of the hooks that a module implements."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

from trainstack.errors import StopTraining, annotate
from trainstack.trainer.events.record_access import refuse_records
from trainstack.trainer.module_interface import CallbackInterface

Hook = Callable[..., Any]
Stop = Callable[[str], None]


def overridden(subscriber: Any, name: str, stop: Stop | None = None) -> Hook | None:
    """Return the hook `name` of `subscriber`, or None if it is not overridden. Errors in the hook get its name as note.

    If the hook raises `StopTraining`, `stop` is called with the reason.
    """
    method = getattr(subscriber, name, None)
    default = getattr(CallbackInterface, name)
    if method is None or getattr(method, "__func__", None) is default:
        return None
    label = f"{type(subscriber).__name__}.{name}"

    def hook(*args: Any, **kwargs: Any) -> Any:
        try:
            return method(*args, **kwargs)
        except Exception as error:
            if isinstance(error, StopTraining) and stop is not None:
                return stop(error.reason or f"{label} raised StopTraining")
            annotate(error, f"raised in {label}")
            raise

    hook.__wrapped__ = method  # type: ignore[attr-defined]
    return hook


def wants_outputs(hook: Hook | None) -> bool:
    """Whether `hook` takes more positional arguments than the global step; `key` does not count."""
    if hook is None:
        return False
    try:
        parameters = inspect.signature(hook).parameters.values()
    except (TypeError, ValueError):
        return True
    by_position = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    positional = [p for p in parameters if p.kind in by_position and p.name != "key"]
    return any(p.kind is p.VAR_POSITIONAL for p in parameters) or len(positional) > 1


def needs_outputs(hook: Hook) -> bool:
    """Whether `hook` requires more arguments than the global step."""
    try:
        inspect.signature(hook).bind(0)
    except (TypeError, ValueError):
        return True
    return False


class Hooks:
    """The hooks of one subscriber, a module or an argument of `train_dl`; None for a hook that is not overridden.

    Args:
        subscriber: object with hooks.
        stop: called with the reason, if a hook raises `StopTraining`.
        hides_records: whether hooks get no outputs and losses of training. A hook with `*outputs` gets none.

    Attributes:
        step_outputs, epoch_outputs, val_outputs: whether a hook reads these outputs.
        withheld: names of hooks that take outputs and get none.
    """

    begin_train_epoch: Hook | None
    end_train_step: Hook | None
    end_train_epoch: Hook | None
    end_val_epoch: Hook | None
    end_train: Hook | None
    val_outputs: bool
    step_outputs: bool
    epoch_outputs: bool

    def __init__(self, subscriber: Any, stop: Stop | None = None, *, hides_records: bool = False) -> None:
        self.begin_train_epoch = overridden(subscriber, "on_begin_train_epoch", stop)
        self.end_backward = overridden(subscriber, "on_end_backward", stop)
        self.end_train_step = overridden(subscriber, "on_end_train_step", stop)
        self.end_train_epoch = overridden(subscriber, "on_end_train_epoch", stop)
        self.end_val_epoch = overridden(subscriber, "on_end_val_epoch", stop)
        self.end_train = overridden(subscriber, "on_end_train", stop)
        self.step_outputs = wants_outputs(self.end_train_step)
        self.epoch_outputs = wants_outputs(self.end_train_epoch)
        self.val_outputs = wants_outputs(self.end_val_epoch)
        self.withheld: list[str] = []
        if hides_records:
            self._hide_records(type(subscriber).__name__)

    def _hide_records(self, owner: str) -> None:
        outputs, loss = ["outputs"], ["the loss"]
        for name, given in (("end_backward", loss), ("end_train_step", outputs), ("end_train_epoch", outputs)):
            hook = getattr(self, name)
            if hook is not None:
                refuse_records(hook, f"{owner}.on_{name}", given)
                self.withheld += [f"on_{name}"] if wants_outputs(hook) else []
        hook = self.end_backward
        self.end_backward = None if hook is None else lambda step, loss: hook(step)
        self.step_outputs = self.epoch_outputs = False
