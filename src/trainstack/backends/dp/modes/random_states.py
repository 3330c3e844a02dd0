"""`RandomStates`: what the random generators are at, that a forward pass may draw from; to go back to it."""

from __future__ import annotations

import random
import sys
from collections.abc import Iterable, Iterator
from itertools import islice
from typing import Any

import numpy as np
import torch
from torch import nn

_OWN = (torch.Generator, np.random.Generator, np.random.RandomState, random.Random)
_DEEP, _WIDE = 2, 100
"""How far generators are looked for: levels of lists, dicts and objects below an attribute, and items of each."""


class RandomStates:
    """The states of generators at this moment.

    Those are the generators of torch, numpy and Python; generators that a part of `module` holds, as an attribute or in
    one; and global variables beside the classes of its parts.
    """

    def __init__(self, module: nn.Module) -> None:
        devices = sorted({p.device.index or 0 for p in module.parameters() if p.is_cuda})
        self._torch = torch.get_rng_state()
        self._cuda = [(device, torch.cuda.get_rng_state(device)) for device in devices]
        self._python, self._numpy = random.getstate(), np.random.get_state()
        self._own = [(generator, _state_of(generator)) for generator in _generators_of(module)]

    def restore(self) -> None:
        """Put the generators back."""
        torch.set_rng_state(self._torch)
        for device, state in self._cuda:
            torch.cuda.set_rng_state(state, device)
        random.setstate(self._python)
        np.random.set_state(self._numpy)
        for generator, state in self._own:
            _put_back(generator, state)


def _generators_of(module: nn.Module) -> list[Any]:
    parts = list(module.modules())
    scopes = {kind.__module__ for part in parts for kind in type(part).__mro__}
    held = [value for part in parts for value in _held(vars(part), _DEEP)]
    beside = [value for scope in scopes if scope in sys.modules for value in _held(vars(sys.modules[scope]), 0)]
    return list({id(generator): generator for generator in (*held, *beside)}.values())


def _held(values: dict[str, Any], deep: int) -> Iterator[Any]:
    """The generators among the values, and so many levels below them."""
    for value in list(values.values()):
        yield from _in(value, deep)


def _in(value: Any, deep: int) -> Iterator[Any]:
    if isinstance(value, _OWN):
        if not isinstance(value, random.SystemRandom):  # which has no state
            yield value
    elif deep:
        for item in islice(_items(value), _WIDE):
            yield from _in(item, deep - 1)


def _items(value: Any) -> Iterable[Any]:
    if isinstance(value, dict):
        return list(value.values())
    if isinstance(value, list | tuple):
        return value
    if isinstance(value, nn.Module | torch.Tensor | type) or callable(value):
        return ()
    return list(getattr(value, "__dict__", {}).values())


def _state_of(generator: Any) -> Any:
    if isinstance(generator, np.random.Generator):
        return generator.bit_generator.state
    return generator.getstate() if isinstance(generator, random.Random) else generator.get_state()


def _put_back(generator: Any, state: Any) -> None:
    if isinstance(generator, np.random.Generator):
        generator.bit_generator.state = state
    elif isinstance(generator, random.Random):
        generator.setstate(state)
    else:
        generator.set_state(state)
