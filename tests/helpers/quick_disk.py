"""Importing this makes `os.fsync` return at once in a process: the rank pool imports it.

The wait for a disk takes longer than the trainings of most tests, and protects from the loss of power only.
"""

from __future__ import annotations

import os


def _return(descriptor: int) -> None:
    pass


os.fsync = _return  # type: ignore[assignment]
