"""How much memory this process has taken, from counters that cost nothing to read."""

from __future__ import annotations

import sys

import torch

GIB = 2**30


def host_peak_gib() -> float | None:
    """The largest resident size of this process so far in GiB; None on Windows."""
    if sys.platform == "win32":
        return None
    import resource

    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return float(peak) * (1 if sys.platform == "darwin" else 1024) / GIB


def device_peak_gib(device: torch.device) -> float | None:
    """The most that tensors have taken on `device` in GiB; None where it is not CUDA."""
    return torch.cuda.max_memory_allocated(device) / GIB if device.type == "cuda" else None
