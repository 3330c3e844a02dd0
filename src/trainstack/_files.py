"""Durable directories and atomic writes of files."""

from __future__ import annotations

import os
from pathlib import Path


def atomic_write(path: Path, content: bytes) -> None:
    """Write the file `path` so that a reader sees the old content or the new one; a loss of power may lose both."""
    # checkpointing/filesystem.py has the durable one, which costs a sync and whose every call tests make fail
    made = path.with_name(f".{path.name}.tmp")
    made.write_bytes(content)
    os.replace(made, path)


def sync_directory(path: Path) -> None:
    """Force the names in `path` to the disk. Windows has no such call and does not need it."""
    if os.name == "nt":
        return
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def make_directories(path: Path) -> None:
    """Create `path` and its missing parents, each made durable in its parent."""
    if path.is_dir():
        return
    if path.parent != path:
        make_directories(path.parent)
    path.mkdir(exist_ok=True)
    sync_directory(path.parent)
