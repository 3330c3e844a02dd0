"""`bf16`: forward pass under bfloat16 autocast; parameters, gradients and optimizer state stay float32."""

from __future__ import annotations

from typing import Any, ClassVar

import torch

from trainstack.backends.base import Slot
from trainstack.backends.decorator import AbstractTrainerBackendDecorator
from trainstack.backends.spec import register_layer
from trainstack.backends.workload import Workload
from trainstack.stage import Stage


@register_layer("bf16", slot=Slot.PRECISION)
class BFloat16(AbstractTrainerBackendDecorator):
    """Autocast to bfloat16, which has float32's range and so needs no loss scaling."""

    summary: ClassVar[str] = "autocasts the forward pass of every stage to bfloat16; needs no loss scaling"
    prepares_again: ClassVar[bool] = True
    autocast_dtype: ClassVar[torch.dtype | None] = torch.bfloat16

    def forward(self, work: Workload, stage: Stage, batch: Any, step: int) -> Any:
        with torch.autocast(work.world.device.type, dtype=self.autocast_dtype):
            return self.inner.forward(work, stage, batch, step)
