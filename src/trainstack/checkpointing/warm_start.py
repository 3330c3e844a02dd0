"""Loading of weights as far as they fit, with a report of the rest."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from trainstack._files import local_path
from trainstack.checkpointing.difference import describe
from trainstack.checkpointing.lookup import resolve_pointer
from trainstack.checkpointing.reading import PICKLE_SUFFIXES, read_model
from trainstack.checkpointing.tensorfile import read_unverified_tensors
from trainstack.errors import CheckpointDamagedError, CheckpointMismatchError, CheckpointNotFoundError

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
