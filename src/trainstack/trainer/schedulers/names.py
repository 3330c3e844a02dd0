"""Schedulers by name: the library's own, and every class of `torch.optim.lr_scheduler`."""

from __future__ import annotations

import difflib
import functools
from typing import Any

from torch.optim import lr_scheduler

from trainstack.errors import ConfigurationError
from trainstack.trainer import placeholders
from trainstack.trainer.schedulers import shapes

_WHOLE_RUN: dict[str, Any] = {"total_steps": placeholders.TOTAL_STEPS}
_SHAPES: dict[str, Any] = {
    "warmup_cosine": functools.partial(shapes.warmup_cosine, **_WHOLE_RUN),
    "warmup_linear": functools.partial(shapes.warmup_linear, **_WHOLE_RUN),
    "warmup_stable_decay": functools.partial(shapes.warmup_stable_decay, **_WHOLE_RUN),
    "inverse_sqrt": shapes.inverse_sqrt,
}


def build_scheduler(name: str, **options: Any) -> functools.partial[Any]:
    """A factory for the scheduler called `name`, to be returned among the schedulers.

    Args:
        name: "warmup_cosine", "warmup_linear" or "warmup_stable_decay", over all steps of the run unless given
            `total_steps`; "inverse_sqrt"; or a class of `torch.optim.lr_scheduler` such as "StepLR".
        **options: for it; may hold placeholders.

    Raises:
        ConfigurationError: there is no such scheduler.
    """
    known = {**_SHAPES, **{key: getattr(lr_scheduler, key) for key in lr_scheduler.__all__ if key != "LRScheduler"}}
    if name not in known:
        close = difflib.get_close_matches(str(name), known, n=1)
        hint = f"Did you mean {close[0]!r}?" if close else f"There are {', '.join(sorted(known))}."
        raise ConfigurationError(f"no scheduler is called {name!r}. {hint}")
    return functools.partial(known[name], **options)
