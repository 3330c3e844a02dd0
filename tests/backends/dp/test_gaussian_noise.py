"""Noise is normal up to its tails and has no grid; no stream of masks is used twice."""

from __future__ import annotations

import math
import sys

import numpy as np
import pytest
import torch
from scipy import stats

from trainstack.backends.dp.gaussian_noise import Words, _redraw_small, add_fast_normal, fast_normal
from trainstack.backends.dp.randomness import SeededRandomness, SystemRandomness, secure_words
from trainstack.errors import PrivacyError

CPU = torch.device("cpu")


def words(seed: int = 0) -> Words:
    return np.random.SFC64(seed).random_raw


def test_moments_and_distribution_of_the_noise_are_normal() -> None:
    count = 2_000_000
    drawn = fast_normal(words(), count, 3.0).numpy().astype(np.float64) / 3.0
    for power, expected in enumerate([0.0, 1.0, 0.0, 3.0, 0.0, 15.0], start=1):
        spread = math.sqrt(math.prod(range(1, 2 * power, 2)) / count)  # of the mean of z^power, or a little more
        assert abs(float(np.mean(drawn**power)) - expected) < 5 * spread
    assert stats.kstest(drawn[:500_000], "norm").pvalue > 1e-4
    assert abs(np.corrcoef(drawn[: count // 2], drawn[count // 2 :])[0, 1]) < 5 / math.sqrt(count / 2)


def test_the_tails_have_as_many_numbers_as_expected() -> None:
    random, found, count = words(1), np.zeros(3), 0
    for _ in range(16):
        drawn = fast_normal(random, 1 << 20, 1.0).abs_()
        found += [int((drawn > far).sum()) for far in (4.0, 4.5, 5.0)]
        count += 1 << 20
    expected = [count * math.erfc(far / math.sqrt(2)) for far in (4.0, 4.5, 5.0)]
    assert all(abs(a - b) < 5 * math.sqrt(b) + 1 for a, b in zip(found, expected, strict=True))


def test_tiny_uniform_numbers_are_drawn_again_without_a_floor() -> None:
    """2^-16, below which numbers get new bits, is 4.7 standard deviations; 24 bits end at 5.8."""
    far, random = np.zeros(200_000, dtype=np.float32), words(2)
    _redraw_small(random, far)
    assert 0 < far.min() < 2.0**-32
    assert stats.kstest(far / 2.0**-16, "uniform").pvalue > 1e-4  # uniform below 2^-16 too


@pytest.mark.parametrize("scale", [1.0, 1.1, 0.3])
def test_all_float32_results_are_reached(scale: float) -> None:
    """float32 numbers that are multiplied by 1.1 leave out one result in ten around 1.5."""
    low = np.float32(1.5)
    drawn = fast_normal(words(3), 3_000_000, scale).numpy()
    # The last 6 bits of numbers in a binade are nearly uniform.
    bits = drawn[(drawn >= low * scale / 1.5) & (drawn < low * scale / 1.5 * 1.5)].view(np.int32) & 63
    assert stats.chisquare(np.bincount(bits, minlength=64)).pvalue > 1e-4


@pytest.mark.parametrize("scale", [1.0, 0.3])
def test_results_near_zero_have_no_grid(scale: float) -> None:
    """There the radius and cosine have fewer bits than the result, unless their product is fused with the dither."""
    drawn = fast_normal(words(5), 6_000_000, scale).numpy()
    low, high = np.float32(0.01 * scale), np.float32(0.013 * scale)
    bits = drawn[(drawn >= low) & (drawn < high)].view(np.int32) & 63
    assert stats.chisquare(np.bincount(bits, minlength=64)).pvalue > 1e-4


@pytest.mark.parametrize("scale", [1e-18, 1e-30, 1e30])
def test_noise_of_any_size_is_normal(scale: float) -> None:
    drawn = fast_normal(words(6), 100_000, scale).numpy().astype(np.float64)
    assert stats.kstest(drawn / scale, "norm").pvalue > 1e-4


def test_noise_that_float32_would_round_to_nothing_is_refused() -> None:
    with pytest.raises(PrivacyError, match="too small for float32"):
        fast_normal(words(), 10, 1e-35)


def test_a_python_without_openssl_has_another_secure_generator(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ssl", None)
    draw = secure_words()
    assert draw(4).dtype == np.uint64
    assert not np.array_equal(draw(4), draw(4))


def test_zero_noise_is_zero_and_odd_counts_work() -> None:
    assert fast_normal(words(), 5, 0.0).tolist() == [0.0] * 5
    assert [len(fast_normal(words(), count, 1.0)) for count in (0, 1, 2, 7, (1 << 18) + 3)] == [
        0,
        1,
        2,
        7,
        (1 << 18) + 3,
    ]


def test_system_noise_is_scaled_in_float64() -> None:
    drawn = SystemRandomness().normal(1, 50_000, CPU, 1.1)
    assert drawn.dtype is torch.float64
    assert stats.kstest(drawn.numpy() / 1.1, "norm").pvalue > 1e-4


def test_no_stream_of_masks_is_used_twice() -> None:
    first, second = SeededRandomness(7), SeededRandomness(7)
    before = first.mask(5, 1000, 0.5)
    assert torch.equal(before, second.mask(5, 1000, 0.5))
    assert not torch.equal(before, first.mask(6, 1000, 0.5))
    first.begin()
    second.begin()
    again = first.mask(5, 1000, 0.5)
    assert not torch.equal(before, again)
    assert torch.equal(again, second.mask(5, 1000, 0.5))


@pytest.mark.parametrize("count", [0, 1, 5, (1 << 17) + 3])
def test_added_noise_equals_drawn_noise(count: int) -> None:
    sums = torch.ones(count)
    add_fast_normal(words(4), sums, 2.0)
    assert torch.equal(sums, fast_normal(words(4), count, 2.0) + 1.0)
