"""Seeds that a dataset gives to random generators while it makes a sample of a private run."""

from __future__ import annotations

import random
from collections.abc import Callable
from random import Random
from typing import Any

import numpy as np
import pytest
import torch
from numpy.random import default_rng
from torch.utils.data import DataLoader, Dataset

from trainstack.backends.random_streams import RandomStreams
from trainstack.errors import PrivacyError
from trainstack.trainer.core.random_state import Seed
from trainstack.trainer.data.loading import Fetcher


def by_python(index: int) -> float:
    random.seed(index)
    return random.random()


def by_numpy(index: int) -> float:
    np.random.seed(index)
    return float(np.random.random())


def by_torch(index: int) -> float:
    with torch.random.fork_rng():
        torch.manual_seed(index)
        return float(torch.rand(()))


DRAWS: dict[str, Callable[[int], float]] = {
    "random.seed": by_python,
    "numpy.random.seed": by_numpy,
    "torch.manual_seed": by_torch,
    "random.Random": lambda index: random.Random(index).random(),
    "default_rng": lambda index: float(np.random.default_rng(index).random()),
    "RandomState": lambda index: float(np.random.RandomState(index).random()),
    "bit generator": lambda index: float(np.random.Generator(np.random.PCG64(index)).random()),
    "counter": lambda index: float(np.random.Generator(np.random.Philox(key=index)).random()),
    "sequence": lambda index: float(np.random.default_rng(np.random.SeedSequence(index)).random()),
    "imported class": lambda index: Random(index).random(),
    "imported function": lambda index: float(default_rng(index).random()),
    "torch.Generator": lambda index: float(torch.rand((), generator=torch.Generator().manual_seed(index))),
}


class Draws(Dataset[Any]):
    """Draws twice from the same seed."""

    def __init__(self, draw: Callable[[int], float]) -> None:
        self.draw = draw

    def __len__(self) -> int:
        return 4

    def __getitem__(self, index: int) -> Any:
        return torch.tensor([self.draw(0), self.draw(0)], dtype=torch.float64)


def samples(draw: Callable[[int], float], seed: Seed, workers: int = 0) -> torch.Tensor:
    context = "fork" if workers else None
    loader = DataLoader(Draws(draw), num_workers=workers, multiprocessing_context=context)
    (batch,) = Fetcher(loader, seed).batches(0, [torch.arange(4)])
    found: torch.Tensor = batch
    return found


@pytest.mark.parametrize("name", DRAWS)
def test_a_seed_of_the_dataset_is_mixed_with_a_secret(name: str) -> None:
    streams = RandomStreams.from_system()
    found, plain = samples(DRAWS[name], streams), DRAWS[name](0)
    assert len({*found[:, 0].tolist(), plain}) == 5  # different for each record, and from the public one
    assert torch.equal(found[:, 0], found[:, 1])  # as an image and its mask need
    assert torch.equal(found, samples(DRAWS[name], streams))
    assert not torch.equal(found, samples(DRAWS[name], RandomStreams.from_system()))
    assert DRAWS[name](0) == plain  # afterwards a seed has its usual effect
    assert set(samples(DRAWS[name], 3).flatten().tolist()) == {plain}  # as in a run that is not private


@pytest.mark.processes
def test_loader_workers_mix_seeds_with_the_same_secret() -> None:
    streams = RandomStreams.from_system()
    assert torch.equal(samples(by_numpy, streams), samples(by_numpy, streams, workers=1))


def test_classes_of_generators_look_the_same_to_the_dataset() -> None:
    kept = [random.Random(1), np.random.RandomState(1), torch.default_generator]

    def draw(_: int) -> float:
        classes: tuple[Any, ...] = (random.Random, np.random.RandomState, torch.Generator)
        return float(all(isinstance(one, kind) for one, kind in zip(kept, classes, strict=True)))

    assert bool(samples(draw, RandomStreams.from_system()).all())


def test_another_seed_of_torchs_generator_is_refused() -> None:
    def draw(index: int) -> float:
        return float(torch.rand((), generator=torch.default_generator.manual_seed(index)))

    with pytest.raises(PrivacyError, match="seeds torch's default generator itself"):
        samples(draw, RandomStreams.from_system())
