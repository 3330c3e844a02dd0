"""Random numbers for privacy, drawn from the operating system and never stored."""

from __future__ import annotations

import math
import os
import secrets
from abc import ABC, abstractmethod
from typing import Any

import numpy as np
import torch
from torch import Tensor

from trainstack.backends.dp.gaussian_noise import Words, add_fast_normal, fast_normal
from trainstack.errors import PrivacyError

_CHUNK = 1 << 20


class Randomness(ABC):
    """The source of masks and noise.

    Attributes:
        same_on_all_ranks: whether all processes draw the same masks.
    """

    same_on_all_ranks = True

    def begin(self) -> None:  # noqa: B027 - most keep nothing from step to step
        """Steps are going to be drawn from here on, on all processes; those drawn ahead before were not made."""

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise PrivacyError(
            "a private run was copied or pickled: two runs with the same noise reveal the data that it hides. Save a "
            "checkpoint, and make a separate Trainer for each run."
        )

    @abstractmethod
    def mask(self, step: int, records: int, rate: float) -> Tensor:
        """The indices (int64, ascending) of a Poisson sample: each of `records` with probability `rate`, alone."""

    @abstractmethod
    def normal(self, step: int, count: int, device: torch.device, scale: float = 1.0) -> Tensor:
        """`count` independent normal numbers of mean 0 and standard deviation `scale`, float32 or float64 on `device`.

        To multiply float32 numbers by `scale` afterwards would leave out up to half of the float32 results.
        """

    def add_normal(self, step: int, sums: Tensor, scale: float) -> None:
        """Add `normal(step, len(sums), sums.device, scale)` to `sums`, float32 of one dimension."""
        sums += self.normal(step, len(sums), sums.device, scale)


class SeededRandomness(Randomness):
    """Generators seeded by the operating system: Philox for masks; for noise that of OpenSSL, on other devices than the
    CPU torch's own.

    Each mask has a separate stream. Processes that draw ahead by different numbers of steps, and are then interrupted,
    therefore draw the same numbers afterwards, and no stream is used twice.

    Args:
        mask_key: 128 bits, the same on all processes.
    """

    def __init__(self, mask_key: int) -> None:
        self._mask_key = mask_key
        self._times_begun = 0
        self._process = os.getpid()
        self._words = secure_words()
        self._noise: dict[torch.device, torch.Generator] = {}

    def begin(self) -> None:
        self._times_begun += 1

    def mask(self, step: int, records: int, rate: float) -> Tensor:
        self._check_not_forked()
        stream = np.random.Philox(key=self._mask_key, counter=[0, 0, step, self._times_begun])
        return _poisson_sample(np.random.Generator(stream), records, rate)

    def normal(self, step: int, count: int, device: torch.device, scale: float = 1.0) -> Tensor:
        self._check_not_forked()
        if device.type == "cpu":
            return fast_normal(self._words, count, scale)
        if device not in self._noise:
            self._noise[device] = torch.Generator(device).manual_seed(secrets.randbits(64))
        return torch.randn(count, generator=self._noise[device], device=device, dtype=torch.float32).mul_(scale)

    def add_normal(self, step: int, sums: Tensor, scale: float) -> None:
        if sums.device.type != "cpu":
            super().add_normal(step, sums, scale)
            return
        self._check_not_forked()
        add_fast_normal(self._words, sums, scale)

    def _check_not_forked(self) -> None:
        if os.getpid() != self._process:
            raise PrivacyError(
                "a private run continues in a forked process: it would have the same noise as its parent, and two runs "
                "with the same noise reveal the data that it hides. Make the Trainer in the process that trains."
            )


def secure_words() -> Words:
    """The random numbers of OpenSSL: its generator is cryptographic, is seeded by the operating system again and again,
    and takes two thirds of the time of SFC64. In a Python without OpenSSL, an SFC64 with 256 bits of the operating
    system. (torch's generator for the CPU takes no more than 32 bits of a seed: few enough to try out.)
    """
    try:
        from ssl import RAND_bytes
    except ImportError:  # some builds of Python
        return np.random.SFC64(np.random.SeedSequence(secrets.randbits(256), pool_size=8)).random_raw

    return lambda count: np.frombuffer(RAND_bytes(8 * count), dtype=np.uint64)


class SystemRandomness(Randomness):
    """Every single number from the operating system's entropy.

    Noise is made in float64 by the method of Box and Muller, four numbers summed and halved, which hides the grid of
    floating-point numbers (Holohan and Braghin: Secure Random Sampling in Differential Privacy, 2021).
    """

    same_on_all_ranks = False

    def mask(self, step: int, records: int, rate: float) -> Tensor:
        return _sample_by_gaps(records, rate)

    def normal(self, step: int, count: int, device: torch.device, scale: float = 1.0) -> Tensor:
        out = np.empty(count)
        for begin in range(0, count, _CHUNK):
            part = out[begin : begin + _CHUNK]
            radii = (np.sqrt(-2.0 * np.log1p(-_uniform(len(part)))) for _ in range(4))  # 1 - u is in (0, 1]
            part[:] = sum(radius * np.cos(2.0 * math.pi * _uniform(len(part))) for radius in radii) * (scale / 2)
        return torch.from_numpy(out).to(device)


class DebugRandomness(Randomness):
    """Reproducible, and therefore not private: everything is a function of a seed and the step."""

    def __init__(self, seed: int) -> None:
        self._seed = seed

    def mask(self, step: int, records: int, rate: float) -> Tensor:
        generator = np.random.default_rng([self._seed, step, 0])
        if records > _CHUNK:
            return _poisson_sample(generator, records, rate)
        return torch.from_numpy(np.flatnonzero(generator.random(records) < rate)).long()

    def normal(self, step: int, count: int, device: torch.device, scale: float = 1.0) -> Tensor:
        noise = np.random.default_rng([self._seed, step, 1]).standard_normal(count, dtype=np.float32)
        return torch.from_numpy(noise).to(device).mul_(scale)


def _poisson_sample(generator: np.random.Generator, records: int, rate: float) -> Tensor:
    """Choose each record with probability `rate`: a binomial number of records, all sets of which are equally probable.

    Work and memory grow with the sample and not with the data set: numpy 2.4 chooses by Floyd's method where the sample
    is less than a twentieth of the records, and shuffles the end of an array of all records otherwise.
    """
    count = generator.binomial(records, rate)
    chosen = generator.choice(records, count, replace=False, shuffle=False)
    return torch.from_numpy(np.sort(chosen)).long()


def _sample_by_gaps(records: int, rate: float) -> Tensor:
    """A Poisson sample by the records left out before each one chosen, from the system's entropy.

    Whether a record is chosen does not depend on those before it, so each gap has the geometric law: it is at least k
    with probability `(1 - rate)**k`. It is `floor(log(u) / log(1 - rate))` for a uniform u in (0, 1]. As with a
    comparison of u with `rate` for each record, probabilities are exact to within the 53 bits of u.
    """
    if rate >= 1 or rate <= 0:
        return torch.arange(records if rate >= 1 else 0)
    log_rest, found, last = math.log1p(-rate), list[Any](), -1
    while last < records:
        left = (records - last) * rate
        count = min(_CHUNK, int(left + 4 * math.sqrt(left)) + 8)
        # A gap beyond the last record need not be known. Up to 2**42 records the sum of so many gaps fits.
        gaps = np.minimum(np.log1p(-_uniform(count)) / log_rest, float(records)).astype(np.int64)
        found.append(last + np.cumsum(gaps + 1))
        last = int(found[-1][-1])
    chosen = np.concatenate(found)
    return torch.from_numpy(chosen[chosen < records])


def _uniform(count: int) -> Any:
    """Uniform on [0, 1) with 53 random bits, float64."""
    bits = np.frombuffer(os.urandom(8 * count), dtype=np.uint64)
    return (bits >> np.uint64(11)).astype(np.float64) * 2.0**-53
