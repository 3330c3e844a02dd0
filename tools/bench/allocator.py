"""The memory of this process: its size, and settings of glibc for measurements."""

from __future__ import annotations

import ctypes
from pathlib import Path

_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3


def keep_freed_memory() -> bool:
    """Let this process keep freed memory; returns False if that is not possible.

    If the memory of a step is at the end of the heap, `free` returns it to the system, and the next step allocates each
    page again. That depends on later small allocations, so it varies by chance: a step on a small CNN costs a tenth
    more in one process and not in the next.
    """
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (OSError, AttributeError, TypeError):
        return False
    return bool(mallopt(_MMAP_THRESHOLD, 32 << 20) and mallopt(_TRIM_THRESHOLD, (1 << 31) - 1))


def forget_peak() -> None:
    """Return freed memory to the system, and let Linux measure the peak (VmHWM) from now on."""
    ctypes.CDLL(None).malloc_trim(0)
    Path("/proc/self/clear_refs").write_text("5")


def memory(field: str) -> float:
    """A field of /proc/self/status, such as "VmRSS" or "VmHWM", in MiB; nan without it (only Linux has it)."""
    status = Path("/proc/self/status")
    lines = status.read_text(encoding="ascii").splitlines() if status.exists() else []
    return next((int(line.split()[1]) / 1024 for line in lines if line.startswith(f"{field}:")), float("nan"))
