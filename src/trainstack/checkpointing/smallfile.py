"""A small file that has its old content or its new one, whenever the power fails."""

from __future__ import annotations

from pathlib import Path

from trainstack.checkpointing import filesystem


def replace(path: Path, data: bytes) -> None:
    """Make `data` the content of the file `path`, durably. Only one process may do so at a time."""
    aside = path.with_name(f".tmp-{path.name}")
    if aside.exists():
        filesystem.remove_file(aside)
    with filesystem.open_new(aside) as handle:
        filesystem.write(handle, data)
        filesystem.sync_file(handle)
    filesystem.replace(aside, path)
    filesystem.sync_directory(path.parent)
