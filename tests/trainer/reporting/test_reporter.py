"""The output of a run."""

from __future__ import annotations

import csv
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader

import trainstack as ts
from tests.helpers.modules import Classifier, arguments, numbers, train


def rows(directory: Path) -> list[dict[str, str]]:
    with open(directory / "metrics.csv", newline="") as file:
        return list(csv.DictReader(file))


class Logs(Classifier):
    def train_step(self, global_step: int, batch: Any, device: Any) -> Any:
        loss = super().train_step(global_step, batch, device)
        self.log("mine", loss)
        return loss

    def on_end_val_epoch(self, global_step: int, loss: Any, predicted: Any, key: str = "default") -> None:
        self.log("val/right", (predicted == self.dataset.tensors[1]).double().mean())


@pytest.mark.spec("PA-37", "PA-39", "HZ-31")
def test_history_and_csv_have_the_same_values(tmp_path: Path) -> None:
    trainer = train(Logs(validate=True, scheduler=True), tmp_path, epochs=2, log_every=4, writers=["csv"])

    history = trainer.history
    assert [r.step for r in history.records("train/loss")] == [4, 8, 12]
    assert [(r.step, r.epoch) for r in history.records("val/right")] == [(6, 0), (12, 1)]
    assert [(r.step, r.epoch) for r in history.records("mine")] == [(s, (s - 1) // 6) for s in range(1, 13)]
    assert {"lr", "train/grad_norm", "val/loss", "train/loss_epoch"} <= history.get_metric_names()
    written = {(r["name"], int(r["step"]), float(r["value"])) for r in rows(tmp_path)}
    recorded = {(name, r.step, r.value) for name in history.get_metric_names() for r in history.records(name)}
    assert written == recorded


@pytest.mark.spec("F309", "HZ-31")
@pytest.mark.parametrize(
    ("breaks_in", "log_every"),
    [
        ("a step", 5),
        ("the epoch's line", 1),
        *(pytest.param("a step", steps, marks=pytest.mark.long) for steps in (1, 100)),
        *(pytest.param("the epoch's line", steps, marks=pytest.mark.long) for steps in (5, 100)),
    ],
)
def test_files_of_a_resumed_run_equal_an_unbroken_run(tmp_path: Path, log_every: int, breaks_in: str) -> None:
    """Also with log points between checkpoints, and with rows of the checkpoint's step that are repeated."""
    saving = ts.DefaultCheckpointerArguments(every_n_steps=3)
    made: dict[str, Any] = {"epochs": 2, "log_every": log_every, "checkpointer_args": saving}
    files = ["csv", "jsonl"]
    train(Logs(validate=True), tmp_path / "unbroken", writers=files, **made)
    module = BreaksInStep(validate=True) if breaks_in == "a step" else Logs(validate=True)
    with pytest.raises(KeyboardInterrupt):
        train(module, tmp_path / "cut", writers=[*files, BreaksAtLine()], **made)
    reader = ts.Trainer(Logs(validate=True), arguments(tmp_path / "cut", resume=True, writers=files, **made))
    saved = reader.load_checkpoints()
    assert saved.global_step == (9 if breaks_in == "a step" else 12)
    if log_every == 1 or breaks_in != "a step":
        assert len(rows(tmp_path / "cut")) > len(saved.history_state["records"]["values"])  # type: ignore[index]
    train(Logs(validate=True), tmp_path / "cut", resume=True, writers=files, **made)

    for name in ("metrics.csv", "metrics.jsonl"):
        cut, unbroken = (read(tmp_path / run / name) for run in ("cut", "unbroken"))
        assert cut == unbroken


def read(file: Path) -> dict[str, Any]:
    return ts.read_history(file).to_dict()


class BreaksInStep(Logs):
    def train_step(self, global_step: int, batch: Any, device: Any) -> Any:
        if global_step == 11:
            raise KeyboardInterrupt
        return super().train_step(global_step, batch, device)


class BreaksAtLine(ts.Writer):
    """Interrupts the run after the rows of the second epoch and before its checkpoint."""

    def write(self, records: Any) -> None:
        pass

    def text(self, line: str) -> None:
        if line.startswith("epoch=2/2"):
            raise KeyboardInterrupt


@pytest.mark.spec("HZ-21")
def test_log_points_may_be_a_fraction_of_all_steps(tmp_path: Path) -> None:
    trainer = train(Logs(), tmp_path, epochs=2, log_every=0.3)  # of 12 steps: 3.6, rounded up
    assert [r.step for r in trainer.history.records("train/loss")] == [4, 8, 12]
    for wrong in (1.5, 0.0, -0.5, 0, True, "2"):
        with pytest.raises(ts.ConfigurationError, match=r"log_every=.* write a whole number .*a fraction"):
            arguments(tmp_path, log_every=wrong)


def test_the_epoch_line_has_loss_and_metrics(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    train(Logs(validate=True), tmp_path, epochs=2, writers=["stdout"])

    lines = [line for line in capsys.readouterr().out.splitlines() if line.startswith("epoch=")]
    assert len(lines) == 2
    for part in ("epoch=2/2 step=12 train/loss=", " val/loss=", " val/right="):
        assert part in lines[1]


@pytest.mark.spec("F306", "F202")
@pytest.mark.parametrize("batch_size", [41, 8, 7, 1])
def test_the_validation_loss_does_not_depend_on_the_batches(batch_size: int, tmp_path: Path) -> None:
    module = Classifier(numbers(41, dtype=torch.float64), dtype=torch.float64, validate=True)
    inputs, labels = module.dataset.tensors
    expected = torch.nn.functional.cross_entropy(module.net(inputs), labels).item()
    trainer = ts.Trainer(module, arguments(tmp_path, val_batch_size=batch_size))
    assert trainer.validate().metrics["val/loss"] == pytest.approx(expected, abs=1e-12)


@pytest.mark.spec("F201", "F412", "PA-32")
def test_validation_restores_the_mode_of_each_layer(tmp_path: Path) -> None:
    module = Classifier(validate=True)
    module.train()
    module.net[2].eval()
    trainer = ts.Trainer(module, arguments(tmp_path))
    trainer.validate()
    modes = [part.training for part in module.net]

    class Boom(Exception):
        pass

    def val_step(**kwargs: Any) -> Any:
        raise Boom

    module.val_step = val_step  # type: ignore[method-assign]
    with pytest.raises(Boom):
        trainer.validate()

    assert modes == [part.training for part in module.net] == [True, True, False, True]


@pytest.mark.spec("PMT-06", "F120")
def test_test_and_predict_return_outputs_in_order(tmp_path: Path) -> None:
    module = Predicts(numbers(13))
    trainer = ts.Trainer(module, arguments(tmp_path, val_batch_size=5))

    outputs = trainer.test()
    tested = outputs["default"]
    predicted = trainer.predict(DataLoader(module.dataset, batch_size=4))

    assert torch.equal(tested[1], module.net(module.dataset.tensors[0]).argmax(1))
    assert torch.equal(predicted, module.dataset.tensors[0].sum(1))
    assert set(trainer.predict({"a": DataLoader(module.dataset, batch_size=4)})) == {"a"}
    assert set(outputs.metrics) == {"test/loss"}
    with pytest.raises(ts.ModuleContractError, match=r"has no test data\. Define get_test_dataloaders"):
        ts.Trainer(Classifier(), arguments(tmp_path)).test()
    with pytest.raises(ts.ModuleContractError, match=r"Define predict_step\("):
        ts.Trainer(Classifier(), arguments(tmp_path)).predict(DataLoader(module.dataset))


class Breaks(Classifier):
    def predict_step(self, global_step: int, batch: Any, device: Any) -> Any:
        raise KeyboardInterrupt


def test_an_interrupted_prediction_has_no_later_effect(
    tmp_path: Path,
) -> None:
    trainer = train(Breaks(validate=True), tmp_path / "run")
    before = trainer.history.to_dict()
    with pytest.raises(KeyboardInterrupt):
        trainer.predict(DataLoader(numbers(13), batch_size=4))

    trainer.save_checkpoint(path=tmp_path / "mine")
    trainer.validate()
    assert (tmp_path / "mine").exists()
    assert trainer.history.to_dict() == before
    assert ts.find_lr(trainer, steps=3).rates


@pytest.mark.spec("PMT-22", "FN-31")
def test_max_val_steps_does_not_limit_tests_or_predictions(tmp_path: Path) -> None:
    module = Predicts(numbers(13), validate=True)
    trainer = ts.Trainer(module, arguments(tmp_path, val_batch_size=5, max_val_steps_per_epoch=1))

    assert len(trainer.validate()["default"][1]) == 5
    assert len(trainer.test()["default"][1]) == 13
    assert len(trainer.predict(DataLoader(module.dataset, batch_size=5))) == 13


class Predicts(Classifier):
    def get_test_dataloaders(self, sampler: Any, batch_size: int) -> Any:
        return DataLoader(self.dataset, batch_size=batch_size, shuffle=True)

    def test_step(self, global_step: int, batch: Any, device: Any) -> Any:
        return self.val_step(global_step, batch, device)

    def predict_step(self, global_step: int, batch: Any, device: Any) -> Any:
        return batch[0].sum(1)


class Peaks(Classifier):
    """Records `val/accuracy` 0.5, 0.9, 0.7 in three epochs."""

    def on_end_val_epoch(self, global_step: int, loss: Any, predicted: Any, key: str = "default") -> None:
        self.log("val/accuracy", {6: 0.5, 12: 0.9}.get(global_step, 0.7))


def last_rows(printed: str) -> dict[str, str]:
    return dict(re.findall(r"^(best|weights|load) +(.*)$", printed, re.M))


@pytest.mark.parametrize("prefix", ["checkpoint", "mine"])
def test_the_last_rows_name_the_best_checkpoint(
    prefix: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Also after another start of the finished run."""
    monkeypatch.chdir(tmp_path)
    saving = ts.DefaultCheckpointerArguments(monitor="val/accuracy", file_prefix=prefix)
    made: dict[str, Any] = {"epochs": 3, "checkpointer_args": saving, "writers": ["stdout"]}
    seen: list[torch.Tensor] = []

    class Keeps(Peaks):
        def on_end_val_epoch(self, global_step: int, *args: Any, **kwargs: Any) -> None:
            super().on_end_val_epoch(global_step, *args, **kwargs)
            seen.append(next(self.parameters()).detach().clone())

    train(Keeps(validate=True), tmp_path / "run", **made)
    said = last_rows(capsys.readouterr().out)
    pointer = f"run/checkpoints/{'best' if prefix == 'checkpoint' else 'mine-best'}"
    assert said["best"] == f"val/accuracy 0.9 in epoch 2: {pointer}"
    assert said["weights"] == f"run/checkpoints/{prefix}-model-000000018"
    state = eval(said["load"], {"trainstack": ts})
    assert any(torch.equal(seen[1], tensor) for tensor in state.values())

    train(Keeps(validate=True), tmp_path / "run", resume="auto", **made)
    assert last_rows(capsys.readouterr().out) == said


@pytest.mark.parametrize("best", ["is the last", "is not kept"])
def test_without_a_best_checkpoint_the_last_rows_name_none(
    best: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    saving = ts.DefaultCheckpointerArguments(keep_best=0, monitor="val/accuracy")
    if best == "is the last":
        saving = ts.DefaultCheckpointerArguments(monitor="val/accuracy")
    epochs = 2 if best == "is the last" else 5
    train(Peaks(validate=True), tmp_path, epochs=epochs, checkpointer_args=saving, writers=["stdout"])
    said = last_rows(capsys.readouterr().out)
    assert said["best"] == "val/accuracy 0.9 in epoch 2"
    assert said["load"] == f'trainstack.read_model("{said["weights"]}")'
