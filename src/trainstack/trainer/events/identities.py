"""Match callbacks of a checkpoint to callbacks of this run, if several have the same class."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from types import FunctionType, MethodType
from typing import Any

import numpy as np
from torch import Tensor, nn

from trainstack.trainer.core.fingerprints import describe, hash_text

_DEPTH, _WIDTH, _MAX_VALUES = 4, 50, 1000
"""Limits of a hash: levels, items of a container, and values. They bound the time for callbacks with large data."""
_NOT_SETTINGS = (type, FunctionType, MethodType, nn.Module)


def settings_hash(callback: object) -> str:
    """Return a hash of the class of `callback` and of its attributes after `__init__`."""
    return hash_text(_settings(callback, 0, iter(range(_MAX_VALUES))))


def _settings(value: Any, depth: int, left: Iterator[int]) -> str:
    if next(left, None) is None:
        return ""
    if isinstance(value, Tensor | np.ndarray):
        return f"{type(value).__qualname__} {tuple(value.shape)}"
    if isinstance(value, Mapping | list | tuple | set | frozenset) and (depth >= _DEPTH or len(value) > _WIDTH):
        return f"{type(value).__qualname__} of {len(value)}"
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{key!s}: {_settings(item, depth + 1, left)}" for key, item in value.items()) + "}"
    if isinstance(value, list | tuple):
        return "[" + ", ".join(_settings(item, depth + 1, left) for item in value) + "]"
    held = getattr(value, "__dict__", None)
    if held is None or isinstance(value, _NOT_SETTINGS) or depth >= _DEPTH:
        return describe(value)
    return f"{type(value).__qualname__}({_settings(held, depth, left)})"


def match_keys(mine: Mapping[str, Sequence[str]], made: Mapping[str, str], saved: Mapping[str, str]) -> dict[str, str]:
    """Return the keys of this run for keys of the checkpoint, where they differ.

    Callbacks of one name match by their settings. Those without a match are paired in order.

    Args:
        mine: keys of the callbacks with one name, in order, by this name.
        made: hashes of the settings in this run, by key.
        saved: hashes of the settings in the checkpoint, by key.
    """
    renamed = dict[str, str]()
    for name, keys in mine.items():
        theirs = [key for key in saved if key == name or _is_numbered(key, name)]
        if len(theirs) < 2 and len(keys) < 2:
            continue
        left, open_keys = list(theirs), list[str]()
        for key in keys:
            # The key itself is tried first, so that callbacks with equal settings keep their keys.
            same = [one for one in ([key] if key in left else []) + left if saved[one] == made[key]]
            if same:
                renamed[same[0]] = key
                left.remove(same[0])
            else:
                open_keys.append(key)
        renamed |= dict(zip(left, open_keys, strict=False))
    return renamed


def _is_numbered(key: str, name: str) -> bool:
    return key.startswith(f"{name}-") and key[len(name) + 1 :].isdigit()
