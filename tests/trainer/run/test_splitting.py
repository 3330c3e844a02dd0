"""Splitting a step into micro-batches, and the settings of a module for it."""

from __future__ import annotations

import copy
import io
import logging
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

import trainstack as ts
from tests.helpers.modules import Classifier, numbers, train, weights
from trainstack.backends.losses import looks_summed

ROWS = torch.randn(20, 3, generator=torch.Generator().manual_seed(0), dtype=torch.float64)


class Line(ts.ModuleInterface):
    """A linear model with a given loss, over 20 rows in order."""

    def __init__(self, loss: Any, dataset: Any = None) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.net, self.loss = nn.Linear(3, 1).double(), loss
        self.dataset = TensorDataset(ROWS, ROWS.sum(1, keepdim=True)) if dataset is None else dataset

    def get_optimizers_schedulers(self, *_: Any) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.01), None

    def get_train_dataloader(self, sampler: Any, batch_size: int) -> Any:
        return DataLoader(self.dataset, batch_size=batch_size)

    def get_val_dataloaders(self, sampler: Any, batch_size: int) -> Any:
        return DataLoader(self.dataset, batch_size=batch_size)

    def train_step(self, global_step: int, batch: Any, device: Any) -> Any:
        return self.loss(self.net(batch[0]), batch[1])

    val_step = train_step


class Listed(Line):
    def get_train_dataloader(self, sampler: Any, batch_size: int) -> Any:
        return list(DataLoader(self.dataset, batch_size=batch_size))


def summed(outputs: Tensor, targets: Tensor) -> Tensor:
    return F.mse_loss(outputs, targets, reduction="sum")


@pytest.mark.parametrize("kind", [Line, Listed])
@pytest.mark.parametrize("limit", [None, 4, 3])
def test_losses_that_are_sums_are_added_up(kind: type[Line], limit: int | None, tmp_path: Path) -> None:
    """Steps of 8 samples and a short last one, whole or split, equal those of a plain loop."""
    plain = Line(summed)
    optimizer, losses = torch.optim.SGD(plain.parameters(), lr=0.01), []
    limit = 4 if kind is Listed and limit == 3 else limit  # its batches cannot be split further
    for inputs, targets in DataLoader(plain.dataset, batch_size=8):
        optimizer.zero_grad()
        losses.append(plain.loss(plain.net(inputs), targets))
        losses[-1].backward()
        optimizer.step()
    module = kind(summed)
    module.loss_reduction = "sum"
    trainer = train(
        module,
        tmp_path,
        train_batch_size=8,
        gpu_batch_size_limit=limit,
        clip_grads=False,
        log_every=1,
        val_batch_size=7,
    )

    assert (weights(module) - weights(plain)).abs().max() < 1e-12
    assert trainer.history.get_metric_values("train/loss") == pytest.approx([loss.item() for loss in losses])
    outputs = plain.net(ROWS)
    assert trainer.history.get_latest_metric("val/loss") == pytest.approx(summed(outputs, ROWS.sum(1, True)).item())


class Growing(Line):
    """Its batches grow within a step, so that the estimated number of items is corrected."""

    def get_train_dataloader(self, sampler: Any, batch_size: int) -> Any:
        return [
            (ROWS[begin:end], ROWS[begin:end].sum(1, keepdim=True)) for begin, end in ((0, 1), (1, 4), (4, 6), (6, 13))
        ]


@pytest.mark.parametrize("counts", [False, True])
def test_sums_of_growing_batches_are_added_up(counts: bool, tmp_path: Path) -> None:
    plain, module = Line(summed), Growing(summed)
    optimizer = torch.optim.SGD(plain.parameters(), lr=0.01)
    for begin, end in ((0, 4), (4, 13)):
        optimizer.zero_grad()
        plain.loss(plain.net(ROWS[begin:end]), ROWS[begin:end].sum(1, keepdim=True)).backward()
        optimizer.step()
    module.loss_reduction = "sum"
    if counts:
        module.batch_weight = lambda batch: float(len(batch[0]))  # type: ignore[method-assign]
    train(module, tmp_path, train_batch_size=8, gpu_batch_size_limit=4, clip_grads=False)

    assert (weights(module) - weights(plain)).abs().max() < 1e-12


def vae_loss(outputs: Tensor, targets: Tensor) -> Tensor:
    divergence = -0.5 * torch.sum(1 + outputs - outputs.pow(2))
    return F.binary_cross_entropy(outputs.sigmoid(), targets.sigmoid(), reduction="sum") + divergence


SUMS = {
    "reduction": summed,
    "sum": lambda outputs, targets: (outputs - targets).pow(2).sum(),
    "parts": vae_loss,
    "rows": lambda outputs, targets: (outputs - targets).pow(2).mean(1).sum(0).float(),
}
MEANS = {
    "mean": F.mse_loss,
    "sum divided": lambda outputs, targets: summed(outputs, targets) / len(outputs),
    "sum times a factor": lambda outputs, targets: summed(outputs, targets) * (1 / len(outputs)),
    "mean of sums": lambda outputs, targets: (outputs - targets).pow(2).sum(1).mean(),
    "sum of means": lambda outputs, targets: (outputs - targets).pow(2).mean(0).sum(),
}


@pytest.mark.parametrize("name", [*SUMS, *MEANS])
def test_a_sum_is_found_in_the_graph_of_the_loss(name: str) -> None:
    module = Line((SUMS | MEANS)[name])
    loss = module.train_step(1, (ROWS[:7], ROWS[:7].sum(1, keepdim=True)), None)
    assert looks_summed(loss, 7) == (name in SUMS)
    with_weights = loss + sum(p.pow(2).sum() for p in module.parameters())
    assert looks_summed(with_weights, 7) == (name in SUMS), "a sum over weights is not one over samples"


@pytest.mark.parametrize("said", [None, "mean", "sum"])
@pytest.mark.parametrize("limit", [None, 4])
def test_splitting_a_sum_without_a_reduction_causes_a_warning(
    limit: int | None, said: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    module = Line(summed)
    module.loss_reduction = said
    with caplog.at_level(logging.WARNING):
        train(module, tmp_path, train_batch_size=8, gpu_batch_size_limit=limit, epochs=2)
    warned = [record.getMessage() for record in caplog.records if "sum over samples" in record.getMessage()]
    assert len(warned) == (limit is not None and said is None)
    assert all("loss_reduction = 'sum'" in text for text in warned)


def test_an_unknown_reduction_is_refused(tmp_path: Path) -> None:
    module = Line(summed)
    module.loss_reduction = "avg"  # type: ignore[assignment]
    with pytest.raises(ts.ConfigurationError, match=r"Line\.loss_reduction is 'avg'\. Write 'mean', or 'sum'"):
        train(module, tmp_path)


def test_a_private_run_refuses_sums(tmp_path: Path) -> None:
    module = Classifier(numbers(16))
    module.loss_reduction = "sum"
    with pytest.raises(ts.ConfigurationError, match="a private run bounds and adds the gradients of single records"):
        train(module, tmp_path, backend="sp-dp")


class Carries(Line):
    """Records the micro-batch of each call of `train_step`."""

    def __init__(self, **changes: Any) -> None:
        super().__init__(F.mse_loss, **changes)
        self.seen: list[Any] = []
        self.elsewhere: list[Any] = []

    def train_step(self, global_step: int, batch: Any, device: Any) -> Any:
        self.seen.append(self.micro_batch)
        samples = self.micro_batch.samples
        assert samples is None or torch.equal(batch[0], ROWS[list(samples)])
        return super().train_step(global_step, batch, device)

    def val_step(self, global_step: int, batch: Any, device: Any) -> Any:
        self.elsewhere.append(self.micro_batch)
        return super().train_step(global_step, batch, device)

    def on_end_train_step(self, global_step: int) -> None:
        self.elsewhere.append(self.micro_batch)


class Shuffled(Carries):
    def get_train_dataloader(self, sampler: Any, batch_size: int) -> Any:
        return DataLoader(self.dataset, sampler=sampler(self.dataset), batch_size=batch_size)


class CarriesListed(Carries, Listed):
    pass


@pytest.mark.parametrize("kind", [Carries, Shuffled, CarriesListed])
def test_a_step_can_read_its_micro_batch_info(kind: Any, tmp_path: Path) -> None:
    module, outside = kind(), ts.MicroBatchInfo(number=0, count=1, samples=None)
    assert module.micro_batch == outside
    train(module, tmp_path, train_batch_size=8, gpu_batch_size_limit=4, epochs=2, val_batch_size=10)

    assert [info.number for info in module.seen] == [0, 1, 0, 1, 0] * 2
    if kind is CarriesListed:
        assert {(info.count, info.samples) for info in module.seen} == {(2, None)}
    else:
        assert [info.count for info in module.seen] == [2, 2, 2, 2, 1] * 2
        assert sorted(sum((info.samples for info in module.seen[:5]), ())) == list(range(20))
    assert set(module.elsewhere) == {outside}
    assert copy.deepcopy(module).micro_batch == outside
    torch.save(module._step_view, io.BytesIO())
    module.micro_batch = 7
    assert module.micro_batch == 7, "an attribute of the user has precedence"


def test_a_module_can_refuse_to_be_split(tmp_path: Path) -> None:
    module = Carries()
    module.splits_batches = False
    refused = re.escape(
        "Carries.splits_batches is False, and a step of 8 samples on each process would be split into 2"
    )
    with pytest.raises(ts.ConfigurationError, match=refused):
        train(module, tmp_path, train_batch_size=8, gpu_batch_size_limit=4)
    assert not module.seen
    assert train(module, tmp_path, train_batch_size=8).global_steps_finished == 3


def test_an_unsplittable_module_is_not_fitted_into_memory(tmp_path: Path) -> None:
    class Hungry(Carries):
        splits_batches = False

        def train_step(self, global_step: int, batch: Any, device: Any) -> Any:
            raise torch.OutOfMemoryError("no memory for so many")

    with pytest.raises(ts.ConfigurationError, match="splits_batches is False"):
        train(Hungry(), tmp_path, train_batch_size=8, fit_micro_batch=True)


def test_a_limit_that_does_not_divide_the_batch_warns(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    trainer = train(Listed(F.mse_loss), tmp_path, train_batch_size=7, gpu_batch_size_limit=3)
    assert (trainer.train_step_batch_size, trainer.gradient_accumulation) == (3, 3)
    assert "a step has 9 samples instead of 7. Write a gpu_batch_size_limit that divides the batch." in caplog.text


@pytest.mark.parametrize("batch", [1024, 650])
def test_large_batches_are_not_split_by_default(batch: int, tmp_path: Path) -> None:
    """With batch norm, the weights and statistics have the bits of a plain loop."""

    def build() -> Classifier:
        module = Classifier(numbers(2 * batch))
        with torch.random.fork_rng():
            torch.manual_seed(0)
            module.net = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Linear(8, 3))
        module.get_train_dataloader = lambda sampler, batch_size: DataLoader(module.dataset, batch_size=batch_size)  # type: ignore[method-assign]
        return module

    plain, module = build(), build()
    optimizer = torch.optim.SGD(plain.parameters(), lr=0.1)
    for one in DataLoader(plain.dataset, batch_size=batch):
        optimizer.zero_grad()
        plain.train_step(1, one, None).backward()
        nn.utils.clip_grad_norm_(plain.parameters(), 1.0)
        optimizer.step()
    train(module, tmp_path, train_batch_size=batch)

    assert all(
        torch.equal(a, b) for a, b in zip(module.state_dict().values(), plain.state_dict().values(), strict=True)
    )


@pytest.mark.parametrize(("limit", "said"), [(None, ""), (7, ""), (5, "5 micro-batches, of which the last has 1")])
def test_a_tiny_last_micro_batch_causes_a_warning(
    limit: int | None, said: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    train(Line(F.mse_loss), tmp_path, train_batch_size=21, gpu_batch_size_limit=limit)
    warned = [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]
    assert [said in text for text in warned] == ([True] if said else [])


@pytest.mark.parametrize("name", ["splits_batches", "keep_modes"])
def test_a_module_setting_that_is_not_a_bool_is_refused(name: str, tmp_path: Path) -> None:
    module = Classifier(numbers(8))
    setattr(module, name, "no")
    with pytest.raises(ts.ConfigurationError, match=f"{name} is 'no'. Write"):
        train(module, tmp_path)
