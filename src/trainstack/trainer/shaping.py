"""How a module's models compute: compiled, or with the channels last in memory. Their weights and names stay."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import nn

from trainstack.errors import ConfigurationError


def shape(module: nn.Module, *, compiled: bool | Mapping[str, Any], channels_last: bool, private: bool) -> None:
    """Compile the models in `module`, in place, and lay out their weights.

    Steps themselves stay as they are, so hooks, logs and whatever else they do work as before.

    Args:
        module: of a run; its parts that hold parameters are its models.
        compiled: whether to; or options of `torch.compile`.
        channels_last: convolutions of images then compute so, whatever the layout of the batch.
        private: whether gradients of single records are taken.

    Raises:
        ConfigurationError: `compiled` with `private`.
    """
    if channels_last:
        module.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    if compiled is False:
        return
    if private:
        raise ConfigurationError(
            "compile=True in a private run: the gradient of each record is taken by transforms that torch.compile does "
            "not see through. Leave compile out."
        )
    options = {} if compiled is True else dict(compiled)
    for model in _models(module):
        if getattr(model, "_compiled_call_impl", None) is None:  # torch 2.13.0: set by `Module.compile`
            model.compile(**options)


def _models(module: nn.Module) -> Iterator[nn.Module]:
    """The parts of `module` that hold parameters and are called themselves."""
    for part in module.children():
        if isinstance(part, nn.ModuleList | nn.ModuleDict):
            yield from _models(part)
        elif next(part.parameters(), None) is not None:
            yield part
