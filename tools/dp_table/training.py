"""Train a row of the table once."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, Dataset

import trainstack as ts
from tools.dp_table.features import private_statistics, scattered
from tools.dp_table.images import Images
from tools.dp_table.rows import Row, build
from trainstack.backends.dp import SharedUse, SpendLedger, epsilon_of

DELTA = 1e-5
PIXEL_MEAN, PIXEL_DEVIATION = 0.1307, 0.3081
"""Public constants of MNIST: Opacus' example normalizes by them without noise."""


class Arrays(Dataset[Any]):
    """Records of an array, which may be mapped from a file.

    Args:
        inputs: of shape (records, ...).
        labels: int64 of shape (records,).
    """

    def __init__(self, inputs: np.ndarray, labels: Tensor) -> None:
        self._inputs, self._labels = inputs, labels

    def __len__(self) -> int:
        return len(self._labels)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        return torch.from_numpy(self._inputs[index].astype(np.float32)), self._labels[index]


class Standardized(nn.Module):
    """Channels minus their mean, divided by their standard deviation; these are buffers, not parameters.

    Args:
        mean: of each channel.
        variance: of each channel; a channel with variance 0 becomes 0.
    """

    def __init__(self, mean: np.ndarray, variance: np.ndarray) -> None:
        super().__init__()
        self.register_buffer("mean", torch.from_numpy(mean).float()[:, None, None])
        self.register_buffer(
            "scale", torch.from_numpy((variance > 0) / np.sqrt(variance + 1e-5)).float()[:, None, None]
        )

    def forward(self, inputs: Tensor) -> Tensor:
        return (inputs - self.mean) * self.scale


class Classifier(ts.ModuleInterface):
    """SGD on the cross entropy, as in both sources."""

    def __init__(self, row: Row, model: nn.Module, train: Arrays, test: Arrays) -> None:
        super().__init__()
        self.model, self._row, self._train, self._test = model, row, train, test

    def get_train_dataloader(self, sampler: Any, batch_size: int) -> DataLoader[Any]:
        return DataLoader(self._train, batch_size=batch_size, sampler=sampler(self._train))

    def get_val_dataloaders(self, sampler: Any, batch_size: int) -> DataLoader[Any]:
        return DataLoader(self._test, batch_size=batch_size, sampler=sampler(self._test))

    def get_optimizers_schedulers(
        self, estimated_global_steps_per_epoch: int, epochs: int
    ) -> tuple[list[Any], list[Any]]:
        row = self._row
        return [torch.optim.SGD(self.model.parameters(), lr=row.learning_rate, momentum=row.momentum)], []

    def train_step(self, global_step: int, batch: Any, device: Any) -> Tensor:
        inputs, labels = batch
        return cross_entropy(self.model(inputs), labels)

    def val_step(self, global_step: int, batch: Any, device: Any) -> tuple[Tensor, Tensor]:
        inputs, labels = batch
        scores = self.model(inputs)
        return cross_entropy(scores, labels), scores.argmax(dim=1) == labels

    def on_end_val_epoch(self, global_step: int, losses: Tensor, right: Tensor, key: str = "default") -> None:
        self.log("val/accuracy", 100 * right.float().mean())


@dataclass(frozen=True, kw_only=True)
class Result:
    """The result of one run.

    Attributes:
        accuracy: on the test set after the last step, in percent.
        epsilon: of all mechanisms together, by the accountant "prv".
        epsilon_rdp: the same by "rdp".
        steps: the number of released steps.
    """

    accuracy: float
    epsilon: float
    epsilon_rdp: float
    steps: int


def run(row: Row, seed: int, images: Images, cache: Path, folder: Path, max_steps: int | None = None) -> Result:
    """Train `row` once, or continue the run in `folder`.

    Args:
        row: the model and its hyper-parameters.
        seed: of the initial weights; noise and samples come from the operating system.
        images: the training and test data.
        cache: the folder for features.
        folder: of the run.
        max_steps: fewer steps than published.
    """
    ts.seed_everything(seed)
    model = build(row.architecture)
    use = SharedUse(name=f"{images.name}, run {seed}", records=len(images.train))
    ledger = SpendLedger(folder / "privacy-ledger.jsonl", shared=use)
    if row.normalization_noise is None:
        train, test = (_pixels(part, row.architecture) for part in (images.train, images.test))
    else:
        train, test = (
            scattered(getattr(images, part), cache / f"{images.name}-{part}.npy") for part in ("train", "test")
        )
        statistics = private_statistics(train, row.normalization_noise, folder / "statistics.npz", ledger)
        model = nn.Sequential(Standardized(*statistics), model)
    steps = row.steps if max_steps is None else max_steps
    batch = min(row.batch, len(images.train) // 4)
    args = ts.TrainerArguments(
        backend="sp-dp",
        differential_privacy_args=ts.DifferentialPrivacyArguments(
            delta=DELTA,
            noise_multiplier=row.noise_multiplier,
            per_sample_max_grad_norm=row.max_grad_norm,
            ledger=ledger.path,
            dataset_name=use.name,
        ),
        max_steps=steps,
        max_train_steps_per_epoch=row.steps_per_epoch,
        train_batch_size=batch,
        gpu_batch_size_limit=min(batch, 1024),
        val_batch_size=1000,
        validate_every=0.1,
        output_dir=folder / "run",
        resume="auto",
        progress="none",
        writers=["csv"],
        device="cpu",
        clip_grads=False,
        checkpointer_args=ts.DefaultCheckpointerArguments(every_n_steps=max(1, steps // 20)),
    )
    module = Classifier(row, model, Arrays(train, images.train_labels), Arrays(test, images.test_labels))
    trainer = ts.Trainer(module, args)
    trainer.train()
    statement = trainer.privacy_statement()
    releases = ledger.spent()  # the normalization and the steps
    return Result(
        accuracy=float(trainer.history.get_latest_metric("val/accuracy")),
        epsilon=epsilon_of(releases, DELTA),
        epsilon_rdp=epsilon_of(releases, DELTA, "rdp"),
        steps=statement.steps,
    )


def _pixels(images: Tensor, architecture: str) -> np.ndarray:
    """Float32 of shape (records, 1, 28, 28): normalized as in Opacus' example, or in [0, 1] as by Tramer and Boneh."""
    values = images[:, None].float() / 255
    return ((values - PIXEL_MEAN) / PIXEL_DEVIATION if architecture == "opacus" else values).numpy()
