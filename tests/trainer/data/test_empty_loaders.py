"""Loaders without samples, and objects other than loaders."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

import trainstack as ts
from tests.helpers.modules import Classifier, numbers, train


class TestEmptyLoaders:
    @staticmethod
    def line(train_set: Any, val_set: Any = None) -> ts.SupervisedModule:
        return ts.SupervisedModule(nn.Linear(6, 3), nn.functional.cross_entropy, "sgd", train_set, val_set)

    @pytest.mark.spec("FN-27")
    def test_a_training_without_samples_is_refused(self, tmp_path: Path) -> None:
        empty = TensorDataset(torch.zeros(0, 6), torch.zeros(0).long())
        with pytest.raises(ts.ModuleContractError, match="a loader over an empty data set"):
            train(self.line(empty), tmp_path)

        class Lists(Classifier):
            def get_train_dataloader(self, sampler: Any, batch_size: int) -> Any:
                return []

        with pytest.raises(ts.ModuleContractError, match="gave no batch at all"):
            train(Lists(), tmp_path)

    def test_a_validation_without_samples_is_logged(self, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
        empty = TensorDataset(torch.zeros(0, 6), torch.zeros(0).long())
        train(self.line(numbers(8), empty), tmp_path)
        assert "the val loader 'default' gave no batch at all" in caplog.text

    def test_an_object_that_cannot_be_iterated_is_refused(self, tmp_path: Path) -> None:
        class Wrong(Classifier):
            def get_train_dataloader(self, sampler: Any, batch_size: int) -> Any:
                return 3

        with pytest.raises(ts.ModuleContractError, match="returned a int, which cannot be iterated over"):
            train(Wrong(), tmp_path)
