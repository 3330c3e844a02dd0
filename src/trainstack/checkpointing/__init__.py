"""Checkpoints that are complete or do not exist, read without pickle."""

from __future__ import annotations

from trainstack.checkpointing.abstract import AbstractCheckpointer, Checkpoint
from trainstack.checkpointing.arguments import DefaultCheckpointerArguments
from trainstack.checkpointing.default_checkpointer import DefaultCheckpointer
from trainstack.checkpointing.directory import CheckpointInfo, list_checkpoints
from trainstack.checkpointing.exporting import export_model, push_to_hub
from trainstack.checkpointing.lease import Lease
from trainstack.checkpointing.reading import read_checkpoint, read_model, verify_checkpoint
from trainstack.checkpointing.warm_start import WarmStartReport, load_torch_weights, warm_start
from trainstack.checkpointing.writing import write_checkpoint, write_model

__all__ = [
    "AbstractCheckpointer",
    "Checkpoint",
    "CheckpointInfo",
    "DefaultCheckpointer",
    "DefaultCheckpointerArguments",
    "Lease",
    "WarmStartReport",
    "export_model",
    "list_checkpoints",
    "load_torch_weights",
    "push_to_hub",
    "read_checkpoint",
    "read_model",
    "verify_checkpoint",
    "warm_start",
    "write_checkpoint",
    "write_model",
]
