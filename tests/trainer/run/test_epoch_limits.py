"""Epochs that end early, fractions of epochs, and saves that are due by time."""

from __future__ import annotations

from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.optim.lr_scheduler import OneCycleLR
from torch.utils.data import DataLoader, IterableDataset

import trainstack as ts
from tests.helpers.modules import Classifier, Hooked, arguments, numbers, train, weights
from trainstack.trainer.core.intervals import Timer

SAVES = {"checkpointer_args": ts.DefaultCheckpointerArguments(every_n_steps=1, keep_last=None)}


class Shortened(ts.Callback):
    """Ends each epoch except the last after `steps`."""

    def __init__(self, steps: int = 3, stop_after: int | None = None) -> None:
        self.steps, self.stop_after, self.calls = steps, stop_after, list[Any]()

    def on_train_step_end(self, trainer: Any, global_step: int) -> None:
        if trainer.state.steps_in_epoch == self.steps and trainer.state.epoch < 2:
            trainer.end_epoch()
        if global_step == self.stop_after:
            trainer.request_stop("killed")

    def on_epoch_end(self, trainer: Any, epoch: int) -> None:
        self.calls.append((epoch, trainer.state.global_step))


def _shortened(directory: Path, stop_after: int | None = None, **changes: Any) -> tuple[ts.Trainer, Shortened]:
    callback = Shortened(stop_after=stop_after)
    args = arguments(directory, epochs=3, seed_everything=True, **SAVES, **changes)
    trainer = ts.Trainer(Hooked(dataset=numbers(44), validate=True), args, callbacks=[callback])
    trainer.train()
    return trainer, callback


def test_end_epoch_skips_the_rest_of_an_epoch(tmp_path: Path) -> None:
    trainer, callback = _shortened(tmp_path)
    assert callback.calls == [(0, 3), (1, 6), (2, 12)]
    assert [record.step for record in trainer.history.records("val/loss")] == [3, 6, 12]


@pytest.mark.parametrize("after", [2, 3, 4])
def test_a_shortened_epoch_is_resumed_exactly(tmp_path: Path, after: int) -> None:
    whole, _ = _shortened(tmp_path / "whole")
    _shortened(tmp_path / "parts", stop_after=after)
    resumed, _ = _shortened(tmp_path / "parts", resume=True)
    assert resumed.state.global_step == 12
    assert torch.equal(weights(whole.module), weights(resumed.module))


def test_end_epoch_is_refused_outside_of_an_epoch(tmp_path: Path) -> None:
    class Late(ts.Callback):
        def on_epoch_end(self, trainer: Any) -> None:
            trainer.end_epoch()

    with pytest.raises(ts.ConfigurationError, match="no epoch is being trained"):
        ts.Trainer(Classifier(), arguments(tmp_path), callbacks=[Late()]).train()


def test_limits_of_an_epoch_may_be_fractions(tmp_path: Path) -> None:
    seen = []

    class Counted(Classifier):
        def val_step(self, global_step: int, batch: Any, device: Any) -> Any:
            seen.append(len(batch[1]))
            return super().val_step(global_step, batch, device)

    trainer = train(
        Counted(validate=True),
        tmp_path,
        max_train_steps_per_epoch=0.4,
        max_val_steps_per_epoch=0.25,
        val_batch_size=8,
        epochs=2,
    )
    assert trainer.plan.max_steps_per_epoch == 3  # of 6
    assert trainer.state.global_step == trainer.plan.total_steps == 6
    assert len(seen) == 2 * 2  # of 6 batches, rounded up, in two validations


def test_a_fraction_of_an_unknown_length_is_refused(tmp_path: Path) -> None:
    class Stream(IterableDataset[Any]):
        def __iter__(self) -> Any:
            return iter(numbers(16))

    class Streams(Classifier):
        def get_val_dataloaders(self, sampler: Any, batch_size: int) -> Any:
            return DataLoader(Stream(), batch_size=batch_size)

    class StreamsTraining(Classifier):
        def get_train_dataloader(self, sampler: Any, batch_size: int) -> Any:
            return DataLoader(Stream(), batch_size=batch_size)

    with pytest.raises(ts.ConfigurationError, match=r"max_val_steps_per_epoch=0.5 is a fraction"):
        train(Streams(), tmp_path / "val", max_val_steps_per_epoch=0.5)
    with pytest.raises(ts.ConfigurationError, match=r"max_train_steps_per_epoch=0.5 is a fraction"):
        train(StreamsTraining(), tmp_path / "train", max_train_steps_per_epoch=0.5)


def test_zero_training_steps_are_refused_with_a_correction(tmp_path: Path) -> None:
    with pytest.raises(ts.ConfigurationError, match=r"call trainer\.validate\(\)"):
        arguments(tmp_path, max_train_steps_per_epoch=0)


class Slow(Classifier):
    """A step takes 30 ms on the clock `now`."""

    now = 0.0

    def train_step(self, global_step: int, batch: Any, device: Any) -> Any:
        self.now += 0.03
        return super().train_step(global_step, batch, device)


def test_validations_and_checkpoints_are_due_by_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    module = Slow(numbers(240), validate=True)
    timer = partial(Timer, clock=lambda: module.now)
    for name in ("run.due_work", "core.intervals"):
        monkeypatch.setattr(f"trainstack.trainer.{name}.Timer", timer)
    saves = ts.DefaultCheckpointerArguments(every_n_seconds=0.1, keep_last=None, every_n_epochs=100, keep_best=0)
    trainer = train(
        module,
        tmp_path,
        validate_every=ts.Every(time=timedelta(milliseconds=200)),
        checkpointer_args=saves,
    )
    # One step passes after each of them: the next interval begins when the timer is read again.
    assert [record.step for record in trainer.history.records("val/loss")] == [7, 15, 23]
    saved = sorted(path.name for path in (tmp_path / "checkpoints").iterdir() if path.is_dir())
    at_steps = [4, 9, 14, 19, 24, 29, 30]
    assert saved == [
        *(f"checkpoint-{step:09d}" for step in at_steps),
        "checkpoint-begin-000000001",
        "checkpoint-model-000000030",
    ]


def test_a_timer_broadcasts_rarely_and_restarts_after_due_work() -> None:
    now, asked = 0.0, 0

    class Comm:
        def broadcast_object(self, value: Any, what: str) -> Any:
            nonlocal asked
            asked += 1
            return value

    timer, due, step = Timer(100.0, clock=lambda: now), [], 0
    timer.begin(0)
    while step < 2500:
        step, now = step + 1, now + 0.1
        if timer.is_due(step, Comm()):  # type: ignore[arg-type]
            due.append(now)
            now += 300.0  # a long validation
    assert [round(at) for at in due] == [100, 500]
    assert asked < 80


def test_a_time_between_validations_is_saved_in_seconds(tmp_path: Path) -> None:
    args = arguments(tmp_path, validate_every=ts.Every(time="00:30:00"))
    assert args.to_dict()["validate_every"]["time"] == 1800.0
    assert ts.TrainerArguments.from_dict({"validate_every": {"time": "00:30:00"}}).validate_every == args.validate_every
    with pytest.raises(ts.ConfigurationError, match="write one of"):
        ts.Every(time=3, epochs=1)
    with pytest.raises(ts.ConfigurationError, match="every_n_seconds=0"):
        ts.DefaultCheckpointerArguments(every_n_seconds=0)


@pytest.mark.parametrize(
    ("interval", "length", "says"),
    [("epoch", 12, "ends early"), ("step", 5, "past its end"), ("step", 12, None), ("epoch", 2, None)],
)
def test_a_one_cycle_schedule_that_does_not_fit_is_named(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, interval: Any, length: int, says: str | None
) -> None:
    class OneCycle(Classifier):
        def get_optimizers_schedulers(self, estimated_global_steps_per_epoch: int, epochs: int) -> Any:
            optimizer = torch.optim.SGD(self.parameters(), lr=0.1)
            return [optimizer], [ts.SchedulerConfig(OneCycleLR(optimizer, 0.1, total_steps=length), interval=interval)]

    trainer = ts.Trainer(OneCycle(), arguments(tmp_path, epochs=2))
    assert trainer.plan.total_steps == 12
    assert [says in text for text in caplog.messages if "OneCycleLR was made" in text] == ([True] if says else [])


class Rated(Classifier):
    """A metric whose names are known only after it is computed."""

    class Ratio:
        def reset(self) -> None:
            pass

        def update(self, outputs: Any, batch: Any) -> None:
            pass

        def compute(self) -> dict[str, float]:
            return {"accuracy": 0.5}

    metrics = Ratio()


@pytest.mark.spec("HZ-19")
def test_a_monitor_without_its_prefix_is_found_before_training(tmp_path: Path) -> None:
    trainer = ts.Trainer(Rated(validate=True), arguments(tmp_path, monitor="accuracy", sanity_val_steps=1))
    with pytest.raises(ts.ConfigurationError, match="the validation gives 'val/Ratio/accuracy'"):
        trainer.train()
    assert trainer.state.global_step == 0


def test_a_saved_callback_that_is_missing_on_resume_is_named(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    class Counts(ts.Callback):
        def get_state(self) -> dict[str, Any]:
            return {"calls": 3}

        def update_state(self, state: Any) -> None:
            """Restores nothing."""

    ts.Trainer(Classifier(), arguments(tmp_path, **SAVES), callbacks=[Counts()]).train()
    for given, says in (([Counts()], []), ([], [True])):
        caplog.clear()
        args = arguments(tmp_path, resume=True, epochs=2, checkpointer_args=ts.DefaultCheckpointerArguments())
        ts.Trainer(Classifier(), args, callbacks=given).train(max_steps=7)
        assert ["'Counts'" in text for text in caplog.messages if "this trainer does not have" in text] == says


@pytest.mark.distributed
def test_ranks_end_epochs_and_validate_at_the_same_steps(tmp_path: Path) -> None:
    from tests.helpers.processes import run_world
    from tests.helpers.workers.epoch_limits import shortened

    ranks = run_world(2, shortened, directory=str(tmp_path))
    assert [rank["steps"] for rank in ranks] == [8, 8]
    assert ranks[0]["validated"] == ranks[1]["validated"] != []
    assert ranks[0]["weights"] == ranks[1]["weights"]
