"""A step of evaluation that is given to the trainer replaces that of the module."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from torch import nn

import trainstack as ts
from tests.helpers.modules import Classifier, arguments


class TestAStepOfEvaluationGivenToTheTrainer:
    @staticmethod
    def own(module: Any, global_step: int, batch: Any, device: Any) -> Any:
        return nn.functional.cross_entropy(module.net(batch[0]), batch[1]) + 100.0

    @pytest.mark.spec("FN-09")
    def test_it_replaces_the_val_step_of_the_module(self, tmp_path: Path) -> None:
        module = Classifier(validate=True)
        plain = ts.Trainer(module, arguments(tmp_path)).validate().metrics["val/loss"]
        trainer = ts.Trainer(module, arguments(tmp_path, backend="sp-bf16"), val_step=self.own)
        assert trainer.validate().metrics["val/loss"] == pytest.approx(plain + 100.0, abs=0.1)
        assert ts.Trainer(module, arguments(tmp_path)).validate().metrics["val/loss"] == plain

    def test_the_module_needs_no_val_step(self, tmp_path: Path) -> None:
        class Without(Classifier):
            val_step = ts.ModuleInterface.val_step  # type: ignore[assignment]

        trainer = ts.Trainer(Without(validate=True), arguments(tmp_path, overfit_batches=1), val_step=self.own)
        trainer.train()
        assert trainer.history.get_latest_metric("val/loss") > 100

    def test_a_function_with_a_wrong_signature_is_refused(self, tmp_path: Path) -> None:
        with pytest.raises(ts.ConfigurationError, match=r"def val_step\(module, global_step, batch, device\)"):
            ts.Trainer(Classifier(), arguments(tmp_path), val_step=lambda batch: 1)
