"""Gradient accumulation: an optimizer step equals that of the whole window, for any micro-batches."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch.utils.data import default_collate

from tools.conformance.adapter import Adapter, Verdict
from tools.conformance.case import case, passed, wrong
from tools.conformance.task import IGNORED, Samples, Sequences, Task, make_task, weights


@case("short last accumulation window")
def short_window(adapter: Adapter, name: str, folder: Path) -> Verdict:
    """20 samples in micro-batches of 4, accumulated by 4: the second step is that of its one micro-batch."""
    return _against_whole_windows(adapter, make_task(folder, data=Samples(20), accumulate=4))


@case("uneven windows")
def uneven_windows(adapter: Adapter, name: str, folder: Path) -> Verdict:
    """22 samples in micro-batches of 4, accumulated by 3: of the last 10, each sample counts the same."""
    return _against_whole_windows(adapter, make_task(folder, data=Samples(22), accumulate=3))


@case("token-weighted loss")
def token_weighted(adapter: Adapter, name: str, folder: Path) -> Verdict:
    """16 padded sequences, accumulated by 4: each token that is not padding counts the same within a step."""
    return _against_whole_windows(adapter, make_task(folder, data=Sequences(16), batch=2, accumulate=4, items=_tokens))


def _tokens(batch: Any) -> int:
    return int((batch["labels"] != IGNORED).sum())


def _against_whole_windows(adapter: Adapter, task: Task) -> Verdict:
    """Train, and compare with plain PyTorch on whole windows."""
    before = weights(task.model)
    expected = _by_hand(make_task(task.folder, data=task.data), task.batch * task.accumulate)
    adapter.train(task)
    states = [before, *expected]
    if len(task.rates) != len(expected):
        return wrong(f"{len(task.rates)} optimizer steps instead of {len(expected)}")
    apart = float((weights(task.model) - states[-1]).abs().max())
    if apart <= 1e-9:
        return passed()
    moved = weights(task.model) - states[-2]
    share = float(moved.norm() / (states[-1] - states[-2]).norm())
    length = f"the last step is {share:.2f} times as long as it should be, " if abs(share - 1) > 0.05 else ""
    return wrong(f"{length}weights differ by {apart:.1e}")


def _by_hand(task: Task, window: int) -> list[torch.Tensor]:
    """The weights after each step of plain PyTorch over whole windows."""
    optimizer = torch.optim.SGD(task.model.parameters(), lr=0.1)
    after = []
    for start in range(0, len(task.data), window):
        indices = range(start, min(start + window, len(task.data)))
        optimizer.zero_grad()
        task.model(**default_collate([task.data[i] for i in indices]))["loss"].backward()
        optimizer.step()
        after.append(weights(task.model))
    return after
