"""The files in addition to the weights that `from_pretrained` of another library reads."""

from __future__ import annotations

import copy
import functools
import os
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, cast

from torch import nn

from trainstack._tensor_classes import class_of
from trainstack.checkpointing import filesystem
from trainstack.checkpointing.verification import PICKLE_SUFFIXES


def is_adapted(model: nn.Module | None) -> bool:
    """Whether `model` is a `PeftModel`: a model with adapters. Its `from_pretrained` reads the adapters without the
    base.
    """
    return hasattr(model, "peft_config") and hasattr(model, "get_base_model") and hasattr(model, "save_pretrained")


def exported_state(model: nn.Module | None, state: Mapping[str, Any]) -> Mapping[str, Any]:
    """The part of `state` in an export of `model`: all of it; for a `PeftModel` the adapters."""
    if not is_adapted(model):
        return state
    from peft import get_peft_model_state_dict  # installed, because the model is an instance of its class

    return cast("Mapping[str, Any]", get_peft_model_state_dict(model, state_dict=dict(state)))


def companions_of(model: nn.Module | None) -> Callable[[Path], None] | None:
    """A function that writes configuration files of `model` to a folder; None for a model without any.

    These are the files of `config.save_pretrained` and `generation_config.save_pretrained`, or those of the model's
    `save_pretrained`, without `model.safetensors`, READMEs and pickles.
    """
    configs = [getattr(model, name, None) for name in ("config", "generation_config")]
    savers = [one for one in configs if callable(getattr(one, "save_pretrained", None))]
    if is_adapted(model) or not savers:
        savers = [model] if callable(getattr(model, "save_pretrained", None)) else []
    return functools.partial(_write, savers, model) if savers else None


def _write(savers: list[Any], model: nn.Module | None, folder: Path) -> None:
    scratch = folder / "save_pretrained"
    filesystem.make_directory(scratch)
    for one in savers:
        if hasattr(one, "architectures"):  # the `save_pretrained` of the model would set it
            one = copy.deepcopy(one)
            one.architectures = [class_of(cast("nn.Module", model)).__name__]
        one.save_pretrained(os.fspath(scratch))
    for file in sorted(scratch.rglob("*")):
        place = file.relative_to(scratch)
        weights = file.name.startswith("model") and ".safetensors" in file.name
        if file.is_file() and not (weights or file.name == "README.md" or file.suffix in PICKLE_SUFFIXES):
            (folder / place).parent.mkdir(parents=True, exist_ok=True)
            os.replace(file, folder / place)
            with open(folder / place, "rb") as handle:
                filesystem.sync_file(handle)
    shutil.rmtree(scratch)
