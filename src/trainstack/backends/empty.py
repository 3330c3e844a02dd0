"""What a process without samples trains on, so that it still takes part when gradients are summed."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor, nn


class Empty:
    """A micro-batch of no samples. `EMPTY` is the only one."""

    def __repr__(self) -> str:
        return "EMPTY"


EMPTY = Empty()
"""What a process without samples of a step trains on."""


def zero_loss(parameters: Iterable[nn.Parameter]) -> Tensor:
    """A loss of 0 whose gradient is 0 for every parameter that is trained."""
    trained = [p for p in parameters if p.requires_grad]
    return torch.stack([(p * 0).sum() for p in trained]).sum()
