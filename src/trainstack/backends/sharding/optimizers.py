"""Refusal of optimizers that cannot step on sharded parameters."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import torch
from torch.optim import Optimizer

from trainstack.errors import ConfigurationError, annotate

_WHOLE = ("Adafactor", "Muon", "Rprop")
"""Optimizers of torch 2.13.0 with in-place operations that sharded tensors do not support."""

_INSTEAD = (
    "Write one that treats all elements alike, such as AdamW, Adam, SGD, NAdam, RMSprop or Adagrad; or use 'ddp'."
)


def check_optimizers(optimizers: Iterable[Optimizer]) -> None:
    """Refuse optimizers of torch that would fail in their first step.

    Raises:
        ConfigurationError: for the first of them.
    """
    classes = tuple(getattr(torch.optim, name) for name in _WHOLE if hasattr(torch.optim, name))
    for optimizer in optimizers:
        if isinstance(optimizer, classes):
            raise ConfigurationError(
                f"backend 'fsdp' with the optimizer {type(optimizer).__name__}: its step uses operations that torch "
                f"does not have for sharded parameters. {_INSTEAD}"
            )


@contextmanager
def explained() -> Iterator[None]:
    """A block in which optimizers step. The error of an operation that sharded tensors do not support gets a note."""
    try:
        yield
    except (RuntimeError, NotImplementedError) as error:
        if "placement" in str(error) or "DTensor" in str(error):
            annotate(
                error, f"An optimizer uses an operation that torch does not have for sharded parameters. {_INSTEAD}"
            )
        raise
