"""The worker processes of loaders end on request, never by a signal after seconds of waiting."""

from __future__ import annotations

import gc
import multiprocessing
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset, get_worker_info
from torchdata.stateful_dataloader import StatefulDataLoader

import trainstack as ts
from tests.helpers.modules import Classifier, Noisy, arguments
from tests.helpers.patience import patience
from tests.helpers.processes import ROOT
from trainstack.trainer.data.loading import Fetcher
from trainstack.trainer.data.overfitting import OverfitSubset

pytestmark = pytest.mark.timeout(patience(60))


class InOrder(IterableDataset[Any]):
    """A data set without indices, so that the loop iterates the loader."""

    def __iter__(self) -> Any:
        return iter([sample for sample in Noisy()])  # noqa: C416 - by index


@pytest.fixture
def others() -> set[Any]:
    """Processes that an earlier test has left."""
    gc.collect()
    return set(multiprocessing.active_children())


def trained(directory: Path, backend: str = "sp", **loader: Any) -> ts.Trainer:
    trainer = ts.Trainer(
        Classifier(Noisy(8), num_workers=1, **loader),
        arguments(directory, backend=backend, max_steps=2, epochs=5, train_batch_size=4),
    )
    trainer.train()
    return trainer


@pytest.mark.processes
@pytest.mark.parametrize("backend", ["sp", "sp-dp"])
@pytest.mark.parametrize("closed", [True, False])
def test_persistent_workers_end_with_their_trainer(
    closed: bool, backend: str, others: set[Any], tmp_path: Path
) -> None:
    trainer = trained(tmp_path, backend, persistent_workers=True)
    (worker,) = set(multiprocessing.active_children()) - others
    if closed:
        trainer.close()
    else:
        del trainer
        gc.collect()
    assert worker.exitcode == 0


@pytest.mark.processes
@pytest.mark.filterwarnings("ignore:'set_vital' is deprecated:UserWarning")  # torchdata 0.11 under torch 2.13
@pytest.mark.parametrize("kind", [None, DataLoader, StatefulDataLoader])
def test_workers_end_after_an_error_in_a_step(kind: Any, others: set[Any], tmp_path: Path) -> None:
    """A loader that the loop replaces, and loaders of the user that the loop iterates."""

    class Fails(Classifier):
        def get_train_dataloader(self, sampler: Any, batch_size: int) -> Any:
            ours = super().get_train_dataloader(sampler, batch_size)
            return ours if kind is None else kind(InOrder(), batch_size, num_workers=1)

        def train_step(self, global_step: int, batch: Any, device: Any) -> Any:
            workers.extend(set(multiprocessing.active_children()) - others)
            raise ValueError("in a step")

    workers: list[Any] = []
    trainer = ts.Trainer(Fails(Noisy(), num_workers=1), arguments(tmp_path))
    with pytest.raises(ValueError, match="in a step"):
        trainer.train()
    del trainer
    gc.collect()
    assert [worker.exitcode for worker in workers] == [0]


@pytest.mark.processes
def test_a_script_ends_while_its_trainer_still_has_workers(tmp_path: Path) -> None:
    script = (
        "from pathlib import Path; from tests.trainer.data.test_loader_workers import trained\n"
        f"trainer = trained(Path({str(tmp_path)!r}), persistent_workers=True)"
    )
    subprocess.run([sys.executable, "-c", script], cwd=ROOT, check=True, timeout=patience(30))


class Scaled(Dataset[float]):
    """Gives its index times a factor, which a worker may change."""

    scale = 1.0

    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> float:
        info = get_worker_info()
        assert info is not None
        assert info.dataset is self
        return index * self.scale

    def multiply(self, scale: float) -> None:
        self.scale = scale


def set_up(worker: int) -> None:
    get_worker_info().dataset.multiply(10.0)  # type: ignore[union-attr, attr-defined]


def collate(samples: list[float]) -> Any:
    return type(get_worker_info().dataset).__name__, torch.tensor(samples)  # type: ignore[union-attr]


def test_overfitting_keeps_the_workers_of_a_persistent_loader() -> None:
    subset, loader = (
        OverfitSubset(2, 2, seed=0, version=0),
        DataLoader(Scaled(), 2, num_workers=1, persistent_workers=True),
    )
    limited = subset.of(loader, 1)
    assert limited.persistent_workers
    assert Fetcher(limited, 0).serves(subset.of(loader, 1))
    assert not subset.of(DataLoader(Scaled(), 2, num_workers=1), 1).persistent_workers


@pytest.mark.processes
@pytest.mark.parametrize("overfit", [False, True])
def test_workers_have_the_dataset_of_the_user(overfit: bool) -> None:
    loader: Any = DataLoader(
        Scaled(), 2, num_workers=1, worker_init_fn=set_up, collate_fn=collate, persistent_workers=not overfit
    )
    if overfit:
        loader = OverfitSubset(2, 2, seed=0, version=0).of(loader, 1)
    fetcher = Fetcher(loader, 0)
    for epoch in (0, 1):
        batches = list(fetcher.batches(epoch, torch.arange(4).split(2)))
        assert batches[0][0] == "Scaled"
        assert [batch[1].tolist() for batch in batches] == [[0.0, 10.0], [20.0, 30.0]]
