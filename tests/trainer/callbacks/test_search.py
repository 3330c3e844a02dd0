"""Callbacks that report to a search for hyperparameters."""

import sys
import types
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

import trainstack as ts
from tests.helpers.processes import run_world
from tests.helpers.workers.search import pruned
from trainstack.errors import ConfigurationError

X = torch.randn(16, 4, generator=torch.Generator().manual_seed(0))
DATA = TensorDataset(X, X.sum(1, keepdim=True))


class Pruned(Exception):
    pass


class Trial:
    """The part of an Optuna trial that a callback uses: it is pruned at its second report."""

    def __init__(self, direction: str = "MINIMIZE") -> None:
        self.reports: list[tuple[int, float]] = []
        self.study = types.SimpleNamespace(direction=types.SimpleNamespace(name=direction))

    def report(self, value: float, step: int) -> None:
        self.reports.append((step, value))

    def should_prune(self) -> bool:
        return len(self.reports) == 2


@pytest.fixture
def _optuna(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "optuna", types.SimpleNamespace(TrialPruned=Pruned))


def make(folder: Path, callbacks: Any, lr: float = 0.01, **options: Any) -> ts.Trainer:
    torch.manual_seed(0)
    module = ts.SupervisedModule(nn.Linear(4, 1), nn.MSELoss(), "sgd", DATA, DATA, optimizer_kwargs={"lr": lr})
    given: Any = {"epochs": 4, "train_batch_size": 4, "writers": [], "progress": "none", "log_level": "ERROR"}
    return ts.Trainer(module, ts.TrainerArguments(output_dir=folder, **given, **options), callbacks=callbacks)


@pytest.mark.usefixtures("_optuna")
def test_a_pruned_training_saves_and_raises(tmp_path: Path) -> None:
    trial = Trial()
    trainer = make(tmp_path, [ts.callbacks.OptunaPruning(trial)])
    with pytest.raises(Pruned, match="at epoch 1"):
        trainer.train()
    assert [step for step, _ in trial.reports] == [0, 1]
    assert trial.reports[-1][1] == trainer.history.get_latest_metric("val/loss")
    assert trainer.global_steps_finished == 8
    assert ts.list_checkpoints(tmp_path / "checkpoints"), "the last checkpoint is missing"
    trainer.train()  # the run has ended: no error


@pytest.mark.usefixtures("_optuna")
def test_another_request_to_stop_does_not_replace_the_error(tmp_path: Path) -> None:
    trainer = make(tmp_path, [ts.callbacks.OptunaPruning(Trial())])
    trainer.on(ts.Event.EPOCH_END)(lambda trainer, epoch: epoch == 1 and trainer.request_stop("other"))
    with pytest.raises(Pruned, match="at epoch 1"):
        trainer.train()


def test_a_training_that_fails_drops_the_error_of_a_request(tmp_path: Path) -> None:
    trainer = make(tmp_path, [])

    @trainer.on(ts.Event.TRAIN_STEP_END, once=True)
    def fail(trainer: ts.Trainer) -> None:
        trainer.request_stop("first", then_raise=Pruned())
        raise KeyError

    with pytest.raises(KeyError):
        trainer.train()
    trainer.train()
    assert trainer.global_steps_finished == 16


@pytest.mark.usefixtures("_optuna")
def test_wrong_arguments_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match="create_study"):
        make(tmp_path / "1", [ts.callbacks.OptunaPruning(Trial("MAXIMIZE"))]).train()
    with pytest.raises(ConfigurationError, match="Pass the trial there"):
        make(tmp_path / "2", [ts.callbacks.OptunaPruning(None)]).train()
    with pytest.raises(ConfigurationError, match="'epoch' or 'global_step'"):
        ts.callbacks.OptunaPruning(Trial(), step="step")


def test_a_missing_package_is_an_error_with_its_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("optuna", "ray", "ray.train"):
        monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(ts.errors.MissingExtraError, match=r"trainstack\[optuna\]"):
        ts.callbacks.OptunaPruning(Trial())
    with pytest.raises(ts.errors.MissingExtraError, match=r"trainstack\[ray\]"):
        ts.callbacks.RayReport()


def test_a_real_study_prunes(tmp_path: Path) -> None:
    optuna = pytest.importorskip("optuna")

    def objective(trial: Any) -> float:
        lr = trial.suggest_categorical("lr", [0.05, 1e-4])
        trainer = make(tmp_path / str(trial.number), [ts.callbacks.OptunaPruning(trial)], lr)
        trainer.train()
        return float(trainer.history.get_latest_metric("val/loss"))

    pruner = optuna.pruners.MedianPruner(n_startup_trials=1, n_warmup_steps=0)
    study = optuna.create_study(sampler=optuna.samplers.GridSampler({"lr": [0.05, 1e-4]}, seed=0), pruner=pruner)
    study.enqueue_trial({"lr": 0.05})
    study.enqueue_trial({"lr": 1e-4})
    study.optimize(objective, n_trials=2)
    assert [trial.state.name for trial in study.trials] == ["COMPLETE", "PRUNED"]


@pytest.mark.distributed
def test_the_main_rank_prunes_all_ranks(tmp_path: Path) -> None:
    """A study over two processes and 17 samples: the second trial is pruned after its second epoch."""
    pytest.importorskip("optuna")
    main, other = run_world(2, pruned, directory=str(tmp_path))

    assert main["states"] == [["COMPLETE", [0, 1, 2]], ["PRUNED", [0, 1]]]
    assert other["states"] == ["TrialPruned"]
    assert main["results"] == other["results"]
    reason = "Optuna has pruned the trial at epoch 1"
    assert main["results"] == [["completed", 9, None], [reason, 6, reason]]
    newest = [ts.list_checkpoints(tmp_path / str(number) / "checkpoints")[-1] for number in range(2)]
    assert [info.global_step for info in newest] == [9, 6]
    assert main["failure"] == "ConnectionError: no storage"
    assert "reporting to the Optuna trial failed on rank 0" in other["failure"]
