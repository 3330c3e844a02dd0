"""Refusal of random numbers in `train_step`, for modes whose comparison with single records is a pass before.

That pass has other random numbers. A number that decides whether records are mixed, or which, would be unseen by it.
"""

from __future__ import annotations

import random
from typing import Any, NoReturn

import numpy as np
import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from trainstack.backends.dp.modes.base import Run
from trainstack.backends.dp.random_functions import COMPOSED, HANDLERS, UNHANDLED, drops_between_layers
from trainstack.backends.generator_search import find_generators
from trainstack.backends.generators import get_generator_state
from trainstack.backends.random_streams import device_generators
from trainstack.errors import PrivacyError

_get_bits = np.random.get_bit_generator  # type: ignore[attr-defined]


class DrawRefusal(TorchFunctionMode):
    """While `train_step` runs, it must leave all generators as they are.

    Args:
        mode: the name of the gradient mode.
        module: may hold generators.
    """

    def __init__(self, mode: str, module: nn.Module) -> None:
        super().__init__()
        self._mode = mode
        device = next((p.device for p in module.parameters()), torch.device("cpu"))
        own = find_generators(module).by_path.values()
        self._others = [generator for generator in own if not isinstance(generator, torch.Generator)]
        self._generators = [generator for generator in own if isinstance(generator, torch.Generator)]
        self._generators += [torch.default_generator, *device_generators(device)]

    def guarded(self, run: Run) -> Run:
        """`run`, which raises `PrivacyError` where the model draws random numbers."""
        return lambda model, batch: run(_Guarded(self, model), batch)

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        handler = HANDLERS.get(func)
        if handler is not None:
            return handler(self, func, *args, **kwargs)  # which calls `uniform` or `normal` if it draws
        if func in COMPOSED:
            with self:
                return COMPOSED[func](*args, **kwargs)
        if func in UNHANDLED or drops_between_layers(func, args):
            self.refuse(getattr(func, "__name__", "a function of torch"))
        return func(*args, **kwargs)

    def uniform(self, like: Tensor) -> Tensor:
        """See `NumberSource`."""
        self.refuse("a function of torch, such as dropout or rand,")

    normal = uniform

    def refuse(self, what: str) -> NoReturn:
        """Raise the error."""
        raise PrivacyError(
            f"{what} draws random numbers in train_step. grad_mode={self._mode!r} compares each batch with its single "
            "records, under other numbers than those of the step, so it cannot see whether records are mixed. Write "
            "grad_mode='auto'."
        )

    def states(self) -> list[Any]:
        """Of all generators; comparable."""
        states: list[Any] = [random.getstate(), repr(_get_bits().state)]
        states += [repr(get_generator_state(generator)) for generator in self._others]
        if torch._C._functorch.maybe_current_level() is None:  # torch 2.13.0; else a state is a tensor of each record
            states += [generator.get_state().numpy().tobytes() for generator in self._generators]
        return states


class _Guarded(nn.Module):
    def __init__(self, refusal: DrawRefusal, model: nn.Module) -> None:
        super().__init__()
        self._refusal, self._model = refusal, (model,)  # in a tuple, because it must not be a submodule

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        before = self._refusal.states()
        with self._refusal:
            outputs = self._model[0](*args, **kwargs)
        if self._refusal.states() != before:
            self._refusal.refuse("a generator of Python, numpy, torch or the module")
        return outputs
