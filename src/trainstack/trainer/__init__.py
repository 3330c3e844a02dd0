"""What a user touches: the module to write, its arguments, and the trainer that runs it."""

from typing import TYPE_CHECKING

from trainstack.backends import TrainerBackend
from trainstack.lazily import lazily
from trainstack.stage import Stage
from trainstack.trainer import placeholders, schedulers
from trainstack.trainer.abstract_trainer import AbstractTrainer
from trainstack.trainer.arguments import TrainerArguments
from trainstack.trainer.callback_interface import CallbackInterface
from trainstack.trainer.collector import OutputCollector
from trainstack.trainer.drive import LoopDriver
from trainstack.trainer.evaluated import EvaluationOutputs
from trainstack.trainer.events import Callback, Event, Events, Filter, only
from trainstack.trainer.history import Record, RunHistory
from trainstack.trainer.lr_finder import FoundRates
from trainstack.trainer.metrics import Metric
from trainstack.trainer.module_interface import ModuleInterface
from trainstack.trainer.nested_arguments import StatsArguments, WriterArguments
from trainstack.trainer.plan import TrainingPlan
from trainstack.trainer.progress import ProgressDisplay
from trainstack.trainer.rhythm import Every
from trainstack.trainer.schedulers import SchedulerConfig, build_scheduler
from trainstack.trainer.seeding import seed_everything
from trainstack.trainer.trainer import RunView, Trainer, find_lr
from trainstack.trainer.user_state import UserState
from trainstack.trainer.writers import (
    CsvWriter,
    JsonLinesWriter,
    MlflowWriter,
    RunInfo,
    StdoutWriter,
    TensorBoardWriter,
    TrackioWriter,
    WandbWriter,
    Writer,
    read_history,
)

if TYPE_CHECKING:
    from trainstack.trainer import callbacks
    from trainstack.trainer.supervised import (
        SupervisedModule,
        apply_mapping,
        build_optimizer,
        call_with_matching_args,
    )

TrainerBackend.driver_class = LoopDriver

__getattr__ = lazily(
    __name__,
    {
        "SupervisedModule": "trainstack.trainer.supervised",
        "apply_mapping": "trainstack.trainer.supervised",
        "build_optimizer": "trainstack.trainer.supervised",
        "call_with_matching_args": "trainstack.trainer.supervised",
        "callbacks": "trainstack.trainer.callbacks",
    },
)

__all__ = [
    "AbstractTrainer",
    "Callback",
    "CallbackInterface",
    "CsvWriter",
    "EvaluationOutputs",
    "Event",
    "Events",
    "Every",
    "Filter",
    "FoundRates",
    "JsonLinesWriter",
    "Metric",
    "MlflowWriter",
    "ModuleInterface",
    "OutputCollector",
    "ProgressDisplay",
    "Record",
    "RunHistory",
    "RunInfo",
    "RunView",
    "SchedulerConfig",
    "Stage",
    "StatsArguments",
    "StdoutWriter",
    "SupervisedModule",
    "TensorBoardWriter",
    "TrackioWriter",
    "Trainer",
    "TrainerArguments",
    "TrainingPlan",
    "UserState",
    "WandbWriter",
    "Writer",
    "WriterArguments",
    "apply_mapping",
    "build_optimizer",
    "build_scheduler",
    "find_lr",
    "call_with_matching_args",
    "callbacks",
    "only",
    "placeholders",
    "read_history",
    "schedulers",
    "seed_everything",
]
