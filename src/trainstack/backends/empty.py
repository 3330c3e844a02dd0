"""What a process without samples trains on, so that it still takes part when gradients are summed."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import get_gradient_edge


class Empty:
    """A micro-batch of no samples. `EMPTY` is the only one."""

    def __repr__(self) -> str:
        return "EMPTY"


EMPTY = Empty()
"""What a process without samples of a step trains on."""


def used_by(loss: Tensor, parameters: Iterable[nn.Parameter]) -> list[nn.Parameter]:
    """Those of `parameters` that `loss` was computed from."""
    waiting, seen, found = [get_gradient_edge(loss).node], set[Any](), set[int]()
    while waiting:
        node = waiting.pop()
        if node not in seen:
            seen.add(node)
            found.add(id(getattr(node, "variable", None)))
            waiting += [before for before, _ in node.next_functions if before is not None]
    return [p for p in parameters if id(p) in found]


def zero_loss(parameters: Iterable[nn.Parameter]) -> Tensor:
    """A loss of 0 whose gradient is 0 for every parameter that is trained."""
    trained = [p for p in parameters if p.requires_grad]
    return torch.stack([(p * 0).sum() for p in trained]).sum()
