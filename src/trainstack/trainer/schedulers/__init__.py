"""Schedulers: warm-up schedules, schedulers by name, and the rhythm in which each steps."""

from trainstack.trainer.schedulers.config import SchedulerConfig
from trainstack.trainer.schedulers.names import build_scheduler
from trainstack.trainer.schedulers.shapes import inverse_sqrt, warmup_cosine, warmup_linear, warmup_stable_decay

__all__ = [
    "SchedulerConfig",
    "build_scheduler",
    "inverse_sqrt",
    "warmup_cosine",
    "warmup_linear",
    "warmup_stable_decay",
]
