"""Host memory that tensors are copied into, kept from one snapshot to the next."""

from __future__ import annotations

import torch


class HostBuffers:
    """One copy of a state on the host.

    Fresh memory costs more than copying does, since the system hands it out page by page on first use. So each
    tensor's buffer is kept under its name and used again while dtype and shape stay the same.
    """

    def __init__(self) -> None:
        self._kept: dict[str, torch.Tensor] = {}

    def copy(self, tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Return contiguous copies on the host, under the same names; the next call overwrites them.

        What lies on a CUDA device is copied into pinned memory, all of it at once, and waited for.
        """
        self._kept = {name: self._fitting(name, tensor) for name, tensor in tensors.items()}
        for name, tensor in tensors.items():
            self._kept[name].copy_(tensor, non_blocking=tensor.is_cuda)
        for device in {tensor.device for tensor in tensors.values() if tensor.is_cuda}:
            torch.cuda.current_stream(device).synchronize()
        return dict(self._kept)

    def release(self) -> None:
        """Give the memory back."""
        self._kept = {}

    def _fitting(self, name: str, tensor: torch.Tensor) -> torch.Tensor:
        kept = self._kept.get(name)
        if (
            kept is not None
            and (kept.dtype, kept.shape) == (tensor.dtype, tensor.shape)
            and (not tensor.is_cuda or kept.is_pinned())
        ):
            return kept
        return torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=tensor.is_cuda)
