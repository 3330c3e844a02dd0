"""Any split of a global batch gives the gradient of the whole batch: equality with plain PyTorch."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import trainstack as ts
from tests.helpers.modules import Classifier, arguments, numbers, train, weights
from trainstack.trainer.reporting.loss_meter import ExactSum


class InOrder(Classifier):
    """Without shuffling, so that a plain loop has the same batches."""

    def get_train_dataloader(self, sampler: Any, batch_size: int) -> Any:
        return DataLoader(self.dataset, batch_size=batch_size)


def by_hand(count: int, batch: int, dtype: torch.dtype, *, clip: float | None = 1.0) -> Tensor:
    """The weights after one epoch of whole batches in plain PyTorch."""
    module = Classifier(numbers(count, dtype=dtype), dtype=dtype)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    inputs, labels = module.dataset.tensors
    for x, y in zip(inputs.split(batch), labels.split(batch), strict=True):
        optimizer.zero_grad()
        nn.functional.cross_entropy(module.net(x), y).backward()
        if clip is not None:
            torch.nn.utils.clip_grad_norm_(module.parameters(), clip)
        optimizer.step()
    return weights(module)


@pytest.mark.spec("PA-08", "F102", "F202", "F402", "PMB-11")
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-6), (torch.float64, 1e-12)])
@pytest.mark.parametrize(
    ("count", "batch", "limit"),
    [
        (20, 16, 4),  # five equal micro-batches, accumulation 4: windows of 4 and 1
        (40, 16, 4),  # windows of 4, 4 and 2
        (41, 16, 4),  # and one sample more
        (23, 12, 5),  # micro-batches that do not divide the tail
    ],
)
def test_accumulation_equals_one_large_batch(
    count: int, batch: int, limit: int, dtype: torch.dtype, tolerance: float, tmp_path: Path
) -> None:
    module = InOrder(numbers(count, dtype=dtype), dtype=dtype)
    train(module, tmp_path, train_batch_size=batch, gpu_batch_size_limit=limit)

    assert (weights(module) - by_hand(count, batch, dtype)).abs().max() <= tolerance


def test_without_accumulation_the_bits_are_those_of_plain_pytorch(tmp_path: Path) -> None:
    module = InOrder(numbers(40))
    train(module, tmp_path, train_batch_size=8)

    assert torch.equal(weights(module), by_hand(40, 8, torch.float32))


class Tokens(ts.ModuleInterface):
    """Sequences of different length; the loss is a mean over the tokens without padding."""

    def __init__(self) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        self.embed = nn.Embedding(11, 7).double()
        nn.init.normal_(self.embed.weight, generator=generator)
        tokens = torch.randint(1, 11, (22, 6), generator=generator)
        lengths = torch.randint(0, 7, (22,), generator=generator)
        lengths[-4:] = 0  # the last micro-batch is all padding
        tokens[torch.arange(6) >= lengths[:, None]] = 0
        self.dataset = TensorDataset(tokens)

    def get_optimizers_schedulers(self, *_: Any) -> Any:
        return [torch.optim.SGD(self.parameters(), lr=0.5)], None

    def get_train_dataloader(self, sampler: Any, batch_size: int) -> Any:
        return DataLoader(self.dataset, batch_size=batch_size)

    def batch_weight(self, batch: Any) -> float:
        return int((batch[0] != 0).sum())

    def loss(self, tokens: Tensor) -> Tensor:
        logits = self.embed(tokens) @ self.embed.weight.T
        return nn.functional.cross_entropy(logits.flatten(0, 1), tokens.flatten(), ignore_index=0)

    def train_step(self, global_step: int, batch: Any, device: Any) -> Any:
        return self.loss(batch[0])


@pytest.mark.spec("PA-31")
@pytest.mark.parametrize("limit", [1, 2, 3, 6])
def test_a_loss_over_tokens_counts_by_tokens(limit: int, tmp_path: Path) -> None:
    """Micro-batches without tokens, whose loss is nan, are ignored."""
    reference, split = Tokens(), Tokens()
    optimizer = torch.optim.SGD(reference.parameters(), lr=0.5)
    for tokens in reference.dataset.tensors[0].split(6):
        if not (tokens != 0).any():
            continue
        optimizer.zero_grad()
        reference.loss(tokens).backward()
        optimizer.step()
    trainer = train(split, tmp_path, train_batch_size=6, gpu_batch_size_limit=limit, clip_grads=False)

    assert (weights(split) - weights(reference)).abs().max() <= 1e-12
    assert trainer.state.skipped_steps == 1, "the last step holds nothing but padding"


def test_a_step_without_items_moves_nothing(tmp_path: Path) -> None:
    module = Tokens()
    module.dataset = TensorDataset(torch.zeros(4, 6, dtype=torch.long))
    before = weights(module)
    trainer = train(module, tmp_path, train_batch_size=2)

    assert torch.equal(weights(module), before)
    assert trainer.state.skipped_steps == 2


@pytest.mark.spec("F202")
@pytest.mark.parametrize("limit", [16, 4, 1])
def test_the_reported_loss_does_not_depend_on_the_split(limit: int, tmp_path: Path) -> None:
    trainer = ts.Trainer(
        InOrder(numbers(41, dtype=torch.float64), dtype=torch.float64, lr=0.0),
        arguments(tmp_path, train_batch_size=16, gpu_batch_size_limit=limit),
    )
    module = trainer.module
    inputs, labels = module.dataset.tensors
    expected = nn.functional.cross_entropy(module.net(inputs), labels).item()
    trainer.train()

    assert trainer.history.get_latest_metric("train/loss_epoch") == pytest.approx(expected, abs=1e-12)


@pytest.mark.spec("PA-09", "F203", "B4")
def test_clipping_by_value_and_by_norm_happens_once_a_step(tmp_path: Path) -> None:
    for changes in ({"clip_grad_value": 0.001}, {"max_grad_norm": 0.01}):
        module = InOrder(numbers(40, dtype=torch.float64), dtype=torch.float64)
        reference = Classifier(numbers(40, dtype=torch.float64), dtype=torch.float64)
        optimizer = torch.optim.SGD(reference.parameters(), lr=0.1)
        inputs, labels = reference.dataset.tensors
        for x, y in zip(inputs.split(8), labels.split(8), strict=True):
            optimizer.zero_grad()
            nn.functional.cross_entropy(reference.net(x), y).backward()
            if "clip_grad_value" in changes:
                torch.nn.utils.clip_grad_value_(reference.parameters(), 0.001)
            else:
                torch.nn.utils.clip_grad_norm_(reference.parameters(), 0.01)
            optimizer.step()
        train(module, tmp_path, gpu_batch_size_limit=2, **changes)

        assert (weights(module) - weights(reference)).abs().max() <= 1e-12


@pytest.mark.parametrize("weight", [-1, float("nan"), float("inf")])
def test_a_weight_other_than_a_count_is_refused(weight: float, tmp_path: Path) -> None:
    module = Tokens()
    module.batch_weight = lambda batch: weight  # type: ignore[method-assign]

    with pytest.raises(ts.ModuleContractError, match=r"batch_weight returned .* finite number >= 0"):
        train(module, tmp_path, train_batch_size=6, gpu_batch_size_limit=3)


@pytest.mark.parametrize("log_every", [1, 1000])
def test_losses_whose_sum_overflows_are_an_error(log_every: int, tmp_path: Path) -> None:
    class Huge(Classifier):
        def train_step(self, global_step: int, batch: Any, device: Any) -> Any:
            return 0.0 * super().train_step(global_step, batch, device).double() + 1e308

    with pytest.raises(ts.NonFiniteError, match="add up to more than a float holds: one is inf"):
        train(Huge(), tmp_path, log_every=log_every)


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_an_exact_sum_refuses_nan_infinity_and_overflow(value: float) -> None:
    total = ExactSum([1.0])
    with pytest.raises(ts.NonFiniteError, match=f"one is {value}[.]"):
        total.add_all([value, 2.0])
    with pytest.raises(ts.NonFiniteError, match=r"one is 1e[+]308[.]"):
        total.add_all([1e308] * 10)
    assert total.value() == 1.0
