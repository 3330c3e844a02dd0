"""Recognizing an error of a memory allocator, and freeing what a failed pass has allocated."""

from __future__ import annotations

import gc

import torch

_SAID_BY_ALLOCATORS = ("can't allocate memory", "out of memory", "CUBLAS_STATUS_ALLOC_FAILED")


def ran_out_of_memory(error: BaseException) -> bool:
    """Whether `error` is an allocator's: torch has a class for accelerators, and sentences for the rest."""
    if isinstance(error, torch.OutOfMemoryError | MemoryError):
        return True
    return isinstance(error, RuntimeError) and any(said in str(error) for said in _SAID_BY_ALLOCATORS)


def free_memory(device: torch.device) -> None:
    """Give back what nobody holds any more."""
    gc.collect()
    if device.type != "cpu":
        torch.get_device_module(device).empty_cache()
