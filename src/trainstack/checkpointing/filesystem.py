"""The calls that change the file system, one function each, so that tests can make any of them fail."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import BinaryIO

from trainstack._files import file_mode, folder_mode, is_unsupported, warn_once
from trainstack._files import make_directories as make_directories
from trainstack._files import sync_directory as sync_directory


def make_directory(path: Path) -> None:
    """Create `path`, whose parent exists. Raises FileExistsError if it exists."""
    os.mkdir(path, folder_mode(path))


def open_new(path: Path) -> BinaryIO:
    """Open a file that does not exist yet, for writing."""

    def create(name: str, flags: int) -> int:
        return os.open(name, flags, file_mode(name))

    return open(path, "xb", buffering=1 << 20, opener=create)  # 1 MiB: combines small writes into few system calls


def write(handle: BinaryIO, data: bytes | memoryview) -> None:
    """Write all of `data`."""
    handle.write(data)


def sync_file(handle: BinaryIO) -> None:
    """Flush the written data to disk."""
    handle.flush()
    os.fsync(handle.fileno())


def rename(source: Path, target: Path) -> None:
    """Move a directory within its parent; `target` does not exist."""
    os.rename(source, target)


def replace(source: Path, target: Path) -> None:
    """Move a file within its directory, replacing `target` if it exists."""
    os.replace(source, target)


def remove_file(path: Path) -> None:
    """Delete a file."""
    os.unlink(path)


def remove_tree(path: Path) -> None:
    """Delete a directory and all in it."""
    shutil.rmtree(path)


def free_bytes(path: Path) -> int | None:
    """Return the free space below `path`, or None if the file system does not report it."""
    try:
        usage = shutil.disk_usage(path)
    except OSError as error:
        if not is_unsupported(error):
            raise
        warn_once("space", f"the file system of {path} does not report its free space, so a save may fail half-way")
        return None
    return usage.free if usage.total else None


def atomic_write(path: Path, data: bytes) -> None:
    """Make `data` the content of the file `path`, durably. Only one process may do so at a time."""
    # `_files.atomic_write` does not sync; this one survives a loss of power, by calls that tests make fail one by one
    aside = path.with_name(f".tmp-{path.name}")
    if os.path.lexists(aside):  # also a link to nothing
        remove_file(aside)
    with open_new(aside) as handle:
        write(handle, data)
        sync_file(handle)
    replace(aside, path)
    sync_directory(path.parent)
