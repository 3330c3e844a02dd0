"""`train()` after an exception in any hook or subscriber ends as an uninterrupted run."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

import trainstack as ts
from tests.helpers.modules import Classifier, arguments, numbers, weights

HOOKS = ["on_begin_train_epoch", "on_end_train_step", "on_end_train_epoch", "on_end_val_epoch", "on_end_train"]
HOOKS += ["on_end_backward"]
EVENTS = ["after_optimizer_step", "before_zero_grad", "after_zero_grad", "train_step_end", "log", "epoch_begin"]
EVENTS += ["train_epoch_begin", "train_epoch_end", "validation_begin", "validation_end", "epoch_end"]
COUNTED = [*HOOKS[:-1], *(f"on_{event}" for event in EVENTS), "call_at_step"]
"""A call of these counts, even if it raised."""
REPEATED = ["train_step", "on_end_backward", "val_step", "get_train_dataloader", "on_fetch_data_begin"]
REPEATED += ["on_fetch_data_end", "on_train_batch_begin", "on_before_backward", "on_after_backward"]
REPEATED += ["on_before_optimizer_step", "on_train_begin", "on_train_end", "on_save_checkpoint", "on_save_model"]
REPEATED += ["validate_every"]
"""The step, the validation or the save of these is repeated."""

ONCE = ["validate_every", "on_end_train", "on_train_begin", "on_train_end", "call_at_step", "on_save_model"]

SETTINGS: dict[str, dict[str, Any]] = {
    "epochs": {"epochs": 3, "log_every": 2},
    "accumulated": {"epochs": 2, "gpu_batch_size_limit": 2, "validate_every": 2, "nonfinite": "skip"},
    "max_steps": {"max_steps": 5, "log_every": 3, "backend": "sp-bf16"},
    "asked": {"epochs": 2, "log_every": 1, "validate_every": None},
}


class Breaks:
    """Records calls, and raises once, at the second call of `point`, or at the first for those in `ONCE`."""

    def __init__(self, point: str | None) -> None:
        self.point, self.calls, self.counts, self.raised = point, list[tuple[Any, ...]](), dict[str, int](), False

    def note(self, name: str, *given: Any) -> None:
        self.calls += [] if name in REPEATED else [(name, *given)]
        self.counts[name] = self.counts.get(name, 0) + 1
        at = 1 if name in ONCE else 2
        if name == self.point and not self.raised and self.counts[name] == at:
            self.raised = True
            raise ValueError(name)


class Watched(Classifier):
    """Reports each call of a hook or a step to `breaks`; has a statistic that must count each step once."""

    def __init__(self, breaks: Breaks) -> None:
        super().__init__(numbers(12), validate=True)
        self.breaks = breaks
        self.register_buffer("steps", torch.zeros(()))

    def get_optimizers_schedulers(self, *_: Any) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=0.1)
        by_step = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
        by_epoch = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
        return [optimizer], [by_step, ts.SchedulerConfig(by_epoch, interval="epoch")]

    def get_train_dataloader(self, *args: Any, **kwargs: Any) -> Any:
        self.breaks.note("get_train_dataloader")
        return super().get_train_dataloader(*args, **kwargs)

    def train_step(self, global_step: int, batch: Any, device: Any) -> Any:
        self.breaks.note("train_step")
        return super().train_step(global_step, batch, device)

    def val_step(self, global_step: int, batch: Any, device: Any) -> Any:
        self.breaks.note("val_step")
        return super().val_step(global_step, batch, device)

    def on_end_train_step(self, global_step: int, losses: Any) -> None:
        self.steps += 1
        self.log("seen", len(losses))
        self.breaks.note("on_end_train_step", global_step, len(losses))

    def on_end_train_epoch(self, global_step: int, losses: Any) -> None:
        self.breaks.note("on_end_train_epoch", global_step, losses.sum().item())

    def on_end_val_epoch(self, global_step: int, *outputs: Any, key: str = "default") -> None:
        self.log("measured", float(global_step))
        self.breaks.note("on_end_val_epoch", global_step)


def watched(breaks: Breaks, directory: Path, setting: str, **changes: Any) -> ts.Trainer:
    kind = type("Module", (Watched,), {name: hook_of(name) for name in HOOKS if name not in vars(Watched)})
    made = {"train_batch_size": 4, "val_batch_size": 6, **SETTINGS[setting], **changes}
    if "validate_every" in made and made["validate_every"] is None:
        made["validate_every"] = lambda trainer: asks(trainer, breaks)
    subscriber = type("Subscriber", (ts.Callback,), {name: event_of(name, breaks) for name in SUBSCRIBED})
    trainer = ts.Trainer(kind(breaks), arguments(directory, **made), callbacks=[subscriber(), ts.callbacks.EMA(0.5)])
    trainer.on(ts.Event.READY)(lambda trainer: asks_for_a_call(trainer, breaks))
    return trainer


def asks_for_a_call(trainer: ts.Trainer, breaks: Breaks) -> None:
    if trainer.state.global_step < 4:
        trainer.call_at_step(4, lambda: breaks.note("call_at_step"))


SUBSCRIBED = [name for name in COUNTED + REPEATED if name in {event.method for event in ts.Event}]


def asks(trainer: ts.Trainer, breaks: Breaks) -> bool:
    breaks.note("validate_every")
    return trainer.state.global_step in (1, 4)


def hook_of(name: str) -> Callable[..., None]:
    return lambda self, *given: self.breaks.note(name, *map(str, given) if name != "on_end_backward" else ())


def event_of(name: str, breaks: Breaks) -> Callable[..., None]:
    return lambda self, trainer: breaks.note(name, trainer.state.global_step)


@cache
def unbroken(setting: str, directory: Path) -> tuple[Any, ...]:
    breaks = Breaks(None)
    trainer = watched(breaks, directory / setting, setting)
    trainer.train()
    return ended(trainer), [call for call in breaks.calls if call[0] in COUNTED]


def ended(trainer: ts.Trainer) -> dict[str, Any]:
    """The values by which runs are compared."""
    rates = [group["lr"] for optimizer in trainer.optimizers for group in optimizer.param_groups]
    averages = trainer.events.callbacks["EMA"].get_state()
    return {
        "weights": weights(trainer.module).tolist(),
        "steps": trainer.module.steps.item(),
        "history": trainer.history.to_dict(),
        "state": trainer.state.get_state(),
        "rates": rates,
        "averages": (averages["updates"], [a.tolist() for a in averages["averages"].values()]),
    }


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("unbroken")


SAVING = {"checkpointer_args": ts.DefaultCheckpointerArguments(every_n_steps=2)}


@pytest.mark.parametrize("point", [*COUNTED, *REPEATED])
def test_train_after_an_exception_ends_as_an_uninterrupted_run(point: str, tmp_path: Path, directory: Path) -> None:
    came = 0
    for setting in SETTINGS:
        saving = SAVING if "save" in point and setting == "max_steps" else {}
        breaks = Breaks(point)
        trainer = watched(breaks, tmp_path / setting, setting, **saving)
        try:
            trainer.train()
        except ValueError:
            came += 1
            trainer.train()
        expected, calls = unbroken(setting, directory)
        assert ended(trainer) == expected, setting
        names = COUNTED if point in COUNTED else ("on_end_train_step", "on_end_train_epoch")  # with all outputs, once
        assert [call for call in breaks.calls if call[0] in names] == [one for one in calls if one[0] in names], setting
    assert came


@pytest.mark.parametrize(
    "point", ["on_end_train_step", "on_log", "validate_every", "on_validation_end", "on_epoch_end"]
)
def test_a_checkpoint_after_an_exception_resumes_exactly(point: str, tmp_path: Path, directory: Path) -> None:
    broken = watched(Breaks(point), tmp_path, "asked")
    with pytest.raises(ValueError, match=point):
        broken.train()
    broken.save_checkpoint(path=tmp_path / "between")
    trainer = watched(Breaks(None), tmp_path, "asked", resume=tmp_path / "between")
    trainer.train()
    assert ended(trainer) == unbroken("asked", directory)[0]


def test_other_subscribers_are_called_and_their_errors_are_noted(tmp_path: Path) -> None:
    def fails(text: str) -> Callable[[], None]:
        def fail() -> None:
            called.append(text)
            raise ValueError(text)

        return fail

    called: list[str] = []
    trainer = ts.Trainer(Classifier(numbers(8)), arguments(tmp_path))
    for event, text in ((ts.Event.EPOCH_END, "first"), (ts.Event.EPOCH_END, "second"), (ts.Event.TRAIN_END, "last")):
        trainer.on(event)(fails(text))
    with pytest.raises(ValueError, match="first") as caught:
        trainer.train()
    assert called == ["first", "second", "last"]
    assert "also: ValueError: second" in caught.value.__notes__
