"""The law of Poisson samples of `SeededRandomness`."""

import math

import torch

from trainstack.backends.dp.randomness import SeededRandomness
from trainstack.backends.dp.sampling import PoissonSampling, draw_ranks
from trainstack.backends.processes.communicator import Communicator
from trainstack.backends.processes.world import World

RECORDS, RATE, STEPS = 50, 0.1, 4000


def test_samples_are_those_of_independent_records() -> None:
    random = SeededRandomness(mask_key=7)
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


def test_all_processes_draw_the_same_sample_and_each_step_and_start_another() -> None:
    one, other = SeededRandomness(mask_key=7), SeededRandomness(mask_key=7)
    assert one.mask(3, 1000, 0.3).tolist() == other.mask(3, 1000, 0.3).tolist()
    assert one.mask(4, 1000, 0.3).tolist() != other.mask(3, 1000, 0.3).tolist()
    other.begin()
    assert one.mask(3, 1000, 0.3).tolist() != other.mask(3, 1000, 0.3).tolist()
    assert one.mask(0, 10, 1.0).tolist() == list(range(10))
    assert len(one.mask(0, 10, 0.0)) == 0


class _Chosen(SeededRandomness):
    """Draws a given sample."""

    def __init__(self, index: list[int]) -> None:
        super().__init__(mask_key=0)
        self._index = torch.tensor(index)

    def mask(self, step: int, records: int, rate: float) -> torch.Tensor:
        return self._index


def _parts(index: list[int]) -> list[list[int]]:
    """The sample `index` of 30 records, as three processes share it."""
    given = {"records": 30, "rate": 0.5, "ranks": draw_ranks(30, 3, key=5), "randomness": _Chosen(index)}
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
    counts = torch.bincount(draw_ranks(30_000, 3, key=5).long())
    assert (counts - 10_000).abs().max() < 5 * math.sqrt(30_000 * 2 / 9)
    assert not torch.equal(draw_ranks(100, 3, key=5), draw_ranks(100, 3, key=6))
