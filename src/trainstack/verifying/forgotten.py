"""What training changed in a module's own attributes and `get_state` does not return: the usual thing to forget."""

from __future__ import annotations

import hashlib
import random
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import nn

_OF_TORCH = frozenset(vars(nn.Module()))
_PLAIN = (bool, int, float, complex, str, bytes, type(None), np.generic)


def marks_of(module: nn.Module) -> dict[str, str]:
    """A mark for each attribute of `module` that is plain data, a tensor or a generator; it changes with the value.

    Parameters, buffers and submodules are left out, since `state_dict` has them, and so is what is of another kind:
    whether that has changed cannot be told.
    """
    marks = {name: _mark(value) for name, value in vars(module).items() if name not in _OF_TORCH}
    return {name: mark for name, mark in marks.items() if mark is not None}


def forgotten(module: nn.Module, before: Mapping[str, str], state: Mapping[str, Any]) -> list[str]:
    """The attributes whose mark is another one than `before` and whose name is not in `state`."""
    now = marks_of(module)
    return sorted(name for name, mark in now.items() if before.get(name) != mark and name not in state)


def _mark(value: Any) -> str | None:
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
    marks = [_mark(part) for part in parts]
    known = [mark for mark in marks if mark is not None]
    return repr(known) if len(known) == len(marks) else None
