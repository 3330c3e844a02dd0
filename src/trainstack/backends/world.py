"""Where this process stands among all processes of the run, and on which device it works."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

import torch

from trainstack.backends.communicator import Communicator
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

    `"auto"` is the accelerator that torch finds, else the CPU. A device type without an index gets `local_rank`.

    Args:
        wanted: one device, -1 for all accelerators of this machine, or several: one for each process.
        local_rank: of this process on its machine.
        local_size: processes on this machine, which several devices have to be as many as; None if unknown.

    Raises:
        ConfigurationError: the device is unknown to torch, or not there, or there are not as many as processes.
    """
    accelerator = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    count = torch.accelerator.device_count() if accelerator is not None else 0
    if wanted == -1 and count:
        wanted = list(range(count))
    if isinstance(wanted, Sequence) and not isinstance(wanted, str):
        wanted = _one_of(wanted, local_rank, local_size)
    if isinstance(wanted, int):
        if accelerator is None or not 0 <= wanted < count:
            raise ConfigurationError(
                f"device={wanted}: torch finds {count} accelerators on this machine. Write the number of one, counted "
                "from 0, or 'auto' or 'cpu'."
            )
        return torch.device(accelerator.type, wanted)
    if wanted == "auto":
        return torch.device("cpu") if accelerator is None else torch.device(accelerator.type, local_rank)
    try:
        device = torch.device(wanted)
    except RuntimeError as error:
        raise ConfigurationError(
            f"device={wanted!r}: torch knows no such device. Write 'auto', 'cpu', 'cuda' or 'cuda:1'."
        ) from error
    if device.type in ("cpu", "meta"):
        return device
    if accelerator is None or accelerator.type != device.type:
        found = "no accelerator" if accelerator is None else f"only {accelerator.type!r}"
        raise ConfigurationError(
            f"device={str(wanted)!r}: torch finds {found} on this machine. Write device='auto' or device='cpu'."
        )
    return torch.device(device.type, local_rank) if device.index is None else device


def _one_of(devices: Sequence[Device], local_rank: int, local_size: int | None) -> Device:
    """The one of this process."""
    if local_rank < len(devices) == (local_size or len(devices)):
        return devices[local_rank]
    raise ConfigurationError(
        f"device={list(devices)} names {len(devices)} devices, for {local_size or f'at least {local_rank + 1}'} "
        "processes on this machine. Start one for each, with a backend that joins them such as 'ddp': "
        f"launch(..., nproc={len(devices)}) or torchrun --nproc-per-node={len(devices)}."
    )
