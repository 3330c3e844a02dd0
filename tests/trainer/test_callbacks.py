"""Built-in callbacks: their effect, no side effect, and the same result after an interruption."""

from __future__ import annotations

import ast
import inspect
import json
import re
import time
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

import trainstack as ts
from tests.helpers.modules import Classifier, Noisy, arguments, numbers, weights
from tests.helpers.processes import run_world
from tests.helpers.workers.callbacks import callbacks_cut, with_callbacks
from tests.trainer.run.test_hot_loop import reads_counted
from trainstack import callbacks as cb
from trainstack.backends import fast_paths

EVERY_STEP = ts.DefaultCheckpointerArguments(every_n_steps=1)


class Scored(Classifier):
    """Records the given values, one an epoch."""

    def __init__(self, *scores: float, **options: Any) -> None:
        super().__init__(numbers(24), validate=True, **options)
        self.scores = scores

    def on_end_val_epoch(self, global_step: int, *outputs: Any, key: str = "default") -> None:
        if key == "default" and self.scores:
            self.log("score", self.scores[self.plan.steps_per_epoch and global_step // self.plan.steps_per_epoch - 1])


REUSED: dict[str, Any] = {
    "EarlyStopping": lambda: cb.EarlyStopping(patience=1, min_delta=1.0),
    "BestCheckpoint": cb.BestCheckpoint,
    "EMA": cb.EMA,
    "MovingAverage": cb.MovingAverage,
    "ExtraValidation": lambda: cb.ExtraValidation({"x": DataLoader(numbers(9))}, when_improved="val/loss"),
    "Freezer": lambda: cb.Freezer("net.0"),
}


@pytest.mark.parametrize("name", REUSED)
def test_a_reused_callback_begins_without_its_earlier_state(name: str, tmp_path: Path) -> None:
    reused = REUSED[name]()

    def run(callback: Any, seed: int, folder: str) -> tuple[Any, Any]:
        module = Scored(seed=seed)
        trainer = ts.Trainer(module, arguments(tmp_path / folder, epochs=3, log_every=1), callbacks=[callback])
        trainer.train()
        return weights(module).tolist(), trainer.history.to_dict()

    run(reused, 0, "first")
    assert run(reused, 1, "second") == run(REUSED[name](), 1, "new")


def trainer_of(directory: Path, module: ts.ModuleInterface, *callbacks: Any, **changes: Any) -> ts.Trainer:
    return ts.Trainer(module, arguments(directory, **changes), callbacks=callbacks)


def trained(directory: Path, module: ts.ModuleInterface, *callbacks: Any, **changes: Any) -> ts.Trainer:
    trainer = trainer_of(directory, module, *callbacks, **changes)
    trainer.train()
    return trainer


# --- early stopping ----------------------------------------------------------------------------------------


@pytest.mark.spec("PA-40", "FN-54", "F208")
@pytest.mark.parametrize(
    ("scores", "mode", "min_delta", "epochs"),
    [
        ([1.0, 2.0, 3.0, 3.0, 2.0, 9.0], "max", 0.0, 5),
        ([3.0, 2.0, 4.0, 1.0, 1.0, 1.0], "min", 0.0, 6),
        ([3.0, 2.9, 2.8, 1.0, 1.0, 1.0], "min", 0.5, 3),
        ([float("nan"), 1.0, 0.5, float("nan"), float("inf"), 0.1], "min", 0.0, 5),
        ([float("nan"), float("nan"), 0.5, 0.4, 0.3, 0.2], "min", 0.0, 2),
    ],
)
def test_early_stopping_waits_for_patience_validations_without_improvement(
    scores: list[float], mode: str, min_delta: float, epochs: int, tmp_path: Path
) -> None:
    stopping = cb.EarlyStopping("score", mode=mode, patience=2, min_delta=min_delta, check_finite=False)
    trainer = trained(tmp_path, Scored(*scores), stopping, epochs=6)

    assert trainer.state.epoch == epochs
    assert (trainer.stop_reason is None) == (epochs == 6 and stopping.waited < 2)


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
def test_early_stopping_stops_at_a_non_finite_value(bad: float, tmp_path: Path) -> None:
    for _ in range(2):
        stopping = cb.EarlyStopping("score", mode="max")
        trainer = trained(
            tmp_path, Scored(1.0, bad, 3.0), stopping, epochs=3, resume="auto", checkpointer_args=EVERY_STEP
        )
        assert trainer.state.epoch == 2
        assert trainer.stop_reason == f"score became {bad} at step 6"


def test_callbacks_retention_and_resume_use_the_monitor_argument(tmp_path: Path) -> None:
    saving = ts.DefaultCheckpointerArguments(keep_last=1, keep_best=1)
    given: dict[str, Any] = {"epochs": 3, "monitor": "score", "monitor_mode": "max", "checkpointer_args": saving}
    best, stopping = cb.BestCheckpoint(), cb.EarlyStopping(patience=2)
    trained(tmp_path, Scored(0.5, 0.9, 0.4), best, stopping, **given)  # while the loss falls

    assert best.best_value.best_step == stopping.best_value.best_step == 6
    resumed = trainer_of(tmp_path, Scored(0.5, 0.9, 0.4), resume="best", **given)
    assert resumed.plan.steps_per_epoch == 3
    assert resumed.state.global_step == 6


def test_the_best_is_saved_after_each_validation_within_an_epoch(tmp_path: Path) -> None:
    """Checkpoints are due at the ends of epochs (3, 6, 9), and validations at 2, 4, 6, 8."""

    class Steps(Scored):
        def on_end_val_epoch(self, global_step: int, *outputs: Any, key: str = "default") -> None:
            self.log("score", {2: 0.1, 4: 0.9, 6: 0.3, 8: 0.9}[global_step])

    saving = ts.DefaultCheckpointerArguments(monitor="score", mode="max", keep_best=1, keep_last=1)
    for resume in (False, True):
        trainer = trainer_of(
            tmp_path, Steps(), epochs=3, validate_every=2, checkpointer_args=saving, resume=resume and "auto"
        )
        if not resume:
            trainer.on(ts.Event.TRAIN_STEP_END, once=5)(lambda trainer: trainer.request_stop("a break"))
        trainer.train()
        kept = [info.global_step for info in ts.list_checkpoints(tmp_path / "checkpoints") if info.kind == "checkpoint"]
        assert sorted(kept) == ([4, 9] if resume else [4, 5])
    best = trainer.checkpointer.best()  # type: ignore[attr-defined]
    assert best is not None
    assert (best.global_step, best.metrics["score"]) == (4, 0.9)


def test_early_stopping_counts_across_interruptions(tmp_path: Path) -> None:
    """Epochs have 3 steps. The run stops at the epoch of an unbroken run, with the same weights."""
    scores = [1.0, 3.0, 2.0, 2.0, 2.0, 9.0]
    unbroken = Scored(*scores, dropout=0.2)
    torch.manual_seed(1)
    whole = trained(tmp_path / "whole", unbroken, cb.EarlyStopping("score", mode="max", patience=3), epochs=6)
    torch.manual_seed(1)
    for stop_at in [1, 3, 4, 6, 8, 9, 12, 14, None]:
        module, stopping = Scored(*scores, dropout=0.2), cb.EarlyStopping("score", mode="max", patience=3)
        trainer = trainer_of(tmp_path / "cut", module, stopping, epochs=6, resume="auto", checkpointer_args=EVERY_STEP)
        trainer.on(ts.Event.TRAIN_STEP_END, when=lambda t, at=stop_at: t.state.global_step == at)(
            lambda trainer: trainer.request_stop("interrupted")
        )
        trainer.train()

    assert whole.state.epoch == trainer.state.epoch == 5
    assert trainer.stop_reason == whole.stop_reason
    assert "score has not improved for 3 validations (best: 3, at step 6)" in str(whole.stop_reason)
    assert torch.equal(weights(unbroken), weights(module))


def test_a_run_that_stopped_early_stops_again_on_resume(tmp_path: Path) -> None:
    scores = [1.0, 1.0, 9.0]
    for _ in range(2):
        trainer = trained(
            tmp_path,
            Scored(*scores),
            cb.EarlyStopping("score", mode="max", patience=1),
            epochs=3,
            resume="auto",
            checkpointer_args=EVERY_STEP,
        )
        assert trainer.state.epoch == 2


def test_early_stopping_monitors_a_function_or_the_default_metric(tmp_path: Path) -> None:
    def gap(results: Mapping[str, float]) -> float:
        return results["score"] - 1

    by_function = cb.EarlyStopping(gap, mode="max", patience=2)
    by_default = cb.EarlyStopping(patience=50)
    trained(tmp_path, Scored(1.0, 2.0), by_function, by_default, epochs=2)

    assert by_function.best_value.best == 1.0
    assert by_default.best_value.best_step == 6


def test_a_monitored_metric_without_records_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(ts.ConfigurationError, match=r"'accuracy', which was never recorded. .*score.*val/loss"):
        trained(tmp_path, Scored(1.0), cb.EarlyStopping("accuracy"))

    class Logs(Classifier):
        def val_step(self, global_step: int, batch: Any, device: Any) -> Any:
            self.log("val/right/accuracy", 1.0)
            return super().val_step(global_step, batch, device)

    told = r"never recorded. Did you mean 'val/right/accuracy'\? Recorded: .* self.log\('accuracy', value\) in val_step"
    with pytest.raises(ts.ConfigurationError, match=told):
        trained(tmp_path / "logs", Logs(numbers(24), validate=True), cb.EarlyStopping("accuracy"))
    with pytest.raises(ts.ConfigurationError, match="Write monitor='val/right/accuracy'"):
        trained(tmp_path / "args", Logs(numbers(24), validate=True), monitor="right/accuracy", sanity_val_steps=1)


def test_early_stopping_works_without_validation_data(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    stopping = cb.EarlyStopping("train/loss_epoch", patience=2, min_delta=100.0)
    trainer = trained(tmp_path, Classifier(numbers(24)), stopping, cb.EarlyStopping(), cb.StepTimer(), epochs=3)

    assert trainer.stop_reason is not None
    assert stopping.waited == 2
    assert "never" not in caplog.text  # the run was stopped, so the metric may come later


@pytest.mark.parametrize("callback", [cb.EarlyStopping, cb.BestCheckpoint])
def test_a_missing_metric_is_logged_at_the_end_without_validation(
    callback: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    trained(tmp_path, Classifier(numbers(24)), callback(), cb.StepTimer())

    (told,) = [record.message for record in caplog.records if "never" in record.message]
    assert told == f"{callback.__name__} monitors 'val/loss', which was never recorded. Recorded: train/loss_epoch."


def test_the_documented_defaults_are_those_of_the_callbacks() -> None:
    page = (Path(__file__).parents[2] / "docs" / "callbacks.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| `([A-Z]\w+)\((.*)\)` \|", page, re.MULTILINE)
    stated = {(name, *pair) for name, given in rows for pair in re.findall(r"(\w+)=([\w.]+)", given)}
    assert {name for name, _ in rows} == set(cb.__all__) - {"default_callbacks"}
    assert len(stated) >= 15
    for name, parameter, value in stated:
        default = inspect.signature(getattr(cb, name)).parameters[parameter].default
        assert default == ast.literal_eval(value), f"{name}({parameter}={default!r})"


def test_memory_of_cuda_is_recorded_in_gib(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    reset: list[Any] = []
    for name, gib in (("memory_allocated", 1), ("memory_reserved", 2), ("max_memory_allocated", 3)):
        monkeypatch.setattr(torch.cuda, name, lambda device, gib=gib: gib * 2**30)
    monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", reset.append)
    trainer = trainer_of(tmp_path, Classifier(numbers(8)))
    monkeypatch.setattr(ts.Trainer, "device", torch.device("cuda:1"))
    cb.MemoryMonitor().on_log(trainer)

    of = trainer.history.get_latest_metric
    assert [of(f"memory/{name}") for name in ("allocated", "reserved", "peak")] == [1.0, 2.0, 3.0]
    assert reset == [torch.device("cuda:1")]


@pytest.mark.parametrize(
    "wrong",
    [
        lambda: cb.EarlyStopping(patience=0),
        lambda: cb.EarlyStopping("x"),
        lambda: cb.EarlyStopping(lambda results: 1.0),
        lambda: cb.EarlyStopping(min_delta=-1.0),
        lambda: cb.EMA(1.0),
        lambda: cb.Freezer(),
        lambda: cb.LimitBatches(),
        lambda: cb.LimitBatches(0),
        lambda: cb.ExtraValidation({}),
        lambda: cb.ExtraValidation({"a": []}, every_n_epochs=0),
        lambda: cb.ThroughputMonitor(flops_per_sample=1.0),
        lambda: cb.ThroughputMonitor(flops_per_sample=-1.0, peak_flops=1.0),
        lambda: cb.Profiler(first_step=1),
        lambda: cb.LRMonitor(0),
        lambda: cb.GradNormMonitor(0),
    ],
)
def test_invalid_arguments_of_callbacks_are_refused(wrong: Any) -> None:
    with pytest.raises(ts.ConfigurationError):
        wrong()


# --- the best weights and averages -------------------------------------------------------------------------


@pytest.mark.spec("PA-40", "FN-54")
def test_the_best_weights_are_restored_after_the_last_checkpoint(tmp_path: Path) -> None:
    seen: list[Any] = []
    module = Scored(1.0, 5.0, 2.0)
    trainer = trainer_of(
        tmp_path, module, cb.BestCheckpoint("score", mode="max"), epochs=3, checkpointer_args=EVERY_STEP
    )
    trainer.on(ts.Event.EPOCH_END)(lambda trainer: seen.append(weights(module)))
    trainer.train()

    assert torch.equal(weights(module), seen[1])
    assert torch.equal(ts.read_model(tmp_path / "best")["net.0.weight"], module.net[0].weight)
    trainer.save_checkpoint(force=True)
    assert torch.equal(weights(module), seen[1])
    resumed = Scored(1.0, 5.0, 2.0)
    trainer_of(tmp_path, resumed, resume=True, epochs=3, checkpointer_args=EVERY_STEP).plan  # noqa: B018
    assert torch.equal(weights(resumed), seen[2])


def test_training_continues_from_the_last_trained_weights(tmp_path: Path) -> None:
    def run(*callbacks: Any) -> torch.Tensor:
        module = Scored(1.0, 5.0, 2.0)
        trainer = trainer_of(tmp_path, module, *callbacks, epochs=3)
        trainer.on(ts.Event.EPOCH_END, once=2)(lambda trainer: trainer.request_stop("a break"))
        trainer.train()
        during.append(weights(module))
        trainer.train()
        trainer.events.weight_swap.swap_out()
        return weights(module)

    during: list[torch.Tensor] = []
    plain = run()
    assert torch.equal(plain, run(cb.EMA(0.9), cb.BestCheckpoint("score", mode="min")))
    assert not torch.equal(during[0], during[1])


def averages_by_hand(decays: list[float], seen: list[torch.Tensor]) -> torch.Tensor:
    average = seen[0]
    for decay, now in zip(decays, seen[1:], strict=True):
        average = decay * average + (1 - decay) * now
    return average


@pytest.mark.spec("PA-40", "F216")
@pytest.mark.parametrize("warmup", [False, True])
def test_the_moving_average_has_no_effect_on_training(warmup: bool, tmp_path: Path) -> None:
    class Looks(Classifier):
        def val_step(self, global_step: int, batch: Any, device: Any) -> Any:
            evaluated.append(weights(self))
            return super().val_step(global_step, batch, device)

    plain, averaged = Classifier(numbers(24), validate=True), Looks(numbers(24), validate=True)
    trained(tmp_path, plain, epochs=2)
    seen, evaluated = [weights(averaged)], list[torch.Tensor]()
    trainer = trainer_of(tmp_path, averaged, cb.EMA(0.5, warmup=warmup), epochs=2)
    trainer.on(ts.Event.TRAIN_STEP_END)(lambda trainer: seen.append(weights(averaged)))
    trainer.train()

    decays = [min(0.5, (1 + n) / (10 + n)) if warmup else 0.5 for n in range(1, 7)]
    assert torch.equal(seen[-1], weights(plain))
    torch.testing.assert_close(weights(averaged), averages_by_hand(decays, seen), rtol=1e-5, atol=1e-6)
    assert torch.equal(evaluated[-1], weights(averaged))
    torch.testing.assert_close(evaluated[0], averages_by_hand(decays[:3], seen[:4]), rtol=1e-5, atol=1e-6)


def test_the_moving_average_survives_a_resume_bit_for_bit(tmp_path: Path) -> None:
    torch.manual_seed(1)
    unbroken = Classifier(numbers(24), dropout=0.2)
    trained(tmp_path / "whole", unbroken, cb.EMA(0.9), epochs=2)
    torch.manual_seed(1)
    for stop_at in [1, 3, 4, None]:
        module = Classifier(numbers(24), dropout=0.2)
        trainer = trainer_of(
            tmp_path / "cut", module, cb.EMA(0.9), epochs=2, resume="auto", checkpointer_args=EVERY_STEP
        )
        trainer.on(ts.Event.TRAIN_STEP_END, when=lambda t, at=stop_at: t.state.global_step == at)(
            lambda trainer: trainer.request_stop("interrupted")
        )
        trainer.train()

    assert torch.equal(weights(unbroken), weights(module))


def test_the_best_averages_are_restored_and_reproduce_their_value(tmp_path: Path) -> None:
    module = Classifier(numbers(24), validate=True, lr=30.0)
    best = cb.BestCheckpoint()
    trainer = trained(tmp_path, module, cb.EMA(0.9), best, epochs=5)
    assert best.best_value.best_step < trainer.state.global_step

    assert (
        trainer.validate().metrics["val/loss"]
        == best.best_value.best
        == min(trainer.history.get_metric_values("val/loss"))
    )


def test_averages_of_another_module_are_refused(tmp_path: Path) -> None:
    trained(tmp_path, Classifier(numbers(24)), cb.EMA(), checkpointer_args=EVERY_STEP)
    ema = cb.EMA()
    trainer_of(tmp_path / "other", ts.SupervisedModule(nn.Linear(2, 1), nn.MSELoss(), "sgd", numbers(8)), ema).plan  # noqa: B018
    state = {"updates": 1, "averages": {"net.0.weight": torch.zeros(2)}}
    with pytest.raises(ts.CheckpointMismatchError, match="moving averages"):
        ema.update_state(state)


# --- trained parts, and limits of data ------------------------------------------------------------------------


@pytest.mark.spec("PA-40", "F214")
def test_a_freezer_freezes_weights_until_its_epoch(tmp_path: Path) -> None:
    module = Classifier(numbers(24), optimizer=torch.optim.AdamW)
    before, after = module.net[0].weight.detach().clone(), list[torch.Tensor]()
    trainer = trainer_of(tmp_path, module, cb.Freezer("net.0", until_epoch=2), epochs=3)
    trainer.on(ts.Event.EPOCH_END)(lambda trainer: after.append(module.net[0].weight.detach().clone()))
    trainer.on(ts.Event.EPOCH_END, once=1)(lambda trainer: last.append(module.net[3].weight.detach().clone()))
    last: list[torch.Tensor] = [module.net[3].weight.detach().clone()]
    trainer.train()

    assert [torch.equal(before, now) for now in after] == [True, True, False]
    assert not torch.equal(*last)


def test_frozen_batch_norms_keep_their_statistics_by_default(tmp_path: Path) -> None:
    def mean(**options: Any) -> float:
        model = nn.Sequential(nn.BatchNorm1d(6), nn.Linear(6, 3))
        module = ts.SupervisedModule(model, nn.CrossEntropyLoss(), "sgd", numbers(24))
        trained(tmp_path, module, cb.Freezer("model.0", **options), epochs=1)
        assert torch.equal(model[0].weight, torch.ones(6))
        return float(model[0].running_mean.abs().sum())  # type: ignore[union-attr, operator]

    assert mean() == 0.0
    assert mean(running_statistics=False) > 0.0


def test_frozen_batch_norms_keep_statistics_despite_calls_of_train(tmp_path: Path) -> None:
    class CallsTrain(Classifier):
        def on_begin_train_epoch(self, global_step: int, epoch: int) -> None:
            self.train()

    module = CallsTrain()
    module.net = nn.Sequential(nn.BatchNorm1d(6), nn.Linear(6, 3))
    ts.Trainer(module, arguments(tmp_path, epochs=2), callbacks=[cb.Freezer("net.0")]).train()

    assert torch.equal(module.net[0].running_mean, torch.zeros(6))  # type: ignore[arg-type]


def test_a_freezer_without_a_matching_parameter_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ts.ConfigurationError, match=r"Freezer\('head'\).*net\.0\.weight"):
        trained(tmp_path, Classifier(), cb.Freezer("head"))


@pytest.mark.spec("PA-40", "F219")
def test_limit_batches_changes_the_plan(tmp_path: Path) -> None:
    module = Classifier(numbers(80), validate=True, scheduler=True)
    trainer = trained(tmp_path, module, cb.LimitBatches(train=2, val=3), epochs=2, max_train_steps_per_epoch=5)

    assert trainer.state.global_step == 4
    assert trainer.plan.steps_per_epoch == 2
    assert trainer.args.max_val_steps_per_epoch == 3


@pytest.mark.spec("FN-54")
def test_extra_validations_follow_their_separate_schedules(tmp_path: Path) -> None:
    keys: list[str] = []

    class Keyed(Scored):
        def on_end_val_epoch(self, global_step: int, *outputs: Any, key: str = "default") -> None:
            super().on_end_val_epoch(global_step, *outputs, key=key)
            keys.append(key)

    loader = DataLoader(numbers(10, seed=2), batch_size=5)
    trainer = trained(
        tmp_path,
        Keyed(1.0, 3.0, 2.0, 4.0),
        cb.ExtraValidation({"second": loader}, every_n_epochs=2),
        cb.ExtraValidation({"better": loader}, when_improved="score", mode="max"),
        cb.EarlyStopping("score", mode="max", patience=2),
        epochs=4,
    )

    assert keys == ["default", "better", "default", "second", "better", "default", "default", "second", "better"]
    assert len(trainer.history.get_metric_values("val/second/loss")) == 2


@pytest.mark.parametrize("stops", [(6,), (1, 6), (3, 6)])
def test_an_improvement_is_validated_at_the_next_due_epoch(stops: tuple[int, ...], tmp_path: Path) -> None:
    loader = DataLoader(numbers(10, seed=2), batch_size=5)
    for epochs in stops:  # the state is in the checkpoints between them
        extra = cb.ExtraValidation({"extra": loader}, every_n_epochs=2, when_improved="score", mode="max")
        saving = {"checkpointer_args": ts.DefaultCheckpointerArguments(), "resume": "auto"}
        trainer = trained(tmp_path, Scored(1.0, 0.5, 3.0, 2.0, 2.5, 1.0), extra, epochs=epochs, **saving)

    assert [record.epoch for record in trainer.history.records("val/extra/loss")] == [1, 3]


# --- measurements -----------------------------------------------------------------------------------------


@pytest.mark.spec("PA-40", "FN-54", "F124")
def test_monitors_read_nothing_from_the_device_between_log_points(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fast_paths, "MOST_ON_HOST", 0.0)  # clip as on an accelerator
    monkeypatch.setattr(fast_paths, "READS_ON_HOST", False)
    module = Classifier(numbers(8 * 30), scheduler=True)
    reads: list[int] = []
    all_of_them = [
        cb.LRMonitor(momentum=True, weight_decay=True),
        cb.GradNormMonitor(),
        cb.MemoryMonitor(),
        cb.ThroughputMonitor(tokens=lambda batch: batch[0].numel(), flops_per_sample=1e3, peak_flops=1e9),
        cb.StepTimer(),
        cb.EMA(),
        cb.EarlyStopping("train/loss_epoch"),
        cb.BestCheckpoint("train/loss_epoch"),
        cb.Freezer("net.0"),
    ]
    trainer = trainer_of(tmp_path, module, *all_of_them, log_every=10)
    with reads_counted(monkeypatch) as counter:
        trainer.on(ts.Event.TRAIN_STEP_END)(lambda: reads.append(counter.count))
        trainer.train()

    assert len(set(reads[:10])) == len(set(reads[10:20])) == len(set(reads[20:])) == 1
    names = trainer.history.get_metric_names()
    assert {"schedule/lr/0", "schedule/momentum/0", "schedule/weight_decay/0"} <= names
    assert {"grad_norm/net", "memory/host_peak", "throughput/mfu"} <= names
    assert {"time/fetch", "time/forward", "time/backward", "time/update"} <= names
    assert len(trainer.history.get_metric_values("schedule/lr/0")) == 30
    assert len(trainer.history.get_metric_values("grad_norm/net")) == 3


def test_a_tensor_learning_rate_is_recorded_at_each_step(tmp_path: Path) -> None:
    class TensorRate(Classifier):
        def get_optimizers_schedulers(self, estimated_global_steps_per_epoch: int, epochs: int) -> Any:
            optimizer = torch.optim.Adam(self.parameters(), lr=torch.tensor(0.5), foreach=False)
            return [optimizer], [torch.optim.lr_scheduler.ExponentialLR(optimizer, gamma=0.5)]

    trainer = trained(tmp_path, TensorRate(numbers(32)), cb.LRMonitor(momentum=True, weight_decay=True), log_every=4)
    assert trainer.history.get_metric_values("schedule/lr/0") == [0.5, 0.25, 0.125, 0.0625]


def test_a_tensor_learning_rate_may_change_at_log_points(tmp_path: Path) -> None:
    rate: Any = torch.tensor(0.5)
    trainer = trainer_of(tmp_path, Classifier(numbers(16), lr=rate), log_every=1)
    trainer.on(ts.Event.LOG)(lambda trainer: rate.mul_(0.5))
    trainer.train()
    assert trainer.history.get_metric_values("lr") == [0.5, 0.25]


def test_gradient_norms_are_those_of_the_logged_step(tmp_path: Path) -> None:
    norms: list[float] = []
    module = Classifier(numbers(48))
    trainer = trainer_of(tmp_path, module, cb.GradNormMonitor(depth=2), log_every=3, clip_grads=False)

    @trainer.on(ts.Event.BEFORE_OPTIMIZER_STEP)
    def note(trainer: ts.Trainer) -> None:
        norms.append(
            float(torch.cat([p.grad.flatten() for p in module.net[3].parameters() if p.grad is not None]).norm())
        )

    trainer.train()
    assert trainer.history.get_metric_values("grad_norm/net.3") == pytest.approx([norms[2], norms[5]])


def test_norms_of_a_failed_attempt_are_not_recorded(tmp_path: Path) -> None:
    class Fails(ts.Callback):
        def __init__(self) -> None:
            self.norms: list[torch.Tensor] = []

        def on_before_optimizer_step(self, trainer: ts.Trainer) -> None:
            gradients = [p.grad for p in trainer.module.parameters() if p.grad is not None]
            self.norms.append(torch.nn.utils.get_total_norm(gradients))
            if len(self.norms) in (1, 3):
                raise RuntimeError("no update")

    fails = Fails()

    class Skips(Classifier):  # the second attempt of step 2
        def train_step(self, global_step: int, batch: Any, device: Any) -> Any:
            factor = float("nan") if global_step == 2 and len(fails.norms) == 3 else 1.0
            return super().train_step(global_step, batch, device) * factor

    trainer = trainer_of(tmp_path, Skips(numbers(24)), fails, cb.GradNormMonitor(), log_every=1, nonfinite="skip")
    for _ in range(2):
        with pytest.raises(RuntimeError, match="no update"):
            trainer.train()
    trainer.train()

    records = [(record.step, record.value) for record in trainer.history.records("grad_norm/net")]
    assert records == [(1, pytest.approx(fails.norms[1].item())), (3, pytest.approx(fails.norms[3].item()))]


def test_throughput_counts_samples_tokens_and_model_flops(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = iter(range(100))
    monkeypatch.setattr("trainstack.trainer.callbacks.timing.perf_counter", lambda: float(next(clock)))
    monitor = cb.ThroughputMonitor(tokens=lambda batch: batch[0].numel(), flops_per_sample=10.0, peak_flops=1000.0)
    trainer = trained(tmp_path, Classifier(numbers(41)), monitor, log_every=2, epochs=2)

    of = trainer.history.get_metric_values
    assert of("throughput/samples_per_s")[:3] == [16.0, 16.0, 9.0]
    assert of("throughput/tokens_per_s")[:3] == [96.0, 96.0, 54.0]
    assert of("throughput/mfu")[:3] == [0.16, 0.16, 0.09]


def test_the_timer_measures_the_parts_of_a_step(tmp_path: Path) -> None:
    class Slow(Noisy):
        def __getitem__(self, index: int) -> Any:
            time.sleep(0.001)
            return super().__getitem__(index)

    class SlowUpdates(torch.optim.SGD):
        def step(self, *given: Any) -> None:  # type: ignore[override]
            time.sleep(0.012)
            super().step(*given)

    module = Classifier(Slow(32), optimizer=SlowUpdates, validate=True)
    trainer = trained(tmp_path, module, cb.StepTimer(), cb.MemoryMonitor(), log_every=2, gpu_batch_size_limit=4)

    of = trainer.history.get_metric_values
    assert all(seconds >= 0.008 for seconds in of("time/fetch"))
    assert all(seconds >= 0.012 for seconds in of("time/update"))
    assert all(seconds > 0 for seconds in of("time/forward") + of("time/backward"))
    assert len(of("time/fetch")) == 2
    assert of("time/validation")[0] >= 0.032
    assert 0.01 < of("memory/host_peak")[-1] < 100


def test_the_profiler_writes_a_trace_of_the_given_steps(tmp_path: Path) -> None:
    profiler = cb.Profiler(first_step=4, steps=2, path=tmp_path / "trace")
    trained(tmp_path, Classifier(numbers(80)), profiler)

    (trace,) = (tmp_path / "trace").iterdir()
    assert trace.name == "rank0_step5.json"
    names = [event.get("name", "") for event in json.loads(trace.read_text())["traceEvents"]]
    assert sum("Optimizer.step" in name for name in names) >= 2


# --- over processes ----------------------------------------------------------------------------------------


@pytest.mark.spec("PA-36", "PA-40")
@pytest.mark.processes
def test_callbacks_have_the_same_effect_on_two_ranks(tmp_path: Path) -> None:
    """Stopping, averages, best weights and freezing, in a run that one rank stops and that is resumed."""
    alone = with_callbacks(str(tmp_path / "one"), backend="sp")
    answers = run_world(2, callbacks_cut, directory=str(tmp_path / "two"))

    (unbroken, resumed), other = answers
    assert other == [unbroken, resumed]
    assert unbroken == resumed
    assert (alone["steps"], alone["reason"]) == (unbroken["steps"], unbroken["reason"])
    assert alone["frozen"] is unbroken["frozen"] is True
    for name in ("weights", "averages"):
        torch.testing.assert_close(torch.tensor(alone[name]), torch.tensor(unbroken[name]), rtol=1e-5, atol=1e-6)


@pytest.mark.spec("PA-40")
def test_sync_batch_norm_is_refused_if_it_cannot_work(tmp_path: Path) -> None:
    model = nn.Sequential(nn.BatchNorm1d(6), nn.Linear(6, 3))
    trained(tmp_path, ts.SupervisedModule(model, nn.CrossEntropyLoss(), "sgd", numbers(24)), cb.SyncBatchNorm)
    assert type(model[0]) is nn.BatchNorm1d

    plan = SimpleNamespace(last_step_samples=5, global_batch=8)
    for device, message in (("cpu", "accelerators only"), ("cuda", "drop_last=True")):
        two: Any = SimpleNamespace(world=SimpleNamespace(size=2), device=torch.device(device), plan=plan, module=model)
        with pytest.raises(ts.ConfigurationError, match=message):
            cb.SyncBatchNorm().on_ready(two)
