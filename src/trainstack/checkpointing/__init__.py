"""Checkpoints that are complete or do not exist, read without pickle.

Names are imported at their first use, because listing and verifying checkpoints does not need torch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from trainstack._lazy import lazy_imports

if TYPE_CHECKING:
    from trainstack.checkpointing.abstract import AbstractCheckpointer, Checkpoint
    from trainstack.checkpointing.arguments import DefaultCheckpointerArguments
    from trainstack.checkpointing.default_checkpointer import DefaultCheckpointer
    from trainstack.checkpointing.directory import CheckpointInfo, list_checkpoints
    from trainstack.checkpointing.integrity.keys import make_key
    from trainstack.checkpointing.integrity.lineage import Ancestor, Lineage, read_lineage
    from trainstack.checkpointing.integrity.signing import (
        Signature,
        checkpoint_signer,
        sign_checkpoint,
        verify_signature,
    )
    from trainstack.checkpointing.lease import Lease
    from trainstack.checkpointing.pretrained.matching import WarmStartReport
    from trainstack.checkpointing.reading import read_checkpoint, read_model
    from trainstack.checkpointing.remote.fetching import fetch, upload_export
    from trainstack.checkpointing.sharded.stored_tensors import StoredTensors, open_tensors
    from trainstack.checkpointing.verification import verify_checkpoint
    from trainstack.checkpointing.weights import export_model, load_torch_weights, push_to_hub, warm_start
    from trainstack.checkpointing.writing import write_checkpoint, write_model

_PLACES = {
    "abstract": ("AbstractCheckpointer", "Checkpoint"),
    "arguments": ("DefaultCheckpointerArguments",),
    "default_checkpointer": ("DefaultCheckpointer",),
    "directory": ("CheckpointInfo", "list_checkpoints"),
    "integrity.keys": ("make_key",),
    "integrity.lineage": ("Ancestor", "Lineage", "read_lineage"),
    "integrity.signing": ("Signature", "checkpoint_signer", "sign_checkpoint", "verify_signature"),
    "lease": ("Lease",),
    "remote.fetching": ("fetch", "upload_export"),
    "pretrained.matching": ("WarmStartReport",),
    "reading": ("read_checkpoint", "read_model"),
    "sharded.stored_tensors": ("StoredTensors", "open_tensors"),
    "verification": ("verify_checkpoint",),
    "weights": ("export_model", "load_torch_weights", "push_to_hub", "warm_start"),
    "writing": ("write_checkpoint", "write_model"),
}
__getattr__ = lazy_imports(
    __name__, {name: f"{__name__}.{place}" for place, names in _PLACES.items() for name in names}
)

__all__ = [
    "AbstractCheckpointer",
    "Ancestor",
    "Checkpoint",
    "CheckpointInfo",
    "DefaultCheckpointer",
    "DefaultCheckpointerArguments",
    "Lease",
    "Lineage",
    "Signature",
    "StoredTensors",
    "WarmStartReport",
    "checkpoint_signer",
    "export_model",
    "fetch",
    "list_checkpoints",
    "load_torch_weights",
    "make_key",
    "open_tensors",
    "push_to_hub",
    "read_checkpoint",
    "read_lineage",
    "read_model",
    "sign_checkpoint",
    "upload_export",
    "verify_checkpoint",
    "verify_signature",
    "warm_start",
    "write_checkpoint",
    "write_model",
]
