"""A schedule of learning rates that a function gives as numbers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler


def by_step(optimizer: Optimizer, rate: Callable[[int], float]) -> LRScheduler:
    """Set the learning rate of all parameter groups to `rate(step)`.

    `LambdaLR` multiplies the learning rate of the optimizer by a factor, and the product may round to another number.

    Args:
        optimizer: its learning rates are replaced.
        rate: gives the learning rate of the update after `step` steps of the scheduler, which are global steps unless
            its interval is another. Checkpoints do not hold the function.

    Examples:
        >>> optimizer = torch.optim.SGD(module.parameters(), lr=1.0)
        >>> scheduler = ts.schedulers.by_step(
        ...     optimizer, lambda step: 0.5 if step < 2 else 0.25
        ... )
        >>> scheduler.get_last_lr()
        [0.5]
    """
    return _LRByStep(optimizer, rate)


class _LRByStep(LRScheduler):
    def __init__(self, optimizer: Optimizer, rate: Callable[[int], float]) -> None:
        self.rate = rate
        super().__init__(optimizer)

    def get_lr(self) -> list[Any]:
        return [self.rate(self.last_epoch)] * len(self.optimizer.param_groups)

    def state_dict(self) -> dict[str, Any]:
        return {name: value for name, value in super().state_dict().items() if name != "rate"}
