"""Where this process stands among all processes of the run, and on which device it works."""

from __future__ import annotations

from dataclasses import dataclass, field

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


def pick_device(wanted: str | torch.device = "auto", local_rank: int = 0) -> torch.device:
    """The device to train on.

    `"auto"` is the accelerator that torch finds, else the CPU. A device type without an index gets `local_rank`.

    Raises:
        ConfigurationError: the device is unknown to torch, or not there.
    """
    accelerator = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
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
