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

from trainstack.backends.dp.gaussian_noise import add_fast_normal, fast_normal
from trainstack.errors import PrivacyError

_CHUNK = 1 << 20


class Randomness(ABC):
    """Where masks and noise come from.

    Attributes:
        same_on_all_ranks: whether all processes draw the same masks.
    """

    same_on_all_ranks = True

    def begin(self) -> None:  # noqa: B027 - most keep nothing from step to step
        """Steps are going to be drawn from here on, on all processes; those drawn ahead before were not made."""

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise PrivacyError(
            "a private run was copied or pickled: two runs with the same noise reveal what it hides. Save a "
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
    """Generators seeded by the operating system: Philox for masks; for noise SFC64, on other devices than the CPU
    torch's own.

    Each mask has a stream of its own, so that processes which draw ahead by different numbers of steps, and are then
    interrupted, still draw alike afterwards; and no stream is used twice.

    Args:
        mask_key: 128 bits, the same on all processes.
    """

    def __init__(self, mask_key: int) -> None:
        self._mask_key = mask_key
        self._times_begun = 0
        self._process = os.getpid()
        # torch's generator for the CPU takes no more than 32 bits of a seed: few enough to try out
        self._host = np.random.Generator(np.random.SFC64(np.random.SeedSequence(secrets.randbits(256), pool_size=8)))
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
            return fast_normal(self._host, count, scale)
        if device not in self._noise:
            self._noise[device] = torch.Generator(device).manual_seed(secrets.randbits(64))
        return torch.randn(count, generator=self._noise[device], device=device, dtype=torch.float32).mul_(scale)

    def add_normal(self, step: int, sums: Tensor, scale: float) -> None:
        if sums.device.type != "cpu":
            super().add_normal(step, sums, scale)
            return
        self._check_not_forked()
        add_fast_normal(self._host, sums, scale)

    def _check_not_forked(self) -> None:
        if os.getpid() != self._process:
            raise PrivacyError(
                "a private run continues in a forked process: it would have the same noise as its parent, and two runs "
                "with the same noise reveal what it hides. Make the Trainer in the process that trains."
            )


class SystemRandomness(Randomness):
    """Every single number from the operating system's entropy.

    Noise is made in float64 by the method of Box and Muller, four numbers summed and halved, which hides the grid of
    floating-point numbers (Holohan and Braghin: Secure Random Sampling in Differential Privacy, 2021).
    """

    same_on_all_ranks = False

    def mask(self, step: int, records: int, rate: float) -> Tensor:
        return _chosen(_uniform(records) < rate)

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
        return _chosen(np.random.default_rng([self._seed, step, 0]).random(records) < rate)

    def normal(self, step: int, count: int, device: torch.device, scale: float = 1.0) -> Tensor:
        noise = np.random.default_rng([self._seed, step, 1]).standard_normal(count, dtype=np.float32)
        return torch.from_numpy(noise).to(device).mul_(scale)


def _poisson_sample(generator: np.random.Generator, records: int, rate: float) -> Tensor:
    """As if each record was chosen with probability `rate`: a binomial number of them, all sets of which are alike.

    The work grows with the sample and not with the data set.
    """
    count = generator.binomial(records, rate)
    chosen = generator.choice(records, count, replace=False, shuffle=False)
    return torch.from_numpy(np.sort(chosen)).long()


def _chosen(mask: Any) -> Tensor:
    return torch.from_numpy(np.flatnonzero(mask)).long()


def _uniform(count: int) -> Any:
    """Uniform on [0, 1) with 53 random bits, float64."""
    bits = np.frombuffer(os.urandom(8 * count), dtype=np.uint64)
    return (bits >> np.uint64(11)).astype(np.float64) * 2.0**-53
