"""Learning rate schedulers: by name, with warm-up, by a function of the step, at intervals."""

from trainstack.trainer.schedulers.building import build_scheduler
from trainstack.trainer.schedulers.rates import by_step
from trainstack.trainer.schedulers.stepping import SchedulerConfig
from trainstack.trainer.schedulers.warmup import inverse_sqrt, warmup_cosine, warmup_linear, warmup_stable_decay

__all__ = [
    "SchedulerConfig",
    "build_scheduler",
    "by_step",
    "inverse_sqrt",
    "warmup_cosine",
    "warmup_linear",
    "warmup_stable_decay",
]
