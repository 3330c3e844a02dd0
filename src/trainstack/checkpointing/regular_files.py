"""Opening of regular files only, and bounds on their contents.

A folder of checkpoints may hold anything: a FIFO blocks who opens it, a link to `/dev/zero` never ends, a sparse file
of 4 TiB costs nothing to make.
"""

from __future__ import annotations

import errno
import os
import stat
from contextlib import suppress
from io import FileIO
from pathlib import Path

from trainstack.errors import CheckpointDamagedError

MAX_SMALL_BYTES = 16 << 20
"""The largest manifest or other small file that is read. A manifest has some kilobytes."""

_KINDS = {
    stat.S_IFIFO: "a FIFO",
    stat.S_IFSOCK: "a socket",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
    stat.S_IFDIR: "a directory",
}


def open_regular(path: Path) -> FileIO:
    """Open a regular file for reading, perhaps by a link; never waits for another process.

    Raises:
        OSError: there is none, it is something else than a regular file, or the system refused.
    """
    _check_regular(path, os.stat(path))  # before the open, since opening a device may do something
    flags = os.O_RDONLY | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_CLOEXEC", 0) | getattr(os, "O_BINARY", 0)
    handle = FileIO(os.open(path, flags), "rb")
    try:
        _check_regular(path, os.fstat(handle.fileno()))  # what was looked at before may have been replaced
    except BaseException:
        handle.close()
        raise
    return handle


def read_small(path: Path) -> bytes:
    """Return the content of a small regular file.

    Raises:
        OSError: as `open_regular`, or the file has more than `MAX_SMALL_BYTES`.
    """
    with open_regular(path) as handle:
        parts, left = [], MAX_SMALL_BYTES + 1
        while left and (part := handle.read(min(left, 1 << 20))):
            parts.append(part)
            left -= len(part)
    if not left:
        raise OSError(errno.EFBIG, f"it has more than {MAX_SMALL_BYTES:,} bytes", os.fspath(path))
    return b"".join(parts)


def drop_pages(path: Path) -> None:
    """Make the system forget the pages of a regular file. It forgets only what is on the disk already."""
    if hasattr(os, "posix_fadvise"):
        with suppress(OSError), open_regular(path) as handle:
            os.posix_fadvise(handle.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def _check_regular(path: Path, status: os.stat_result) -> None:
    if not stat.S_ISREG(status.st_mode):
        kind = _KINDS.get(stat.S_IFMT(status.st_mode), "something else")
        raise OSError(errno.EINVAL, f"it is {kind}, not a regular file", os.fspath(path))


def available_memory() -> int | None:
    """Return the bytes that this machine can still give to processes, swap included; None where it does not say."""
    try:
        with open("/proc/meminfo", encoding="ascii") as file:
            lines = dict(line.split(":", 1) for line in file if ":" in line)
        return sum(int(lines[name].split()[0]) << 10 for name in ("MemAvailable", "SwapFree"))
    except (OSError, ValueError, KeyError, IndexError):
        return None


def check_memory(path: Path, needed: int) -> None:
    """Refuse a file that needs more memory than there is, before any is taken.

    Raises:
        CheckpointDamagedError: it does. A sparse file claims any size, and no checkpoint was written that large here.
    """
    available = available_memory()
    if available is not None and needed > available:
        raise CheckpointDamagedError(
            f"{path} is refused before it is read: it would need {needed:,} bytes of memory, and {available:,} are "
            "available. Load another checkpoint, or read this one on a larger machine."
        )


_CONTAINER_BYTES = 300
_TEXT_FACTOR = 12
"""Bounds on the memory of a JSON text in Python: a dict of one item takes 184 bytes, a number of 4 digits 28."""


def check_json_memory(path: Path, data: bytes) -> None:
    """Refuse a JSON text whose objects would take more memory than there is; as `check_memory`."""
    check_memory(path, len(data) * _TEXT_FACTOR + (data.count(b"{") + data.count(b"[")) * _CONTAINER_BYTES)
