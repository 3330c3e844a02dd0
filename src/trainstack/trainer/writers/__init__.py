"""Writers: where the records of a run go, at log points, on the main process only."""

from __future__ import annotations

from trainstack.trainer.writers.base import Writer
from trainstack.trainer.writers.build import build_writers
from trainstack.trainer.writers.csv import CsvWriter
from trainstack.trainer.writers.group import WriterGroup
from trainstack.trainer.writers.stdout import StdoutWriter
from trainstack.trainer.writers.tensorboard import TensorBoardWriter

__all__ = ["Writer", "WriterGroup", "CsvWriter", "StdoutWriter", "TensorBoardWriter", "build_writers"]
