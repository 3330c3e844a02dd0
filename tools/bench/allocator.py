"""Memory that glibc gives back to the system and asks for again: left out of measurements."""

from __future__ import annotations

import ctypes
from pathlib import Path

_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3


def keep_freed_memory() -> bool:
    """Let this process keep freed memory; False where that is not possible.

    If the memory of a step is at the end of the heap, `free` returns it to the system, and the next step allocates
    each page again. That depends on small allocations after it, so by chance. A contender's step on a small CNN costs
    a tenth more in one process and not in the next.
    """
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (OSError, AttributeError, TypeError):
        return False
    return bool(mallopt(_MMAP_THRESHOLD, 32 << 20) and mallopt(_TRIM_THRESHOLD, (1 << 31) - 1))


def forget_peak() -> None:
    """Give freed memory back to the system, and let Linux measure the peak (VmHWM) again from here."""
    ctypes.CDLL(None).malloc_trim(0)
    Path("/proc/self/clear_refs").write_text("5")
