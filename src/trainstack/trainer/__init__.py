"""The user API: base class of modules, arguments, and the trainer."""

from typing import TYPE_CHECKING

from trainstack._lazy import lazy_imports
from trainstack.stage import Stage
from trainstack.trainer import schedulers
from trainstack.trainer.abstract_trainer import AbstractTrainer
from trainstack.trainer.argument_checks import StatsArguments, WriterArguments
from trainstack.trainer.arguments import TrainerArguments
from trainstack.trainer.core.intervals import Every
from trainstack.trainer.core.plan import TrainingPlan
from trainstack.trainer.core.random_state import seed_everything
from trainstack.trainer.core.state import UserState
from trainstack.trainer.data.library_orders import LengthGroupedSampler
from trainstack.trainer.data.packing import PackedDataset, document_mask
from trainstack.trainer.evaluation.collector import OutputCollector
from trainstack.trainer.evaluation.metrics import Metric
from trainstack.trainer.events import Callback, Event, Events, Filter, call_filter
from trainstack.trainer.module_interface import CallbackInterface, MicroBatchInfo, ModuleInterface
from trainstack.trainer.schedulers import SchedulerConfig, build_scheduler, placeholders
from trainstack.trainer.tracking.history import Record, RunHistory
from trainstack.trainer.tracking.media import Table
from trainstack.trainer.tracking.progress import ProgressDisplay
from trainstack.trainer.tracking.provenance import Provenance
from trainstack.trainer.tracking.writers import (
    CsvWriter,
    JsonLinesWriter,
    LoggingWriter,
    MlflowWriter,
    RunInfo,
    StdoutWriter,
    TensorBoardWriter,
    TrackioWriter,
    WandbWriter,
    Writer,
    read_history,
    register_writer,
    unregister_writer,
)
from trainstack.trainer.trainer import Trainer, find_lr

if TYPE_CHECKING:
    from trainstack.trainer import callbacks
    from trainstack.trainer.arg_matching import apply_mapping, call_with_matching_args
    from trainstack.trainer.data.as_is import as_is
    from trainstack.trainer.evaluation.metric_of import metric_of
    from trainstack.trainer.evaluation.outputs import EvaluationOutputs
    from trainstack.trainer.named_parameters import parameter_groups, split_parameters
    from trainstack.trainer.optimizers import build_optimizer
    from trainstack.trainer.parser_arguments import ParserArguments
    from trainstack.trainer.reporting.run_comparison import RunComparison, compare_runs
    from trainstack.trainer.run.lr_finder import LRFinderResult
    from trainstack.trainer.run.view import RunView
    from trainstack.trainer.supervised import SupervisedModule
    from trainstack.trainer.tracking.writers.more_trackers import AimWriter, ClearmlWriter, CometWriter, DvcliveWriter
    from trainstack.trainer.tracking.writers.prometheus import PrometheusWriter

__getattr__ = lazy_imports(
    __name__,
    {
        "AimWriter": "trainstack.trainer.tracking.writers.more_trackers",
        "ClearmlWriter": "trainstack.trainer.tracking.writers.more_trackers",
        "CometWriter": "trainstack.trainer.tracking.writers.more_trackers",
        "DvcliveWriter": "trainstack.trainer.tracking.writers.more_trackers",
        "EvaluationOutputs": "trainstack.trainer.evaluation.outputs",
        "LRFinderResult": "trainstack.trainer.run.lr_finder",
        "PrometheusWriter": "trainstack.trainer.tracking.writers.prometheus",
        "ParserArguments": "trainstack.trainer.parser_arguments",
        "RunComparison": "trainstack.trainer.reporting.run_comparison",
        "RunView": "trainstack.trainer.run.view",
        "SupervisedModule": "trainstack.trainer.supervised",
        "apply_mapping": "trainstack.trainer.arg_matching",
        "as_is": "trainstack.trainer.data.as_is",
        "build_optimizer": "trainstack.trainer.optimizers",
        "call_with_matching_args": "trainstack.trainer.arg_matching",
        "callbacks": "trainstack.trainer.callbacks",
        "compare_runs": "trainstack.trainer.reporting.run_comparison",
        "metric_of": "trainstack.trainer.evaluation.metric_of",
        "parameter_groups": "trainstack.trainer.named_parameters",
        "split_parameters": "trainstack.trainer.named_parameters",
    },
)

__all__ = [
    "AbstractTrainer",
    "AimWriter",
    "Callback",
    "CallbackInterface",
    "ClearmlWriter",
    "CometWriter",
    "CsvWriter",
    "DvcliveWriter",
    "EvaluationOutputs",
    "Event",
    "Events",
    "Every",
    "Filter",
    "LRFinderResult",
    "LengthGroupedSampler",
    "JsonLinesWriter",
    "LoggingWriter",
    "Metric",
    "MicroBatchInfo",
    "MlflowWriter",
    "ModuleInterface",
    "OutputCollector",
    "PackedDataset",
    "ParserArguments",
    "ProgressDisplay",
    "PrometheusWriter",
    "Provenance",
    "Record",
    "RunHistory",
    "RunInfo",
    "RunView",
    "SchedulerConfig",
    "Stage",
    "StatsArguments",
    "StdoutWriter",
    "SupervisedModule",
    "Table",
    "TensorBoardWriter",
    "TrackioWriter",
    "RunComparison",
    "Trainer",
    "TrainerArguments",
    "TrainingPlan",
    "UserState",
    "WandbWriter",
    "Writer",
    "WriterArguments",
    "apply_mapping",
    "as_is",
    "build_optimizer",
    "build_scheduler",
    "find_lr",
    "call_with_matching_args",
    "compare_runs",
    "callbacks",
    "call_filter",
    "metric_of",
    "document_mask",
    "parameter_groups",
    "placeholders",
    "read_history",
    "register_writer",
    "schedulers",
    "seed_everything",
    "split_parameters",
    "unregister_writer",
]
