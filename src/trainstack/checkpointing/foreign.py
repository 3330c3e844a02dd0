"""Weights that other programs wrote with `torch.save`: read only when asked for, and without running any of it."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from trainstack.errors import CheckpointMismatchError, CheckpointNotFoundError

PICKLE_SUFFIXES = (".pt", ".pth", ".bin", ".ckpt", ".pkl", ".pickle")
_NESTINGS = ("state_dict", "model_state_dict", "module_interface_state", "model", "module", "weights")
_WRAPPERS = ("module.", "_orig_mod.")
"""What `DistributedDataParallel` and `torch.compile` put before each name."""


def read_foreign_weights(path: str | os.PathLike[str], *, strip_prefix: str = "") -> dict[str, torch.Tensor]:
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
    file = Path(path)
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
    return _stripped(_tensors_in(loaded, file), strip_prefix, file)


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


def _stripped(tensors: dict[str, torch.Tensor], prefix: str, file: Path) -> dict[str, torch.Tensor]:
    wrapper: str | None = ""
    while wrapper is not None:
        tensors = {name.removeprefix(wrapper): tensor for name, tensor in tensors.items()}
        wrapper = next((w for w in _WRAPPERS if all(name.startswith(w) for name in tensors)), None)
    if prefix and not any(name.startswith(prefix) for name in tensors):
        raise CheckpointMismatchError(
            f"strip_prefix={prefix!r}: no name in {file} begins with it; there is {next(iter(tensors))!r}."
        )
    return {name.removeprefix(prefix): tensor for name, tensor in tensors.items()}
