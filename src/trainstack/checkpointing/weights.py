"""Weights alone: export to a folder or a hub, and loading as far as they fit."""

from __future__ import annotations

import importlib.util
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, overload

import torch
from torch import nn

from trainstack._files import local_path
from trainstack.checkpointing.difference import describe, differences
from trainstack.checkpointing.directory import is_checkpoint_directory, read_manifest
from trainstack.checkpointing.lookup import resolve_pointer
from trainstack.checkpointing.reading import read_model
from trainstack.checkpointing.tensorfile import read_unverified_tensors
from trainstack.checkpointing.verification import PICKLE_SUFFIXES
from trainstack.checkpointing.writing import write_model
from trainstack.errors import (
    CheckpointDamagedError,
    CheckpointError,
    CheckpointMismatchError,
    CheckpointNotFoundError,
    ConfigurationError,
    MissingExtraError,
)


@overload
def export_model(model: nn.Module | Mapping[str, Any], path: BinaryIO) -> None: ...


@overload
def export_model(
    model: nn.Module | Mapping[str, Any],
    path: str | os.PathLike[str],
    *,
    plan: dict[str, Any] | None = None,
    global_step: int | None = None,
    metadata: dict[str, Any] | None = None,
    run_id: str | None = None,
    overwrite: bool = False,
) -> Path: ...


def export_model(
    model: nn.Module | Mapping[str, Any],
    path: str | os.PathLike[str] | BinaryIO,
    *,
    plan: dict[str, Any] | None = None,
    global_step: int | None = None,
    metadata: dict[str, Any] | None = None,
    run_id: str | None = None,
    overwrite: bool = False,
) -> Path | None:
    """Write weights as the folder `path`: safetensors, JSON, a manifest with hashes, and a README.

    `read_model(path)` returns them; `init_weights_from=path` starts a training from them; any reader of safetensors
    opens `model.safetensors`. An export of the same state at `path` is left as it is, with a README that you have
    edited and files that you have added.

    Args:
        model: a module, whose `get_state()` or else `state_dict()` is taken, or a state dict.
        path: of the folder to make; missing parents are made as well. A binary file, such as an `io.BytesIO`, gets the
            tensors alone, in the safetensors format.
        plan: of the training, for the manifest and the README.
        global_step: global steps behind these weights, skipped ones included.
        metadata: whatever else is worth knowing. Plain values, one level of dicts.
        run_id: of the run that trained the weights, for the manifest.
        overwrite: replace an export of another state at `path`, whole or not at all, and delete all files in it.

    Returns:
        The absolute path; None for a file.

    Raises:
        CheckpointError: an export of another state or something else is there, or the file system refused.
        UnsupportedStateError: a state holds a value that the format does not.
        ConfigurationError: `model` is neither a module nor a mapping, or has values that are no tensors, for a file.
    """
    if not isinstance(path, str | os.PathLike):
        _write_tensors(model, path)
        return None
    target = local_path(path).absolute()
    if is_checkpoint_directory(target) and read_manifest(target).kind == "checkpoint":
        raise CheckpointError(f"{target} is a checkpoint, which an export does not replace. Give another path.")
    model = _state_of(model)
    if not overwrite and is_checkpoint_directory(target):
        if _holds(target, model):
            return target
        raise CheckpointError(
            f"{target} is an export of another state, which is not replaced. Give another path, or write "
            "overwrite=True, which deletes it with all files that were added to it."
        )
    return write_model(model, target.parent, target.name, metadata, plan=plan, global_step=global_step, run_id=run_id)


def _state_of(model: Any) -> Mapping[str, Any]:
    if isinstance(model, nn.Module):
        model = getattr(model, "get_state", model.state_dict)()
    if not isinstance(model, Mapping):
        raise ConfigurationError(f"export_model was given a {type(model).__name__}. Give it a module or a state dict.")
    return model


def _write_tensors(model: Any, file: BinaryIO) -> None:
    if not hasattr(file, "write"):
        raise ConfigurationError(f"export_model(path={file!r}): give the path of a folder, or an open binary file.")
    state = _state_of(model)
    others = [name for name, value in state.items() if not isinstance(value, torch.Tensor)]
    if others:
        raise ConfigurationError(
            f"export_model to a file: {', '.join(map(repr, others[:3]))} are no tensors, and a safetensors file holds "
            "nothing else. Give the path of a folder, or a dict of the tensors."
        )
    from safetensors.torch import save  # the library writes its own files by itself

    # copies, since the format refuses tensors that share memory, as tied weights do
    file.write(save({name: value.detach().cpu().contiguous().clone() for name, value in state.items()}))


def _holds(export: Path, state: Mapping[str, Any]) -> bool:
    """Whether `export` is intact and holds exactly `state`."""
    try:
        return not any(differences(read_model(export), dict(state)))
    except CheckpointError:
        return False


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


_NESTINGS = ("state_dict", "model_state_dict", "module_interface_state", "model", "module", "weights")
_WRAPPERS = ("module.", "_orig_mod.")
"""What `DistributedDataParallel` and `torch.compile` put before each name."""


def load_torch_weights(path: str | os.PathLike[str], *, strip_prefix: str = "") -> dict[str, torch.Tensor]:
    """Read the tensors of a `.pt`, `.pth`, `.bin` or `.ckpt` file by `torch.load(weights_only=True)`.

    Nothing that the file names is imported or called. A state dict that lies under `state_dict`, `model_state_dict`,
    `module_interface_state`, `model`, `module` or `weights` is found there. The prefixes `module.` and `_orig_mod.`,
    which wrappers add, are taken off if every name has them; `model.` is a part of a model as often as not, and is only
    taken off if `strip_prefix` says so.

    Args:
        path: of the file.
        strip_prefix: taken off the names that begin with it, such as `"model."`; there must be one.

    Returns:
        Tensors by name, on the CPU. Give them to `warm_start` or `load_state_dict`, or keep them with `export_model`.

    Raises:
        CheckpointNotFoundError: there is no such file.
        CheckpointMismatchError: it holds other things than tensors and plain values, or no state dict.
    """
    file = local_path(path)
    if not file.is_file():
        raise CheckpointNotFoundError(f"{file} is not a file. Give the file that torch.save wrote.")
    try:
        loaded = torch.load(file, map_location="cpu", weights_only=True)
    except Exception as error:  # the bytes are anybody's, and so are the errors
        reason = " ".join(str(error).split()).split(" Please ")[0][:300]
        raise CheckpointMismatchError(
            f"{file} was not read: torch.load(weights_only=True) refused it ({type(error).__name__}: {reason}). "
            "Have its author save model.state_dict() alone, or a safetensors file."
        ) from error
    return _strip_prefix(_tensors_in(loaded, file), strip_prefix, file)


def _tensors_in(loaded: Any, file: Path) -> dict[str, torch.Tensor]:
    found = loaded
    while isinstance(found, Mapping) and not _is_state_dict(found):
        inner = next((found[name] for name in _NESTINGS if isinstance(found.get(name), Mapping)), None)
        if inner is None:
            break
        found = inner
    if not isinstance(found, Mapping) or not _is_state_dict(found):
        has = f"a dict with the keys {list(found)[:8]}" if isinstance(found, Mapping) else f"a {type(found).__name__}"
        raise CheckpointMismatchError(
            f"{file} holds {has}, in which there is no state dict. Load it with torch.load(weights_only=True), pick "
            "out the tensors and give them to warm_start."
        )
    return {str(name): value for name, value in found.items() if isinstance(value, torch.Tensor)}


def _is_state_dict(value: Mapping[Any, Any]) -> bool:
    return any(isinstance(item, torch.Tensor) for item in value.values())


def _strip_prefix(tensors: dict[str, torch.Tensor], prefix: str, file: Path) -> dict[str, torch.Tensor]:
    wrapper: str | None = ""
    while wrapper is not None:
        tensors = {name.removeprefix(wrapper): tensor for name, tensor in tensors.items()}
        wrapper = next((w for w in _WRAPPERS if all(name.startswith(w) for name in tensors)), None)
    if prefix and not any(name.startswith(prefix) for name in tensors):
        raise CheckpointMismatchError(
            f"strip_prefix={prefix!r}: no name in {file} begins with it; there is {next(iter(tensors))!r}."
        )
    return {name.removeprefix(prefix): tensor for name, tensor in tensors.items()}


@dataclass(frozen=True, slots=True, kw_only=True)
class WarmStartReport:
    """What became of each tensor; `str(report)` says it in words.

    Attributes:
        source: where the weights came from.
        loaded: names that the model took.
        missing: names of the model that the source lacks; they are as the model was built.
        unexpected: names of the source that the model lacks.
        mismatched: names of both with another shape or kind of dtype, each with what the source and the model have;
            they are as the model was built.
    """

    source: str
    loaded: tuple[str, ...]
    missing: tuple[str, ...]
    unexpected: tuple[str, ...]
    mismatched: Mapping[str, str]

    @property
    def is_complete(self) -> bool:
        """Whether every tensor of the source has its place in the model, and the reverse."""
        return not (self.missing or self.unexpected or self.mismatched)

    def __str__(self) -> str:
        count = len(self.loaded)
        parts = [f"loaded {count} tensor{'s' if count != 1 else ''} from {self.source}"]
        if self.missing:
            parts.append(f"{len(self.missing)} missing there stay as they were built: {_format_names(self.missing)}")
        if self.unexpected:
            parts.append(f"{len(self.unexpected)} there have no place in the model: {_format_names(self.unexpected)}")
        if self.mismatched:
            words = [f"{name} ({what})" for name, what in self.mismatched.items()]
            parts.append(f"{len(words)} do not fit and stay as they were built: {_format_names(words)}")
        return "; ".join(parts)


def warm_start(
    model: nn.Module,
    source: str | os.PathLike[str] | Mapping[str, Any],
    *,
    strict: bool = False,
    name: str | None = None,
) -> WarmStartReport:
    """Load into `model` what fits by name and shape, and report the rest.

    Args:
        model: any module; its other tensors stay as they are.
        source: a checkpoint, a file `last` or `best` beside it, an export, a `.safetensors` file, or tensors by name.
        strict: refuse what does not fit in every name and shape.
        name: of the source, for the report; by default its path.

    Raises:
        CheckpointMismatchError: nothing fits at all, or not everything while `strict`. The model is unchanged.
        CheckpointNotFoundError, CheckpointDamagedError: `source` cannot be read.
    """
    if not isinstance(source, Mapping):
        source = resolve_pointer(local_path(source, "source"))
    said = name or ("the given tensors" if isinstance(source, Mapping) else os.fspath(source))
    weights = flat_tensors(source) if isinstance(source, Mapping) else read_weights(source)
    own = {key: value for key, value in model.state_dict().items() if isinstance(value, torch.Tensor)}
    mismatched = {
        key: f"{describe(weights[key])} there, {describe(own[key])} in the model"
        for key in own
        if key in weights and not _fits(weights[key], own[key])
    }
    fitting = {key: weights[key] for key in own if key in weights and key not in mismatched}
    report = WarmStartReport(
        source=said,
        loaded=tuple(fitting),
        missing=tuple(key for key in own if key not in weights),
        unexpected=tuple(key for key in weights if key not in own),
        mismatched=mismatched,
    )
    if not fitting:
        raise CheckpointMismatchError(_nothing_fits(model, weights, own, said))
    if strict and not report.is_complete:
        raise CheckpointMismatchError(f"{said} does not fit {type(model).__name__} in everything. Not {report}.")
    model.load_state_dict(fitting, strict=False)
    return report


def read_weights(path: str | os.PathLike[str]) -> dict[str, torch.Tensor]:
    """Return the tensors of a checkpoint's model, an export, or a `.safetensors` file, by name. No pickle is read.

    Raises:
        CheckpointNotFoundError: there is nothing at `path`.
        CheckpointDamagedError: it is not as it was written, or no safetensors file.
        CheckpointMismatchError: it is a pickle, or of a newer trainstack.
    """
    file = local_path(path)
    if file.is_dir():
        return flat_tensors(read_model(file))
    if not file.exists():
        if re.fullmatch(r"[\w.-]+/[\w.-]+", os.fspath(path)) and not file.suffix:
            raise CheckpointNotFoundError(
                f"{os.fspath(path)} does not exist. If it is the id of a model on the Hub, download it first and give "
                f"the folder: huggingface_hub.snapshot_download({os.fspath(path)!r})."
            )
        raise CheckpointNotFoundError(f"{file} does not exist. Give a checkpoint, an export or a .safetensors file.")
    if file.suffix.lower() in PICKLE_SUFFIXES:
        raise CheckpointMismatchError(
            f"{file} is a pickle by its name, and pickles are never read unasked. Read it explicitly and keep what is "
            f"in it: export_model(load_torch_weights({str(file)!r}), 'weights'), and name that folder instead."
        )
    try:
        return read_unverified_tensors(file)
    except CheckpointDamagedError as error:
        raise CheckpointDamagedError(
            f"{file} cannot be read as safetensors: {error} A file that torch.save wrote is read by "
            "load_torch_weights(path)."
        ) from error


def flat_tensors(state: Mapping[Any, Any], prefix: str = "") -> dict[str, torch.Tensor]:
    """The tensors of nested dicts, their keys joined by dots; other values are left out."""
    found: dict[str, torch.Tensor] = {}
    for key, value in state.items():
        if isinstance(value, torch.Tensor):
            found[f"{prefix}{key}"] = value
        elif isinstance(value, Mapping):
            found |= flat_tensors(value, f"{prefix}{key}.")
    return found


def _fits(one: torch.Tensor, other: torch.Tensor) -> bool:
    kinds = [(tensor.shape, tensor.is_floating_point(), tensor.is_complex()) for tensor in (one, other)]
    return kinds[0] == kinds[1]


def _format_names(names: Sequence[str]) -> str:
    more = len(names) - 6
    return ", ".join(names[:6]) + (f" and {more} more" if more > 0 else "")


def _nothing_fits(model: nn.Module, weights: Mapping[str, Any], own: Mapping[str, Any], said: str) -> str:
    fits = {
        child: sum(f"{child}.{key}" in own and _fits(weights[key], own[f"{child}.{key}"]) for key in weights)
        for child, _ in model.named_children()
    }
    best = max(fits, key=lambda child: fits[child], default=None)
    hint = "Compare the names, and rename: warm_start(model, {new_name: tensor, ...})."
    if best is not None and fits[best]:
        hint = f"They fit its {best!r}: call warm_start(module.{best}, ...) before you make the Trainer."
    return (
        f"nothing in {said} fits {type(model).__name__}: it holds {_format_names(list(weights)) or 'no tensors'}; the "
        f"model has {_format_names(list(own)) or 'none'}. {hint}"
    )
