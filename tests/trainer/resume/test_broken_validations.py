"""An interrupted validation changes the state of a run once, as an uninterrupted one does."""

from __future__ import annotations

import os
import signal
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from torch.utils.data import DataLoader, Subset

import trainstack as ts
from tests.helpers.beginnings import unlike
from tests.helpers.modules import Classifier, arguments, numbers

LOADERS = {"left": 2, "right": 3}
"""Fewest batches of each validation loader."""
PER_VALIDATION = 3 + 4
"""Validation batches in the first validation: each call of the loader method adds a sample to both."""


class Counts(Classifier):
    """Counts all calls of a validation in its state, on which losses and validation data depend."""

    def __init__(self, breaks: set[int], how: str, order: tuple[str, ...] = ("left", "right")) -> None:
        super().__init__(numbers(24))
        self.breaks, self.how, self.order = breaks, how, order
        self.counts = {"loaders": 0, "begins": 0, "steps": 0}
        self.ended: list[tuple[int, str]] = []
        self.run = 0  # no state: validation steps of this process

    def get_val_dataloaders(self, sampler: Any, batch_size: int) -> Any:
        self.counts["loaders"] += 1
        parts = {key: Subset(self.dataset, range(4 * LOADERS[key] + self.counts["loaders"])) for key in self.order}
        return {key: DataLoader(part, batch_size=4) for key, part in parts.items()}

    def on_validation_begin(self, trainer: Any) -> None:
        self.counts["begins"] += 1

    def train_step(self, global_step: int, batch: Any, device: Any) -> Any:
        return super().train_step(global_step, batch, device) * (1 + 0.01 * sum(self.counts.values()))

    def val_step(self, global_step: int, batch: Any, device: Any) -> Any:
        self.counts["steps"] += 1
        self.run += 1
        if self.run in self.breaks:
            if self.how == "raises":
                raise InterruptedError
            os.kill(os.getpid(), signal.SIGTERM)
        return super().val_step(global_step, batch, device)

    def on_end_val_epoch(self, global_step: int, key: str) -> None:
        self.ended = [*self.ended, (global_step, key)]

    def get_state(self) -> dict[str, Any]:
        return {"weights": super().get_state(), "counts": dict(self.counts), "ended": self.ended}

    def update_state(self, state: Any) -> None:
        if state:
            super().update_state(state["weights"])
            self.counts, self.ended = dict(state["counts"]), [tuple(one) for one in state["ended"]]


def trained(folder: Path, breaks: set[int], how: str = "stops", again: tuple[str, ...] = (), **changes: Any) -> Counts:
    """Train 2 epochs of 3 steps over all interruptions; the last module. `again` is the later order of loaders."""
    saving = ts.DefaultCheckpointerArguments(every_n_steps=2)
    module = Counts(breaks, how)
    while True:
        args = arguments(folder, epochs=2, checkpointer_args=saving, resume="auto", log_every=1, **changes)
        trainer = ts.Trainer(module, args)
        with suppress(SystemExit):
            try:
                trainer.train()
            except InterruptedError:
                trainer.train()
        trainer.close()
        if trainer.stop_reason is None:
            return module
        module = Counts(set(), how, again or module.order)


@pytest.mark.parametrize("how", ["stops", "raises"])
@pytest.mark.parametrize("at", [1, 4, 5, PER_VALIDATION, PER_VALIDATION + 2])
@pytest.mark.parametrize("every", [None, 2], ids=["after the epoch", "within it"])
def test_an_interrupted_validation_changes_state_once(every: int | None, at: int, how: str, tmp_path: Path) -> None:
    unbroken = trained(tmp_path / "unbroken", set(), validate_every=every)
    broken = trained(tmp_path / "broken", {at}, how, validate_every=every)

    assert unlike(tmp_path / "unbroken", tmp_path / "broken") == []
    assert broken.counts == unbroken.counts
    assert broken.counts["begins"] == broken.counts["loaders"] == (2 if every is None else 3)
    assert broken.ended == unbroken.ended


def test_finished_loaders_are_skipped_by_name(tmp_path: Path) -> None:
    broken = trained(tmp_path, {5}, again=("right", "left"), validate_every=None)

    assert broken.ended == [(3, "left"), (3, "right"), (6, "right"), (6, "left")]


class Fails(Counts):
    """Its loader method raises at the first call."""

    def get_val_dataloaders(self, sampler: Any, batch_size: int) -> Any:
        loaders = super().get_val_dataloaders(sampler, batch_size)
        self.run += 1
        if self.run == 1:
            raise InterruptedError
        return loaders


def test_a_loader_method_that_raises_leaves_no_trace(tmp_path: Path) -> None:
    module = Fails(set(), "raises")
    trainer = ts.Trainer(module, arguments(tmp_path))
    with pytest.raises(InterruptedError):
        trainer.train()
    trainer.train()

    assert module.counts["loaders"] == module.counts["begins"] == 1
