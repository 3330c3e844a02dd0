"""A value that the steps of an evaluation log is recorded once, as the mean over all its samples."""

from __future__ import annotations

import math
import os
import signal
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

import trainstack as ts
from tests.helpers.modules import Classifier, arguments, numbers, train
from tests.helpers.workers.evaluation import logged_means
from trainstack import callbacks as cb
from trainstack.trainer.core.state import RunState
from trainstack.trainer.tracking.log_sink import LogSink
from trainstack.trainer.tracking.provenance import MetricGuard, Provenance


class Logs(Classifier):
    """Logs the mean of `values` over a batch. With `val_batch_size=3` the last of 10 samples is a batch alone."""

    values = torch.tensor([0.0, 0, 0, 0, 0, 0, 0, 0, 0, 1])

    def __init__(self, **changes: Any) -> None:
        super().__init__(numbers(16), validate=True, **changes)

    def get_val_dataloaders(self, sampler: Any, batch_size: int) -> Any:
        data = TensorDataset(*numbers(10).tensors, torch.arange(10))
        return DataLoader(data, batch_size, sampler=sampler(data))

    get_test_dataloaders = get_val_dataloaders

    def val_step(self, global_step: int, batch: Any, device: Any) -> Any:
        loss, _ = super().val_step(global_step, batch, device)
        self.log("val/right", self.values[batch[2]].mean())
        self.log("val/copy", loss)
        return loss

    def test_step(self, global_step: int, batch: Any, device: Any) -> Any:
        return self.val_step(global_step, batch, device)


def test_it_is_the_mean_over_samples_and_recorded_once(tmp_path: Path) -> None:
    class Seen(ts.Callback):
        def on_validation_end(self, trainer: ts.Trainer, results: Any) -> None:
            seen.append(results["val/right"])

    seen = list[float]()
    trainer = ts.Trainer(Logs(), arguments(tmp_path, val_batch_size=3, epochs=2), callbacks=[Seen()])
    trainer.train()
    assert [(r.value, r.step, r.epoch) for r in trainer.history.records("val/right")] == [(0.1, 2, 0), (0.1, 4, 1)]
    assert seen == [0.1, 0.1]
    assert trainer.history.get_metric_values("val/copy") == trainer.history.get_metric_values("val/loss")


@pytest.mark.parametrize("log", [False, True])
@pytest.mark.parametrize("verb", ["validate", "test"])
def test_separate_evaluations_return_it(verb: str, log: bool, tmp_path: Path) -> None:
    trainer = ts.Trainer(Logs(), arguments(tmp_path, val_batch_size=3))
    result = getattr(trainer, verb)(log=log).metrics
    loss = "val/loss" if verb == "validate" else "test/loss"
    assert result == {loss: result[loss], "val/copy": result[loss], "val/right": 0.1}
    assert trainer.history.get_metric_names() == (set(result) if log else set())


def test_a_value_is_a_mean_over_batches_that_log_it(tmp_path: Path) -> None:
    class Sometimes(Logs):
        def val_step(self, global_step: int, batch: Any, device: Any) -> None:
            first = int(batch[2][0])
            self.log("late" if first >= 6 else "early", first)
            if first == 0:
                self.log("early", 30)  # logged twice in a batch: both count

    trainer = train(Sometimes(), tmp_path, val_batch_size=3)
    assert trainer.history.get_metric_values("early") == [pytest.approx((0 + 30 + 3) / 3)]
    assert trainer.history.get_metric_values("late") == [pytest.approx((3 * 6 + 9) / 4)]


def test_means_are_weighted_by_batch_weight(tmp_path: Path) -> None:
    class Weighted(Logs):
        def batch_weight(self, batch: Any) -> float:
            return float(len(batch) == 2 or batch[2].sum())

        def val_step(self, global_step: int, batch: Any, device: Any) -> None:
            self.log("value", batch[2].sum() if batch[2].sum() else math.nan)
            if not batch[2].sum():
                self.log("never", 1.0)

    trainer = train(Weighted(), tmp_path, val_batch_size=1)
    assert trainer.history.get_metric_values("value") == [pytest.approx(sum(i * i for i in range(10)) / 45)]
    assert "never" not in trainer.history.get_metric_names()


def test_values_keep_their_precision_and_may_change_afterwards(tmp_path: Path) -> None:
    class Changes(Logs):
        def val_step(self, global_step: int, batch: Any, device: Any) -> None:
            value = torch.full((1, 1), 2.0**60 if batch[2][0] == 0 else 3.0, dtype=torch.float64)
            self.log("large", value)
            value.zero_()
            self.log("whole", len(batch[2]))
            self.log("infinite", math.inf if batch[2][0] else -math.inf)

    history = train(Changes(), tmp_path, val_batch_size=5).history
    assert history.get_latest_metric("large") == 2.0**59
    assert history.get_latest_metric("whole") == 5.0
    assert math.isnan(history.get_latest_metric("infinite"))


@pytest.mark.parametrize("value", ["high", torch.zeros(2), None])
def test_a_value_other_than_a_number_is_refused(value: Any, tmp_path: Path) -> None:
    class Wrong(Logs):
        def val_step(self, global_step: int, batch: Any, device: Any) -> None:
            with pytest.raises(ts.ConfigurationError, match="metric 'wrong' was given"):
                self.log("wrong", value)
            with pytest.raises(ts.ConfigurationError, match="control character"):
                self.log("a\nb", 1.0)

    train(Wrong(), tmp_path)


def test_values_of_train_step_and_hooks_are_all_recorded(tmp_path: Path) -> None:
    class Everywhere(Logs):
        def train_step(self, global_step: int, batch: Any, device: Any) -> Any:
            self.log("shared", float(global_step))
            return super().train_step(global_step, batch, device)

        def val_step(self, global_step: int, batch: Any, device: Any) -> Any:
            self.log("shared", 7.0)

        def on_end_val_epoch(self, global_step: int, key: str = "default") -> None:
            self.log("of_hook", trainer.history.get_latest_metric("shared"))
            self.log("of_hook", 1.0)

    trainer = ts.Trainer(Everywhere(), arguments(tmp_path, gpu_batch_size_limit=4))
    trainer.train()
    assert trainer.history.get_metric_values("shared") == [1.0, 1.0, 2.0, 2.0, 7.0]
    assert trainer.history.get_metric_values("of_hook") == [7.0, 1.0]


def test_monitors_use_it(tmp_path: Path) -> None:
    """The mean rises and the value of the last batch falls, from epoch to epoch."""

    class Rising(Logs):
        def get_optimizers_schedulers(self, *given: Any) -> Any:
            self.sgd = torch.optim.SGD(self.parameters(), lr=0.1)
            plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(self.sgd, mode="max", patience=0)
            return [self.sgd], [ts.SchedulerConfig(plateau, monitor="val/score")]

        def val_step(self, global_step: int, batch: Any, device: Any) -> Any:
            self.log("val/score", float(-global_step if len(batch[0]) == 1 else global_step))

    saving = ts.DefaultCheckpointerArguments(monitor="val/score", mode="max", keep_best=1, keep_last=1)
    stopping, best = (make("val/score", mode="max") for make in (cb.EarlyStopping, cb.BestCheckpoint))
    stopping.patience = 1
    module = Rising()
    args = arguments(tmp_path, val_batch_size=3, epochs=3, checkpointer_args=saving)
    trainer = ts.Trainer(module, args, callbacks=[stopping, best])
    trainer.train()
    assert trainer.history.get_metric_values("val/score") == [pytest.approx(0.8 * step) for step in (2, 4, 6)]
    assert (stopping.best_value.best_step, best.best_value.best_step) == (6, 6)
    assert module.sgd.param_groups[0]["lr"] == 0.1
    kept = trainer.checkpointer.best()  # type: ignore[attr-defined]
    assert (kept.global_step, kept.metrics["val/score"]) == (6, pytest.approx(4.8))


class TwoLoaders(Logs):
    """Evaluates 3 and 7 samples; its first validation may be interrupted within the second loader."""

    breaks = ""

    def get_val_dataloaders(self, sampler: Any, batch_size: int) -> Any:
        parts = {"few": range(3), "many": range(3, 10)}
        return {key: DataLoader(TensorDataset(torch.tensor(part)), batch_size) for key, part in parts.items()}

    def val_step(self, global_step: int, batch: Any, device: Any) -> None:
        if self.breaks and batch[0][0] == 7:
            breaks, self.breaks = self.breaks, ""
            if breaks == "raises":
                raise InterruptedError
            os.kill(os.getpid(), signal.SIGTERM)
        self.log("number", batch[0].double().mean())


@pytest.mark.parametrize("breaks", ["", "raises", "stops"])
def test_it_is_one_mean_over_all_loaders(breaks: str, tmp_path: Path) -> None:
    def run(**changes: Any) -> ts.RunHistory:
        saving = ts.DefaultCheckpointerArguments()
        args = arguments(tmp_path, val_batch_size=2, epochs=2, checkpointer_args=saving, **changes)
        trainer = ts.Trainer(module, args)
        with suppress(SystemExit):
            try:
                trainer.train()
            except InterruptedError:
                assert trainer.history.get_metric_names() == {"train/loss_epoch"}
                trainer.train()
        trainer.close()
        return trainer.history

    module = TwoLoaders()
    module.breaks = breaks
    history = run()
    if breaks == "stops":
        assert history.get_metric_names() == {"train/loss_epoch"}
        module = TwoLoaders()
        history = run(resume=True)
    assert [(r.value, r.step) for r in history.records("number")] == [(4.5, 2), (4.5, 4)]


def test_a_private_run_collects_nothing_that_it_does_not_record() -> None:
    history, collected = ts.RunHistory(guard=MetricGuard()), list[str]()
    sink = LogSink().connect(history, RunState())
    with sink.collecting(lambda name, value: collected.append(name)):
        with sink.evaluating(Provenance.PRIVATE):
            sink.record("hidden", 1.0)
        with sink.evaluating():
            sink.record("shown", 1.0)
            with sink.mute(RunState()):
                sink.record("muted", 1.0)
    assert collected == ["shown"]
    assert history.get_metric_names() == set()
    assert history.guard is not None
    assert history.guard.hidden == {"hidden"}


@pytest.mark.distributed
def test_it_has_the_same_bits_on_any_number_of_ranks() -> None:
    from tests.helpers.processes import run_world

    alone = logged_means("sp")
    assert len(alone["val/mean"]) == 2
    for size in (2, 3):
        assert run_world(size, logged_means, backend="ddp") == [alone] * size
