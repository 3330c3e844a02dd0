"""`trainer.view` shows the state of a run, and cannot be written to."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import trainstack as ts
from tests.helpers.modules import Classifier, arguments


class TestTheViewOfARun:
    @pytest.mark.spec("FN-49", "HZ-32")
    def test_it_shows_counters_and_loaders(self, tmp_path: Path) -> None:
        module = Classifier(validate=True)
        given: list[Any] = []
        make = module.get_train_dataloader
        module.get_train_dataloader = lambda **options: given.append(make(**options)) or given[-1]  # type: ignore[func-returns-value]
        trainer = ts.Trainer(module, arguments(tmp_path, epochs=2, gpu_batch_size_limit=4))
        seen = []

        @trainer.on(ts.Event.TRAIN_STEP_END)
        def look(trainer: ts.Trainer) -> None:
            view = trainer.view
            counters = (view.epoch, view.global_step, view.steps_in_epoch, view.batches, view.batches_in_epoch)
            seen.append((*counters, view.samples_in_epoch))

        trainer.train()
        view = trainer.view
        assert seen[6:8] == [(1, 7, 1, 13, 2, 8), (1, 8, 2, 15, 4, 16)]
        assert (view.epochs, view.total_steps, view.steps_per_epoch, view.batches_per_step) == (2, 12, 6, 2)
        assert (view.epoch, view.global_step, view.batches, view.device) == (2, 12, 22, torch.device("cpu"))
        assert view.train_dataloader is given[-1]
        assert list(view.val_dataloaders) == ["default"]

    @pytest.mark.parametrize("name", ["epoch", "global_step", "batches", "train_dataloader", "new"])
    def test_it_is_read_only(self, name: str, tmp_path: Path) -> None:
        view = ts.Trainer(Classifier(validate=True), arguments(tmp_path)).view
        with pytest.raises(AttributeError):
            setattr(view, name, 1)
        with pytest.raises(TypeError):
            view.val_dataloaders["more"] = 1  # type: ignore[index]
