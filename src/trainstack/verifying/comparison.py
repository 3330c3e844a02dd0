"""Comparison of the checkpoints of two trainings."""

from __future__ import annotations

import hashlib
import random
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from trainstack.checkpointing import CheckpointInfo, list_checkpoints
from trainstack.checkpointing.difference import Difference, differences
from trainstack.checkpointing.reading import read_states


@dataclass(frozen=True, slots=True, kw_only=True)
class Divergence:
    """Where one training leaves the other.

    Attributes:
        difference: the first tensor that differs at the end and by how much, else the first thing.
        same_at: the last global step whose checkpoints agree in every bit; 0 if none do.
        diverged_at: the first one after it whose checkpoints do not.
    """

    difference: str
    same_at: int
    diverged_at: int


def checkpoints_of(place: Path) -> list[CheckpointInfo]:
    """The checkpoints that a training in `place` has left, oldest first."""
    return [info for info in list_checkpoints(place / "checkpoints") if info.kind == "checkpoint"]


def compare(one: Path, other: Path) -> Divergence | None:
    """Compare the last checkpoints of two trainings; None if every bit agrees."""
    mine, theirs = checkpoints_of(one), checkpoints_of(other)
    found = _between(mine[-1], theirs[-1])
    if not found:
        return None
    first = next((row for row in found if row.elements is not None), found[0])
    more = f"; {len(found) - 1} more differ" if len(found) > 1 else ""
    same_at, left = 0, {info.global_step: info for info in theirs}
    for info in mine[:-1]:
        if info.global_step in left and _between(info, left[info.global_step]):
            return Divergence(difference=f"{first}{more}", same_at=same_at, diverged_at=info.global_step or 0)
        same_at = info.global_step or 0 if info.global_step in left else same_at
    return Divergence(difference=f"{first}{more}", same_at=same_at, diverged_at=mine[-1].global_step or 0)


def _between(one: CheckpointInfo, other: CheckpointInfo) -> list[Difference]:
    return list(differences(read_states(one.path)[1], read_states(other.path)[1]))


_OF_TORCH = frozenset(vars(nn.Module()))
_PLAIN = (bool, int, float, complex, str, bytes, type(None), np.generic)


def fingerprints(module: nn.Module) -> dict[str, str]:
    """A mark for each attribute of `module` that is plain data, a tensor or a generator; it changes with the value.

    Parameters, buffers and submodules are left out, since `state_dict` has them, and so is what is of another kind:
    whether that has changed cannot be told.
    """
    marks = {name: _fingerprint(value) for name, value in vars(module).items() if name not in _OF_TORCH}
    return {name: mark for name, mark in marks.items() if mark is not None}


def untracked_state(module: nn.Module, before: Mapping[str, str], state: Mapping[str, Any]) -> list[str]:
    """The attributes whose mark is another one than `before` and whose name is not in `state`."""
    now = fingerprints(module)
    return sorted(name for name, mark in now.items() if before.get(name) != mark and name not in state)


def _fingerprint(value: Any) -> str | None:
    if isinstance(value, _PLAIN):
        return repr(value)
    if isinstance(value, random.Random):
        return repr(value.getstate())
    if isinstance(value, np.random.Generator):
        return repr(value.bit_generator.state)
    if isinstance(value, torch.Generator):
        value = value.get_state()
    if isinstance(value, torch.Tensor):
        value = value.detach().to("cpu").contiguous().reshape(-1).view(torch.uint8).numpy()
    if isinstance(value, np.ndarray):
        return None if value.dtype.hasobject else hashlib.sha256(value.tobytes()).hexdigest()
    if isinstance(value, Mapping):
        return _joined([part for pair in value.items() for part in pair])
    if isinstance(value, list | tuple | set | frozenset):
        return _joined(list(value))
    return None


def _joined(parts: list[Any]) -> str | None:
    marks = [_fingerprint(part) for part in parts]
    known = [mark for mark in marks if mark is not None]
    return repr(known) if len(known) == len(marks) else None
