"""A stage for trying things out on a module: nothing is random on it, and nothing that happens there remains."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode


@contextmanager
def undisturbed(module: nn.Module) -> Iterator[None]:
    """Dropout does nothing and noise is constant; buffers and states of random generators are put back at the end."""
    buffers = [(buffer, buffer.detach().clone()) for buffer in module.buffers()]
    devices = sorted({p.device.index or 0 for p in module.parameters() if p.is_cuda})
    host, array = random.getstate(), np.random.get_state()
    try:
        with torch.random.fork_rng(devices), Calm():
            yield
    finally:
        random.setstate(host)
        np.random.set_state(array)
        with torch.no_grad():
            for buffer, before in buffers:
                buffer.copy_(before)


class Calm(TorchFunctionMode):
    """Takes the randomness out of what draws from torch's generators in a forward pass."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in _DROPOUTS:
            return args[0] if args else kwargs["input"]
        if func in _NOISE_LIKE:
            return torch.full_like(args[0] if args else kwargs["input"], 0.5)
        if func in _NOISE:
            return torch.full_like(func(*args, **kwargs), 0.5)
        if kwargs.get("dropout_p"):
            kwargs = {**kwargs, "dropout_p": 0.0}
        return func(*args, **kwargs)


_DROPOUTS = {
    F.dropout,
    F.dropout1d,
    F.dropout2d,
    F.dropout3d,
    F.alpha_dropout,
    F.feature_alpha_dropout,
    torch.dropout,
    torch.alpha_dropout,
    torch.feature_dropout,
}
_NOISE_LIKE = {torch.rand_like, torch.randn_like}
_NOISE = {torch.rand, torch.randn, torch.bernoulli, torch.normal}


def changed_buffers(module: nn.Module, before: dict[str, Tensor]) -> list[str]:
    """The names of the buffers that are not what they were."""
    return [
        name
        for name, buffer in module.named_buffers()
        if name not in before or buffer.shape != before[name].shape or not _same(buffer, before[name])
    ]


def _same(left: Tensor, right: Tensor) -> bool:
    return torch.equal(left, right) or bool(((left == right) | (left.isnan() & right.isnan())).all())
