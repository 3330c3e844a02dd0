"""Checkpoints that are complete or do not exist, read without pickle.

A name is imported when it is first used: to list and verify checkpoints needs no torch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from trainstack._lazy import lazy_imports

if TYPE_CHECKING:
    from trainstack.checkpointing.abstract import AbstractCheckpointer, Checkpoint
    from trainstack.checkpointing.arguments import DefaultCheckpointerArguments
    from trainstack.checkpointing.default_checkpointer import DefaultCheckpointer
    from trainstack.checkpointing.directory import CheckpointInfo, list_checkpoints
    from trainstack.checkpointing.lease import Lease
    from trainstack.checkpointing.reading import read_checkpoint, read_model
    from trainstack.checkpointing.remote.fetching import fetch, upload_export
    from trainstack.checkpointing.verification import verify_checkpoint
    from trainstack.checkpointing.weights import (
        WarmStartReport,
        export_model,
        load_torch_weights,
        push_to_hub,
        warm_start,
    )
    from trainstack.checkpointing.writing import write_checkpoint, write_model

_PLACES = {
    "abstract": ("AbstractCheckpointer", "Checkpoint"),
    "arguments": ("DefaultCheckpointerArguments",),
    "default_checkpointer": ("DefaultCheckpointer",),
    "directory": ("CheckpointInfo", "list_checkpoints"),
    "lease": ("Lease",),
    "remote.fetching": ("fetch", "upload_export"),
    "reading": ("read_checkpoint", "read_model"),
    "verification": ("verify_checkpoint",),
    "weights": ("WarmStartReport", "export_model", "load_torch_weights", "push_to_hub", "warm_start"),
    "writing": ("write_checkpoint", "write_model"),
}
__getattr__ = lazy_imports(
    __name__, {name: f"{__name__}.{place}" for place, names in _PLACES.items() for name in names}
)

__all__ = [
    "AbstractCheckpointer",
    "Checkpoint",
    "CheckpointInfo",
    "DefaultCheckpointer",
    "DefaultCheckpointerArguments",
    "Lease",
    "WarmStartReport",
    "export_model",
    "fetch",
    "list_checkpoints",
    "load_torch_weights",
    "push_to_hub",
    "read_checkpoint",
    "read_model",
    "upload_export",
    "verify_checkpoint",
    "warm_start",
    "write_checkpoint",
    "write_model",
]
