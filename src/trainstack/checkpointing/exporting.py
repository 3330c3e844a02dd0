"""Export of a model to a folder or a hub."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import nn

from trainstack._files import local_path
from trainstack.checkpointing.directory import is_checkpoint_directory, read_manifest
from trainstack.checkpointing.writing import write_model
from trainstack.errors import CheckpointError, ConfigurationError, MissingExtraError


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
        global_step: global steps behind these weights, skipped ones included.
        metadata: whatever else is worth knowing. Plain values, one level of dicts.

    Returns:
        The absolute path.

    Raises:
        CheckpointError: something else lies there, or the file system refused.
        UnsupportedStateError: a state holds a value that the format does not.
        ConfigurationError: `model` is neither a module nor a mapping.
    """
    target = local_path(path).absolute()
    if is_checkpoint_directory(target) and read_manifest(target).kind == "checkpoint":
        raise CheckpointError(f"{target} is a checkpoint, which an export does not replace. Give another path.")
    if isinstance(model, nn.Module):
        model = getattr(model, "get_state", model.state_dict)()
    if not isinstance(model, Mapping):
        raise ConfigurationError(f"export_model was given a {type(model).__name__}. Give it a module or a state dict.")
    return write_model(model, target.parent, target.name, metadata, plan=plan, global_step=global_step)


def require_hub() -> None:
    """Raise `MissingExtraError` where huggingface_hub is not installed."""
    if importlib.util.find_spec("huggingface_hub") is None:
        raise MissingExtraError("push_to_hub", "huggingface_hub", "hub")


def push_to_hub(
    path: str | os.PathLike[str],
    repo_id: str,
    *,
    commit_message: str = "Upload a model trained with trainstack",
    private: bool | None = None,
    revision: str | None = None,
    token: str | None = None,
    endpoint: str | None = None,
) -> str:
    """Upload the export at `path` to the model repository `repo_id`, in one commit.

    The repository is made if it does not exist. What is uploaded is the folder that `export_model` and `Trainer.export`
    write; files of other names in the repository stay.

    Args:
        path: of the export.
        repo_id: such as `"me/my-model"`.
        commit_message: first line of the commit.
        private: whether a repository that is made now is; None for what the account has set.
        revision: the branch; the main one if None.
        token: of the account; by default that of `hf auth login` or of HF_TOKEN.
        endpoint: the server's URL; by default HF_ENDPOINT or the public Hub.

    Returns:
        The URL of the commit.

    Raises:
        MissingExtraError: huggingface_hub is not installed.
        ConfigurationError: there is no export at `path`.
        huggingface_hub.errors.HfHubHTTPError: the server refused.
    """
    require_hub()
    folder = local_path(path)
    if not is_checkpoint_directory(folder) or read_manifest(folder).kind != "model":
        raise ConfigurationError(
            f"push_to_hub({str(path)!r}): that is no export. Write one by trainer.export(path) or export_model(model, "
            "path)."
        )
    from huggingface_hub import HfApi

    api = HfApi(endpoint=endpoint, token=token, library_name="trainstack")
    made = api.create_repo(repo_id, private=private, exist_ok=True)
    commit = api.upload_folder(
        repo_id=made.repo_id, folder_path=folder, commit_message=commit_message, revision=revision
    )
    return str(commit.commit_url)
