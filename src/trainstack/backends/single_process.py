"""`sp`: one process, full precision. The innermost layer of every stack."""

from __future__ import annotations

import os
from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from functools import lru_cache
from typing import Any, ClassVar

import torch
from torch import Tensor

from trainstack.backends.base import TrainerBackend
from trainstack.backends.clipping import clip_gradients
from trainstack.backends.registry import Slot, register_layer
from trainstack.backends.workload import Workload
from trainstack.backends.world import World, pick_device
from trainstack.errors import ConfigurationError
from trainstack.stage import Stage

_NOTHING = nullcontext()


@register_layer("sp", slot=Slot.PROCESS)
class SingleProcess(TrainerBackend):
    """The core: places the module, runs it, and steps the optimizers.

    Args:
        environ: where to look for a launcher's variables; the process environment by default.
        standalone: False inside a layer that joins processes; then a world of several is no mistake.
    """

    summary: ClassVar[str] = "runs the module in this process, on one device"

    def __init__(self, *, environ: Mapping[str, str] | None = None, standalone: bool = True) -> None:
        self._environ = os.environ if environ is None else environ
        self._standalone = standalone

    def open(self, device: str | torch.device = "auto") -> World:
        size = int(self._environ.get("WORLD_SIZE") or 1)
        if self._standalone and size > 1:
            raise ConfigurationError(
                f"backend 'sp' in a world of {size} processes: each would train a model of its own. "
                "Start one process, or choose a backend that joins them."
            )
        return World(device=pick_device(device))

    def prepare(self, work: Workload) -> Workload:
        work.module.to(work.world.device)
        return work

    def accumulate(self, work: Workload, last: bool) -> AbstractContextManager[Any]:
        return _NOTHING

    def forward(self, work: Workload, stage: Stage, batch: Any, step: int) -> Any:
        device = work.world.device
        if device.type != "cpu":
            batch = move_to_device(batch, device)
        return work.model(stage=stage, global_step=step, batch=batch, device=device)

    def backward(self, work: Workload, loss: Tensor, weight: float) -> None:
        loss.backward(_constant(weight, loss.dtype, loss.device))  # type: ignore[no-untyped-call]

    def clip(self, work: Workload) -> Tensor | None:
        return clip_gradients(work.parameters, work.clipping)

    def step(self, work: Workload) -> bool:
        for optimizer in work.optimizers:
            optimizer.step()
        return True

    def gather(self, outputs: Any) -> Any:
        return outputs

    def close(self) -> None:
        """Nothing was taken."""


@lru_cache(maxsize=256)
def _constant(value: float, dtype: torch.dtype, device: torch.device) -> Tensor:
    """A 0-dim tensor made once: a gradient seed costs less than multiplying the loss, for the same bits."""
    return torch.tensor(value, dtype=dtype, device=device)


def move_to_device(batch: Any, device: torch.device) -> Any:
    """`batch` with every tensor in it on `device`; containers are rebuilt, anything else is passed through.

    Objects with a `to` method (`BatchEncoding`, `PackedSequence`) move themselves.
    """
    if isinstance(batch, Tensor):
        return batch.to(device, non_blocking=True)
    if isinstance(batch, dict):
        return {key: move_to_device(value, device) for key, value in batch.items()}
    if isinstance(batch, tuple) and hasattr(batch, "_fields"):
        return type(batch)(*(move_to_device(value, device) for value in batch))
    if isinstance(batch, list | tuple):
        return type(batch)(move_to_device(value, device) for value in batch)
    if callable(getattr(batch, "to", None)):
        return batch.to(device)
    return batch
