"""The last messages of a private run, and the corrections in its refusals."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import trainstack as ts
from tests.helpers.modules import Classifier
from tests.helpers.private_runs import private, promise


class Detached(Classifier):
    def train_step(self, global_step: int, batch: Any, device: Any) -> Any:
        return super().train_step(global_step, batch, device).detach()


def said(module: ts.ModuleInterface, directory: Path, out: pytest.CaptureFixture[str], **promised: float) -> str:
    args = private(directory, promise(**promised), epochs=2, writers=["stdout"], progress="none")
    ts.Trainer(module, args).train()
    return out.readouterr().out


def test_a_complete_run_does_not_report_a_spent_budget(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = said(Classifier(), tmp_path, capsys, target_epsilon=3.0)
    assert "12 taken, 12 planned" in text
    assert "budget is spent" not in text


def test_a_spent_budget_is_reported_with_the_stated_epsilon(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = said(Classifier(), tmp_path, capsys, noise_multiplier=1.0, max_epsilon=3.0)
    spent = text.split("budget is spent: epsilon is ")[1].split(" ")[0]
    assert f"The training is (epsilon {spent}, delta" in text
    assert "max_epsilon=... in DifferentialPrivacyArguments" in text


def test_coarse_parameters_are_named_in_one_sentence(tmp_path: Path) -> None:
    module = Classifier()
    module.net.to(torch.bfloat16)
    with pytest.raises(ts.PrivacyError, match=r"net\.0\.bias, net\.0\.weight, .*sp-dp-bf16") as caught:
        ts.Trainer(module, private(tmp_path)).train()
    assert str(caught.value).count("torch.bfloat16") == 1


def test_a_detached_loss_is_refused_with_a_correction(tmp_path: Path) -> None:
    with pytest.raises(ts.ModuleContractError, match=r"Do not call \.item\(\) or \.detach\(\) on it"):
        ts.Trainer(Detached(), private(tmp_path)).train()
