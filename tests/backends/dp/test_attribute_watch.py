"""Probes of plain attributes leave the step under way as it is, and see what carries records into later steps."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

import trainstack as ts
from tests.backends.dp.test_sealed_state import BATCH, STEPS, Gradients, Net, private_trainer, slow_mean, sums_of
from tests.helpers.modules import arguments
from trainstack.errors import PrivacyError


class Counts(Net):
    """Counts its forward passes."""

    calls = 0

    def remember(self, step: int, x: Tensor) -> None:
        self.calls += 1


def small_batches(directory: Any, module: ts.ModuleInterface) -> list[Tensor]:
    seen = Gradients()
    private = ts.DifferentialPrivacyArguments(delta=1e-4, noise_multiplier=0.0, debug_seed=7, accountant="rdp")
    args = arguments(
        directory,
        backend="sp-dp",
        differential_privacy_args=private,
        epochs=1,
        train_batch_size=BATCH,
        gpu_batch_size_limit=4,
        writers=[],
    )
    ts.Trainer(module, args, callbacks=[seen]).train()
    return seen.sums


def test_a_probe_keeps_the_sums_of_earlier_micro_batches(tmp_path: Any) -> None:
    plain, counted = small_batches(tmp_path / "plain", Net(0.5)), small_batches(tmp_path / "counts", Counts(0.5))
    for one, other in zip(plain, counted, strict=True):
        torch.testing.assert_close(one, other)


@pytest.mark.parametrize("clipping", ["flat", "adaptive"])
def test_a_probe_leaves_telemetry_alone(clipping: Any, tmp_path: Any) -> None:
    telemetry = {"loss": (0.0, 5.0), "grad_norm": (0.1, 1.0)}
    found = sums_of(tmp_path, Counts(0.5), grad_mode="auto", telemetry=telemetry, clipping=clipping)
    assert len(found) == STEPS


class RunningAccuracy(Net):
    right = total = 0

    def train_step(self, global_step: int, batch: Any, device: torch.device) -> Any:
        scores = self.net(batch[0])
        if global_step >= 3:
            self.right += float((scores.argmax(1) == batch[1]).sum())
            self.total += len(batch[1])
        loss = cross_entropy(scores, batch[1])
        return {"loss": loss, "accuracy": torch.full((len(batch[1]),), self.right / max(1, self.total))}


def test_telemetry_of_earlier_records_is_refused(tmp_path: Any) -> None:
    with pytest.raises(PrivacyError, match="right, total changed in the course of training"):
        sums_of(tmp_path, RunningAccuracy(0.5), telemetry={"accuracy": (0.0, 1.0)})


class FirstMean(Net):
    """Centres by the records of its first forward pass."""

    begins = 1

    def remember(self, step: int, x: Tensor) -> None:
        if step >= self.begins and self.kept is None:
            self.kept = x.mean(0)


@pytest.mark.parametrize("mode", ["auto", "loop"])
def test_an_attribute_of_the_first_forward_pass_is_refused_before_anything_is_released(
    mode: str, tmp_path: Any
) -> None:
    seen = Gradients()
    with pytest.raises(PrivacyError, match="gradients of other records change"):
        private_trainer(tmp_path / "1", FirstMean(0.5), [seen], grad_mode=mode).train()
    assert not seen.sums
    late = FirstMean(0.5)
    late.begins = 2
    with pytest.raises(PrivacyError, match="kept changed in the course of training"):
        private_trainer(tmp_path / "2", late, [seen], grad_mode=mode).train()
    assert len(seen.sums) == 1


class LateMean(Net):
    def remember(self, step: int, x: Tensor) -> None:
        if step >= STEPS:
            self.kept = slow_mean(self.kept, x)


def test_the_last_step_is_looked_at_too(tmp_path: Any) -> None:
    with pytest.raises(PrivacyError, match="kept changed"):
        sums_of(tmp_path, LateMean(0.5))
