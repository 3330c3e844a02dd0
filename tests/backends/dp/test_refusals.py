"""Refusals of private training before its first step: all in one error, each with a correction."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils.parametrizations import spectral_norm
from torch.utils.data import DataLoader, IterableDataset, TensorDataset, WeightedRandomSampler

import trainstack as ts
from tests.helpers.modules import FEATURES, Classifier, arguments, numbers
from tests.helpers.private_runs import private, promise

NOISY = {"noise_multiplier": 1.0}


def refusal(module: Any, directory: Path, args: Any = None, **changes: Any) -> str:
    with pytest.raises(ts.PrivacyError) as caught:
        ts.Trainer(module, private(directory, args or promise(**NOISY), **changes)).train()
    assert "private training is refused" in str(caught.value)
    assert not (directory / "privacy-ledger.jsonl").exists()  # nothing was spent
    return str(caught.value)


class With(Classifier):
    """`layer` on the inputs; `optimizers` instead of the one."""

    def __init__(self, layer: nn.Module | None = None, optimizers: Any = None, loader: Any = None) -> None:
        super().__init__()
        self.before, self.optimizers, self.data_loader = layer or nn.Identity(), optimizers, loader

    def get_optimizers_schedulers(self, *given: Any) -> Any:
        made = super().get_optimizers_schedulers(*given)
        return (self.optimizers(self), []) if self.optimizers else made

    def get_train_dataloader(self, sampler: Any, batch_size: int) -> Any:
        return self.data_loader(batch_size) if self.data_loader else super().get_train_dataloader(sampler, batch_size)

    def train_step(self, global_step: int, batch: Any, device: Any) -> Any:
        return nn.functional.cross_entropy(self.net(self.before(batch[0])), batch[1])


class Codebook(nn.Module):
    """Learns from its inputs, without a gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("code", torch.zeros(FEATURES))

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            self.code.lerp_(x.mean(0), 0.1)
        return x + self.code


class Standardised(nn.Module):
    """Batch normalisation by hand."""

    def forward(self, x: Tensor) -> Tensor:
        return (x - x.mean(0)) / (x.std(0, correction=0) + 0.1)


class ComplexScale(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(FEATURES, dtype=torch.complex64))

    def forward(self, x: Tensor) -> Tensor:
        return (x * self.scale).real


class Misspelt(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return inptu  # type: ignore[name-defined, no-any-return]  # noqa: F821


@pytest.mark.parametrize(
    ("layer", "words"),
    [
        (nn.BatchNorm1d(FEATURES), r"before \(BatchNorm1d\).*nn\.GroupNorm"),
        (nn.BatchNorm1d(FEATURES, affine=False), r"before \(BatchNorm1d\).*nn\.GroupNorm"),
        (nn.BatchNorm1d(FEATURES).requires_grad_(False), r"before \(BatchNorm1d\).*nn\.GroupNorm"),
        (nn.BatchNorm1d(FEATURES, track_running_stats=False), r"before \(BatchNorm1d\).*nn\.GroupNorm"),
        (nn.SyncBatchNorm(FEATURES), r"before \(SyncBatchNorm\).*nn\.GroupNorm"),
        (nn.LazyBatchNorm1d(), r"before \(LazyBatchNorm1d\).*nn\.GroupNorm"),
        (nn.Embedding(9, 4, max_norm=1.0), r"before \(Embedding\): max_norm.*Remove it"),
        (nn.Embedding(9, 4, sparse=True), r"before \(Embedding\): sparse.*sparse=False"),
        (nn.InstanceNorm1d(FEATURES, track_running_stats=True), r"InstanceNorm1d.*track_running_stats=False"),
        (nn.DataParallel(nn.Linear(FEATURES, FEATURES)), r"before \(DataParallel\).*backend='ddp-dp'"),
        (Codebook(), r"before\.code changes in a forward pass.*Remove the write"),
        (spectral_norm(nn.Linear(FEATURES, FEATURES)), r"\. before has spectral_norm.*weight_norm"),
        (nn.utils.spectral_norm(nn.Linear(FEATURES, FEATURES)), r"\. before has spectral_norm.*weight_norm"),
        (ComplexScale(), r"before\.scale: private training does not support complex.*view_as_real"),
        (Misspelt(), r"train_step raised NameError: name 'inptu' is not defined"),
        (nn.Linear(FEATURES, FEATURES).to(torch.bfloat16), r"before\.weight: torch\.bfloat16.*sp-dp-bf16"),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, nn.Module) else "",
)
def test_layers_that_mix_records_or_learn_without_noise_are_refused(
    layer: nn.Module, words: str, tmp_path: Path
) -> None:
    assert re.search(words, refusal(With(layer), tmp_path))


def test_batch_normalisation_in_eval_mode_is_a_constant(tmp_path: Path) -> None:
    class Frozen(nn.BatchNorm1d):
        def train(self, mode: bool = True) -> Frozen:
            return super().train(False)

    module = With(Frozen(FEATURES))
    ts.Trainer(module, private(tmp_path, promise(**NOISY))).train()
    assert torch.equal(module.before.running_mean, torch.zeros(FEATURES))


def test_hidden_coupling_of_records_is_refused_by_hooks(tmp_path: Path) -> None:
    assert "Write grad_mode='auto'" in refusal(With(Standardised()), tmp_path, promise(**NOISY, grad_mode="hooks"))


class TimeFirst(Classifier):
    """A recurrent model's order of dimensions: (positions, records, features)."""

    def __init__(self, positions: int, collate: bool) -> None:
        x, y = numbers(41 * positions).tensors
        super().__init__(TensorDataset(x.view(41, positions, FEATURES), y[:41]), collate_fn=self.collate)
        self.first = collate

    def collate(self, samples: list[Any]) -> Any:
        x, y = torch.utils.data.default_collate(samples)
        return (x.transpose(0, 1), y) if self.first else (x, y)

    def train_step(self, global_step: int, batch: Any, device: Any) -> Any:
        x = batch[0] if self.first else batch[0].transpose(0, 1)
        return nn.functional.cross_entropy(self.net(x).mean(0), batch[1])


@pytest.mark.parametrize("positions", [1, 3, 6, 12])
def test_records_along_another_dimension_are_refused_or_told_apart(positions: int, tmp_path: Path) -> None:
    found = refusal(TimeFirst(positions, collate=True), tmp_path)
    assert "records" in found
    trainer = ts.Trainer(TimeFirst(positions, collate=False), private(tmp_path, promise(**NOISY)))
    trainer.train()
    assert trainer.privacy_statement().grad_mode == "bookkeeping"


class Stream(IterableDataset[Any]):
    def __iter__(self) -> Any:
        return iter(numbers(41))


@pytest.mark.parametrize(
    ("loader", "words"),
    [
        (lambda size: DataLoader(Stream(), batch_size=size), "sampled record by record"),
        (
            lambda size: DataLoader(numbers(41), sampler=WeightedRandomSampler([1.0] * 41, 41), batch_size=size),
            "sampled record by record",
        ),
        (lambda size: [torch.zeros(2)] * 5, "sampled record by record"),
    ],
)
def test_data_that_cannot_be_sampled_evenly_is_refused(loader: Any, words: str, tmp_path: Path) -> None:
    found = refusal(With(loader=loader), tmp_path)
    assert words in found
    assert "Return DataLoader(dataset, batch_size=batch_size, sampler=sampler(dataset))" in found


@pytest.mark.parametrize(
    ("records", "promised", "words"),
    [
        (1, {"delta": 0.1}, "holds 1 record"),
        (41, {"delta": 1 / 41}, "Write less than 1/41"),
        (41, {"sample_rate": 0.5}, "sample_rate=0.5 contradicts"),
        (41, {"dataset_size": 40}, "Write the larger number"),
        (6, {}, "train_batch_size=8 with 6 records"),
    ],
)
def test_numbers_that_contradict_the_data_are_refused(
    records: int, promised: dict[str, Any], words: str, tmp_path: Path
) -> None:
    size = {} if records != 1 else {"train_batch_size": 1}
    assert words in refusal(Classifier(numbers(records)), tmp_path, promise(**{**NOISY, **promised}), **size)


@pytest.mark.parametrize(
    ("optimizers", "words"),
    [
        (lambda m: [torch.optim.SGD(m.net[0].parameters(), lr=0.1)], "net.3.bias, net.3.weight: trainable, but in no"),
        (
            lambda m: [torch.optim.SGD(m.parameters(), lr=0.1), torch.optim.SGD([m.net[0].bias], lr=0.1)],
            "holds 1 parameters that an earlier optimizer holds too",
        ),
        (
            lambda m: [torch.optim.SGD([*m.parameters(), nn.Parameter(torch.zeros(2))], lr=0.1)],
            "holds 1 parameters that are not With's",
        ),
    ],
)
def test_each_trained_parameter_is_in_one_optimizer(optimizers: Any, words: str, tmp_path: Path) -> None:
    with pytest.raises((ts.PrivacyError, ts.ModuleContractError), match=words):
        ts.Trainer(With(optimizers=optimizers), private(tmp_path, promise(**NOISY))).train()


def test_noise_on_the_count_is_compared_with_calibrated_noise(tmp_path: Path) -> None:
    args = promise(target_epsilon=0.5, clipping="adaptive", count_noise_multiplier=0.3)
    assert "count_noise_multiplier=0.3: the count of unclipped records" in refusal(Classifier(), tmp_path, args)


def test_all_reasons_are_in_one_error(tmp_path: Path) -> None:
    module = With(nn.BatchNorm1d(FEATURES), lambda m: [torch.optim.SGD(m.net.parameters(), lr=0.1)])
    found = refusal(module, tmp_path, promise(**{**NOISY, "delta": 0.5, "sample_rate": 0.9}), clip_grad_value=1.0)
    assert found.count("\n- ") == 5
    for words in ("BatchNorm1d", "in no optimizer", "delta=0.5", "sample_rate=0.9", "clip_grad_value=1.0"):
        assert words in found


@pytest.mark.parametrize("backend", ["sp-dp-amp", "ddp-dp-amp", "sp-dp-amp-apex"])
def test_a_gradient_scaler_is_refused(backend: str, tmp_path: Path) -> None:
    with pytest.raises(ts.ConfigurationError, match=r"a gradient scaler skips steps.*'bf16'"):
        ts.Trainer(Classifier(), arguments(tmp_path, backend=backend, differential_privacy_args=promise(**NOISY)))


def test_freezing_parameters_during_training_stops_it(tmp_path: Path) -> None:
    class Freezing(Classifier):
        def on_end_train_step(self, global_step: int) -> None:
            self.net[0].requires_grad_(False)

    with pytest.raises(ts.PrivacyError, match="the trained parameters have changed"):
        ts.Trainer(Freezing(), private(tmp_path, promise(**NOISY))).train()
