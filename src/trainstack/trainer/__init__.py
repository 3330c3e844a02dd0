"""What a user touches: the module to write, its arguments, and the trainer that runs it."""

from trainstack.stage import Stage
from trainstack.trainer.abstract_trainer import AbstractTrainer
from trainstack.trainer.arguments import TrainerArguments
from trainstack.trainer.callback_interface import CallbackInterface
from trainstack.trainer.collector import OutputCollector
from trainstack.trainer.history import Record, RunHistory
from trainstack.trainer.module_interface import ModuleInterface
from trainstack.trainer.nested_arguments import StatsArguments, WriterArguments
from trainstack.trainer.plan import TrainingPlan
from trainstack.trainer.seeding import seed_everything
from trainstack.trainer.trainer import Trainer
from trainstack.trainer.writers import CsvWriter, StdoutWriter, TensorBoardWriter, Writer

__all__ = [
    "AbstractTrainer",
    "CallbackInterface",
    "CsvWriter",
    "ModuleInterface",
    "OutputCollector",
    "Record",
    "RunHistory",
    "Stage",
    "StatsArguments",
    "StdoutWriter",
    "TensorBoardWriter",
    "Trainer",
    "TrainerArguments",
    "TrainingPlan",
    "Writer",
    "WriterArguments",
    "seed_everything",
]
