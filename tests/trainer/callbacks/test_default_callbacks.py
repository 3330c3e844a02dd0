"""Callbacks that a trainer adds by default, and the moving average."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest

import trainstack as ts
from tests.helpers.modules import Classifier, arguments, train


class TestDefaultCallbacks:
    @pytest.mark.spec("PA-02")
    def test_they_are_added_on_request_only(self, tmp_path: Path) -> None:
        names = ["throughput/samples_per_s", "memory/host_peak", "train/loss_ema"]
        for wanted in (False, True):
            trainer = train(Classifier(), tmp_path, default_callbacks=wanted, log_every=2)
            assert [name in trainer.history.get_metric_names() for name in names] == [wanted] * 3

    def test_a_callback_of_the_same_class_replaces_the_default(self, tmp_path: Path) -> None:
        mine = ts.callbacks.MovingAverage("train/loss", decay=0.5)
        trainer = ts.Trainer(Classifier(), arguments(tmp_path, default_callbacks=True), callbacks=[mine])
        assert [c for c in trainer.events.callbacks.values() if isinstance(c, ts.callbacks.MovingAverage)] == [mine]
        assert len(trainer.events.callbacks) == len(ts.callbacks.default_callbacks())


class TestMovingAverage:
    @pytest.mark.spec("HZ-29")
    def test_it_weights_each_value_less_than_the_next(self, tmp_path: Path) -> None:
        callbacks = [ts.callbacks.MovingAverage("train/loss", "val/loss", decay=0.5)]
        trainer = ts.Trainer(Classifier(validate=True), arguments(tmp_path, log_every=1, epochs=2), callbacks=callbacks)
        trainer.train()
        for name in ("train/loss", "val/loss"):
            values = trainer.history.get_metric_values(name)
            sums = [sum(v * 0.5 ** (n - i) for i, v in enumerate(values[: n + 1])) for n in range(len(values))]
            expected = [s / sum(0.5**i for i in range(n + 1)) for n, s in enumerate(sums)]
            averages = trainer.history.records(f"{name}_ema")
            assert [a.value for a in averages] == pytest.approx(expected)
            assert [a.step for a in averages] == [r.step for r in trainer.history.records(name)]

    def test_inf_and_nan_are_ignored(self, tmp_path: Path) -> None:
        values = [math.inf, 1.0, math.nan, 2.0, -math.inf]

        class Unstable(Classifier):
            def on_end_train_step(self, global_step: int, *outputs: Any) -> None:
                self.log("score", values[global_step - 1])

        callbacks = [ts.callbacks.MovingAverage("score", decay=0.5)]
        trainer = ts.Trainer(Unstable(), arguments(tmp_path, log_every=1, max_steps=5), callbacks=callbacks)
        trainer.train()
        averages = trainer.history.records("score_ema")
        assert [(one.step, one.value) for one in averages] == [(2, 1.0), (4, pytest.approx(2.5 / 1.5))]

    def test_a_resumed_run_continues_it(self, tmp_path: Path) -> None:
        saving = ts.DefaultCheckpointerArguments()
        histories = []
        for folder, parts in (("whole", [3]), ("parts", [1, 3])):
            for epochs in parts:
                args = arguments(tmp_path / folder, log_every=2, epochs=epochs, resume="auto", checkpointer_args=saving)
                trainer = ts.Trainer(Classifier(), args, callbacks=[ts.callbacks.MovingAverage()])
                trainer.train()
            histories.append(trainer.history.to_dict()["train/loss_ema"])
        assert histories[0] == histories[1]

    def test_wrong_values_are_refused(self) -> None:
        with pytest.raises(ts.ConfigurationError, match="decay=1"):
            ts.callbacks.MovingAverage(decay=1)
        with pytest.raises(ts.ConfigurationError, match="names of metrics"):
            ts.callbacks.MovingAverage(3)  # type: ignore[arg-type]
