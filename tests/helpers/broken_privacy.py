"""Private training that does not keep its promise, in ten ways; `python -m tests.helpers.broken_privacy` audits each."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from trainstack.backends.dp import DifferentialPrivacyArguments, preparing
from trainstack.backends.dp.clipping import FlatClipper
from trainstack.backends.dp.mechanism import Mechanism
from trainstack.backends.dp.poisson import PoissonSampling
from trainstack.backends.dp.randomness import SeededRandomness
from trainstack.backends.sampling import Draw


def scaled_noise(factor: Callable[[Mechanism], float]) -> AbstractContextManager[Any]:
    real = Mechanism._noise

    def noise(self: Mechanism, *given: Any) -> Tensor:
        return real(self, *given) * factor(self)

    return mock.patch.object(Mechanism, "_noise", noise)


def drawn(draw: Callable[[PoissonSampling, int, Draw], Tensor]) -> AbstractContextManager[Any]:
    """What `draw` makes of a correct sample, in its place."""
    real = PoissonSampling.draw

    def patched(self: PoissonSampling, step: int) -> Draw:
        honest = real(self, step)
        return Draw(mine=draw(self, step, honest), total=honest.total)

    return mock.patch.object(PoissonSampling, "draw", patched)


class ReusedNoise(SeededRandomness):
    """Draws noise once."""

    def normal(self, step: int, count: int, device: torch.device) -> Tensor:
        if not hasattr(self, "kept"):
            self.kept = super().normal(step, count, device)
        return self.kept.clone()


class LooseClipper(FlatClipper):
    """Clips to ten times the norm to which the noise is scaled."""

    def _rows(self, squares: Tensor, joint: Tensor, finite: Tensor) -> tuple[Tensor, ...]:
        return tuple(10 * row for row in super()._rows(squares, joint / 10, finite))


def doubled_rate() -> AbstractContextManager[Any]:
    real = SeededRandomness.mask

    def mask(self: SeededRandomness, step: int, records: int, rate: float) -> Tensor:
        return real(self, step, records, 2 * rate)

    return mock.patch.object(SeededRandomness, "mask", mask)


def in_order(sampling: PoissonSampling, step: int, honest: Draw) -> Tensor:
    batch = round(sampling._records * sampling._rate)
    return (torch.arange(batch) + (step - 1) * batch) % sampling._records


def the_first_again(sampling: Any, step: int, honest: Draw) -> Tensor:
    if not hasattr(sampling, "first"):
        sampling.first = honest.mine
    first: Tensor = sampling.first
    return first


BROKEN: dict[str, tuple[Callable[[], AbstractContextManager[Any]], set[str]]] = {
    "no noise": (lambda: scaled_noise(lambda _: 0.0), {"noise", "canaries"}),
    "noise / batch": (
        lambda: scaled_noise(lambda mechanism: 1 / mechanism.accountant.plan.expected_batch_size),
        {"noise", "canaries"},
    ),
    "half the noise": (lambda: scaled_noise(lambda _: 0.5), {"noise"}),
    "0.8 of the noise": (lambda: scaled_noise(lambda _: 0.8), {"noise"}),
    "the same noise again": (lambda: mock.patch.object(preparing, "SeededRandomness", ReusedNoise), {"noise"}),
    "clipped to 10 C": (lambda: mock.patch.object(preparing, "FlatClipper", LooseClipper), {"sampling", "canaries"}),
    "every record twice": (lambda: drawn(lambda _, step, honest: honest.mine.repeat(2)), {"sampling"}),
    "a fixed order": (lambda: drawn(in_order), {"sampling"}),
    "the same sample again": (lambda: drawn(the_first_again), {"sampling"}),
    "doubled rate": (doubled_rate, {"sampling"}),
}
"""How to break it, and the probes that must see it, each on its own."""


@contextmanager
def broken(how: str) -> Iterator[None]:
    """A block in which private training is broken in this way."""
    with BROKEN[how][0]():
        yield


def main() -> None:
    """Print which probes see what."""
    from trainstack.backends.dp.audit import audit

    args = DifferentialPrivacyArguments(delta=1e-6, noise_multiplier=2.0)
    probes = ("noise", "sampling", "canaries")
    write = sys.stdout.write
    write(f"{'':22}" + "".join(f"{probe:>10}" for probe in probes) + "   epsilon at least (stated)\n")
    for how in (None, *BROKEN):
        with BROKEN[how][0]() if how else mock.MagicMock():
            report = audit(args)
        seen = {finding.probe for finding in report.broken}
        marks = "".join(f"{'BROKEN' if probe in seen else '-':>10}" for probe in probes)
        bounds = f"{report.epsilon_at_least:.2f} or {report.epsilon_at_least_tradeoff:.2f}"
        write(f"{how or 'correct':22}{marks}   {bounds} ({report.epsilon_claimed:.2f})\n")


if __name__ == "__main__":
    main()
