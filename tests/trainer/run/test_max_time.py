"""`max_time` ends a training with a checkpoint."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import trainstack as ts
from tests.helpers.modules import Classifier, arguments, numbers
from trainstack.trainer.core.intervals import seconds_of

SAVING = ts.DefaultCheckpointerArguments()


@pytest.mark.parametrize(
    ("value", "seconds"),
    [(90, 90.0), (0.5, 0.5), ("00:01:30", 90.0), ("11:30:00", 41400.0), ("1:00:00:01", 86401.0), ("100:0:5", 360005.0)],
)
def test_a_duration_is_in_seconds_or_has_clock_format(value: Any, seconds: float) -> None:
    assert seconds_of("max_time", value) == seconds
    assert ts.TrainerArguments.from_dict(ts.TrainerArguments(max_time=value).to_dict()).max_time == value


@pytest.mark.parametrize("wrong", [0, -1, float("inf"), float("nan"), True, "90", "1:30", "00:61:00", "1d", "", [1]])
def test_a_value_other_than_a_duration_is_refused(wrong: Any) -> None:
    with pytest.raises(ts.ConfigurationError, match=r"max_time=.*HH:MM:SS"):
        ts.TrainerArguments(max_time=wrong)


@pytest.mark.parametrize("moment", ["in a step", "in a validation", "before the first step"])
def test_it_saves_a_checkpoint_from_which_the_run_continues(
    moment: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    started: list[tuple[float, Callable[[], None]]] = []

    class Clock:
        def __init__(self, seconds: float, function: Any, given: Any) -> None:
            started.append((seconds, lambda: function(*given)))

        def start(self) -> None:
            if moment == "before the first step" and len(started) == 1:
                started[0][1]()

        def cancel(self) -> None: ...

    class Watches(Classifier):
        def train_step(self, global_step: int, batch: Any, device: Any) -> Any:
            if moment == "in a step" and global_step == 2 and len(started) == 1:
                started[0][1]()
            return super().train_step(global_step, batch, device)

        def val_step(self, global_step: int, batch: Any, device: Any) -> Any:
            if moment == "in a validation" and global_step == 3 and len(started) == 1:
                started[0][1]()
            return super().val_step(global_step, batch, device)

    monkeypatch.setattr(threading, "Timer", Clock)
    module = Watches(numbers(24), validate=True)
    args = arguments(tmp_path, epochs=2, max_time="01:00:00", checkpointer_args=SAVING, val_batch_size=8)
    trainer = ts.Trainer(module, args)
    trainer.train()

    stopped = {"in a step": 2, "in a validation": 3, "before the first step": 0}[moment]
    assert (trainer.stop_reason, trainer.state.global_step) == ("max_time='01:00:00' is over", stopped)
    saved = [info.global_step for info in ts.list_checkpoints(tmp_path / "checkpoints") if info.kind == "checkpoint"]
    assert saved == [stopped]
    trainer.train()
    assert (trainer.stop_reason, trainer.state.global_step) == (None, 6)
    assert [seconds for seconds, _ in started] == [3600.0, 3600.0]


def test_a_real_clock_ends_an_endless_training(tmp_path: Path) -> None:
    class Endless(Classifier):
        def get_train_dataloader(self, sampler: Any, batch_size: int) -> Any:
            return itertools.repeat(self.dataset[:8])

    trainer = ts.Trainer(Endless(), arguments(tmp_path, max_steps=10**9, max_time=0.1))
    trainer.train()
    assert trainer.stop_reason == "max_time=0.1 is over"


def test_a_time_in_yaml_is_not_read_in_base_60(tmp_path: Path) -> None:
    path = tmp_path / "args.yaml"
    path.write_text("max_time: 1:00:00:00\nepochs: 3\nlog_every: 0.5\n")
    args = ts.TrainerArguments.from_yaml(path)

    assert (args.max_time, args.epochs, args.log_every) == ("1:00:00:00", 3, 0.5)
