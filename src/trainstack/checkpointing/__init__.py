"""What survives a training: checkpoints that are complete or do not exist, read without pickle."""

from __future__ import annotations

from trainstack.checkpointing.abstract import AbstractCheckpointer
from trainstack.checkpointing.arguments import DefaultCheckpointerArguments
from trainstack.checkpointing.checkpoint import Checkpoint
from trainstack.checkpointing.default import DefaultCheckpointer
from trainstack.checkpointing.directory import CheckpointInfo, list_checkpoints
from trainstack.checkpointing.exporting import export_model
from trainstack.checkpointing.reading import read_checkpoint, read_model, verify_checkpoint
from trainstack.checkpointing.writing import write_checkpoint, write_model

__all__ = [
    "AbstractCheckpointer",
    "Checkpoint",
    "CheckpointInfo",
    "DefaultCheckpointer",
    "DefaultCheckpointerArguments",
    "export_model",
    "list_checkpoints",
    "read_checkpoint",
    "read_model",
    "verify_checkpoint",
    "write_checkpoint",
    "write_model",
]
