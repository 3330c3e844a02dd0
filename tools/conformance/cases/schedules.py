"""A schedule steps once for each optimizer step."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from tools.conformance.adapter import Adapter, Verdict
from tools.conformance.case import case, passed, wrong
from tools.conformance.process import in_processes
from tools.conformance.task import Net, Samples, make_task


@case("scheduler ticks under ddp")
def ticks_ddp(adapter: Adapter, name: str, folder: Path) -> Verdict:
    """24 samples on 2 processes in batches of 4: a linear decay over the run has the factors 1, 2/3, 1/3."""
    rates = in_processes(2, name, "schedules:decay", folder=str(folder))[0]
    return _compare(rates, [0.1, 0.2 / 3, 0.1 / 3])


def decay(adapter: Adapter, folder: str) -> list[float]:
    """In each process."""
    task = make_task(Path(folder), data=Samples(24), processes=2, decay="linear")
    adapter.train(task)
    return task.rates


@case("scheduler ticks under skipped AMP steps")
def ticks_amp(adapter: Adapter, name: str, folder: Path) -> Verdict:
    """float16 with a loss scaler; step 3 of 6 overflows and is skipped: the schedule waits, its five ticks follow the
    five steps."""
    passes = 0

    def spy(net: Net, x: Tensor) -> Any:
        nonlocal passes
        passes += 1
        return _Steep.apply if passes == 3 else None

    task = make_task(folder, data=Samples(24, dtype=torch.float32), fp16=True, decay="hyperbolic")
    task.model.spy = spy
    adapter.train(task)
    return _compare(task.rates, [0.1 / step for step in range(1, 6)])


class _Steep(torch.autograd.Function):
    """Returns its input, with a gradient that overflows in float16."""

    @staticmethod
    def forward(ctx: Any, values: Tensor) -> Tensor:
        return values.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:  # type: ignore[override]
        return gradient * 1e8


def _compare(rates: list[float], expected: list[float]) -> Verdict:
    if len(rates) == len(expected) and all(abs(a - b) < 1e-9 for a, b in zip(rates, expected, strict=True)):
        return passed()
    return wrong(f"factors {_factors(rates)} instead of {_factors(expected)}")


def _factors(rates: list[float]) -> str:
    return ", ".join(f"{rate / 0.1:.2f}" for rate in rates)
