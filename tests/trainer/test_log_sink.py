"""The records of the values that a module logs, and the attributes that a trainer sets on the module."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import trainstack as ts
from tests.helpers.modules import Classifier, arguments, numbers
from trainstack.trainer.core.state import RunState
from trainstack.trainer.tracking.log_sink import LogSink

DOCUMENTED = {"plan", "_log_sink", "_step_view"}


class Logs(Classifier):
    """Logs in each step; `fails_in` names the method that raises."""

    def __init__(self, fails_in: str = "", **changes: Any) -> None:
        super().__init__(numbers(16), validate=True, **changes)
        self.fails_in = fails_in

    def _visit(self, method: str) -> None:
        if method == self.fails_in:
            raise RuntimeError(f"failed in {method}")

    def get_optimizers_schedulers(self, *given: Any, **named: Any) -> Any:
        self._visit("get_optimizers_schedulers")
        return super().get_optimizers_schedulers(*given, **named)

    def train_step(self, global_step: int, batch: Any, device: Any) -> Any:
        self.log("in_train_step", global_step)
        self._visit("train_step")
        return super().train_step(global_step, batch, device)

    def val_step(self, global_step: int, batch: Any, device: Any) -> Any:
        self.log("in_val_step", 1.0)
        self._visit("val_step")
        return super().val_step(global_step, batch, device)

    def get_test_dataloaders(self, sampler: Any, batch_size: int) -> Any:
        return self.get_val_dataloaders(sampler, batch_size)

    def test_step(self, global_step: int, batch: Any, device: Any) -> Any:
        self.log("in_test_step", 1.0)
        self._visit("test_step")
        return self.val_step(global_step, batch, device)

    def predict_step(self, global_step: int, batch: Any, device: Any) -> Any:
        self._visit("predict_step")
        return self.net(batch[0])

    def on_end_train_step(self, global_step: int) -> None:
        self._visit("on_end_train_step")

    def on_end_val_epoch(self, global_step: int, *outputs: Any, key: str = "default") -> None:
        self._visit("on_end_val_epoch")


def own_val_step(module: Any, global_step: int, batch: Any, device: Any) -> Any:
    module.log("in_own", 1.0)
    return module.val_step(global_step, batch, device)


VERBS: dict[str, Callable[[ts.Trainer], Any]] = {
    "train": lambda trainer: trainer.train(),
    "validate": lambda trainer: trainer.validate(log=False),
    "test": lambda trainer: trainer.test(),
    "predict": lambda trainer: trainer.predict(
        trainer.module.get_val_dataloaders(torch.utils.data.SequentialSampler, 8)
    ),
    "find_lr": lambda trainer: ts.find_lr(trainer, start=1e-3, end=1e-1, steps=3),
}
FAILURES = {
    "train": ["", "get_optimizers_schedulers", "train_step", "val_step", "on_end_train_step", "on_end_val_epoch"],
    "validate": ["", "val_step", "on_end_val_epoch"],
    "test": ["", "test_step", "val_step"],
    "predict": ["", "predict_step"],
    "find_lr": ["", "train_step"],
}
FEW = {("sp-amp", "train", ""), ("sp-dp", "train", ""), ("sp-dp", "train", "train_step"), ("sp-dp", "validate", "")}
"""The cases of other stacks than `sp` in `make test`."""
CASES = [
    pytest.param(
        *(backend, verb, fails_in),
        marks=() if backend == "sp" or (backend, verb, fails_in) in FEW else pytest.mark.long,
    )
    for backend in ("sp", "sp-amp", "sp-dp")
    for verb, names in FAILURES.items()
    for fails_in in names
    if (backend, verb) != ("sp-dp", "find_lr")  # refused, because it would spend privacy
]


class TestWhatTheTrainerLeaves:
    @pytest.mark.parametrize(("backend", "verb", "fails_in"), CASES)
    def test_only_documented_attributes_are_set(self, backend: str, verb: str, fails_in: str, tmp_path: Path) -> None:
        module = Logs(fails_in)
        before = dict(vars(module))
        trainer = ts.Trainer(module, arguments(tmp_path, backend=backend, sanity_val_steps=1), val_step=own_val_step)
        if fails_in:
            with pytest.raises(Exception, match=f"failed in {fails_in}"):
                VERBS[verb](trainer)
        else:
            VERBS[verb](trainer)

        after = vars(module)
        assert set(after) - set(before) == DOCUMENTED
        assert all(after[name] is value for name, value in before.items() if not isinstance(value, bool))
        assert module._log_sink is not None
        assert module._log_sink.history is trainer.history

    def test_a_failed_micro_batch_trial_keeps_the_sink_connected(self, tmp_path: Path) -> None:
        module = Logs("train_step")
        trainer = ts.Trainer(module, arguments(tmp_path, fit_micro_batch=True))
        with pytest.raises(RuntimeError, match="failed in train_step"):
            trainer.train()

        assert module._log_sink is not None
        assert (module._log_sink.history, module._log_sink.state) == (trainer.history, trainer.state)
        assert trainer.history.get_metric_names() == set()


class TestWhereValuesGo:
    def test_a_validation_without_log_does_not_reach_the_history(self, tmp_path: Path) -> None:
        trainer = ts.Trainer(Logs(), arguments(tmp_path))
        metrics = trainer.validate(log=False).metrics
        assert metrics["in_val_step"] == 1.0
        assert trainer.history.get_metric_names() == set()

        trainer.validate(log=True)
        assert trainer.history.get_metric_names() == {"in_val_step", "val/loss"}

    def test_a_validation_within_training_is_recorded_by_default(self, tmp_path: Path) -> None:
        class Asks(Logs):
            def on_end_train_step(self, global_step: int) -> None:
                trainer.validate(log=global_step != 1)

        module = Asks()
        trainer = ts.Trainer(module, arguments(tmp_path, validate_every=0))
        trainer.train()
        steps, _ = trainer.history.arrays("in_val_step")
        assert set(steps.tolist()) == {2}
        assert trainer.history.arrays("in_train_step")[0].tolist() == [1, 2]

    def test_a_sanity_check_is_not_recorded(self, tmp_path: Path) -> None:
        trainer = ts.Trainer(Logs(), arguments(tmp_path, sanity_val_steps=1))
        trainer.train()
        assert trainer.history.arrays("in_val_step")[0].tolist() == [2]

    @pytest.mark.parametrize("backend", ["sp", "sp-dp"])
    def test_trial_steps_of_a_layer_are_not_recorded(self, backend: str, tmp_path: Path) -> None:
        trainer = ts.Trainer(Logs(), arguments(tmp_path, backend=backend))
        assert trainer.plan.total_steps == 2
        assert trainer.history.get_metric_names() == set()
        trainer.train()
        assert set(trainer.history.arrays("in_train_step")[0].tolist()) == {1, 2}

    def test_a_learning_rate_search_is_not_recorded(self, tmp_path: Path) -> None:
        trainer = ts.Trainer(Logs(), arguments(tmp_path))
        VERBS["find_lr"](trainer)
        assert trainer.history.get_metric_names() == set()
        trainer.train()
        assert trainer.history.arrays("in_train_step")[0].tolist() == [1, 2]

    def test_consecutive_trainers_record_in_separate_histories(self, tmp_path: Path) -> None:
        module = Logs()
        first = ts.Trainer(module, arguments(tmp_path / "first"))
        first.train()
        second = ts.Trainer(module, arguments(tmp_path / "second", epochs=2))
        second.train()
        assert first.history.arrays("in_train_step")[0].tolist() == [1, 2]
        assert second.history.arrays("in_train_step")[0].tolist() == [1, 2, 3, 4]

        recorded = len(second.history.get_metric_values("in_val_step"))
        first.validate(log=True)
        assert first.history.arrays("in_val_step")[0].tolist() == [2, 2]
        assert len(second.history.get_metric_values("in_val_step")) == recorded
        module.log("afterwards", 1.0)
        assert second.history.get_metric_names() - first.history.get_metric_names() == {"afterwards"}


class TestAStepOfEvaluationGivenToTheTrainer:
    def test_it_replaces_val_step_only_and_may_call_it(self, tmp_path: Path) -> None:
        trainer = ts.Trainer(Logs(), arguments(tmp_path), val_step=own_val_step)
        assert {"in_own", "in_val_step"} <= trainer.validate().metrics.keys()
        assert "in_own" not in trainer.test().metrics

    def test_it_does_not_apply_to_another_trainer(self, tmp_path: Path) -> None:
        module = Logs()
        plain = ts.Trainer(module, arguments(tmp_path))
        own = ts.Trainer(module, arguments(tmp_path), val_step=own_val_step)
        for _ in range(2):
            assert "in_own" not in plain.validate().metrics
            assert "in_own" in own.validate().metrics

    def test_it_does_not_apply_to_another_module(self, tmp_path: Path) -> None:
        teacher = Logs()
        results = []

        def val_step(module: Any, global_step: int, batch: Any, device: Any) -> Any:
            results.append(teacher(stage=ts.Stage.VAL, global_step=global_step, batch=batch, device=device))
            return results[-1]

        teacher.val_step = lambda **given: torch.tensor(7.0)  # type: ignore[method-assign]
        trainer = ts.Trainer(Logs(), arguments(tmp_path), val_step=val_step)
        assert trainer.validate().metrics["val/loss"] == 7.0


class TestTheSink:
    @staticmethod
    def recorded(*histories: ts.RunHistory) -> list[set[str]]:
        return [history.get_metric_names() for history in histories]

    def test_it_records_at_the_step_and_epoch_of_the_state(self) -> None:
        history, state = ts.RunHistory(), RunState(epoch=3)
        sink = LogSink().connect(history, state)
        state.current_step = 5
        sink.record("value", torch.tensor(2.0))
        assert history.to_dict()["value"] == {"value": [2.0], "step": [5], "epoch": [3]}

    def test_nested_blocks_restore_the_outer_sink_after_an_error(self) -> None:
        outer, inner, history, state = ts.RunHistory(), ts.RunHistory(), ts.RunHistory(), RunState()
        sink = LogSink().connect(history, state)

        def fail_within() -> None:
            with sink.redirect(inner, state):
                sink.record("inner", 1.0)
                with sink.mute(state):
                    sink.record("muted", 1.0)
                    raise KeyError

        with sink.redirect(outer, RunState(current_step=8)):
            sink.record("outer", 1.0)
            with pytest.raises(KeyError):
                fail_within()
            sink.record("outer", 2.0)
        sink.record("after", 1.0)

        assert self.recorded(outer, inner, history) == [{"outer"}, {"inner"}, {"after"}]
        assert outer.arrays("outer")[0].tolist() == [8, 8]
        assert (sink.history, sink.state) == (history, state)
