"""A block in which torch uses the algorithms that give the same bits every time."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Literal

import torch


@contextmanager
def deterministic(wanted: bool | Literal["warn"]) -> Iterator[None]:
    """Let torch refuse operations that have no deterministic algorithm, or warn of them, until the block ends.

    cuDNN does not try out algorithms meanwhile. cuBLAS is deterministic only if CUBLAS_WORKSPACE_CONFIG was set before
    its first use in the process; it is set here if it is not.

    Args:
        wanted: True, "warn", or False for a block in which nothing is different.
    """
    if not wanted:
        yield
        return
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    before = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    benchmark = torch.backends.cudnn.benchmark
    torch.use_deterministic_algorithms(True, warn_only=wanted == "warn")
    torch.backends.cudnn.benchmark = False
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before[0], warn_only=before[1])
        torch.backends.cudnn.benchmark = benchmark
