"""PyMarlin's modules over trainstack: replace `pymarlin` by `trainstack.compat.pymarlin` in the import lines.

Each name is trainstack's own, or a thin layer above it with PyMarlin's arguments, defaults and order of hooks. A value
is passed on, or refused with a reason, or named in the log where nothing corresponds to it. The table of names is in
docs/coming-from/pymarlin.md.
"""

from trainstack.compat.pymarlin.core.data_interface import DataInterface, DataProcessor
from trainstack.compat.pymarlin.core.module_interface import CallbackInterface, ModuleInterface
from trainstack.compat.pymarlin.core.trainer import Trainer, TrainerArguments
from trainstack.compat.pymarlin.core.trainer_backend import (
    DDPTrainerBackend,
    SingleProcess,
    SingleProcessAmp,
    SingleProcessApexAmp,
)
from trainstack.compat.pymarlin.utils.checkpointer.checkpoint_utils import (
    DefaultCheckpointer,
    DefaultCheckpointerArguments,
)
from trainstack.compat.pymarlin.utils.config_parser.custom_arg_parser import CustomArgParser
from trainstack.compat.pymarlin.utils.stats.basic_stats import BasicStats

__all__ = [
    "BasicStats",
    "CallbackInterface",
    "CustomArgParser",
    "DDPTrainerBackend",
    "DataInterface",
    "DataProcessor",
    "DefaultCheckpointer",
    "DefaultCheckpointerArguments",
    "ModuleInterface",
    "SingleProcess",
    "SingleProcessAmp",
    "SingleProcessApexAmp",
    "Trainer",
    "TrainerArguments",
]
