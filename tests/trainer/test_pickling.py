"""A `Trainer` in a pickle."""

import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

import trainstack as ts
from trainstack.errors import ConfigurationError
from trainstack.trainer.core.state_tree import same

X = torch.randn(16, 4, generator=torch.Generator().manual_seed(0))
DATA = TensorDataset(X, X.sum(1, keepdim=True))


def make(folder: Path, **options: Any) -> ts.Trainer:
    torch.manual_seed(0)
    module = ts.SupervisedModule(nn.Linear(4, 1), nn.MSELoss(), "adamw", DATA, DATA)
    given: Any = {"epochs": 2, "train_batch_size": 4, "writers": [], "progress": "none", "log_level": "ERROR"}
    stack = options.pop("trainer_backend", None)
    args = ts.TrainerArguments(output_dir=folder, **given, **options)
    return ts.Trainer(module, args, stack, callbacks=[ts.callbacks.EMA(), ts.callbacks.EarlyStopping()])


def copy_of(trainer: ts.Trainer) -> ts.Trainer:
    made: ts.Trainer = pickle.loads(pickle.dumps(trainer))
    return made


def test_a_copy_made_before_training_ends_with_equal_weights(tmp_path: Path) -> None:
    trainer = make(tmp_path / "one")
    copied = copy_of(make(tmp_path / "two"))
    trainer.train()
    copied.train()
    assert all(map(torch.equal, trainer.module.parameters(), copied.module.parameters()))


def test_a_copy_of_a_finished_trainer_evaluates_and_exports(tmp_path: Path) -> None:
    trainer = make(tmp_path / "run", overwrite=True)
    trainer.user_state["note"] = 3
    trainer.train()
    copied = copy_of(trainer)
    assert (copied.state.global_step, copied.user_state["note"]) == (8, 3)
    assert copied.history.records("val/loss") == trainer.history.records("val/loss")
    before = trainer.history.get_latest_metric("val/loss")
    copied.validate()
    assert copied.history.get_latest_metric("val/loss") == before
    copied.export(tmp_path / "export")
    for key in ("EMA", "EarlyStopping"):
        assert same(copied.events.get_state()[key], trainer.events.get_state()[key])
    copied.train()  # does nothing: the run is finished
    with pytest.raises(ConfigurationError, match="resume=True"):
        copied.train(epochs=3)
    assert copy_of(copied).state.global_step == 8


def test_a_copy_of_a_stopped_trainer_evaluates_but_cannot_train(tmp_path: Path) -> None:
    trainer = make(tmp_path)
    trainer.on(ts.Event.TRAIN_STEP_END)(lambda trainer: trainer.request_stop("enough"))
    trainer.train()
    copied = copy_of(trainer)
    assert copied.state.global_step == 1
    assert copied.validate().metrics == trainer.validate().metrics
    with pytest.raises(ConfigurationError, match="resume=True"):
        copied.train()


def test_objects_that_cannot_be_pickled_are_refused(tmp_path: Path) -> None:
    trainer = make(tmp_path / "training")
    said: list[str] = []

    def try_it(trainer: ts.Trainer) -> None:
        with pytest.raises(ConfigurationError, match="before or after train") as found:
            pickle.dumps(trainer)
        said.append(str(found.value))

    trainer.on(ts.Event.TRAIN_STEP_END, once=True)(try_it)
    trainer.train()
    assert said
    with pytest.raises(ConfigurationError, match="backend as a string"):
        pickle.dumps(make(tmp_path / "stack", trainer_backend=ts.build_trainer_backend("sp")))
