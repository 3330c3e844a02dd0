"""`sp`: one process in full precision, the innermost layer of every stack."""

from __future__ import annotations

import copy
import os
from collections.abc import Mapping, MutableMapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import fields, is_dataclass, replace
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from trainstack.backends.base import Slot, TrainerBackend
from trainstack.backends.clipping import clip_gradients
from trainstack.backends.fast_paths import fast_backward, fast_call, fast_step, gradient_seed
from trainstack.backends.processes.environment import launcher_world_size
from trainstack.backends.processes.world import DeviceChoice, World, pick_device
from trainstack.backends.spec import register_layer
from trainstack.backends.workload import Workload
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

    def open(self, device: DeviceChoice = "auto") -> World:
        if self._standalone and (size := launcher_world_size(self._environ)) > 1:
            raise ConfigurationError(
                f"backend 'sp' in a world of {size} processes: each would train a model of its own. "
                "Start one process, or choose a backend that joins them: 'ddp'. If each is to train its own, write "
                "backend_options={'sp': {'environ': {}}}, and another output_dir in each."
            )
        return World(device=pick_device(device))

    def place(self, module: nn.Module, world: World) -> None:
        module.to(world.device)

    def prepare(self, work: Workload) -> Workload:
        return work

    def accumulate(self, work: Workload, last: bool) -> AbstractContextManager[Any]:
        return _NOTHING

    def forward(self, work: Workload, stage: Stage, batch: Any, step: int) -> Any:
        device = work.world.device
        if device.type != "cpu":
            batch = move_to_device(batch, device)
        call = fast_call(work.model, enabled=work.fast_paths)
        return call(stage=stage, global_step=step, batch=batch, device=device)

    def backward(self, work: Workload, loss: Tensor, weight: float) -> None:
        fast_backward(loss, gradient_seed(weight, loss), enabled=work.fast_paths)

    def clip(self, work: Workload) -> Tensor | None:
        return clip_gradients(work.optimized_params, work.clipping, fast_paths=work.fast_paths)

    def step(self, work: Workload) -> bool:
        for optimizer in work.optimizers:
            fast_step(optimizer, enabled=work.fast_paths)
        return True

    def gather(self, outputs: Any) -> Any:
        return outputs

    def read(self, tensors: Sequence[Tensor]) -> list[float]:
        """In one transfer, as float64."""
        if not tensors:
            return []
        device = tensors[0].device
        here = [tensor if tensor.device == device else tensor.to(device) for tensor in tensors]
        values: list[float] = torch.stack(here).double().tolist()
        return values

    def close(self) -> None:
        """Nothing was taken."""


_CONTAINERS = (MutableMapping, list, tuple)


def move_to_device(batch: Any, device: torch.device) -> Any:
    """`batch` with every tensor in it on `device`; containers are rebuilt, anything else is passed through.

    Objects with a `to` method (`BatchEncoding`, `PackedSequence`) move themselves. Mappings and lists of a class of
    their own are copied, with what else they hold.
    """
    if isinstance(batch, Tensor):
        return batch.to(device, non_blocking=True)
    if isinstance(batch, _CONTAINERS) and not callable(getattr(type(batch), "to", None)):  # a key may be called so
        return _move_container(batch, device)
    if callable(getattr(batch, "to", None)):
        return batch.to(device)
    if is_dataclass(batch) and not isinstance(batch, type):
        return replace(
            batch, **{f.name: move_to_device(getattr(batch, f.name), device) for f in fields(batch) if f.init}
        )
    return batch


def _move_container(batch: Any, device: torch.device) -> Any:
    if isinstance(batch, MutableMapping):
        moved = {} if type(batch) is dict else _shallow_copy(batch)
        for key, value in batch.items():
            moved[key] = move_to_device(value, device)
        return moved
    items = [move_to_device(value, device) for value in batch]
    if isinstance(batch, tuple):
        return type(batch)(*items) if hasattr(batch, "_fields") else type(batch)(items)
    if type(batch) is list:
        return items
    moved = _shallow_copy(batch)
    moved[:] = items
    return moved


def _shallow_copy(batch: Any) -> Any:
    """A shallow copy, whose constructor is not called; a dict that is its own `__dict__` stays one."""
    copied = copy.copy(batch)
    if getattr(batch, "__dict__", None) is batch:
        copied.__dict__ = copied
    return copied
