"""Private runs: the values that are recorded, that may control the training, and that are exported."""

from __future__ import annotations

import json
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import trainstack as ts
from tests.helpers.modules import Classifier, arguments, numbers, train
from tests.helpers.private_runs import BreaksOff, private, promise
from trainstack.trainer.callbacks import BestCheckpoint, EarlyStopping, ExtraValidation, MovingAverage
from trainstack.trainer.tracking.provenance import MetricGuard, Provenance

pytestmark = pytest.mark.usefixtures("unprobed")

TELEMETRY = {"loss": (0, 4)}


class Watched(Classifier):
    """Has a plateau schedule on `monitor`, and logs in `train_step` and in `val_step`."""

    def __init__(self, monitor: str | None = None) -> None:
        super().__init__(validate=True)
        self.monitor, self.steps = monitor, 0

    def get_optimizers_schedulers(self, *given: Any) -> Any:
        self.sgd = torch.optim.SGD(self.parameters(), lr=0.1)
        if self.monitor is None:
            return self.sgd
        plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(self.sgd)
        return [self.sgd], [ts.SchedulerConfig(plateau, monitor=self.monitor)]

    def train_step(self, global_step: int, batch: Any, device: Any) -> Any:
        self.steps = global_step
        self.log("train/logged", 1.0)
        return super().train_step(global_step, batch, device)

    def val_step(self, global_step: int, batch: Any, device: Any) -> Any:
        self.log("val/logged", 2.0)
        return super().val_step(global_step, batch, device)


def by_schedule(name: str, path: Path, options: dict[str, Any]) -> tuple[ts.ModuleInterface, ts.Trainer]:
    module = Watched(name)
    return module, ts.Trainer(module, private(path, **options))


def by_callback(make: Callable[[str], ts.Callback]) -> Callable[..., Any]:
    def made(name: str, path: Path, options: dict[str, Any]) -> tuple[ts.ModuleInterface, ts.Trainer]:
        module = Watched()
        return module, ts.Trainer(module, private(path, **options), callbacks=[make(name)])

    return made


def by_argument(name: str, path: Path, options: dict[str, Any]) -> tuple[ts.ModuleInterface, ts.Trainer]:
    module = Watched()
    return module, ts.Trainer(module, private(path, monitor=name, monitor_mode="min", **options))


def by_checkpoints(name: str, path: Path, options: dict[str, Any]) -> tuple[ts.ModuleInterface, ts.Trainer]:
    module, keeping = Watched(), ts.DefaultCheckpointerArguments(keep_last=1, keep_best=2, monitor=name, mode="min")
    return module, ts.Trainer(module, private(path, **{**options, "checkpointer_args": keeping}))


EXTRA = {"extra": DataLoader(numbers(4), 4)}
MONITORS = {
    "scheduler": by_schedule,
    "EarlyStopping": by_callback(lambda name: EarlyStopping(name, mode="min")),
    "BestCheckpoint": by_callback(lambda name: BestCheckpoint(name, mode="min")),
    "ExtraValidation": by_callback(lambda name: ExtraValidation(EXTRA, when_improved=name, mode="min")),
    "TrainerArguments.monitor": by_argument,
    "keep_best": by_checkpoints,
}
KNOWN = {"train/loss": "refused", "train/loss_epoch": "refused", "val/loss": "refused", "val/logged": "refused"}
LATE = {"train/logged": "refused"}
COVERED = ("train/loss_epoch", "val/loss", "val/logged", "lr")


@pytest.mark.parametrize("kind", list(MONITORS))
def test_a_monitor_of_values_without_noise_is_refused(kind: str, tmp_path: Path) -> None:
    for name in KNOWN:
        module, trainer = MONITORS[kind](name, tmp_path / name, {"epochs": 2})
        with pytest.raises(ts.PrivacyError, match=rf"decides by '{name}'.*telemetry={{'loss': \(0, 10\)}}"):
            trainer.train()
        assert module.steps <= 1, "the probe runs step 1"  # type: ignore[union-attr]
        assert trainer.state.global_step == 0


@pytest.mark.parametrize("kind", [kind for kind in MONITORS if kind != "keep_best"])
def test_a_monitor_of_a_train_step_value_is_refused(kind: str, tmp_path: Path) -> None:
    _, trainer = MONITORS[kind]("train/logged", tmp_path, {"epochs": 2})
    with pytest.raises(ts.PrivacyError, match="'train/logged', which is computed from training data without noise"):
        trainer.train()
    assert trainer.state.global_step == 6  # the end of the first epoch


@pytest.mark.parametrize(
    ("kind", "name"),
    [
        (kind, name)
        if kind == "scheduler" or name in ("train/loss_epoch", "val/loss")
        else pytest.param(kind, name, marks=pytest.mark.long)
        for kind in MONITORS
        for name in COVERED
    ],
)
def test_a_monitor_of_covered_and_public_values_works(kind: str, name: str, tmp_path: Path) -> None:
    args = promise(telemetry=TELEMETRY, public_validation=True, grad_mode="vmap")
    options = {"epochs": 2, "max_train_steps_per_epoch": 1, "log_every": 1, "differential_privacy_args": args}
    _, trainer = MONITORS[kind](name, tmp_path, options)
    trainer.train()
    assert trainer.state.global_step == 2


def test_a_monitor_function_gets_public_and_covered_values_only(tmp_path: Path) -> None:
    seen = list[set[str]]()

    def watched(values: Any) -> float:
        seen.append(set(values))
        return 0.0

    def run(**promised: Any) -> set[str]:
        seen.clear()
        args = private(tmp_path / next(iter(promised)), promise(**promised), log_every=1, max_train_steps_per_epoch=1)
        ts.Trainer(Watched(), args, callbacks=[EarlyStopping(watched, mode="min")]).train()
        return set().union(*seen)

    assert run(log_train_loss=True) == {"lr", "train/grad_norm"}
    assert run(public_validation=True) == {"lr", "train/grad_norm", "val/loss", "val/logged"}


class Net(ts.ModuleInterface):
    """One record can have a huge loss, and a plateau schedule on the loss lowers the rate by it."""

    def __init__(self, scale: torch.Tensor) -> None:
        super().__init__()
        self.w, self.data = nn.Parameter(torch.zeros(1)), TensorDataset(scale)

    def get_optimizers_schedulers(self, *given: Any) -> Any:
        self.sgd = torch.optim.SGD([self.w], lr=0.3)
        plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(self.sgd, factor=0.1, patience=0)
        return [self.sgd], [ts.SchedulerConfig(plateau, monitor="train/loss_epoch")]

    def get_train_dataloader(self, sampler: Any, batch_size: int) -> Any:
        return DataLoader(self.data, batch_size, sampler=sampler(self.data))

    def train_step(self, global_step: int, batch: Any, device: Any) -> Any:
        return (batch[0] * (self.w - 100).abs()).mean()


def test_a_plateau_schedule_gets_losses_with_noise_only(tmp_path: Path) -> None:
    ones, huge = torch.ones(399), torch.cat([torch.ones(399), torch.tensor([1e9])])

    def losses(name: str, scale: torch.Tensor, **promised: Any) -> list[float]:
        made = {"delta": 1e-5, "dataset_size": 400, "grad_mode": "vmap", "per_sample_max_grad_norm": 1.0, **promised}
        args = private(tmp_path / name, promise(**made), epochs=6, train_batch_size=400)
        trainer = ts.Trainer(Net(scale), args)
        trainer.train()
        return trainer.history.get_metric_values("train/loss_epoch")

    with pytest.raises(ts.PrivacyError, match="ReduceLROnPlateau decides by 'train/loss_epoch'"):
        losses("refused", huge)
    telemetry = {"telemetry": {"loss": (0, 200)}}
    without, record = losses("without", ones, **telemetry), losses("record", huge, **telemetry)
    assert len(record) == 6
    # All records are in each step: the means differ by at most half of the range over 400, which noise would hide.
    assert max(abs(a - b) for a, b in zip(without, record, strict=True)) <= 100 / 400 * 1.001


CONSTANT = 123456.75


class Constant(Classifier):
    """A loss of which the value is known, which is also logged."""

    def train_step(self, global_step: int, batch: Any, device: Any) -> Any:
        loss = super().train_step(global_step, batch, device)
        self.log("train/other", CONSTANT)
        return loss - loss.detach() + CONSTANT


def holding_files(folder: Path) -> set[str]:
    """The files below `folder` that hold the constant as text or as a binary number."""
    wanted = [b"123456.75", b"123457", b"1.235e+05", *(struct.pack(form, CONSTANT) for form in ("<d", "<f", ">d"))]
    return {
        file.relative_to(folder).as_posix()
        for file in folder.rglob("*")
        if file.is_file() and any(form in file.read_bytes() for form in wanted)
    }


@pytest.mark.parametrize("logged", [False, True])
def test_by_default_no_file_has_values_without_noise(
    logged: bool, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    options = {"writers": ["stdout", "csv", "jsonl"], "log_every": 1, "report": True, "progress": "plain"}
    args = private(
        tmp_path,
        promise(noise_multiplier=1.0, log_train_loss=logged, grad_mode="vmap"),
        checkpointer_args=ts.DefaultCheckpointerArguments(every_n_steps=2),
        **options,
    )
    trainer = ts.Trainer(Constant(validate=True), args)
    trainer.train()
    found = holding_files(tmp_path)
    shown = capsys.readouterr()
    assert ("metrics.csv" in found) == logged, "the search finds logged values"
    assert not any("checkpoint-model" in name for name in found)
    if not logged:
        assert not found
        assert not any(text in shown.out + shown.err for text in ("123456", "123457", "1.235e+05"))
    exports = list(tmp_path.rglob("checkpoint-model-*/MANIFEST.json"))
    assert exports
    metrics = json.loads(exports[0].read_text())["metadata"]["metrics"]
    assert set(metrics) == {"lr", "train/grad_norm"}  # the validation data were not declared public
    listed = [line for line in trainer.privacy_statement().not_covered if "recorded without noise" in line]
    assert len(listed) == logged


def test_a_failure_checkpoint_has_no_error_message(tmp_path: Path) -> None:
    class Fails(BreaksOff):
        def train_step(self, global_step: int, batch: Any, device: Any) -> Any:
            if global_step > self.steps:
                raise ArithmeticError(f"the loss is {CONSTANT}")
            return super().train_step(global_step, batch, device)

    saving = {"checkpointer_args": ts.DefaultCheckpointerArguments(), "save_on_exception": True}
    trainer = ts.Trainer(Fails(2), private(tmp_path, **saving))
    with pytest.raises(ArithmeticError):
        trainer.train()
    manifests = [json.loads(file.read_text()) for file in tmp_path.rglob("MANIFEST.json")]
    assert {one["metadata"].get("exception") for one in manifests} == {None, "ArithmeticError"}
    assert not holding_files(tmp_path)


def test_the_error_for_a_hidden_metric_has_the_reason(tmp_path: Path) -> None:
    trainer = ts.Trainer(Watched(), private(tmp_path, log_every=1))
    trainer.train()
    with pytest.raises(ts.ConfigurationError, match="The run is private and does not record it"):
        trainer.history.get_latest_metric("train/logged")
    assert trainer.history.get_metric_names() == {"lr", "train/grad_norm", "val/loss", "val/logged"}


def test_provenance_survives_a_resume_and_is_inherited(tmp_path: Path) -> None:
    def run(epochs: int) -> ts.Trainer:
        args = promise(telemetry=TELEMETRY, grad_mode="vmap")
        options = {"checkpointer_args": ts.DefaultCheckpointerArguments(), "resume": "auto", "log_every": 1}
        average = MovingAverage("train/loss", "val/loss")
        trainer = ts.Trainer(Watched(), private(tmp_path, args, epochs=epochs, **options), callbacks=[average])
        trainer.train()
        return trainer

    run(1)
    history = run(2).history
    found = {name: history.provenance_of(name) for name in history.get_metric_names()}
    assert found == {
        "lr": Provenance.PUBLIC,
        "train/grad_norm": Provenance.COVERED,
        "train/loss": Provenance.COVERED,
        "train/loss_ema": Provenance.COVERED,
        "train/loss_epoch": Provenance.COVERED,
        "val/logged": Provenance.EVALUATION,
        "val/loss": Provenance.EVALUATION,
        "val/loss_ema": Provenance.EVALUATION,
    }


def test_a_metric_has_the_strictest_of_its_provenances() -> None:
    guard = MetricGuard(shows_private=True)
    assert guard.admit("m", Provenance.PUBLIC)
    guard.require("m", "who")
    assert guard.admit("m", Provenance.PRIVATE)
    assert guard.admit("m", Provenance.PUBLIC)
    with pytest.raises(ts.PrivacyError, match="who decides by 'm'"):
        guard.require("m", "who")
    assert guard.usable({"m": 1.0, "unknown": 2.0}) == {}


def test_a_run_without_a_privacy_layer_has_no_guard(tmp_path: Path) -> None:
    trainer = train(Watched("train/logged"), tmp_path, epochs=2)
    assert trainer.history.guard is None
    assert "provenance" not in trainer.history.get_state()
    assert {"train/logged", "val/loss"} <= trainer.history.get_metric_names()
    shared = ts.RunHistory()
    ts.Trainer(Watched(), private(tmp_path / "private"), run_history=shared).train()
    ts.Trainer(Watched(), arguments(tmp_path / "plain"), run_history=shared).train()
    assert shared.get_metric_values("train/logged") == [1.0] * 6
