"""The trial before training: errors that count as out of memory, and errors that it raises."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import trainstack as ts
from tests.helpers.modules import Classifier, arguments, train, weights

TOO_MUCH = 1 << 60
"""Bytes: more than any machine has, so that the allocation fails."""


class Hungry(Classifier):
    """From step `since` on, no more than `most` samples fit into a pass."""

    def __init__(self, most: int, since: int = 1) -> None:
        super().__init__()
        self.most, self.since = most, since
        self.sizes: list[int] = []

    def train_step(self, global_step: int, batch: Any, device: Any) -> Any:
        self.sizes.append(len(batch[0]))
        if len(batch[0]) > self.most and global_step >= self.since:
            torch.empty(TOO_MUCH, dtype=torch.uint8)
        return super().train_step(global_step, batch, device)


def test_a_host_allocation_error_halves_the_micro_batch(tmp_path: Path) -> None:
    module = Hungry(most=3)
    trainer = train(module, tmp_path, fit_micro_batch=True)
    assert module.sizes[:4] == [8, 4, 2, 2]
    assert trainer.plan.micro_batch == 2


def test_out_of_memory_during_training_is_an_error(tmp_path: Path) -> None:
    module = Hungry(most=3, since=3)
    with pytest.raises(RuntimeError, match="allocate"):
        train(module, tmp_path, fit_micro_batch=True)
    assert module.sizes == [8, 8, 8, 8]


def test_other_errors_of_the_trial_are_raised(tmp_path: Path) -> None:
    class Broken(Hungry):
        def train_step(self, global_step: int, batch: Any, device: Any) -> Any:
            raise RuntimeError("something else")

    with pytest.raises(RuntimeError, match="something else"):
        train(Broken(most=8), tmp_path, fit_micro_batch=True)


def test_fit_micro_batch_always_is_refused_with_a_correction(tmp_path: Path) -> None:
    with pytest.raises(ts.ConfigurationError, match=r"fit_micro_batch='always': .* Write fit_micro_batch=True"):
        arguments(tmp_path, fit_micro_batch="always")


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_a_trial_fits_the_micro_batch_into_gpu_memory(tmp_path: Path) -> None:
    class Large(Classifier):
        """Keeps a few tensors of 128 MiB a sample for the backward pass."""

        def train_step(self, global_step: int, batch: Any, device: Any) -> Any:
            factor = torch.ones(1 << 25, device=device)
            wide = self.net(batch[0]).mean(1, keepdim=True) * factor
            return wide.sin().square().mean()

    most = 2 << 30
    total = torch.cuda.get_device_properties(0).total_memory
    torch.cuda.set_per_process_memory_fraction(most / total)
    try:
        plain = train(Large(), tmp_path, gpu_batch_size_limit=1, device="cuda")
        trainer = train(Large(), tmp_path, fit_micro_batch=True, device="cuda")
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)
    assert trainer.plan.micro_batch < 8
    assert torch.cuda.max_memory_allocated() <= most
    assert torch.allclose(weights(trainer.module), weights(plain.module), atol=1e-5)
