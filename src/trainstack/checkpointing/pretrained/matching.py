"""`match_weights` finds the tensors of a file that fit a model; `WarmStartReport` lists the result for each."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from trainstack._tensor_classes import class_of, is_sharded, plain_parts
from trainstack.checkpointing.difference import describe
from trainstack.checkpointing.encoding import tensor_identity
from trainstack.errors import CheckpointMismatchError


@dataclass(frozen=True, slots=True, kw_only=True)
class WarmStartReport:
    """The result for each tensor. `str(report)` is a text of it.

    Attributes:
        source: the source of the weights.
        loaded: names that the model loaded, including those of tied tensors.
        missing: names of the model that the source lacks; they keep their initial values.
        unexpected: names of the source that the model lacks.
        mismatched: names of both with another shape or kind of dtype, with values that the model's dtype cannot
            represent, or with another value than a tensor that the model ties to it; each with the values of source and
            model. They keep their initial values.
        part: the child of the model that loaded the weights, such as "model"; "" for the model itself. All names except
            `unexpected` are the model's, with this prefix.
    """

    source: str
    loaded: tuple[str, ...]
    missing: tuple[str, ...]
    unexpected: tuple[str, ...]
    mismatched: Mapping[str, str]
    part: str = ""

    @property
    def is_complete(self) -> bool:
        """Whether source and model have the same tensors, and all fit."""
        return not (self.missing or self.unexpected or self.mismatched)

    def __str__(self) -> str:
        count = len(self.loaded)
        into = f" into {self.part!r}" if self.part else ""
        parts = [f"loaded {count} tensor{'s' if count != 1 else ''} from {self.source}{into}"]
        if self.missing:
            parts.append(f"{len(self.missing)} missing there keep their initial values: {_format_names(self.missing)}")
        if self.unexpected:
            parts.append(f"{len(self.unexpected)} there are not in the model: {_format_names(self.unexpected)}")
        if self.mismatched:
            words = [f"{name} ({what})" for name, what in self.mismatched.items()]
            parts.append(f"{len(words)} do not fit and keep their initial values: {_format_names(words)}")
        return "; ".join(parts)


def match_weights(
    model: nn.Module, own: Mapping[str, torch.Tensor], given: Mapping[str, torch.Tensor], said: str, *, strict: bool
) -> tuple[WarmStartReport, dict[str, str]]:
    """The report of `warm_start`, and the names in `given` of the tensors to load, by their names in the model.

    Args:
        model: the model that will load the weights.
        own: its tensors by name, whole or sharded; their values are not read.
        given: the weights.
        said: the name of the weights in messages.
        strict: refuse weights that do not match in every name and shape.

    Raises:
        CheckpointMismatchError: no tensor fits, or not every one with `strict`.
    """
    part = _part_that_fits(model, given, own)
    if part is None:
        raise CheckpointMismatchError(_nothing_fits(model, given, own, said))
    prefix = f"{part}." if part else ""
    weights = {f"{prefix}{key}": value for key, value in given.items()}
    mismatched = {
        key: f"{describe(weights[key])} there, {describe(own[key])} in the model"
        for key in own
        if key in weights and not _fits(weights[key], own[key])
    }
    mismatched |= _changed_values(own, {key: weights[key] for key in own if key in weights and key not in mismatched})
    fitting = {key: key.removeprefix(prefix) for key in own if key in weights and key not in mismatched}
    taken = {_identity(own[key]) for key in fitting}  # files omit the other names of a tied tensor
    loaded = {key for key in own if key not in mismatched and (key in fitting or _identity(own[key]) in taken)}
    report = WarmStartReport(
        source=said,
        part=part,
        loaded=tuple(key for key in own if key in loaded),
        missing=tuple(key for key in own if key not in weights and key not in loaded),
        unexpected=tuple(key for key in given if f"{prefix}{key}" not in own),
        mismatched=mismatched,
    )
    if strict and not report.is_complete:
        raise CheckpointMismatchError(f"{said} does not fit {class_of(model).__name__} completely. Not {report}.")
    return report, fitting


def _part_that_fits(model: nn.Module, weights: Mapping[str, Any], own: Mapping[str, Any]) -> str | None:
    """The path of the submodule that fits `weights`, "" for the model; None if there is none, or more than one."""
    children = [name for name, _ in model.named_children()]
    inner = [f"{name}.{key}" for name in children for key, _ in model.get_submodule(name).named_children()]
    for level in ([""], children, inner):
        fits = [part for part in level if _count_fitting(weights, own, f"{part}." if part else "")]
        if fits:
            return fits[0] if len(fits) == 1 else None
    return None


def _count_fitting(weights: Mapping[str, Any], own: Mapping[str, Any], prefix: str) -> int:
    return sum(f"{prefix}{key}" in own and _fits(weights[key], own[f"{prefix}{key}"]) for key in weights)


def _identity(tensor: torch.Tensor) -> Any:
    """A value that tied tensors share; of a sharded tensor that of the local part."""
    part = next(plain_parts(tensor)) if is_sharded(tensor) else tensor
    return tensor_identity(part if part.numel() else tensor)


def _fits(one: torch.Tensor, other: torch.Tensor) -> bool:
    kinds = [(tensor.shape, tensor.is_floating_point(), tensor.is_complex()) for tensor in (one, other)]
    return kinds[0] == kinds[1]


def _changed_values(own: Mapping[str, torch.Tensor], given: Mapping[str, torch.Tensor]) -> dict[str, str]:
    """The reasons why the model would not get the given values, by name, for the names that have one."""
    found, first = dict[str, str](), dict[Any, str]()
    for key, tensor in given.items():
        other = first.setdefault(_identity(own[key]), key)
        both = [one.to(own[key].dtype).nan_to_num() for one in (given[other], tensor)] if other is not key else []
        if both and not torch.equal(*both):
            found[key] = f"another value there than {other}, and the model has one tensor for both"
        elif not _keeps_values(own[key].dtype, tensor):
            found[key] = f"{describe(tensor)} there, with values that {describe(own[key])} in the model cannot hold"
    return found


def _keeps_values(dtype: torch.dtype, tensor: torch.Tensor) -> bool:
    """Whether `dtype` represents the values of `tensor`, rounded: no finite one becomes inf, no integer changes."""
    if tensor.dtype is dtype or tensor.is_complex() or not tensor.numel() or tensor.is_meta:
        return True
    if not dtype.is_floating_point:
        return torch.equal(tensor.to(dtype).to(tensor.dtype), tensor)
    if torch.finfo(dtype).max >= torch.finfo(tensor.dtype).max:
        return True
    wide = tensor if tensor.dtype in (torch.float32, torch.float64) else tensor.float()
    return not bool((wide.isfinite() & ~wide.to(dtype).to(wide.dtype).isfinite()).any())


def _format_names(names: Sequence[str]) -> str:
    more = len(names) - 6
    return ", ".join(names[:6]) + (f" and {more} more" if more > 0 else "")


def _nothing_fits(model: nn.Module, weights: Mapping[str, Any], own: Mapping[str, Any], said: str) -> str:
    fits = [child for child, _ in model.named_children() if _count_fitting(weights, own, f"{child}.")]
    hint = "Compare the names, and rename: warm_start(model, {new_name: tensor, ...})."
    if fits:
        hint = (
            f"They fit its {_format_names(list(map(repr, fits)))} equally: call warm_start(module.{fits[0]}, ...) for "
            "the intended one, before you make the Trainer."
        )
    return (
        f"nothing in {said} fits {class_of(model).__name__}: it has {_format_names(list(weights)) or 'no tensors'}; "
        f"the model has {_format_names(list(own)) or 'none'}. {hint}"
    )
