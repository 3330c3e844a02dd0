"""`os.fsync` without the wait for the disk. Tests end processes and no machine, and a file outlives its process."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest


def fsync(descriptor: int) -> None:
    """Fail as `os.fsync` does for a closed descriptor; nothing else."""
    os.fstat(descriptor)


def replace_fsync() -> Iterator[None]:
    """For a fixture of the conftest of a folder."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "fsync", fsync)
        yield
