"""Random generators of torch, numpy and Python: their states and seeds."""

from __future__ import annotations

import random
from functools import cache
from typing import Any

import numpy as np
import torch


@cache
def kinds_of_generators() -> tuple[type, ...]:
    """The classes of random generators. The first call imports `numpy.random`."""
    return torch.Generator, np.random.Generator, np.random.RandomState, random.Random


def get_generator_state(generator: Any) -> Any:
    """The state of one generator, as plain values, arrays and tensors."""
    if isinstance(generator, np.random.Generator):
        return generator.bit_generator.state
    if isinstance(generator, np.random.RandomState):
        return generator.get_state(legacy=False)
    return generator.getstate() if isinstance(generator, random.Random) else generator.get_state()


def set_generator_state(generator: Any, state: Any) -> None:
    """Set the state of one generator to a result of `get_generator_state` for a generator of the same class.

    Raises:
        TypeError, ValueError, RuntimeError, KeyError: it is the state of another kind of generator.
    """
    if isinstance(generator, np.random.Generator):
        generator.bit_generator.state = state
    elif isinstance(generator, random.Random):
        generator.setstate(state)
    else:
        generator.set_state(state)


def seed_generator(generator: Any, seed: int) -> None:
    """Seed one generator with 64 bits.

    Raises:
        TypeError, ValueError: it cannot be seeded.
    """
    if isinstance(generator, np.random.Generator):
        bits: Any = type(generator.bit_generator)
        generator.bit_generator.state = bits(seed).state
    elif isinstance(generator, np.random.RandomState):
        generator.seed(seed & 0xFFFFFFFF)
    elif isinstance(generator, random.Random):
        generator.seed(seed)
    else:
        # Shifted by one: a seed of 63 bits is the same number as a signed and as an unsigned integer.
        generator.manual_seed(seed >> 1)
