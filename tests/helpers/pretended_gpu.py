"""A CUDA device that a test pretends to have: tensors stay on the CPU, and the operations of a device are recorded."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode


class PretendedGpu(TorchFunctionMode):
    """Placements on CUDA have no effect. A copy to the CPU holds nan until a call waits, unless it waits itself.

    Attributes:
        calls: the calls, in order: `("select", 1)`, `("upload", shape, non_blocking)`, `("record",)`, `("wait",)`,
            `("set in thread", 1)`.
        index: of the current device.
        pinned: storages that count as pinned, by address.
    """

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[Any, ...]] = []
        self.index = 0
        self.pinned: set[int] = set()
        self._late: list[tuple[Tensor, Tensor]] = []

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if function in (Tensor.item, Tensor.tolist):
            self.settle()
        if function is Tensor.is_pinned:
            return args[0].untyped_storage().data_ptr() in self.pinned
        target = kwargs.get("device", args[1] if function is Tensor.to and len(args) > 1 else None)
        kind = torch.device(target).type if isinstance(target, str | torch.device) else None
        if kind == "cuda":
            if function is Tensor.to:
                self.calls.append(("upload", tuple(args[0].shape), bool(kwargs.get("non_blocking"))))
                args = (args[0], torch.device("cpu"), *args[2:])
                return function(*args, **(kwargs | {"copy": True}))
            kwargs["device"] = "cpu"
        result = function(*args, **kwargs)
        if function is Tensor.to and kind == "cpu" and kwargs.get("non_blocking") and result.is_floating_point():
            late = torch.full_like(result, float("nan"))
            self._late.append((late, result.detach().clone()))
            return late
        return result

    def settle(self) -> None:
        """Waiting for the device: pending copies arrive."""
        late, self._late = self._late, []
        for tensor, value in late:
            tensor.copy_(value)

    def current_stream(self, device: Any = None) -> Any:
        """A stream whose events are written down."""

        def record() -> Any:
            self.calls.append(("record",))
            return SimpleNamespace(synchronize=lambda: self.calls.append(("wait",)))

        return SimpleNamespace(record_event=record)

    def set_device_index(self, index: int) -> None:
        """`torch.accelerator.set_device_index`, whose effect is limited to the calling thread."""
        if threading.current_thread() is threading.main_thread():
            self.index = index
        else:
            self.calls.append(("set in thread", index))

    def device_index(self, index: int | None) -> Any:
        """`torch.accelerator.device_index`."""
        gpu = self

        class Selection:
            def __enter__(self) -> None:
                if index is not None:
                    self.before, gpu.index = gpu.index, index
                    gpu.calls.append(("select", index))

            def __exit__(self, *_: object) -> None:
                if index is not None:
                    gpu.index = self.before

        return Selection()


@contextmanager
def pretended_gpu(count: int = 2) -> Iterator[PretendedGpu]:
    """A block in which torch seems to have `count` CUDA devices, 0 of which is current."""
    gpu = PretendedGpu()
    replaced: dict[str, Any] = {
        "current_accelerator": lambda: torch.device("cuda"),
        "is_available": lambda: True,
        "device_count": lambda: count,
        "device_index": gpu.device_index,
        "current_device_index": lambda: gpu.index,
        "set_device_index": gpu.set_device_index,
        "current_stream": gpu.current_stream,
        "synchronize": lambda device=None: gpu.settle(),
    }
    generators = SimpleNamespace(
        device_count=lambda: 0,  # of those that torch.random.fork_rng looks at
        default_generators=[torch.Generator() for _ in range(count)],
        get_rng_state=lambda device: torch.get_rng_state(),
        set_rng_state=lambda state, device: None,
    )
    with (
        mock.patch.multiple(torch.accelerator, **replaced),
        mock.patch.object(torch, "get_device_module", return_value=generators),
        gpu,
    ):
        yield gpu
