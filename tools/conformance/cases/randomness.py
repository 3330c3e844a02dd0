"""The order of samples, and the random numbers of user code."""

from __future__ import annotations

import random
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from tools.conformance.adapter import Adapter, Verdict
from tools.conformance.case import case, passed, wrong
from tools.conformance.process import in_processes
from tools.conformance.task import Net, Samples, make_task, seed_all


@case("order over world sizes")
def order(adapter: Adapter, name: str, folder: Path) -> Verdict:
    """2 shuffled epochs of 20 samples, 4 a step, on one process and on two: each step sees the same samples."""
    alone = _steps([shuffled(adapter, str(folder), processes=1)])
    together = _steps(in_processes(2, name, "randomness:shuffled", folder=str(folder), processes=2))
    if alone == together:
        return passed()
    step = next(i for i, pair in enumerate(zip(alone, together, strict=False), start=1) if pair[0] != pair[1])
    return wrong(f"step {step} sees {alone[step - 1]} on one process, {together[step - 1]} on two")


def _steps(of_ranks: list[list[list[int]]]) -> list[list[int]]:
    return [sorted(index for part in parts for index in part) for parts in zip(*of_ranks, strict=True)]


def shuffled(adapter: Adapter, folder: str, processes: int) -> list[list[int]]:
    """In each process: the samples of each step."""
    seen: list[list[int]] = []

    def spy(net: Net, x: Tensor) -> None:
        seen.append(x[:, 0].int().tolist())

    task = make_task(Path(folder), data=Samples(20), batch=4 // processes, processes=processes, epochs=2, shuffle=True)
    task.model.spy = spy
    adapter.train(task)
    return seen


@case("global random generators left alone")
def generators(adapter: Adapter, name: str, folder: Path) -> Verdict:
    """Training leaves the generators of torch, numpy and random as the user has seeded them: with another seed, the
    random numbers in and after training are different."""
    draws = []
    for seed in (101, 202):
        task = make_task(folder / str(seed), data=Samples(8), seed=None)
        task.model.spy = lambda net, x: drawn.append(_draw())  # noqa: B023  # called in this iteration
        drawn: list[dict[str, float]] = []
        seed_all(seed)
        adapter.train(task)
        draws.append([*drawn, _draw()])
    same = [which for which in draws[0][0] if any(a[which] == b[which] for a, b in zip(*draws, strict=True))]
    return wrong(f"{', '.join(same)} draw the same after other seeds: reseeded") if same else passed()


def _draw() -> dict[str, float]:
    return {"torch": torch.rand(()).item(), "numpy": float(np.random.rand()), "random": random.random()}
