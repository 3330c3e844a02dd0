"""The values that user code sees of a private step do not depend on the other records of the step."""

from __future__ import annotations

from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import ConcatDataset, DataLoader, Dataset, Subset, TensorDataset

import trainstack as ts
from tests.backends.dp.test_sealed_state import Net
from tests.backends.dp.test_state_within_steps import Carries, run_in_parts
from trainstack.backends.dp.sealed import attribute_watch
from trainstack.backends.dp.sealed.sample_replay import OTHER_SAMPLES

RECORDS = 40


class Linear(ts.ModuleInterface):
    """A step over all records whose gradients have length 1, and weights that never move."""

    def __init__(self, dataset: Any) -> None:
        super().__init__()
        self.net, self.dataset = nn.Linear(2, 1, bias=False), dataset

    def get_optimizers_schedulers(self, estimated_global_steps_per_epoch: int, epochs: int) -> Any:
        return [torch.optim.SGD(self.parameters(), lr=1.0)], []

    def get_train_dataloader(self, sampler: Any, batch_size: int) -> Any:
        return DataLoader(self.dataset, batch_size=batch_size, sampler=sampler(self.dataset))

    def train_step(self, global_step: int, batch: Any, device: Any) -> Any:
        return self.net(batch[0]).sum()


def vectors(records: int) -> TensorDataset:
    return TensorDataset(torch.nn.functional.normalize(torch.linspace(1, 2, 2 * RECORDS).view(-1, 2))[:records])


def train(module: Any, directory: Path, *, size: int = RECORDS, grad_mode: Any = "auto", **changes: Any) -> Tensor:
    """The sum of a step over all records, without noise."""
    private = ts.DifferentialPrivacyArguments(delta=1e-4, noise_multiplier=0.0, dataset_size=size, grad_mode=grad_mode)
    given = {"backend": "sp-dp", "device": "cpu", "epochs": 1, "writers": [], "output_dir": str(directory), **changes}
    args = ts.TrainerArguments(differential_privacy_args=private, train_batch_size=size, **given)
    before = module.net.weight.detach().clone()
    ts.Trainer(module, args).train()
    return (before - module.net.weight.detach()).flatten() * size


class ScaledTogether(Dataset[Any]):
    """Loads samples together, and negates all of them if a marked one is among them."""

    def __init__(self, inner: TensorDataset) -> None:
        self.inner = inner

    def __len__(self) -> int:
        return len(self.inner)

    def __getitem__(self, index: int) -> Any:
        return self.inner[index]

    def __getitems__(self, index: list[int]) -> Any:
        return [(-self.inner[i][0] if RECORDS - 1 in index else self.inner[i][0],) for i in index]


class TurnsFirstPart(Linear):
    def train_step(self, global_step: int, batch: Any, device: Any) -> Any:
        loss = super().train_step(global_step, batch, device)
        return loss if self.micro_batch.number % 2 == 0 else -loss


@pytest.mark.parametrize(
    "make", [lambda data: Linear(ScaledTogether(data)), TurnsFirstPart], ids=["getitems", "number"]
)
def test_a_record_moves_the_sum_by_its_own_gradient(make: Any, tmp_path: Path) -> None:
    # four micro-batches of 10 records, or three of 13
    whole, less = (train(make(vectors(n)), tmp_path / str(n), gpu_batch_size_limit=13) for n in (RECORDS, RECORDS - 1))
    assert (whole - less).norm() <= 1.001


@pytest.mark.parametrize(
    "repeated",
    [lambda data: Subset(data, [*range(RECORDS), 3, -RECORDS + 3]), lambda data: ConcatDataset([data, data, data])],
    ids=["subset", "concat"],
)
def test_a_dataset_that_repeats_a_record_is_refused(repeated: Any, tmp_path: Path) -> None:
    dataset = repeated(vectors(RECORDS))
    with pytest.raises(ts.PrivacyError, match="a record is in the data set 3 times"):
        train(Linear(dataset), tmp_path, size=len(dataset))


@pytest.mark.parametrize("place", ["mean", "list", "dict", "tensor"])
def test_values_set_in_a_forward_pass_are_reset_each_step(
    place: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(attribute_watch.AttributeWatch, "check", lambda *given, **named: None)  # as between its turns
    found: list[Any] = []
    run_in_parts(tmp_path, Carries(place, found), "loop", None)
    assert max(step for step, _ in found) >= 4  # it writes from step 3 on
    assert all(value == found[0][1] for _, value in found)


class Scheduled(Net):
    """Its schedule reads a value that `train_step` keeps, and its hook reads it afterwards."""

    worst = 0.0
    read: ClassVar[list[float]] = []

    def get_optimizers_schedulers(self, *given: Any) -> Any:
        self.optimizer = torch.optim.SGD(self.parameters(), lr=1.0)
        return [self.optimizer], [torch.optim.lr_scheduler.LambdaLR(self.optimizer, lambda step: 1.0 + self.worst)]

    def remember(self, step: int, x: Tensor) -> None:
        self.worst = max(self.worst, float(x.abs().max()))

    def on_end_train_step(self, global_step: int) -> None:
        assert self.optimizer.param_groups[0]["lr"] == 1.0
        type(self).read.append(self.worst)


def test_a_schedule_reads_no_value_of_a_forward_pass(tmp_path: Path) -> None:
    Scheduled.read = []
    run_in_parts(tmp_path, Scheduled(0.5), "loop", None)
    assert Scheduled.read
    assert min(Scheduled.read) > 0.0


class TurnsAfterMarked(ScaledTogether):
    """Negates all samples after the marked first record, whose value it keeps as a number."""

    kept = 1.0

    def __getitem__(self, index: int) -> Any:
        value = self.inner[index][0]
        self.kept = min(self.kept, float(value[0]))
        return (value if self.kept > 0 else -value,)


class InWorkers(Linear):
    def get_train_dataloader(self, sampler: Any, batch_size: int) -> Any:
        return DataLoader(self.dataset, batch_size=batch_size, sampler=sampler(self.dataset), num_workers=1)


@pytest.mark.parametrize("kind", [Linear, pytest.param(InWorkers, marks=pytest.mark.processes)])
def test_a_value_that_a_dataset_keeps_of_samples_is_restored(kind: type[Linear], tmp_path: Path) -> None:
    marked = vectors(RECORDS)
    marked.tensors[0][0, 0] *= -1
    less = TensorDataset(marked.tensors[0][1:])
    one, other = (
        train(kind(TurnsAfterMarked(data)), tmp_path / str(len(data)), grad_mode="loop") for data in (marked, less)
    )
    assert (one - other).norm() <= 1.001


_LAST, _IN_ORDER, _LONGEST = [0], [0], [0]


class KeepsInGlobals(ScaledTogether):
    """Negates all samples after eight consecutive ones, as in a step over all records.

    Records that are probed before the first step are in random order, in which a few are consecutive by chance.
    """

    def __getitem__(self, index: int) -> Any:
        _IN_ORDER[0] = _IN_ORDER[0] + 1 if index == _LAST[0] + 1 else 0
        _LAST[0], _LONGEST[0] = index, max(_LONGEST[0], _IN_ORDER[0])
        return (self.inner[index][0] * (1 if _LONGEST[0] < 8 else -1),)


def test_a_dataset_that_learns_within_a_step_stops_its_release(tmp_path: Path) -> None:
    module = Linear(KeepsInGlobals(vectors(RECORDS)))
    before = module.net.weight.detach().clone()
    with pytest.raises(ts.PrivacyError, match="it keeps something of the records between"):
        train(module, tmp_path, gpu_batch_size_limit=10)
    assert torch.equal(before, module.net.weight)


class OtherData(Linear):
    """Gives another data set in each epoch."""

    def get_train_dataloader(self, sampler: Any, batch_size: int) -> Any:
        self.dataset = TensorDataset(self.dataset.tensors[0] + 1.0)
        return super().get_train_dataloader(sampler, batch_size)


@pytest.mark.parametrize("kind", [Linear, OtherData])
def test_samples_that_change_between_epochs_are_noted(kind: type[Linear], tmp_path: Path) -> None:
    args = ts.TrainerArguments(
        backend="sp-dp",
        device="cpu",
        epochs=2,
        train_batch_size=20,
        output_dir=str(tmp_path),
        writers=[],
        differential_privacy_args=ts.DifferentialPrivacyArguments(delta=1e-4, noise_multiplier=1.0),
    )
    trainer = ts.Trainer(kind(vectors(RECORDS)), args)
    trainer.train()
    assert (OTHER_SAMPLES in trainer.privacy_statement().not_covered) is (kind is OtherData)
