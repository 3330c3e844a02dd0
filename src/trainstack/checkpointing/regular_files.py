"""Limits of the memory that the files of a checkpoint may need."""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path

from trainstack._files import open_regular
from trainstack.errors import CheckpointDamagedError


def drop_pages(path: Path) -> None:
    """Drop the cached pages of a regular file. The system drops only pages that are already on disk."""
    if hasattr(os, "posix_fadvise"):
        with suppress(OSError), open_regular(path) as handle:
            os.posix_fadvise(handle.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def available_memory() -> int | None:
    """Return the bytes that this machine can still allocate, including swap; None if it does not report them."""
    try:
        with open("/proc/meminfo", encoding="ascii") as file:
            lines = dict(line.split(":", 1) for line in file if ":" in line)
        return sum(int(lines[name].split()[0]) << 10 for name in ("MemAvailable", "SwapFree"))
    except (OSError, ValueError, KeyError, IndexError):
        return None


def check_memory(path: Path, needed: int) -> None:
    """Refuse a file that needs more memory than is available, before any is allocated.

    Raises:
        CheckpointDamagedError: it needs more. A sparse file can claim any size, but no checkpoint was written that
            large.
    """
    available = available_memory()
    if available is not None and needed > available:
        raise CheckpointDamagedError(
            f"{path} is refused before it is read: it would need {needed:,} bytes of memory, and {available:,} are "
            "available. Load another checkpoint, or read this one on a larger machine."
        )


_CONTAINER_BYTES = 300
_TEXT_FACTOR = 12
"""Bounds of the memory of a JSON text in Python: a dict of one item takes 184 bytes, a number of 4 digits 28."""


def check_json_memory(path: Path, data: bytes) -> None:
    """Refuse a JSON text whose objects would take more memory than is available. See `check_memory`."""
    check_memory(path, len(data) * _TEXT_FACTOR + (data.count(b"{") + data.count(b"[")) * _CONTAINER_BYTES)
