"""The search for generators in a module."""

from __future__ import annotations

import functools
import random
from typing import Any

import numpy as np
import torch
from torch import nn

from trainstack.backends.generator_search import find_generators
from trainstack.backends.generators import get_generator_state, seed_generator, set_generator_state

SHARED = np.random.default_rng(5)


class Slotted:
    __slots__ = ("rng",)

    def __init__(self) -> None:
        self.rng = np.random.RandomState(1)


class Holder:
    def __init__(self) -> None:
        self.itself, self.inner = self, Slotted()

    def draw(self) -> None: ...


class Part(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.rng = torch.Generator()

    @property
    def trap(self) -> Any:
        raise AssertionError("no property is read")


def closed_over() -> Any:
    rng = random.Random(3)
    return lambda: rng.random()


class Module(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.part = nn.Sequential(Part())
        self.again = self.part[0].rng
        self.by_name = {"a": [np.random.default_rng(1)], "b": (random.Random(2),)}
        self.holder, self.method = Holder(), Holder().draw
        self.function, self.partial = closed_over(), functools.partial(print, np.random.default_rng(4))
        self.system, self.many = random.SystemRandom(), list(range(10**6))


def test_each_place_is_searched_and_each_generator_found_once() -> None:
    found = find_generators(Module())

    assert set(found.by_path) == {
        "again",
        "by_name['a'][0]",
        "by_name['b'][0]",
        "holder.inner.rng",
        "method.__self__.inner.rng",
        "function(rng)",
        "partial(0)",
        "global SHARED",
    }
    assert list(found.without_state) == ["system"]
    assert not found.unsearched


def test_generators_of_all_kinds_are_restored_and_seeded() -> None:
    for made in (
        torch.Generator(),
        np.random.RandomState(1),
        random.Random(1),
        *(np.random.Generator(kind(1)) for kind in (np.random.PCG64, np.random.MT19937, np.random.Philox)),
    ):
        state = get_generator_state(made)
        before = repr(get_generator_state(made))
        seed_generator(made, 2**63 - 1)
        seeded = repr(get_generator_state(made))
        assert seeded != before
        seed_generator(made, 2**63 - 1)
        assert repr(get_generator_state(made)) == seeded
        set_generator_state(made, state)
        assert repr(get_generator_state(made)) == before
