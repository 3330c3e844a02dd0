"""Memory that glibc gives back to the system and asks for again: left out of what is measured."""

from __future__ import annotations

import ctypes
from pathlib import Path

_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3


def keep_freed_memory() -> bool:
    """Let this process keep what it has freed; False where that cannot be had.

    Whether a step's memory lies at the end of the heap, so that freeing it gives it back and the next step has every
    page of it made anew, depends on whatever small thing was allocated after it. Chance decides then whether a
    contender's step on a small CNN costs a tenth more, and the same one in the next process does not.
    """
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (OSError, AttributeError, TypeError):
        return False
    return bool(mallopt(_MMAP_THRESHOLD, 32 << 20) and mallopt(_TRIM_THRESHOLD, (1 << 31) - 1))


def forget_peak() -> None:
    """Give freed memory back to the system, and let Linux measure the peak (VmHWM) anew from here on."""
    ctypes.CDLL(None).malloc_trim(0)
    Path("/proc/self/clear_refs").write_text("5")
