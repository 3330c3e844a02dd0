"""The law of Poisson samples, in memory that grows with the sample alone."""

import math
import tracemalloc
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from trainstack.backends.dp import randomness
from trainstack.backends.dp.randomness import DebugRandomness, Randomness, SeededRandomness, SystemRandomness
from trainstack.backends.dp.sampling import PoissonSampling, ranks_of
from trainstack.backends.processes.communicator import Communicator
from trainstack.backends.processes.world import World

RECORDS, RATE, STEPS = 50, 0.1, 4000


def _known(count: int) -> Any:
    """In place of the operating system's numbers, so that the test has the same result each time."""
    return KNOWN.random(count)


KNOWN = np.random.default_rng(3)
SOURCES: dict[str, Callable[[], Randomness]] = {
    "seeded": lambda: SeededRandomness(mask_key=7),
    "system": SystemRandomness,
    "debug": lambda: DebugRandomness(7),
}


@pytest.mark.parametrize("source", SOURCES)
def test_samples_are_those_of_independent_records(source: str, monkeypatch: pytest.MonkeyPatch) -> None:
    random = SOURCES[source]()
    monkeypatch.setattr(randomness, "_uniform", _known)
    monkeypatch.setattr(randomness, "_CHUNK", 7)  # several chunks for the gaps, and the law for many records
    chosen = torch.zeros(STEPS, RECORDS)
    for step in range(STEPS):
        index = random.mask(step, RECORDS, RATE)
        assert index.dtype is torch.int64
        assert index.tolist() == sorted(set(index.tolist()))
        chosen[step, index] = 1.0
    tolerance = 5 * math.sqrt(RATE * (1 - RATE) / STEPS)
    assert (chosen.mean(0) - RATE).abs().max() < tolerance
    variance = RECORDS * RATE * (1 - RATE)
    assert abs(float(chosen.sum(1).var()) / variance - 1) < 5 * math.sqrt(2 / STEPS)
    together = chosen.t() @ chosen / STEPS - RATE**2
    assert together.fill_diagonal_(0.0).abs().max() < 6 * math.sqrt(RATE**2 / STEPS)


@pytest.mark.parametrize("source", SOURCES)
@pytest.mark.parametrize("records", [10**9, 10**12])
def test_memory_grows_with_the_sample_not_the_data_set(source: str, records: int) -> None:
    random, expected = SOURCES[source](), 1000
    random.mask(1, 100, 0.5)  # imports
    tracemalloc.start()
    try:
        index = torch.cat([random.mask(step, records, expected / records) for step in range(20)])
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < 1e6, "bytes of numpy"
    assert abs(len(index) - 20 * expected) < 5 * math.sqrt(20 * expected)
    assert int(index.min()) >= 0
    assert int(index.max()) < records
    tenths = torch.bincount(index * 10 // records, minlength=10)
    assert (tenths - 2 * expected).abs().max() < 5 * math.sqrt(2 * expected)


@pytest.mark.parametrize("source", SOURCES)
def test_normal_numbers_have_the_given_scale(source: str) -> None:
    count = 20_000
    numbers = SOURCES[source]().normal(1, count, torch.device("cpu"), 3.0)
    assert numbers.shape == (count,)
    assert abs(float(numbers.mean())) < 6 * 3.0 / math.sqrt(count)
    assert abs(float(numbers.std()) / 3.0 - 1) < 6 / math.sqrt(2 * count)


@pytest.mark.parametrize("source", SOURCES)
def test_rates_of_0_and_1_take_none_and_all(source: str) -> None:
    assert SOURCES[source]().mask(0, 10, 1.0).tolist() == list(range(10))
    assert len(SOURCES[source]().mask(0, 10, 0.0)) == 0


def test_samples_are_equal_on_ranks_and_differ_by_step() -> None:
    one, other = SeededRandomness(mask_key=7), SeededRandomness(mask_key=7)
    assert one.mask(3, 1000, 0.3).tolist() == other.mask(3, 1000, 0.3).tolist()
    assert one.mask(4, 1000, 0.3).tolist() != other.mask(3, 1000, 0.3).tolist()
    other.begin()
    assert one.mask(3, 1000, 0.3).tolist() != other.mask(3, 1000, 0.3).tolist()


class _Chosen(SeededRandomness):
    """Draws a given sample."""

    def __init__(self, index: list[int]) -> None:
        super().__init__(mask_key=0)
        self._index = torch.tensor(index)

    def mask(self, step: int, records: int, rate: float) -> torch.Tensor:
        return self._index


def _parts(index: list[int]) -> list[list[int]]:
    """The sample `index` of 30 records, as three processes share it."""
    given = {"records": 30, "rate": 0.5, "rank_key": 5, "randomness": _Chosen(index)}
    calls = {"steps_allowed": lambda steps: steps, "exhausted_reason": str, "discard": lambda: None}
    worlds = [
        World(rank=rank, size=3, local_rank=0, device=torch.device("cpu"), comm=Communicator()) for rank in range(3)
    ]
    return [PoissonSampling(**given, **calls, world=world).draw(1).local.tolist() for world in worlds]


def test_the_process_of_a_record_depends_on_no_other_record() -> None:
    sample = list(range(0, 30, 2))
    whole = _parts(sample)
    assert sorted(index for part in whole for index in part) == sample
    for gone in sample:
        assert _parts([i for i in sample if i != gone]) == [[i for i in part if i != gone] for part in whole]


def test_processes_get_equal_shares_of_the_records_on_average() -> None:
    records = torch.arange(30_000)
    ranks = ranks_of(records, 3, key=5)
    assert (torch.bincount(ranks) - 10_000).abs().max() < 5 * math.sqrt(30_000 * 2 / 9)
    pairs = torch.bincount(3 * ranks[1:] + ranks[:-1], minlength=9)
    assert (pairs - 29_999 / 9).abs().max() < 5 * math.sqrt(30_000 * 8 / 81)
    for key in (6, 5 + (1 << 64)):
        alike = int((ranks_of(records, 3, key=key) == ranks).sum())
        assert abs(alike - 10_000) < 5 * math.sqrt(30_000 * 2 / 9)


def test_processes_that_draw_apart_keep_the_rate_of_each_record(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(randomness, "_uniform", _known)
    calls = {"steps_allowed": lambda steps: steps, "exhausted_reason": str, "discard": lambda: None}
    drawn = torch.zeros(RECORDS)
    for rank in range(3):
        world = World(rank=rank, size=3, local_rank=0, device=torch.device("cpu"), comm=Communicator())
        sampling = PoissonSampling(
            records=RECORDS, rate=RATE, world=world, rank_key=5, randomness=SystemRandomness(), **calls
        )
        own = torch.zeros(RECORDS)
        for step in range(STEPS):
            draw = sampling.draw(step)
            own[draw.local] += 1
            assert draw.total == RECORDS * RATE
        assert not (own * drawn).any(), "a record has one process"
        drawn += own
    assert (drawn / STEPS - RATE).abs().max() < 5 * math.sqrt(RATE * (1 - RATE) / STEPS)
