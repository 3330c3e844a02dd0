"""A user's own progress display."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import trainstack as ts
from tests.helpers.modules import Classifier, train


class Bells(ts.ProgressDisplay):
    """Rings at each step."""

    next_poll = 0

    def __init__(self) -> None:
        self.rung: list[Any] = []

    def start_epoch(self, epoch: int, epochs: int, total_steps: int | None, done: int) -> None:
        self.rung.append(f"epoch {epoch} of {epochs}")
        self.next_poll = 0

    def poll(self, done: int, loss: Callable[[], float | None]) -> None:
        self.rung.append(done)
        self.next_poll = done + 1

    def end_epoch(self, summary: str = "") -> None:
        self.next_poll = 1 << 62

    def start_validation(self, key: str, total: int | None) -> None:
        self.rung.append(key)
        self.next_poll = 1 << 62

    def end_validation(self) -> None: ...

    def close(self) -> None:
        self.rung.append("closed")


@pytest.mark.spec("FN-26")
def test_a_progress_display_of_ones_own(tmp_path: Path) -> None:
    bells = Bells()
    train(Classifier(validate=True), tmp_path, progress=bells, max_train_steps_per_epoch=2)
    assert bells.rung == ["epoch 1 of 1", 1, 2, "default", "closed"]
    with pytest.raises(ts.ConfigurationError, match=r"progress='bar': write one of 'auto'.*ProgressDisplay"):
        ts.TrainerArguments(progress="bar")  # type: ignore[arg-type]
