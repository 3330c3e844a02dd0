"""Checkpoints of an interrupted run, and their files."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path

from torch import Tensor

from tools.conformance.adapter import Adapter
from tools.conformance.task import Net, make_task, weights


class BrokenOffError(Exception):
    """Interrupts a run."""


def break_off(adapter: Adapter, folder: Path, steps: int) -> None:
    """Train with a checkpoint at each step, and interrupt the run after step `steps`."""
    passes = 0

    def spy(net: Net, x: Tensor) -> None:
        nonlocal passes
        passes += 1
        if passes > steps:
            raise BrokenOffError

    task = make_task(folder, save=True)
    task.model.spy = spy
    with suppress(BrokenOffError):
        adapter.train(task)


def loaded(adapter: Adapter, checkpoint: Path, folder: Path) -> Tensor:
    """The weights with which a run continues from `checkpoint`."""
    seen: list[Tensor] = []

    def spy(net: Net, x: Tensor) -> None:
        seen.append(weights(net))

    task = make_task(folder, resume=checkpoint, epochs=2)
    task.model.spy = spy
    adapter.train(task)
    return seen[0]


def files_of(checkpoint: Path) -> list[Path]:
    """The files of a checkpoint, which is a folder or a file."""
    return [checkpoint] if checkpoint.is_file() else sorted(path for path in checkpoint.rglob("*") if path.is_file())
