"""Writers: where the records of a run go, at log points, on the main process only."""

from __future__ import annotations

from trainstack.trainer.writers.base import RunInfo, Writer
from trainstack.trainer.writers.build import build_writers
from trainstack.trainer.writers.csv import CsvWriter
from trainstack.trainer.writers.group import WriterGroup
from trainstack.trainer.writers.jsonl import JsonLinesWriter
from trainstack.trainer.writers.mlflow import MlflowWriter
from trainstack.trainer.writers.reading import read_history
from trainstack.trainer.writers.stdout import StdoutWriter
from trainstack.trainer.writers.tensorboard import TensorBoardWriter
from trainstack.trainer.writers.trackio import TrackioWriter
from trainstack.trainer.writers.wandb import WandbWriter

__all__ = [
    "CsvWriter",
    "JsonLinesWriter",
    "MlflowWriter",
    "RunInfo",
    "StdoutWriter",
    "TensorBoardWriter",
    "TrackioWriter",
    "WandbWriter",
    "Writer",
    "WriterGroup",
    "build_writers",
    "read_history",
]
