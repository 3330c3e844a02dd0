"""`StepParameters` owns the parameters of the current global step."""

from __future__ import annotations

from collections.abc import Iterable
from copy import copy

from torch import nn
from torch.optim import Optimizer


class StepParameters:
    """The parameters that a global step zeroes, clips, reduces and checks.

    The loop and the layers read them here, through `Workload`, and do not collect them elsewhere.

    Attributes:
        all: those of the module, each once, frozen ones included.
        optimized: those that the optimizers hold, each once: what is clipped.
        frozen: those that `Trainer.freeze` has frozen, by `id`.
    """

    def __init__(self, module: nn.Module, optimizers: Iterable[Optimizer]) -> None:
        self._module, self._optimizers = module, tuple(optimizers)
        self.frozen: dict[int, nn.Parameter] = {}
        self.refresh()

    def refresh(self) -> None:
        """Read again what the module and the optimizers hold."""
        held = {id(p): p for optimizer in self._optimizers for group in optimizer.param_groups for p in group["params"]}
        self.all, self.optimized = tuple(self._module.parameters()), tuple(held.values())

    def clipping(self, optimized: Iterable[nn.Parameter]) -> StepParameters:
        """The same with `optimized` to clip, for a layer that steps copies of the parameters."""
        params = copy(self)
        params.optimized = tuple(optimized)
        return params
