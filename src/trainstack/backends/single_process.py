"""`sp`: one process in full precision, the innermost layer of every stack."""

from __future__ import annotations

import copy
import os
from collections.abc import Iterator, Mapping, MutableMapping, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import fields, is_dataclass, replace
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from trainstack._tensor_classes import has_meta
from trainstack.backends.base import Slot, TrainerBackend
from trainstack.backends.clipping import clip_gradients
from trainstack.backends.fast_paths import fast_backward, fast_call, fast_step, gradient_seed
from trainstack.backends.processes.borrowed import Borrowed
from trainstack.backends.processes.environment import launcher_world_size
from trainstack.backends.processes.world import DeviceChoice, World, select_device
from trainstack.backends.spec import register_layer
from trainstack.backends.workload import Workload
from trainstack.errors import ConfigurationError
from trainstack.stage import Stage

_NOTHING = nullcontext()


@register_layer("sp", slot=Slot.PROCESS)
class SingleProcess(TrainerBackend):
    """The core: places the module, runs it, and steps the optimizers.

    Args:
        environ: the environment with a launcher's variables; by default that of the process.
        standalone: False inside a layer that joins processes. A launcher with several processes is then accepted.
    """

    summary: ClassVar[str] = "runs the module in this process, on one device"
    prepares_again: ClassVar[bool] = True

    def __init__(self, *, environ: Mapping[str, str] | None = None, standalone: bool = True) -> None:
        self._environ = os.environ if environ is None else environ
        self.standalone = standalone
        self._selected = ExitStack()  # closing it restores the device that was current before

    def open(self, device: DeviceChoice = "auto") -> World:
        if self.standalone and (size := launcher_world_size(self._environ)) > 1:
            raise ConfigurationError(
                f"backend 'sp' in a world of {size} processes: each would train a separate model. "
                "Start one process, or choose a backend that joins them: 'ddp' for 'sp', 'ddp-bf16' for 'sp-bf16', or "
                "'auto' and 'auto-bf16', which need no change for one process. If separate models are intended, write "
                "backend_options={'sp': {'environ': {}}}, and another output_dir in each."
            )
        self._selected.close()
        return World(device=select_device(device, self._selected))

    def place(self, module: nn.Module, world: World) -> None:
        if has_meta(module):  # tensors without memory get it after all layers have placed the module
            module._apply(  # type: ignore[no-untyped-call]
                lambda one: one if one.is_meta else one.to(world.device)
            )
        else:
            module.to(world.device)

    def prepare(self, work: Workload) -> Workload:
        return work

    def accumulate(self, work: Workload, last: bool) -> AbstractContextManager[Any]:
        return _NOTHING

    def forward(self, work: Workload, stage: Stage, batch: Any, step: int) -> Any:
        device = work.world.device
        if type(batch) is Borrowed and work.model is work.module:  # no layer around this one opens it
            batch = batch.open()
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
            if work.closure is None:
                fast_step(optimizer, enabled=work.fast_paths)
            else:
                optimizer.step(work.closure)  # type: ignore[arg-type]  # the stubs say that it returns a float
        return True

    def gather(self, outputs: Any) -> Any:
        return outputs

    def read(self, tensors: Sequence[Tensor]) -> list[float]:
        """Read with one transfer for each device and dtype."""
        return read_numbers(tensors)

    def close(self) -> None:
        self._selected.close()


def read_numbers(tensors: Sequence[Tensor]) -> list[float]:
    """The values of real one-element tensors, in their order, with one transfer for each device and dtype.

    Tensors are not converted on the device: MPS has no float64, and an integer may not fit into a float. A Python float
    represents every value of float64, float32, bfloat16 and float16.
    """
    groups: dict[tuple[torch.device, torch.dtype], list[int]] = {}
    for index, tensor in enumerate(tensors):
        groups.setdefault((tensor.device, tensor.dtype), []).append(index)
    values = [0.0] * len(tensors)
    for indices in groups.values():
        group = [tensors[index] for index in indices]
        read = torch.stack([tensor if tensor.dim() == 0 else tensor.reshape(()) for tensor in group]).tolist()
        for index, value in zip(indices, read, strict=True):
            values[index] = float(value)
    return values


_CONTAINERS = (MutableMapping, list, tuple)

_STAGED = ("cuda", "xpu")
"""Device types for which torch copies host memory that is not pinned to a buffer before `to(..., non_blocking=True)`
returns, so that its owner may write to it. MPS reads the memory later. Checked on torch 2.13.0."""


def move_to_device(batch: Any, device: torch.device) -> Any:
    """`batch` with every tensor in it on `device`. Containers are rebuilt; other objects are returned unchanged.

    Objects with a `to` method (`BatchEncoding`, `PackedSequence`) move themselves. Mappings and lists of other classes
    are copied with their attributes. A copy to the host is complete at return. A copy to CUDA may still read its pinned
    source; `after_copies` waits for it.
    """
    if isinstance(batch, Tensor):
        return _move_tensor(batch, device)
    if isinstance(batch, Borrowed):
        return Borrowed(move_to_device(batch.batch, device), batch.begin)
    if isinstance(batch, _CONTAINERS) and not callable(getattr(type(batch), "to", None)):  # type: "to" may be a key
        return _move_container(batch, device)
    if callable(getattr(batch, "to", None)):
        return batch.to(device)
    if is_dataclass(batch) and not isinstance(batch, type):
        return replace(
            batch, **{f.name: move_to_device(getattr(batch, f.name), device) for f in fields(batch) if f.init}
        )
    return batch


def _move_tensor(tensor: Tensor, device: torch.device) -> Tensor:
    if device.type not in _STAGED:
        return tensor.to(device)
    moved = tensor.to(device, non_blocking=True)
    if _uploads.watched and moved is not tensor and tensor.is_pinned():
        _uploads.events.append(torch.accelerator.current_stream(device).record_event())
    return moved


class _Uploads:
    """Copies out of pinned memory that may still run.

    Attributes:
        watched: the number of loops over `after_copies` with a batch in use.
        events: one for each copy since the last wait.
    """

    def __init__(self) -> None:
        self.watched = 0
        self.events: list[torch.Event] = []

    def wait(self) -> None:
        events, self.events = self.events, []
        for event in events:
            event.synchronize()


_uploads = _Uploads()


def after_copies(batches: Iterator[Any]) -> Iterator[Any]:
    """`batches`, whose next item is fetched only after the copies of the last one from pinned memory are complete.

    A loader may use one pinned buffer for all batches. torch protects pinned memory that is freed, but not memory to
    which its owner writes again. The loop waits for copies only, not for the step that follows them.
    """
    return _wait_between(batches) if torch.accelerator.is_available() else batches


def _wait_between(batches: Iterator[Any]) -> Iterator[Any]:
    for batch in batches:
        _uploads.watched += 1
        try:
            yield batch
        finally:
            _uploads.watched -= 1
        del batch  # frees its memory for the next one
        _uploads.wait()


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
    """A shallow copy without a call of the constructor. A dict that is its own `__dict__` remains so."""
    copied = copy.copy(batch)
    if getattr(batch, "__dict__", None) is batch:
        copied.__dict__ = copied
    return copied
