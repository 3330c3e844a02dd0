"""Random states: of the host, of one device, of ranks, and of loaders."""

from __future__ import annotations

import random
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch

from trainstack.backends import Communicator, World
from trainstack.trainer.core import random_state
from trainstack.trainer.core.random_state import IsolatedIterator, LoaderGenerators, isolated_rng, separate_ranks

HOST = torch.device("cpu")


class Device:
    """A device module with two devices."""

    def __init__(self) -> None:
        self.default_generators = torch.Generator(), torch.Generator()

    def get_rng_state(self, device: torch.device) -> torch.Tensor:
        return self.default_generators[device.index].get_state()

    def set_rng_state(self, state: torch.Tensor, device: torch.device) -> None:
        self.default_generators[device.index].set_state(state)


class Rank(Communicator):
    """One of two ranks; rank 0 has broadcast the first of `sent`."""

    size = 2

    def __init__(self, rank: int, sent: list[Any]) -> None:
        self.rank, self.sent = rank, sent

    def broadcast_object(self, value: Any, what: str = "") -> Any:
        if self.rank == 0:
            self.sent.append(value)
        return self.sent[0]


def draws() -> list[float]:
    return [torch.rand(()).item(), float(np.random.rand()), random.random()]


def test_an_evaluation_seeds_its_own_device_and_no_other() -> None:
    module, cuda = Device(), torch.device("cuda", 0)
    before = [generator.get_state() for generator in module.default_generators]
    with mock.patch.object(torch, "get_device_module", return_value=module), isolated_rng(7, cuda):
        first, other = (generator.get_state() for generator in module.default_generators)

    assert not torch.equal(first, before[0])
    assert torch.equal(other, before[1])
    assert all(
        torch.equal(one.get_state(), state) for one, state in zip(module.default_generators, before, strict=True)
    )


def test_ranks_derive_their_generators_from_those_of_rank_0() -> None:
    module, cuda, sent = Device(), torch.device("cuda", 1), list[Any]()
    states = [generator.get_state() for generator in module.default_generators]
    random_state.seed_everything(0)
    expected = draws()
    numbers = []
    with mock.patch.object(torch, "get_device_module", return_value=module):
        for rank in (0, 1, 1):
            random_state.seed_everything(0 if rank == 0 else 50)  # a rank derives nothing from its own state
            separate_ranks(World(rank=rank, size=2, device=cuda, comm=Rank(rank, sent)))
            numbers.append([*draws(), torch.rand((), generator=module.default_generators[1]).item()])

    assert numbers[0][:3] == expected
    assert numbers[1] == numbers[2]
    assert all(one != other for one, other in zip(numbers[0], numbers[1], strict=True))
    assert torch.equal(module.default_generators[0].get_state(), states[0])


@pytest.mark.parametrize("which", [0, 1, 2])
def test_each_generator_depends_on_the_same_one_of_rank_0(which: int) -> None:
    """A user who seeds torch alone gets the same numbers of torch."""
    draw = (lambda: torch.rand(()), np.random.randn, random.random)[which]
    numbers = []
    for times in (0, 1, 1):
        sent = list[Any]()
        for rank in (0, 1):
            random_state.seed_everything(0)
            for _ in range(times):
                draw()
            separate_ranks(World(rank=rank, size=2, device=HOST, comm=Rank(rank, sent)))
        numbers.append(draws())

    assert numbers[1] == numbers[2]
    assert [one != other for one, other in zip(numbers[0], numbers[1], strict=True)] == [i == which for i in range(3)]


def test_a_loader_draws_from_separate_generators_only() -> None:
    def numbers() -> Any:
        yield from ([*draws(), *draws()] for _ in range(3))

    def read(between: int) -> list[list[float]]:
        found = []
        for one in IsolatedIterator(LoaderGenerators(0, 4), numbers):
            found.append(one)
            torch.rand(between), np.random.randn(between), random.random()
        return found

    torch.manual_seed(1), np.random.seed(1), random.seed(1)
    expected = [np.random.randn(), *draws()]
    torch.manual_seed(1), np.random.seed(1), random.seed(1)
    iterator = IsolatedIterator(LoaderGenerators(0, 4), numbers)
    begun = np.random.randn()  # numpy keeps the second of two normal numbers
    rest = list(iterator)

    assert [begun, *draws()] == expected
    assert rest == read(0) == read(5) != [next(iter(IsolatedIterator(LoaderGenerators(0, 5), numbers)))]


def test_generators_are_swapped_for_the_first_item_only() -> None:
    swaps = mock.MagicMock(spec=LoaderGenerators(0, 0))

    assert list(IsolatedIterator(swaps, lambda: iter(range(5)), first_alone=True)) == [*range(5)]
    assert swaps.__enter__.call_count == 2, "once when the iterator is made"
    assert list(IsolatedIterator(swaps, lambda: iter(range(5)))) == [*range(5)]
    assert swaps.__enter__.call_count == 2 + 1 + 6, "and once for the end"


def test_a_failing_loader_restores_the_generators_of_the_process() -> None:
    def fails() -> Any:
        draws()
        yield 1
        raise LookupError

    torch.manual_seed(3), np.random.seed(3), random.seed(3)
    expected = draws()
    torch.manual_seed(3), np.random.seed(3), random.seed(3)
    iterator = IsolatedIterator(LoaderGenerators(0, 0), fails)
    next(iterator)
    with pytest.raises(LookupError):
        next(iterator)

    assert draws() == expected
