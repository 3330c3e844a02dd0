"""One rare record in 10,000 moves the sum within the limit, also under a normalised loss."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import TensorDataset

import trainstack as ts
from trainstack.backends.losses import losses_per_record
from trainstack.trainer.core.record_losses import without_reduction

RECORDS = 10_000


class Own(ts.ModuleInterface):
    """One step over all records; `losses(logits, labels)` is the user's loss."""

    def __init__(self, losses: Any, net: nn.Module, data: TensorDataset) -> None:
        super().__init__()
        self.losses, self.net, self.data = losses, net, data

    def get_optimizers_schedulers(self, estimated_global_steps_per_epoch: int, epochs: int) -> Any:
        return [torch.optim.SGD(self.parameters(), lr=1.0)], []

    def get_train_dataloader(self, sampler: Any, batch_size: int) -> Any:
        return self.build_dataloader(self.data, sampler, batch_size)

    def get_val_dataloaders(self, sampler: Any, batch_size: int) -> None:
        return None

    def train_step(self, global_step: int, batch: Any, device: Any) -> Tensor:
        return self.losses(self.net(batch[0]), batch[1])


def class_weights(logits: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(logits, labels, weight=torch.tensor([1.0, 500.0]))


def masked_mean(logits: Tensor, labels: Tensor) -> Tensor:
    """Label 1 marks a record without a known label."""
    return F.cross_entropy(logits, 0 * labels, reduction="none")[labels == 0].mean()


def token_mean(logits: Tensor, labels: Tensor) -> Tensor:
    """The rare record has 64 labels, all others one."""
    labels = torch.where((torch.arange(64) == 0) | (labels[:, None] == 1), labels[:, None], -100)
    return F.cross_entropy(logits[:, :, None].expand(-1, -1, 64), labels, ignore_index=-100)


def weighted_by_the_batch(logits: Tensor, labels: Tensor) -> Tensor:
    """One loss for each record, which nevertheless depends on the others."""
    weights = torch.tensor([1.0, 500.0])[labels]
    return F.cross_entropy(logits, labels, reduction="none") * weights / weights.mean()


def sum_over(records: int, make: Any, mode: str, directory: Path) -> tuple[Tensor, str]:
    torch.manual_seed(0)
    net, labels = nn.Linear(1, 2), torch.zeros(records, dtype=torch.long)
    nn.init.zeros_(net.weight)
    nn.init.zeros_(net.bias)
    labels[RECORDS - 1 :] = 1  # the rare record is the last
    promised = ts.DifferentialPrivacyArguments(
        delta=1e-5, noise_multiplier=0.0, dataset_size=RECORDS, grad_mode=mode, per_sample_max_grad_norm=0.1
    )
    args = ts.TrainerArguments(
        backend="sp-dp",
        device="cpu",
        epochs=1,
        train_batch_size=RECORDS,
        gpu_batch_size_limit=RECORDS,
        differential_privacy_args=promised,
        writers=[],
        output_dir=directory / str(records),
    )
    trainer = ts.Trainer(make(net, TensorDataset(torch.ones(records, 1), labels)), args)
    trainer.train()
    moved = torch.cat([net.weight.detach().flatten(), net.bias.detach()])
    return -RECORDS * moved, trainer.privacy_statement().grad_mode


OWN = (class_weights, masked_mean, token_mean, weighted_by_the_batch)


@pytest.mark.parametrize("loss", [*OWN, "criterion"], ids=lambda loss: getattr(loss, "__name__", loss))
def test_omitting_the_rare_record_moves_the_sum_within_the_limit(loss: Any, tmp_path: Path) -> None:
    def make(net: nn.Module, data: TensorDataset) -> Any:
        if loss != "criterion":
            return Own(loss, net, data)
        criterion = nn.CrossEntropyLoss(weight=torch.tensor([1.0, 500.0]))
        return ts.SupervisedModule(net, criterion, partial(torch.optim.SGD, lr=1.0), data)

    whole, mode = sum_over(RECORDS, make, "auto", tmp_path)
    others, _ = sum_over(RECORDS - 1, make, "auto", tmp_path)
    assert mode == "bookkeeping"
    assert float((whole - others).norm()) <= 0.1 * (1 + 1e-3)


@pytest.mark.slow
@pytest.mark.parametrize(("mode", "loss"), [("hooks", class_weights), ("ghost", weighted_by_the_batch)])
def test_opacus_hooks_end_the_run_at_the_rare_record(mode: str, loss: Any, tmp_path: Path) -> None:
    with pytest.raises(ts.PrivacyError, match=r"not the mean of the losses of its records.*grad_mode='auto'"):
        sum_over(RECORDS, partial(Own, loss), mode, tmp_path)


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("rare", [0, 1])
def test_a_criterion_gives_each_record_the_mean_over_its_labels(rare: int, training: bool) -> None:
    weights, logits = torch.tensor([1.0, 500.0]), torch.randn(3, 2, 4)
    labels = torch.tensor([[0, 1, -100, -100], [0, 0, 0, rare], [-100] * 4])
    module = ts.SupervisedModule(nn.Identity(), nn.CrossEntropyLoss(weight=weights), "sgd", None)
    with losses_per_record(module):
        found = module.step((logits, labels), training=training)["loss"]
    each = F.cross_entropy(logits, labels, weight=weights, reduction="none")
    expected = torch.stack([each[0, :2].mean(), each[1].mean(), torch.tensor(0.0)])
    if not training:
        expected = F.cross_entropy(logits, labels, weight=weights)
    torch.testing.assert_close(found, expected)
    torch.testing.assert_close(module.step((logits, labels), training=True)["loss"], module.loss(logits, labels))


@pytest.mark.parametrize(
    ("loss", "is_each"),
    [
        (F.cross_entropy, True),
        (partial(F.cross_entropy, label_smoothing=0.1), True),
        (nn.MSELoss(), True),
        (nn.MSELoss(reduction="sum"), False),
        (lambda outputs, target: F.mse_loss(outputs, target), False),
        (nn.CTCLoss(), False),
    ],
)
def test_only_a_criterion_with_that_option_is_called_without_reduction(loss: Any, is_each: bool) -> None:
    assert (without_reduction(loss) is not None) == is_each
