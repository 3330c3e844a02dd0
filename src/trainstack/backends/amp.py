"""`amp`: forward pass in float16 with dynamic loss scaling."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.amp import GradScaler
from torch.optim import Optimizer

from trainstack.backends.base import Slot, TrainerBackend
from trainstack.backends.decorator import AbstractTrainerBackendDecorator
from trainstack.backends.spec import register_layer
from trainstack.backends.workload import Workload
from trainstack.errors import ConfigurationError
from trainstack.stage import Stage


class _JointScaler(GradScaler):
    """A `GradScaler` with one overflow decision for all optimizers: all of them step, or none does.

    torch has no public way to read the decision before `step`. The private names `_per_optimizer_states` and `_scale`
    were checked on torch 2.13.0.
    """

    def found_inf(self) -> list[Tensor]:
        """For each optimizer and device, a flag: not 0 if a gradient was inf or nan when it was unscaled."""
        states = self._per_optimizer_states.values()
        return [flag for state in states for flag in state["found_inf_per_device"].values()]

    def unscale_all(self, optimizers: Iterable[Optimizer]) -> None:
        """Divide the gradients by the scale. `_scale` is None until a loss was scaled; no gradients exist then."""
        if self._scale is not None:
            for optimizer in optimizers:
                self.unscale_(optimizer)

    def forget(self) -> None:
        """Drop the unscaling records of a step that will not complete."""
        self._per_optimizer_states.clear()


@register_layer("amp", slot=Slot.PRECISION)
class Amp(AbstractTrainerBackendDecorator):
    """Native mixed precision in float16 (`torch.autocast` and `torch.amp.GradScaler`), on CUDA devices and CPUs.

    A step whose gradients contain inf or nan is skipped, and the scale is reduced.

    Args:
        inner: the layer inside this one.
        **scaler_options: keyword arguments for `GradScaler`, e.g. `init_scale`, `growth_interval`.

    Raises:
        ConfigurationError: `enabled` is among the options.
    """

    scaler: _JointScaler
    summary: ClassVar[str] = (
        "autocasts the forward pass of every stage to float16, scales the loss, and skips a step that overflowed"
    )
    may_skip_steps: ClassVar[bool] = True
    autocast_dtype: ClassVar[torch.dtype | None] = torch.float16
    refuses_closures = "a gradient scaler scales one loss a step. Use bf16 or full precision"
    prepares_again: ClassVar[bool] = True

    def __init__(self, inner: TrainerBackend, **scaler_options: Any) -> None:
        super().__init__(inner)
        if "enabled" in scaler_options:
            raise ConfigurationError(
                f"amp: enabled={scaler_options['enabled']!r}: the backend string decides whether the loss is scaled. "
                f"Remove the option, or remove 'amp' from the string: backend={inner.spec!r}."
            )
        self._scaler_options = scaler_options
        self.scaler = _JointScaler("cpu", **scaler_options)

    def prepare(self, work: Workload) -> Workload:
        if any(p.dtype is torch.float16 for p in work.optimized_params):
            raise ConfigurationError(
                "'amp' with a module in float16: its gradients cannot be unscaled without loss. Keep the module in "
                "float32; the layer runs the forward pass in float16."
            )
        self.scaler = _JointScaler(work.world.device.type, **self._scaler_options)
        return self.inner.prepare(work)

    def forward(self, work: Workload, stage: Stage, batch: Any, step: int) -> Any:
        with torch.autocast(work.world.device.type, dtype=self.autocast_dtype):
            return self.inner.forward(work, stage, batch, step)

    def backward(self, work: Workload, loss: Tensor, weight: float) -> None:
        self.inner.backward(work, self.scaler.scale(loss), weight)

    def clip(self, work: Workload) -> Tensor | None:
        self.scaler.forget()  # an interrupted step may have left records, for which `unscale_` raises
        self.scaler.unscale_all(work.optimizers)
        return self.inner.clip(work)

    def step(self, work: Workload) -> bool:
        found = self.scaler.found_inf()
        if not found:  # no optimizer has a gradient, so there is nothing to unscale
            self.scaler.forget()
            return self.inner.step(work)
        # One read for any number of optimizers. Fused optimizers could read the flag on the device, but schedulers,
        # counters, buffers, hooks and the other optimizers need the decision on the host.
        moved = not any(self.inner.read(found)) and self.inner.step(work)
        self.scaler.update()
        return moved

    def skip(self, work: Workload) -> None:
        if any(self.inner.read(self.scaler.found_inf())):
            self.scaler.update()
        else:  # a step without a weighted loss gives no information about the scale
            self.scaler.forget()
        self.inner.skip(work)

    def get_layer_state(self) -> dict[str, Any]:
        return self.scaler.state_dict()

    def update_layer_state(self, state: dict[str, Any]) -> None:
        self.scaler.load_state_dict(state)
