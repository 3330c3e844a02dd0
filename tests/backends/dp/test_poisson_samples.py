"""The law of Poisson samples of `SeededRandomness`."""

import math

import torch

from trainstack.backends.dp.randomness import SeededRandomness

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
