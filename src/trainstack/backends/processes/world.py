"""`World`: the rank, size and device of this process."""

from __future__ import annotations

import os
from collections.abc import Sequence
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import torch

from trainstack.backends.processes.communicator import Communicator
from trainstack.errors import ConfigurationError


@dataclass(frozen=True, slots=True, kw_only=True)
class World:
    """The result of `open()`: the rank and device of this process, and the communicator.

    Attributes:
        rank, size: among all processes.
        local_rank: among the processes of this machine.
        device: the device of the training.
        comm: exchanges sums, objects and failures between all processes.
    """

    rank: int = 0
    size: int = 1
    local_rank: int = 0
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    comm: Communicator = field(default_factory=Communicator)

    @property
    def is_main(self) -> bool:
        """Whether this process writes files and prints."""
        return self.rank == 0


Device: TypeAlias = str | torch.device | int
DeviceChoice: TypeAlias = Device | Sequence[Device]
"""A device as a name, an object or the number of an accelerator; -1 for all accelerators; or one for each process."""


def pick_device(wanted: DeviceChoice = "auto", local_rank: int = 0, local_size: int | None = 1) -> torch.device:
    """Select the device for the training.

    `"auto"` is the accelerator that torch finds, or else the CPU. A device type without an index gets the index
    `local_rank`, or 0 if the environment makes only one device visible to this process.

    Args:
        wanted: one device, -1 for all accelerators of this machine, or one device for each process.
        local_rank: of this process on its machine.
        local_size: processes on this machine, which has to be the number of devices in `wanted`; None if unknown.

    Raises:
        ConfigurationError: torch does not know the device or does not find it, or the number of devices is not the
            number of processes.
    """
    accelerator = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    count = torch.accelerator.device_count() if accelerator is not None else 0
    kind = "cpu" if accelerator is None else accelerator.type
    if wanted == -1 and count:
        wanted = "auto" if _is_bound(count) else list(range(count))
    if isinstance(wanted, Sequence) and not isinstance(wanted, str):
        wanted = _one_of(wanted, local_rank, local_size)
    if isinstance(wanted, int):
        wanted = torch.device(kind, _check_index(wanted, wanted, count))
    try:
        device = torch.device(kind if wanted == "auto" else wanted)
    except RuntimeError as error:
        raise ConfigurationError(
            f"device={wanted!r}: torch has no such device; write 'auto', 'cpu', 'cuda' or 'cuda:1'."
        ) from error
    if device.type in ("cpu", "meta"):
        return device
    if device.type != kind:
        found = "no accelerator" if accelerator is None else f"only {kind!r}"
        raise ConfigurationError(
            f"device={str(wanted)!r}: torch finds {found} on this machine. Write device='auto' or device='cpu'."
        )
    if device.index is None:
        return torch.device(kind, _own_index(wanted, local_rank, local_size, count))
    return torch.device(kind, _check_index(wanted, device.index, count))


def select_device(wanted: DeviceChoice, until: ExitStack) -> torch.device:
    """Select a device by `pick_device`, and make it the current device of the process until `until` is closed."""
    device = pick_device(wanted)
    until.enter_context(current_device(device))
    return device


def current_device(device: torch.device) -> AbstractContextManager[Any]:
    """A block in which `device` is current.

    `torch.empty(device="cuda")` and kernels of other libraries use the current device, and make a context of several
    hundred MB on it. Leaving the block makes the previous device current without making a context on it.
    """
    return torch.accelerator.device_index(None if device.type in ("cpu", "meta") else device.index or 0)


def _check_index(wanted: Device, index: int, count: int) -> int:
    if not 0 <= index < count:
        raise ConfigurationError(
            f"device={_format_device(wanted)}: torch finds {count} accelerators on this machine. Write the number of "
            "one, counted from 0, or 'auto' or 'cpu'."
        )
    return index


def _own_index(wanted: Device, local_rank: int, local_size: int | None, count: int) -> int:
    """The index of this process's accelerator if the user gave none: the local rank, or 0 if only one is visible."""
    if _is_bound(count):
        return 0
    if max(local_rank + 1, local_size or 0) <= count:
        return local_rank
    raise ConfigurationError(
        f"device={_format_device(wanted)}: {local_size or f'at least {local_rank + 1}'} processes on this machine, and "
        f"torch finds {count} accelerators. Start one process for each, or write device='cpu'. If each process has "
        "other visible devices, name one of them: device='cuda:0'."
    )


def _is_bound(count: int) -> bool:
    """Whether the environment makes one device visible to this process: srun --gpus-per-task=1, Ray, a script.

    If all processes see the same one, nccl raises an error at their first collective.
    """
    names = ("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES", "ZE_AFFINITY_MASK")
    visible = (os.environ.get(name, "") for name in names)
    return count == 1 and any(devices and "," not in devices for devices in visible)


def _format_device(wanted: Device) -> str:
    return repr(str(wanted) if isinstance(wanted, torch.device) else wanted)


def _one_of(devices: Sequence[Device], local_rank: int, local_size: int | None) -> Device:
    if local_rank < len(devices) == (local_size or len(devices)):
        return devices[local_rank]
    raise ConfigurationError(
        f"device={list(devices)} names {len(devices)} devices, for {local_size or f'at least {local_rank + 1}'} "
        "processes on this machine. Start one for each, with a backend that joins them such as 'ddp': "
        f"launch(..., nproc={len(devices)}) or torchrun --nproc-per-node={len(devices)}."
    )
