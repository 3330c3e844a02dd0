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
    """What `open()` finds out: this process's rank among `size`, its device, and how to talk to the others.

    Attributes:
        rank, size: among all processes.
        local_rank: among those of this machine.
        device: what this process trains on.
        comm: sums, objects and failures, from and to all processes.
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
"""A device, by name, as an object or as the number of an accelerator; -1 is all of them; or one for each process."""


def pick_device(wanted: DeviceChoice = "auto", local_rank: int = 0, local_size: int | None = 1) -> torch.device:
    """The device to train on.

    `"auto"` is the accelerator that torch finds, else the CPU. A device type without an index gets `local_rank`, or 0
    where this process is bound to one device and sees no other.

    Args:
        wanted: one device, -1 for all accelerators of this machine, or several: one for each process.
        local_rank: of this process on its machine.
        local_size: processes on this machine, which several devices have to be as many as; None if unknown.

    Raises:
        ConfigurationError: the device is unknown to torch, or not there, or there are not as many as processes.
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
    """What `pick_device` gives, as the current device of the process until `until` is closed."""
    device = pick_device(wanted)
    until.enter_context(current_device(device))
    return device


def current_device(device: torch.device) -> AbstractContextManager[Any]:
    """A block in which `device` is current.

    `torch.empty(device="cuda")` and kernels of other libraries use the current device, and make a context of several
    hundred MB on it. The previous device becomes current again without a context if it has none.
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
    """The accelerator of this process where none was named: one for each, unless each sees its own alone."""
    if _is_bound(count):
        return 0
    if max(local_rank + 1, local_size or 0) <= count:
        return local_rank
    raise ConfigurationError(
        f"device={_format_device(wanted)}: {local_size or f'at least {local_rank + 1}'} processes on this machine, and "
        f"torch finds {count} accelerators. Start one process for each, or write device='cpu'; where each process sees "
        "devices of its own, name one of them: device='cuda:0'."
    )


def _is_bound(count: int) -> bool:
    """Whether somebody has left this process one device of the machine's: srun --gpus-per-task=1, Ray, a script.

    Where all processes were left the same one, nccl says so as soon as they talk.
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
