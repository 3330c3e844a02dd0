"""Exporting a model to a folder that explains itself."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import nn

from trainstack.checkpointing.directory import is_checkpoint_directory, read_manifest
from trainstack.checkpointing.writing import write_model
from trainstack.errors import CheckpointError, ConfigurationError


def export_model(
    model: nn.Module | Mapping[str, Any],
    path: str | os.PathLike[str],
    *,
    plan: dict[str, Any] | None = None,
    global_step: int | None = None,
    metadata: dict[str, Any] | None = None,
) -> Path:
    """Write weights as the folder `path`: safetensors, JSON, a manifest with hashes, and a README.

    `read_model(path)` returns them; `init_weights_from=path` starts a training from them; any reader of safetensors
    opens `model.safetensors`. A folder that is an export already is replaced, whole or not at all.

    Args:
        model: a module, whose `get_state()` or else `state_dict()` is taken, or a state dict.
        path: of the folder to make; missing parents are made as well.
        plan: of the training, for the manifest and the README.
        global_step: optimizer updates behind these weights.
        metadata: whatever else is worth knowing. Plain values, one level of dicts.

    Returns:
        The absolute path.

    Raises:
        CheckpointError: something else lies there, or the file system refused.
        UnsupportedStateError: a state holds a value that the format does not.
        ConfigurationError: `model` is neither a module nor a mapping.
    """
    target = Path(path).absolute()
    if is_checkpoint_directory(target) and read_manifest(target).kind == "checkpoint":
        raise CheckpointError(f"{target} is a checkpoint, which an export does not replace. Give another path.")
    if isinstance(model, nn.Module):
        model = getattr(model, "get_state", model.state_dict)()
    if not isinstance(model, Mapping):
        raise ConfigurationError(f"export_model was given a {type(model).__name__}. Give it a module or a state dict.")
    return write_model(
        model, target.parent, target.name, metadata, plan=plan, global_step=global_step
    )  # fmt: skip
