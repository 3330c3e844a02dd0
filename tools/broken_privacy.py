"""Break private training in 16 ways, and audit each; `make bench ARGS=audit` runs it.

A table shows the probes that find each fault, and the false alarms of audits of correct training.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from trainstack.backends.dp import DifferentialPrivacyArguments, setup
from trainstack.backends.dp.budget import Accountant
from trainstack.backends.dp.clipping import AutomaticClipper, FlatClipper
from trainstack.backends.dp.mechanism import Mechanism
from trainstack.backends.dp.randomness import SeededRandomness
from trainstack.backends.dp.sampling import PoissonSampling
from trainstack.backends.workload import Draw

Patch = Callable[[], AbstractContextManager[Any]]

PROBES = ("noise", "account", "sampling", "canaries")


def _scaled_noise(factor: Callable[[Mechanism], float]) -> Patch:
    return _changed_noise(lambda mechanism, noise: noise * factor(mechanism))


def _drawn(draw: Callable[[Any, int, Tensor], Tensor]) -> Patch:
    """A patch that replaces each sample by `draw(sampling, step, sample)`."""
    real = PoissonSampling.draw

    def patched(self: PoissonSampling, step: int) -> Draw:
        correct = real(self, step)
        return Draw(local=draw(self, step, correct.local), total=correct.total)

    return lambda: mock.patch.object(PoissonSampling, "draw", patched)


def _in_order(sampling: Any, step: int, correct: Tensor) -> Tensor:
    batch = round(sampling._records * sampling._rate)
    return (torch.arange(batch) + (step - 1) * batch) % sampling._records


def _the_first_again(sampling: Any, step: int, correct: Tensor) -> Tensor:
    if not hasattr(sampling, "first"):
        sampling.first = correct
    first: Tensor = sampling.first
    return first


class _ReusedNoise(SeededRandomness):
    """Draws noise only once, for all steps."""

    def normal(self, step: int, count: int, device: torch.device, scale: float = 1.0) -> Tensor:
        if not hasattr(self, "kept"):
            self.kept = super().normal(step, count, device, scale)
        return self.kept.clone()

    def add_normal(self, step: int, sums: Tensor, scale: float) -> None:
        sums += self.normal(step, len(sums), sums.device, scale)


class _LooseClipper(FlatClipper):
    """Clips to ten times the norm to which the noise is scaled."""

    def _rows(self, squares: Tensor, joint: Tensor, finite: Tensor) -> tuple[Tensor, ...]:
        return tuple(10 * row for row in super()._rows(squares, joint / 10, finite))


class _DoubledRate(SeededRandomness):
    def mask(self, step: int, records: int, rate: float) -> Tensor:
        return super().mask(step, records, 2 * rate)


class _LooseLastLayer(AutomaticClipper):
    """Divides the last parameter's gradient by a third of the norm."""

    def _rows(self, squares: Tensor, joint: Tensor, finite: Tensor) -> tuple[Tensor, ...]:
        rows = super()._rows(squares, joint, finite)
        return (*rows[:-1], 3 * rows[-1])


class _HugeExempt(FlatClipper):
    """Does not clip gradients longer than a million times the limit."""

    def _rows(self, squares: Tensor, joint: Tensor, finite: Tensor) -> tuple[Tensor, ...]:
        return tuple(torch.where(joint > 1e6 * self.limit, 1.0, row) for row in super()._rows(squares, joint, finite))


def _half_charged() -> AbstractContextManager[Any]:
    real = Accountant.charge

    def charge(self: Any) -> None:
        self.calls = getattr(self, "calls", 0) + 1
        if self.calls % 2:
            real(self)

    return mock.patch.object(Accountant, "charge", charge)


def _changed_noise(change: Callable[[Mechanism, Tensor], Tensor]) -> Patch:
    """A patch that replaces noise by `change(mechanism, noise)`."""
    real = Mechanism._add_noise

    def add_noise(self: Mechanism, flat: Tensor) -> None:
        noise = torch.zeros_like(flat)
        real(self, noise)
        flat += change(self, noise)

    return lambda: mock.patch.object(Mechanism, "_add_noise", add_noise)


def _none_on_the_last(mechanism: Mechanism, noise: Tensor) -> Tensor:
    size = sum(p.numel() for p in mechanism.mode.trained)
    noise[size - mechanism.mode.trained[-1].numel() : size] = 0
    return noise


def _one_vector(mechanism: Mechanism, noise: Tensor) -> Tensor:
    """The same numbers for each parameter, from its first weight."""
    sizes = [p.numel() for p in mechanism.mode.trained]
    vector = noise[: max(sizes)].clone()
    return torch.cat([*(vector[:size] for size in sizes), noise[sum(sizes) :]])


def _silent_count(mechanism: Mechanism, noise: Tensor) -> Tensor:
    noise[-1] = 0
    return noise


BROKEN: dict[str, tuple[Patch, set[str]]] = {
    "no noise": (_scaled_noise(lambda _: 0.0), {"noise", "canaries"}),
    "noise / batch": (
        _scaled_noise(lambda mechanism: 1 / mechanism.accountant.plan.expected_batch_size),
        {"noise", "canaries"},
    ),
    "half the noise": (_scaled_noise(lambda _: 0.5), {"noise"}),
    "0.8 of the noise": (_scaled_noise(lambda _: 0.8), {"noise"}),
    "the same noise again": (lambda: mock.patch.object(setup, "SeededRandomness", _ReusedNoise), {"noise"}),
    "clipped to 10 C": (lambda: mock.patch.object(setup, "FlatClipper", _LooseClipper), {"sampling", "canaries"}),
    "every record twice": (_drawn(lambda _, step, correct: correct.repeat(2)), {"sampling"}),
    "a fixed order": (_drawn(_in_order), {"sampling"}),
    "the same sample again": (_drawn(_the_first_again), {"sampling"}),
    "doubled rate": (lambda: mock.patch.object(setup, "SeededRandomness", _DoubledRate), {"sampling"}),
    "last layer to 3 C": (lambda: mock.patch.object(setup, "AutomaticClipper", _LooseLastLayer), {"sampling"}),
    "above 1e6 C not clipped": (lambda: mock.patch.object(setup, "FlatClipper", _HugeExempt), {"sampling"}),
    "half the steps charged": (_half_charged, {"account"}),
    "last layer without noise": (_changed_noise(_none_on_the_last), {"noise"}),
    "one vector for all layers": (_changed_noise(_one_vector), {"noise"}),
    "a count without noise": (_changed_noise(_silent_count), {"noise"}),
}
"""Patches by name, each with the probes that must find the fault separately."""

SETTINGS: dict[str, dict[str, str]] = {
    "last layer to 3 C": {"clipping": "automatic"},
    "a count without noise": {"clipping": "adaptive"},
}
"""Settings for faults that the default settings do not show."""


CORRECT: tuple[dict[str, Any], ...] = (
    {},
    {"clipping": "automatic"},
    {"clipping": "adaptive"},
    {"clipping": "adaptive", "per_sample_max_grad_norm": 0.1, "count_noise_multiplier": 60.0, "target_quantile": 0.8},
    {"clipping": "per_layer"},
    {"clipping": "per_layer", "per_sample_max_grad_norm": (0.5, 2.0)},
    {"grad_mode": "vmap", "per_sample_max_grad_norm": 30.0},
    {"grad_mode": "hooks", "noise_multiplier": 0.7},
    {"secure": True, "noise_multiplier": 8.0},
    {"noise_multiplier": None, "target_epsilon": 3.0, "accountant": "rdp"},
)
"""Settings of correct training, in which an audit must not find a fault."""


@contextmanager
def broken(how: str) -> Iterator[None]:
    """A block in which private training has the fault `how` of `BROKEN`."""
    with BROKEN[how][0]():
        yield


def main(argv: Sequence[str] | None = None) -> int:
    """Print the table. Returns 1 if a fault is not found, or if correct training is reported as broken."""
    from trainstack.auditing import audit

    parser = argparse.ArgumentParser(prog="python -m tools.broken_privacy", description=__doc__)
    parser.add_argument("--runs", type=int, default=40, help="number of audits of correct training")
    parser.add_argument("--full", action="store_true", help="audits of the level 'full'")
    options = parser.parse_args(argv)
    args = DifferentialPrivacyArguments(delta=1e-6, noise_multiplier=2.0)
    level = "full" if options.full else "quick"

    print(f"{'':26}" + "".join(f"{probe:10}" for probe in PROBES) + "epsilon at least (stated)  smallest p  seconds")
    escaped = 0
    for how in BROKEN:
        with broken(how):
            settings = replace(args, **SETTINGS.get(how, {}))
            caught = bool(_row(how, lambda settings=settings: audit(settings, level=level)))
        escaped += not caught
    blamed = []
    for i in range(options.runs):
        settings = replace(args, **CORRECT[i % len(CORRECT)])
        blamed.append(_row(f"correct, audit {i + 1}", lambda settings=settings: audit(settings, level=level)))
    summary = f"{len(BROKEN) - escaped} of {len(BROKEN)} broken ones caught"
    print(f"{summary}; {sum(map(bool, blamed))} of {options.runs} correct ones blamed")
    return int(bool(escaped or any(blamed)))


def _row(name: str, audit: Callable[[], Any]) -> set[str]:
    began = time.perf_counter()
    report = audit()
    took = time.perf_counter() - began
    seen = {finding.probe for finding in report.broken}
    marks = "".join(f"{'BROKEN' if probe in seen else '-':10}" for probe in PROBES)
    bounds = f"{report.epsilon_at_least:.2f} or {report.epsilon_at_least_tradeoff:.2f} ({report.epsilon_claimed:.2f})"
    least = min(finding.p_value for finding in report.findings)
    print(f"{name:26}{marks}{bounds:25}  {least:10.1g}  {took:7.1f}", flush=True)
    return seen


if __name__ == "__main__":
    sys.exit(main())
