"""Weights without other states: export to a folder or a hub, and loading of all tensors that fit."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, BinaryIO, overload

import torch
from torch import nn

from trainstack._files import local_path
from trainstack.checkpointing.difference import differences
from trainstack.checkpointing.directory import is_checkpoint_directory, read_manifest
from trainstack.checkpointing.pretrained.companions import exported_state
from trainstack.checkpointing.pretrained.matching import WarmStartReport, match_weights
from trainstack.checkpointing.pretrained.reading import folder_of_hub_id, read_file, read_folder
from trainstack.checkpointing.reading import read_model, without_prefix
from trainstack.checkpointing.verification import resolve_pointer
from trainstack.checkpointing.writing import write_model
from trainstack.errors import (
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
    part: str = ...,
    card: Mapping[str, Any] | None = ...,
    max_shard_size: int | str | None = ...,
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
    part: str = "",
    card: Mapping[str, Any] | None = None,
    max_shard_size: int | str | None = None,
) -> Path | None:
    """Write weights as the folder `path`: safetensors, JSON, a manifest with hashes, and a README.

    `read_model(path)` returns them; `init_weights_from=path` starts a training from them; any reader of safetensors
    opens `model.safetensors`. An existing export of the same state at `path` is not changed, nor is a README that you
    have edited or a file that you have added.

    Args:
        model: a module, whose `get_state()` or else `state_dict()` is written, or a state dict.
        path: of the folder to create, with missing parents. A binary file, such as an `io.BytesIO`, gets only the
            tensors, in the safetensors format.
        plan: of the training, for the manifest and the README.
        global_step: global steps of the training of these weights, including skipped ones.
        metadata: further information: plain values, and dicts of these.
        run_id: of the run that trained the weights, for the manifest.
        overwrite: replace an export of another state at `path`, completely or not at all, and delete all files in it.
        part: a submodule, such as `"model"`, whose weights are written under the names in the submodule; by default the
            whole module. If a submodule, or a module that is not a `ModuleInterface`, has a configuration with
            `save_pretrained`, that is written too, so that its `from_pretrained` reads the folder. Of a `PeftModel`
            only the adapters are written, as its `save_pretrained` does.
        card: fields for the README's front matter, the metadata of a model card, such as `{"license": "mit"}`.
        max_shard_size: write the tensors of a larger state to several files, `model-00001-of-00003.safetensors` and so
            on, with a `model.safetensors.index.json` for `from_pretrained`. A number of bytes, `"5GB"` or `"500MiB"`. A
            tensor that is larger has a separate file.

    Returns:
        The absolute path; None for a file.

    Raises:
        CheckpointError: an export of another state or something else exists at `path`, or the file system refused.
        UnsupportedStateError: a state contains a value that the format cannot store.
        ConfigurationError: `model` is neither a module nor a mapping, or has no such part, or contains other values
            than tensors, for a file.

    Examples:
        >>> path = ts.export_model(module, "line", card={"license": "mit"})
        >>> sorted(ts.read_model(path))
        ['model.bias', 'model.weight']
    """
    owner, state = None, _state_of(model)
    if isinstance(model, nn.Module) and (part or not hasattr(model, "get_state")):
        owner = find_part(model, part)
    if not isinstance(path, str | os.PathLike):
        _write_tensors(_state_of_part(state, owner, part), path)
        return None
    about: dict[str, Any] = {"plan": plan, "global_step": global_step, "metadata": metadata, "run_id": run_id}
    about["max_shard_size"] = max_shard_size
    return write_export(state, path, owner=owner, part=part, card=card, overwrite=overwrite, **about)


def find_part(module: nn.Module, part: str) -> nn.Module:
    """The submodule `part` of `module`, without a wrapper of `torch.compile`; "" for `module` itself.

    Raises:
        ConfigurationError: there is no such submodule; the message has the existing names.
    """
    try:
        found = module.get_submodule(part)
    except AttributeError as error:
        names = ", ".join(repr(name) for name, _ in module.named_children()) or "none"
        raise ConfigurationError(
            f"part={part!r}: {type(module).__name__} has no such part. Its parts are {names}."
        ) from error
    inner = getattr(found, "_orig_mod", found)
    return inner if isinstance(inner, nn.Module) else found


def write_export(
    model: Mapping[str, Any],
    path: str | os.PathLike[str],
    *,
    owner: nn.Module | None = None,
    part: str = "",
    card: Mapping[str, Any] | None = None,
    overwrite: bool = False,
    **about: Any,
) -> Path:
    """Write the state dict `model`, or its `part`, the state of the module `owner`. Otherwise like `export_model`."""
    target = local_path(path).absolute()
    if is_checkpoint_directory(target) and read_manifest(target).kind == "checkpoint":
        raise CheckpointError(f"{target} is a checkpoint, which an export does not replace. Use another path.")
    model = _state_of_part(model, owner, part)
    if not overwrite and is_checkpoint_directory(target):
        if _holds(target, model):
            return target
        raise CheckpointError(
            f"{target} is an export of another state, which is not replaced. Use another path, or write "
            "overwrite=True, which deletes it with all files that were added to it."
        )
    return write_model(model, target.parent, target.name, owner=owner, card=card, **about)


def _state_of(model: Any) -> Mapping[str, Any]:
    if isinstance(model, nn.Module):
        model = getattr(model, "get_state", model.state_dict)()
    if not isinstance(model, Mapping):
        raise ConfigurationError(f"export_model got a {type(model).__name__}. Pass a module or a state dict.")
    return model


def _state_of_part(state: Mapping[str, Any], owner: nn.Module | None, part: str) -> Mapping[str, Any]:
    if part:
        state = {name[len(part) + 1 :]: value for name, value in state.items() if name.startswith(f"{part}.")}
        if not state:
            raise ConfigurationError(f"part={part!r}: no name in the state begins with {part + '.'!r}.")
    return exported_state(owner, state)


def _write_tensors(state: Mapping[str, Any], file: BinaryIO) -> None:
    if not hasattr(file, "write"):
        raise ConfigurationError(f"export_model(path={file!r}): pass the path of a folder, or an open binary file.")
    others = [name for name, value in state.items() if not isinstance(value, torch.Tensor)]
    if others:
        raise ConfigurationError(
            f"export_model to a file: {', '.join(map(repr, others[:3]))} are not tensors, and a safetensors file can "
            "store only tensors. Pass the path of a folder, or a dict of the tensors."
        )
    from safetensors.torch import save  # the library writes its files with its own code

    # copies, because the format refuses tensors that share memory, such as tied weights
    file.write(save({name: value.detach().cpu().contiguous().clone() for name, value in state.items()}))


def _holds(export: Path, state: Mapping[str, Any]) -> bool:
    """Whether `export` is intact and contains exactly `state`."""
    try:
        return not any(differences(read_model(export), dict(state)))
    except CheckpointError:
        return False


def require_hub() -> None:
    """Raise `MissingExtraError` if huggingface_hub is not installed."""
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
    allow_checkpoint: bool = False,
) -> str:
    """Upload the export at `path` to the model repository `repo_id`, in one commit.

    The repository is created if it does not exist. The upload is a folder of `export_model` or `Trainer.export`. Files
    with other names in the repository are not changed.

    Args:
        path: of the export.
        repo_id: such as `"me/my-model"`.
        commit_message: first line of the commit.
        private: whether a new repository is private; None for the setting of the account.
        revision: the branch; the main one if None.
        token: of the account; by default that of `hf auth login` or of HF_TOKEN.
        endpoint: the server's URL; by default HF_ENDPOINT or the public Hub.
        allow_checkpoint: upload a checkpoint too, which also contains optimizers, counters and history.

    Returns:
        The URL of the commit.

    Raises:
        MissingExtraError: huggingface_hub is not installed.
        ConfigurationError: there is no export at `path`.
        huggingface_hub.errors.HfHubHTTPError: the server refused.
    """
    require_hub()
    folder = local_path(path)
    kind = read_manifest(folder).kind if is_checkpoint_directory(folder) else None
    if kind is None or (kind != "model" and not allow_checkpoint):
        advice = "" if kind is None else " To upload the checkpoint itself, write allow_checkpoint=True."
        raise ConfigurationError(
            f"push_to_hub({str(path)!r}): this is not an export. Write one: trainer.export(path) or export_model(model,"
            f" path).{advice}"
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
"""The prefixes of names under `DistributedDataParallel` and `torch.compile`."""


def load_torch_weights(path: str | os.PathLike[str], *, strip_prefix: str = "") -> dict[str, torch.Tensor]:
    """Read the tensors of a `.pt`, `.pth`, `.bin` or `.ckpt` file by `torch.load(weights_only=True)`.

    Nothing that the file names is imported or called. A state dict under the key `state_dict`, `model_state_dict`,
    `module_interface_state`, `model`, `module` or `weights` is found. The prefixes `module.` and `_orig_mod.` of
    wrappers are removed if every name has them. `model.` may be a part of the model, so it is removed only with
    `strip_prefix`.

    Args:
        path: of the file.
        strip_prefix: removed from the names that begin with it, such as `"model."`; at least one name must.

    Returns:
        Tensors by name, on the CPU. Pass them to `warm_start` or `load_state_dict`, or store them with `export_model`.

    Raises:
        CheckpointNotFoundError: the file does not exist.
        CheckpointMismatchError: it contains other objects than tensors and plain values, or no state dict.
    """
    file = local_path(path)
    if not file.is_file():
        raise CheckpointNotFoundError(f"{file} is not a file. Name a file that torch.save wrote.")
    try:
        loaded = torch.load(file, map_location="cpu", weights_only=True)
    except Exception as error:  # the bytes may be anything, and so may the errors
        reason = " ".join(str(error).split()).split(" Please ")[0][:300]
        raise CheckpointMismatchError(
            f"{file} was not read: torch.load(weights_only=True) refused it ({type(error).__name__}: {reason}). "
            "Ask its author to save only model.state_dict(), or a safetensors file."
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
            f"{file} contains {has}, in which there is no state dict. Load it with torch.load(weights_only=True), "
            "select the tensors and pass them to warm_start."
        )
    return {str(name): value for name, value in found.items() if isinstance(value, torch.Tensor)}


def _is_state_dict(value: Mapping[Any, Any]) -> bool:
    return any(isinstance(item, torch.Tensor) for item in value.values())


def _strip_prefix(tensors: dict[str, torch.Tensor], prefix: str, file: Path) -> dict[str, torch.Tensor]:
    wrapper: str | None = ""
    while wrapper is not None:
        tensors = {name.removeprefix(wrapper): tensor for name, tensor in tensors.items()}
        wrapper = next((w for w in _WRAPPERS if all(name.startswith(w) for name in tensors)), None)
    return without_prefix(tensors, prefix, file)


def warm_start(
    model: nn.Module,
    source: str | os.PathLike[str] | Mapping[str, Any],
    *,
    strict: bool = False,
    name: str | None = None,
) -> WarmStartReport:
    """Load the tensors that match `model` by name and shape, and report the rest.

    If nothing fits `model` itself, but exactly one of its children, or of their children, has tensors of these names,
    the weights are loaded there. So the weights of a network fit the `SupervisedModule` around it.

    Args:
        model: any module; its other tensors are not changed.
        source: a checkpoint, a file `last` or `best` next to it, an export, a folder of `save_pretrained`, a
            `.safetensors` file, a `.safetensors.index.json`, the id of a model in the cache of `huggingface_hub`, or
            tensors by name.
        strict: refuse weights that do not match in every name and shape.
        name: of the source, for the report; by default its path.

    Returns:
        The result for each tensor.

    Raises:
        CheckpointMismatchError: nothing fits, or not everything with `strict`. The model is unchanged.
        CheckpointNotFoundError, CheckpointDamagedError: `source` cannot be read.

    Examples:
        >>> path = ts.export_model(module, "line")
        >>> report = ts.warm_start(make_module(), path)
        >>> sorted(report.loaded)
        ['model.bias', 'model.weight']
    """
    if not isinstance(source, Mapping):
        source = resolve_pointer(local_path(source, "source"))
    said = name or ("the given tensors" if isinstance(source, Mapping) else os.fspath(source))
    given = flat_tensors(source) if isinstance(source, Mapping) else read_weights(source)
    own = {key: value for key, value in model.state_dict().items() if isinstance(value, torch.Tensor)}
    report, names = match_weights(model, own, given, said, strict=strict)
    model.load_state_dict({key: given[name] for key, name in names.items()}, strict=False)
    return report


def read_weights(path: str | os.PathLike[str], *, mapped: bool = False) -> dict[str, torch.Tensor]:
    """Return the tensors of a path that `warm_start` accepts, by name. No pickle is read, and nothing is downloaded.

    With `mapped` they are in the mapped files, as for `read_checkpoint`, so that each is read at its use.

    Raises:
        CheckpointNotFoundError: nothing exists at `path`, and it is not an id in the cache of `huggingface_hub`.
        CheckpointDamagedError: it differs from the written one, or is not a safetensors file.
        CheckpointMismatchError: it is a pickle, or of a newer trainstack.
    """
    place = local_path(path)
    if not os.path.lexists(place):
        place = folder_of_hub_id(os.fspath(path))
    if not place.is_dir():
        return read_file(place, mapped=mapped)
    weights = None if is_checkpoint_directory(place) else read_folder(place, mapped=mapped)
    return flat_tensors(read_model(place, mapped=mapped)) if weights is None else weights


def flat_tensors(state: Mapping[Any, Any], prefix: str = "") -> dict[str, torch.Tensor]:
    """The tensors of nested dicts, with keys joined by dots. Other values are omitted."""
    found: dict[str, torch.Tensor] = {}
    for key, value in state.items():
        if isinstance(value, torch.Tensor):
            found[f"{prefix}{key}"] = value
        elif isinstance(value, Mapping):
            found |= flat_tensors(value, f"{prefix}{key}.")
    return found
