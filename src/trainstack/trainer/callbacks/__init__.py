"""Ready-made callbacks."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from trainstack.trainer.callbacks.ema import EMA
from trainstack.trainer.callbacks.extra_validation import ExtraValidation
from trainstack.trainer.callbacks.freezer import Freezer
from trainstack.trainer.callbacks.monitored import BestCheckpoint, EarlyStopping
from trainstack.trainer.callbacks.monitors import GradNormMonitor, LRMonitor, MemoryMonitor, MovingAverage
from trainstack.trainer.callbacks.profiler import Profiler
from trainstack.trainer.callbacks.ray_report import RayReport
from trainstack.trainer.callbacks.search import OptunaPruning
from trainstack.trainer.callbacks.settings import LimitBatches, SyncBatchNorm
from trainstack.trainer.callbacks.timing import StepTimer, ThroughputMonitor
from trainstack.trainer.events import Callback


def default_callbacks() -> list[Callback]:
    """Return the default callbacks: monitors of throughput and memory, and a moving average of the loss.

    They are useful in most runs and add no measurable time to a step. Placement of the module, checks for inf and nan,
    progress, logs and checkpoints are parts of every run and have their own arguments.
    """
    return [ThroughputMonitor(), MemoryMonitor(), MovingAverage("train/loss")]


def with_defaults(callbacks: Iterable[Any] | None) -> list[Any]:
    """Return the default callbacks followed by `callbacks`; a given callback replaces the default of its class."""
    given = list(callbacks or ())
    classes = {one if isinstance(one, type) else type(one) for one in given}
    return [*(one for one in default_callbacks() if type(one) not in classes), *given]


__all__ = [
    "EMA",
    "BestCheckpoint",
    "EarlyStopping",
    "ExtraValidation",
    "Freezer",
    "GradNormMonitor",
    "LRMonitor",
    "LimitBatches",
    "MemoryMonitor",
    "MovingAverage",
    "OptunaPruning",
    "Profiler",
    "RayReport",
    "StepTimer",
    "SyncBatchNorm",
    "ThroughputMonitor",
    "default_callbacks",
]
