"""Optimizers with the modes `train` and `eval`, such as schedule-free ones."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

import trainstack as ts

X = torch.randn(16, 4, generator=torch.Generator().manual_seed(0))
DATA = TensorDataset(X, X.sum(1, keepdim=True))


class Averaging(torch.optim.SGD):
    """SGD that shifts the parameters in evaluation mode; shifting them back rounds."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, lr=0.03)
        self.param_groups[0]["evaluates"] = True

    def train(self) -> None:
        self._switch(False, -1.0)

    def eval(self) -> None:
        self._switch(True, 1.0)

    @torch.no_grad()
    def _switch(self, evaluates: bool, sign: float) -> None:
        group = self.param_groups[0]
        if group["evaluates"] is evaluates:
            return
        group["evaluates"] = evaluates
        for p in group["params"]:
            if "shift" in self.state[p]:
                p.add_(self.state[p]["shift"], alpha=sign)

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        assert not self.param_groups[0]["evaluates"], "a step in evaluation mode"
        super().step()
        for p in self.param_groups[0]["params"]:
            self.state[p]["shift"] = p.detach() / 3


def schedule_free(parameters: Any) -> Any:
    return pytest.importorskip("schedulefree").AdamWScheduleFree(parameters, lr=0.01)


OPTIMIZERS = pytest.mark.parametrize("optimizer", [Averaging, schedule_free], ids=["averaging", "schedulefree"])


def make(optimizer: Any, folder: Path, *, val: bool = True, **options: Any) -> ts.Trainer:
    torch.manual_seed(0)
    module = ts.SupervisedModule(nn.Linear(4, 1), nn.MSELoss(), optimizer, DATA, DATA if val else None)
    callbacks = options.pop("callbacks", None)
    options = {"epochs": 3, "train_batch_size": 4, "writers": [], "progress": "none", "output_dir": folder, **options}
    return ts.Trainer(module, ts.TrainerArguments(**options), callbacks=callbacks)


def weights(trainer: ts.Trainer) -> list[Tensor]:
    return [p.detach().clone() for p in trainer.module.parameters()]


def equal(one: list[Tensor], other: list[Tensor]) -> bool:
    return all(map(torch.equal, one, other))


@OPTIMIZERS
def test_validation_export_and_end_have_the_evaluated_weights(optimizer: Any, tmp_path: Path) -> None:
    seen: list[list[Tensor]] = []

    class Look(ts.Callback):
        def on_validation_begin(self, trainer: ts.Trainer) -> None:
            with trainer.evaluation_context():
                seen.append(weights(trainer))

        def on_train_epoch_end(self, trainer: ts.Trainer) -> None:
            trained = weights(trainer)
            trainer.export(tmp_path / f"epoch{trainer.state.epoch}")
            exported = list(ts.read_model(tmp_path / f"epoch{trainer.state.epoch}").values())
            assert not equal(exported, trained)
            seen.append(exported)
            assert equal(weights(trainer), trained), "evaluation rounds the trained weights"

    trainer = make(optimizer, tmp_path / "run", callbacks=[Look(), ts.callbacks.BestCheckpoint(load_best_at_end=False)])
    trainer.train()
    assert equal(seen[-1], weights(trainer))
    before = trainer.history.get_latest_metric("val/loss")
    trainer.validate()
    assert trainer.history.get_latest_metric("val/loss") == before
    best = ts.read_model(tmp_path / "run" / "best")
    assert equal(list(best.values()), seen[-1])


@OPTIMIZERS
def test_evaluation_changes_no_bit_of_the_training(optimizer: Any, tmp_path: Path) -> None:
    results = []
    for val in (True, False):
        trainer = make(optimizer, tmp_path / str(val), val=val, validate_every=1 if val else None)
        trainer.train()
        results.append(weights(trainer))
    assert equal(*results)


@OPTIMIZERS
def test_a_resumed_run_has_the_same_bits(optimizer: Any, tmp_path: Path) -> None:
    whole = make(optimizer, tmp_path / "whole", epochs=4)
    whole.train()
    stop = ts.Callback()
    stop.on_train_step_end = lambda trainer: trainer.request_stop("a part") if trainer.global_steps_finished == 6 else 0  # type: ignore[attr-defined]
    make(optimizer, tmp_path / "part", epochs=4, callbacks=[stop]).train()
    rest = make(optimizer, tmp_path / "part", epochs=4, resume=True)
    rest.train()
    assert equal(weights(whole), weights(rest))


@OPTIMIZERS
def test_training_continues_from_the_trained_weights(optimizer: Any, tmp_path: Path) -> None:
    whole, parts = make(optimizer, tmp_path / "whole", epochs=4), make(optimizer, tmp_path / "parts", epochs=2)
    whole.train()
    parts.train()
    parts.save_checkpoint(force=True)  # holds the trained weights, and changes nothing
    parts.train(epochs=4)
    assert equal(weights(whole), weights(parts))


@OPTIMIZERS
def test_a_checkpoint_is_evaluated_with_the_evaluated_weights(optimizer: Any, tmp_path: Path) -> None:
    trained = make(optimizer, tmp_path)
    trained.train()
    trained.close()
    wanted = trained.history.get_latest_metric("val/loss")
    for mode in ("full", "weights_and_optimizer"):
        trainer = make(optimizer, tmp_path, resume=True, resume_mode=mode)
        assert trainer.validate().metrics["val/loss"] == wanted
        trainer.export(tmp_path / mode)
        assert equal(list(ts.read_model(tmp_path / mode).values()), weights(trained))
        trainer.close()
    found = ts.list_checkpoints(tmp_path / "checkpoints")
    trainer = make(optimizer, tmp_path / "new")
    trainer.load_checkpoint(next(one.path for one in found if (one.kind, one.global_step) == ("checkpoint", 12)))
    assert trainer.validate().metrics["val/loss"] == wanted


def test_an_evaluation_without_the_optimizer_names_the_export(tmp_path: Path, caplog: Any) -> None:
    trained = make(Averaging, tmp_path)
    trained.train()
    trained.close()
    args = {"output_dir": tmp_path, "writers": [], "progress": "none"}
    lacks = ts.SupervisedModule(nn.Linear(4, 1), nn.MSELoss(), val_dataset=DATA)
    with pytest.raises(ts.TrainstackError) as raised:
        ts.Trainer(lacks, ts.TrainerArguments(resume=True, **args)).validate()
    assert "init_weights_from='.../checkpoint-model-...'" in " ".join(raised.value.__notes__)

    kinds = {info.kind: info.path for info in ts.list_checkpoints(tmp_path / "checkpoints")}
    results = dict[str, float]()
    for kind, said in (("checkpoint", True), ("model", False)):
        caplog.clear()
        module = ts.SupervisedModule(nn.Linear(4, 1), nn.MSELoss(), val_dataset=DATA)
        given = {**args, "output_dir": tmp_path / kind, "init_weights_from": kinds[kind]}
        results[kind] = ts.Trainer(module, ts.TrainerArguments(**given)).validate().metrics["val/loss"]
        assert ("the weights that Averaging trains" in caplog.text) is said
    assert results["model"] == trained.history.get_latest_metric("val/loss") != results["checkpoint"]
    caplog.clear()
    make(Averaging, tmp_path, resume=True, resume_mode="weights").validate()
    assert "resume_mode='weights': The checkpoint holds the weights that Averaging trains" in caplog.text
