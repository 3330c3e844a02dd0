"""Uploading an export to the Hugging Face Hub, or to a server that speaks its API."""

from __future__ import annotations

import importlib.util
import os
from pathlib import Path

from trainstack.checkpointing.directory import is_checkpoint_directory, read_manifest
from trainstack.errors import ConfigurationError, MissingExtraError


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
    folder = Path(path)
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
