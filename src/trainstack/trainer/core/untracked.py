"""Fingerprints of plain attributes, which detect changes of state that no checkpoint holds."""

from __future__ import annotations

import hashlib
import random
from collections import deque
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
import torch
from torch import nn

from trainstack._tensor_bytes import bytes_of

_OF_TORCH = frozenset(vars(nn.Module()))
_PLAIN = (bool, int, float, complex, str, bytes, type(None), np.generic)


def fingerprints(module: nn.Module) -> dict[str, str]:
    """Return a fingerprint of each attribute of `module` that is plain data, a tensor or a random generator.

    Attributes of submodules are included, with names such as "encoder.calls".

    A fingerprint changes with the value. Parameters, buffers and submodules are omitted, because `state_dict` has them.
    Attributes of other types are omitted, because a change in them cannot be detected.
    """
    marks = {
        f"{owner}.{name}" if owner else name: _fingerprint(value)
        for owner, part in module.named_modules()
        for name, value in vars(part).items()
        if name not in _OF_TORCH
    }
    return {name: mark for name, mark in marks.items() if mark is not None}


def changed_attributes(module: nn.Module, before: Mapping[str, str]) -> list[str]:
    """Return the attributes whose fingerprints differ from `before`, a result of `fingerprints`.

    An instance attribute with the same value as the class attribute counts as missing.
    """
    now, parts = fingerprints(module), dict(module.named_modules())
    changed = [name for name in {**before, **now} if before.get(name) != now.get(name)]

    def of_class(name: str) -> str | None:
        owner, _, attribute = name.rpartition(".")
        return _fingerprint(getattr(type(parts.get(owner, module)), attribute, None))

    return sorted(
        name for name in changed if (name in before and name in now) or of_class(name) != {**before, **now}[name]
    )


def fingerprints_of_run(module: nn.Module, callbacks: Mapping[str, Any], private: bool) -> dict[str, str]:
    """Return fingerprints of the module and its parts, such as "self.encoder.calls", and of users' callbacks, by key.

    In a private run they include non-persistent buffers, because its checkpoints do not hold these.
    """
    marks = {f"self.{name}": mark for name, mark in fingerprints(module).items()}
    values = {
        f"callbacks.{key}.{name}": value
        for key, callback in callbacks.items()
        if type(callback).__module__.partition(".")[0] != "trainstack"
        for name, value in vars(callback).items()
    }
    if private:
        kept = module.state_dict(keep_vars=True)
        values |= {f"self.{name}": value for name, value in module.named_buffers() if name not in kept}
    found = {name: _fingerprint(value) for name, value in values.items()}
    return marks | {name: mark for name, mark in found.items() if mark is not None}


def untracked_state(
    now: Mapping[str, str], before: Mapping[str, str], states: Iterable[Mapping[str, Any]]
) -> list[str]:
    """Return the attributes whose fingerprints differ from `before` and whose names are in none of `states`."""
    saved = {name for state in states for name in state}
    changed = (name for name, mark in now.items() if before.get(name) != mark)
    return sorted(name for name in changed if saved.isdisjoint((name.removeprefix("self."), name.rpartition(".")[2])))


def _fingerprint(value: Any) -> str | None:
    if isinstance(value, _PLAIN):
        return repr(value)
    if isinstance(value, random.Random):
        return repr(value.getstate())
    if isinstance(value, np.random.Generator):
        return repr(value.bit_generator.state)
    if isinstance(value, np.random.RandomState):
        return repr(value.get_state())
    if isinstance(value, torch.Generator):
        value = value.get_state()
    if isinstance(value, nn.Parameter):
        return None  # layers such as `nn.LSTM` keep parameters in plain lists too
    if isinstance(value, torch.Tensor):
        if value.layout is not torch.strided or value.is_quantized or value.is_meta:
            return None
        value = bytes_of(value.detach().to("cpu")).numpy()
    if isinstance(value, np.ndarray):
        return None if value.dtype.hasobject else hashlib.sha256(value.tobytes()).hexdigest()
    if isinstance(value, Mapping):
        return _joined([part for pair in value.items() for part in pair])
    if isinstance(value, list | tuple | set | frozenset | deque):
        return _joined(list(value))
    return None


def _joined(parts: list[Any]) -> str | None:
    marks = [_fingerprint(part) for part in parts]
    known = [mark for mark in marks if mark is not None]
    return repr(known) if len(known) == len(marks) else None
