"""Ready-made callbacks."""

from trainstack.trainer.callbacks.best_checkpoint import BestCheckpoint
from trainstack.trainer.callbacks.defaults import default_callbacks
from trainstack.trainer.callbacks.early_stopping import EarlyStopping
from trainstack.trainer.callbacks.ema import EMA
from trainstack.trainer.callbacks.extra_validation import ExtraValidation
from trainstack.trainer.callbacks.freezer import Freezer
from trainstack.trainer.callbacks.limit_batches import LimitBatches
from trainstack.trainer.callbacks.monitors import GradNormMonitor, LRMonitor, MemoryMonitor
from trainstack.trainer.callbacks.moving_average import MovingAverage
from trainstack.trainer.callbacks.profiler import Profiler
from trainstack.trainer.callbacks.step_timer import StepTimer
from trainstack.trainer.callbacks.sync_batch_norm import SyncBatchNorm
from trainstack.trainer.callbacks.throughput import ThroughputMonitor

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
    "Profiler",
    "StepTimer",
    "SyncBatchNorm",
    "ThroughputMonitor",
    "default_callbacks",
]
