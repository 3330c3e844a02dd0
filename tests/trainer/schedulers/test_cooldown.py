"""The cosine schedule with warm-up, cool-down and absolute rates, value by value."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import nn

import trainstack as ts
from trainstack.trainer.schedulers import warmup_cosine, warmup_linear


def rates(make: Any, lrs: tuple[float, ...] = (0.1,), steps: int = 20, **options: Any) -> list[list[float]]:
    groups = [{"params": [nn.Parameter(torch.zeros(1))], "lr": lr} for lr in lrs]
    optimizer = torch.optim.SGD(groups)
    scheduler = make(optimizer, steps, **options)
    seen = []
    for _ in range(steps + 3):
        seen.append([group["lr"] for group in optimizer.param_groups])
        if len(seen) == 17:  # within the cool-down
            state, scheduler = scheduler.state_dict(), make(optimizer, steps, **options)
            scheduler.load_state_dict(state)
        optimizer.step()
        scheduler.step()
    return seen


@pytest.mark.spec("PA-17")
def test_the_cosine_with_cool_down_has_its_documented_values() -> None:
    warm, cool, start, final, peak = 5, 5, 1e-6, 1e-4, 0.1
    got = rates(warmup_cosine, warmup=warm, cooldown=cool, start_lr=start, final_lr=final, k_decay=2.0)
    for step, (rate,) in enumerate(got):
        if step < warm:
            expected = start + (peak - start) * step / warm
        elif step < 20 - cool:
            progress = ((step - warm) / (20 - cool - warm)) ** 2
            expected = final + (peak - final) * 0.5 * (1 + math.cos(math.pi * progress))
        else:
            expected = final
        assert rate == pytest.approx(expected, rel=1e-9)


@pytest.mark.spec("PA-17")
def test_absolute_rates_hold_for_all_groups() -> None:
    got = rates(warmup_linear, (0.1, 0.2), warmup=0.25, cooldown=0.25, start_lr=0.01, final_lr=0.05)
    assert got[0] == pytest.approx([0.01, 0.01])
    assert got[5] == pytest.approx([0.1, 0.2])
    assert got[15:] == [pytest.approx([0.05, 0.05])] * 8
    assert rates(warmup_cosine, warmup=5) == rates(warmup_cosine, warmup=5, cooldown=0, k_decay=1)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"final_lr": 0.2}, "from 0.0 to that of the optimizer"),
        ({"final_lr": 0.01, "final_ratio": 0.1}, "contradict each other"),
        ({"warmup": 15, "cooldown": 5}, "leave no step of total_steps=20"),
        ({"cooldown": 21}, "a whole number of steps from 0"),
        ({"k_decay": 0.0}, "k_decay=0.0: write a number above 0"),
    ],
)
def test_impossible_rates_and_lengths_are_refused(options: Any, message: str) -> None:
    with pytest.raises(ts.ConfigurationError, match=message):
        rates(warmup_cosine, **options)
