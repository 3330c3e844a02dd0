"""Torch settings of a run: compile, channels last, determinism, memory counters."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Literal

import torch
from torch import nn

from trainstack.errors import ConfigurationError


def prepare_model(module: nn.Module, *, compiled: bool | Mapping[str, Any], channels_last: bool, private: bool) -> None:
    """Compile the models in `module`, in place, and lay out their weights.

    Steps themselves stay as they are, so hooks, logs and whatever else they do work as before.
    The parts of `module` that hold parameters are its models. `compiled` may be options of `torch.compile`.

    Raises:
        ConfigurationError: `compiled` with `private`.
    """
    if channels_last:
        module.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    if compiled is False:
        return
    if private:
        raise ConfigurationError(
            "compile=True in a private run: the gradient of each record is taken by transforms that torch.compile does "
            "not see through. Leave compile out."
        )
    options = {} if compiled is True else dict(compiled)
    for model in _models(module):
        if getattr(model, "_compiled_call_impl", None) is None:  # torch 2.13.0: set by `Module.compile`
            model.compile(**options)


def _models(module: nn.Module) -> Iterator[nn.Module]:
    """The parts of `module` that hold parameters and are called themselves."""
    for part in module.children():
        if isinstance(part, nn.ModuleList | nn.ModuleDict):
            yield from _models(part)
        elif next(part.parameters(), None) is not None:
            yield part


@contextmanager
def deterministic(wanted: bool | Literal["warn"]) -> Iterator[None]:
    """Let torch refuse operations that have no deterministic algorithm, or warn of them, until the block ends.

    cuDNN does not try out algorithms meanwhile. cuBLAS is deterministic only if CUBLAS_WORKSPACE_CONFIG was set before
    its first use in the process; it is set here if it is not, and stays set.
    """
    if not wanted:
        yield
        return
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    before = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    benchmark = torch.backends.cudnn.benchmark
    torch.use_deterministic_algorithms(True, warn_only=wanted == "warn")
    torch.backends.cudnn.benchmark = False
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before[0], warn_only=before[1])
        torch.backends.cudnn.benchmark = benchmark


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
