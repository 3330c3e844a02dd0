"""Trial runs of a module without randomness or side effects."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from trainstack.backends.dp.modes.base import full_float32
from trainstack.backends.dp.random_functions import RECURRENT
from trainstack.backends.generator_search import find_generators
from trainstack.backends.generators import get_generator_state, set_generator_state


class RandomStates:
    """The states of generators at this moment.

    These are the generators of torch, numpy and Python; generators that a part of `module` holds, as an attribute or in
    one; and global variables of the files of its classes.
    """

    def __init__(self, module: nn.Module) -> None:
        devices = sorted({p.device.index or 0 for p in module.parameters() if p.is_cuda})
        self._torch = torch.get_rng_state()
        self._cuda = [(device, torch.cuda.get_rng_state(device)) for device in devices]
        self._python, self._numpy = random.getstate(), np.random.get_state()
        found = find_generators(module).by_path.values()
        self._own = [(generator, get_generator_state(generator)) for generator in found]

    def restore(self) -> None:
        """Put the generators back."""
        torch.set_rng_state(self._torch)
        for device, state in self._cuda:
            torch.cuda.set_rng_state(state, device)
        random.setstate(self._python)
        np.random.set_state(self._numpy)
        for generator, state in self._own:
            set_generator_state(generator, state)


@contextmanager
def deterministic_forward(module: nn.Module) -> Iterator[RandomStates]:
    """Dropout does nothing, noise is constant and float32 is not rounded to TF32.

    Parameters, buffers, states of random generators and precisions are put back at the end.

    Yields:
        The states of the generators, for code that draws from them all the same.
    """
    kept = [(tensor, tensor.detach().clone()) for tensor in (*module.parameters(), *module.buffers())]
    states = RandomStates(module)
    try:
        with full_float32(), DisableRandomness():
            yield states
    finally:
        states.restore()
        with torch.no_grad():
            for tensor, before in kept:
                if not _same(tensor, before):
                    tensor.copy_(before)


class DisableRandomness(TorchFunctionMode):
    """Removes the randomness of functions that draw from torch's generators in a forward pass."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in _DROPOUTS:
            return args[0] if args else kwargs["input"]
        if func in _NOISE_LIKE:
            return torch.full_like(args[0] if args else kwargs["input"], 0.5)
        if func in _NOISE:
            return torch.full_like(func(*args, **kwargs), 0.5)
        if kwargs.get("dropout_p"):
            kwargs = {**kwargs, "dropout_p": 0.0}
        if func in RECURRENT:  # whose dropout is the one float among its arguments
            args = tuple(0.0 if isinstance(value, float) else value for value in args)
        return func(*args, **kwargs)


_DROPOUTS = {
    F.dropout,
    F.dropout1d,
    F.dropout2d,
    F.dropout3d,
    F.alpha_dropout,
    F.feature_alpha_dropout,
    torch.dropout,
    torch.alpha_dropout,
    torch.feature_dropout,
}
_NOISE_LIKE = {torch.rand_like, torch.randn_like}
_NOISE = {torch.rand, torch.randn, torch.bernoulli, torch.normal}


class NoAutocast(nn.Module):
    """Calls a model without autocast, also inside an autocast block, so that differences are mistakes and not rounding.

    Calls `note` with whether there was autocast.
    """

    def __init__(self, model: nn.Module, note: Callable[[bool], object] = bool) -> None:
        super().__init__()
        self._model, self._note = (model,), note  # in a tuple, because it must not be a submodule

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        device = next((v for v in kwargs.values() if isinstance(v, torch.device)), torch.device("cpu"))
        self._note(torch.is_autocast_enabled(device.type))
        with torch.autocast(device.type, enabled=False):
            return self._model[0](*args, **kwargs)


def copy_tensors(module: nn.Module) -> dict[str, Tensor]:
    """Copies of all parameters and buffers."""
    return {name: tensor.detach().clone() for name, tensor in (*module.named_parameters(), *module.named_buffers())}


def changed_tensors(module: nn.Module, before: dict[str, Tensor]) -> list[str]:
    """The names of the parameters and buffers that differ from the copies of `copy_tensors`."""
    return [
        name
        for name, tensor in (*module.named_parameters(), *module.named_buffers())
        if name not in before or tensor.shape != before[name].shape or not _same(tensor, before[name])
    ]


def plain_attributes(module: nn.Module) -> dict[str, str]:
    """The plain attributes of modules, without parameters and buffers, as text."""
    return {
        f"{name}.{key}" if name else key: _describe_value(value)
        for name, part in module.named_modules()
        for key, value in vars(part).items()
        if key not in _OF_EVERY_MODULE
    }


_OF_EVERY_MODULE = set(vars(nn.Module()))


def _describe_value(value: object) -> str:
    plain = type(value).__repr__ is object.__repr__ and hasattr(value, "__dict__")
    return repr(vars(value)) if plain else repr(value)


class WriteDetector:
    """Notices a forward pass that writes into parameters or buffers; costs microseconds, and reads no values."""

    def __init__(self, module: nn.Module) -> None:
        self._places = [
            (held, key, f"{name}.{key}" if name else key)
            for name, part in module.named_modules()
            for held in (part._parameters, part._buffers)  # torch 2.13.0; public iterators hide a swap
            for key in held
        ]
        self._fingerprints: list[tuple[int, int, int] | None] = []

    def begin(self) -> None:
        """Remember how everything is."""
        self._fingerprints = [_fingerprint(held.get(key)) for held, key, _ in self._places]

    def changed(self) -> str | None:
        """The name of a tensor that was written to or replaced since `begin`."""
        for (held, key, name), mark in zip(self._places, self._fingerprints, strict=True):
            if _fingerprint(held.get(key)) != mark:
                return name
        return None


def _fingerprint(tensor: Tensor | None) -> tuple[int, int, int] | None:
    if tensor is None:
        return None
    try:
        return id(tensor), tensor.data_ptr(), tensor._version  # torch 2.13.0: counts writes in place
    except RuntimeError:  # a tensor of records under `vmap` has no memory
        return id(tensor), 0, 0


def _same(left: Tensor, right: Tensor) -> bool:
    left, right = left.detach(), right.detach()
    return torch.equal(left, right) or bool(((left == right) | (left.isnan() & right.isnan())).all())
