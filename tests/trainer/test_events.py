"""Events: three ways to subscribe, a fixed order, and the state that a resume restores."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

import trainstack as ts
from tests.helpers.modules import Classifier, arguments, numbers
from trainstack.trainer.events.bus import Subscription
from trainstack.trainer.events.loop_events import (
    no_subscribers,
    with_batch_events,
    with_fetch_events,
)

SAVING = ts.DefaultCheckpointerArguments()


class Recorder(ts.Callback):
    """Records the method name of each event."""

    def __init__(self, seen: list[str] | None = None) -> None:
        self.seen: list[str] = [] if seen is None else seen

    def __getattr__(self, name: str) -> Callable[..., None]:
        if name not in {event.method for event in ts.Event}:
            raise AttributeError(name)
        return lambda trainer, *given: self.seen.append(name.removeprefix("on_"))


def trainer_of(directory: Path, module: ts.ModuleInterface | None = None, **changes: Any) -> ts.Trainer:
    callbacks = changes.pop("callbacks", None)
    module = Classifier(numbers(16), validate=True) if module is None else module
    return ts.Trainer(module, arguments(directory, **changes), callbacks=callbacks)


@pytest.mark.spec("FN-36", "PA-35", "PA-29", "PA-32")
def test_the_events_of_a_run_occur_in_the_documented_order(tmp_path: Path) -> None:
    recorder = Recorder()
    trainer = trainer_of(tmp_path, callbacks=[recorder], gpu_batch_size_limit=4, log_every=1, checkpointer_args=SAVING)
    trainer.train()

    batch = ["train_batch_begin", "before_backward", "train_batch_end", "after_backward"]
    evaluated = ["validation_batch_begin", "validation_batch_end"] * 16
    update = ["before_optimizer_step", "after_optimizer_step", "before_zero_grad", "after_zero_grad"]
    fetched = ["fetch_data_begin", "fetch_data_end", *batch]
    step = [*fetched, *fetched, *update, "train_step_end", "log"]
    assert recorder.seen == [
        *("init", "ready", "train_begin", "epoch_begin", "train_epoch_begin"),
        *(step + step),
        *("fetch_data_begin", "train_epoch_end", "validation_begin", *evaluated, "validation_end", "epoch_end"),
        *("save_checkpoint", "checkpoint_saved", "train_end", "save_model"),
    ]
    once = [
        name for name in dict.fromkeys(recorder.seen) if name != "save_checkpoint"
    ]  # which also occurs within epochs
    assert once == [event.value for event in ts.Event if event.value in once]


def test_a_subscriber_gets_the_documented_arguments(tmp_path: Path) -> None:
    given: dict[ts.Event, tuple[Any, ...]] = {}
    trainer = trainer_of(tmp_path, checkpointer_args=SAVING, log_every=1)
    for event in set(ts.Event) - {ts.Event.INIT}:
        trainer.on(event)(lambda trainer, *rest, event=event: given.setdefault(event, rest))
    trainer.train()

    never = {ts.Event.INIT, ts.Event.LOAD_CHECKPOINT, ts.Event.STOP_TRAINING, ts.Event.EXCEPTION}
    never |= {ts.Event.LOAD_MODEL, ts.Event.SANITY_CHECK_BEGIN, ts.Event.SANITY_CHECK_END}
    assert set(given) == set(ts.Event) - never
    assert all(len(rest) == len(event.gives) for event, rest in given.items())
    assert given[ts.Event.TRAIN_STEP_END] == (1,)
    assert set(given[ts.Event.VALIDATION_END][0]) >= {"val/loss", "train/loss_epoch"}
    assert given[ts.Event.TRAIN_END] == ("finished",)


@pytest.mark.spec("FN-40", "FN-12", "PA-04")
def test_subscribers_of_one_event_run_in_the_documented_order(tmp_path: Path) -> None:
    seen: list[str] = []

    class Module(Classifier):
        def on_end_train_step(self, global_step: int) -> None:
            seen.append("hook")

        def on_train_step_end(self, trainer: ts.Trainer) -> None:
            seen.append("method of the module")

    class Named(ts.Callback):
        def __init__(self, name: str = "class", priority: int = 0) -> None:
            self.name, self.priority = name, priority

        def on_train_step_end(self, trainer: ts.Trainer) -> None:
            seen.append(self.name)

    trainer = trainer_of(tmp_path, Module(numbers(8)), callbacks=[Named, Named("object"), Named("first", 1)])
    trainer.on(ts.Event.TRAIN_STEP_END)(lambda: seen.append("function"))
    trainer.on(ts.Event.TRAIN_STEP_END, priority=-1)(lambda: seen.append("last"))
    trainer.train()

    assert seen == ["hook", "first", "method of the module", "class", "object", "function", "last"]


@pytest.mark.spec("FN-38", "FN-39")
def test_a_subscriber_with_a_wrong_signature_is_refused_at_once(tmp_path: Path) -> None:
    trainer = trainer_of(tmp_path)

    def too_much(trainer: ts.Trainer, step: int, more: int) -> None: ...

    with pytest.raises(ts.ConfigurationError, match=r"(?s)too_much.*more.*TRAIN_STEP_END"):
        trainer.on(ts.Event.TRAIN_STEP_END)(too_much)
    with pytest.raises(ts.ConfigurationError, match="not an event"):
        trainer.on("train_step_end")  # type: ignore[arg-type]

    with pytest.raises(ts.ConfigurationError, match=r"Define Callback\.on_init"):
        trainer.on(ts.Event.INIT)

    class Wrong(ts.Callback):
        def on_epoch_end(self, trainer: ts.Trainer, epoch: int, results: Any) -> None: ...

    with pytest.raises(ts.ConfigurationError, match="on_epoch_end"):
        trainer_of(tmp_path, callbacks=[Wrong])


def test_a_subscriber_may_omit_arguments_and_keeps_its_defaults(tmp_path: Path) -> None:
    seen: list[Any] = []
    trainer = trainer_of(tmp_path, Classifier(numbers(8)))
    trainer.on(ts.Event.TRAIN_STEP_END)(lambda: seen.append("nothing"))
    trainer.on(ts.Event.TRAIN_STEP_END)(lambda trainer, bound="mine": seen.append(bound))
    trainer.on(ts.Event.TRAIN_STEP_END)(lambda trainer, step=None: seen.append(step))
    trainer.train()

    assert seen == ["nothing", "mine", 1]


@pytest.mark.spec("FN-37", "F414")
def test_a_filter_selects_the_occurrences_of_an_event(tmp_path: Path) -> None:
    seen: dict[str, list[int]] = {name: [] for name in ("every", "once", "third", "when")}
    trainer = trainer_of(tmp_path, Classifier(numbers(80)))

    def big_and_even(trainer: ts.Trainer, filter: ts.Filter) -> bool:
        return trainer.state.global_step % 2 == 0 and filter.num_called > 5 and filter.num_executed < 2

    trainer.on(ts.Event.TRAIN_STEP_END, every=4)(lambda trainer, step: seen["every"].append(step))
    trainer.on(ts.Event.TRAIN_STEP_END, once=True)(lambda trainer, step: seen["once"].append(step))
    trainer.on(ts.Event.TRAIN_STEP_END, once=3)(lambda trainer, step: seen["third"].append(step))
    trainer.on(ts.Event.TRAIN_STEP_END, when=big_and_even)(lambda trainer, step: seen["when"].append(step))
    trainer.train()

    assert seen == {"every": [4, 8], "once": [1], "third": [3], "when": [6, 8]}


@pytest.mark.parametrize(
    "wrong",
    [
        {"every": 0},
        {"every": 1.5},
        {"every": True},
        {"once": -1},
        {"when": 3},
        {"when": lambda a, b, c: True},
        {"every": 2, "once": 2},
        {"every": 2, "once": 2, "when": lambda trainer: True},
    ],
)
def test_an_invalid_filter_is_refused(wrong: dict[str, Any], tmp_path: Path) -> None:
    with pytest.raises(ts.ConfigurationError):
        trainer_of(tmp_path).on(ts.Event.TRAIN_STEP_END, **wrong)


class Sometimes(ts.Callback):
    """Counts its calls; two of its methods have filters."""

    def __init__(self) -> None:
        self.third, self.epochs, self.count = list[int](), list[int](), 0

    @ts.call_filter(every=3)
    def on_train_step_end(self, trainer: ts.Trainer, step: int) -> None:
        self.third.append(step)

    @ts.call_filter(every=2)
    def on_epoch_begin(self, trainer: ts.Trainer, epoch: int) -> None:
        self.epochs.append(epoch)

    def on_after_optimizer_step(self, trainer: ts.Trainer) -> None:
        self.count += 1

    def get_state(self) -> dict[str, Any]:
        return {"count": self.count}

    def update_state(self, state: Mapping[str, Any]) -> None:
        self.count = state["count"]


@pytest.mark.spec("FN-37", "FN-41", "F408", "FN-50", "FN-45")
@pytest.mark.parametrize(
    "stop_at", [step if step in (1, 3, 4, 11) else pytest.param(step, marks=pytest.mark.long) for step in range(1, 12)]
)
def test_counters_and_states_of_subscribers_continue_after_a_resume(stop_at: int, tmp_path: Path) -> None:
    """4 epochs of 3 steps, interrupted after one of them; two callbacks of a class keep separate states."""
    fourth: list[int] = []

    def run(last: int | None = None) -> tuple[ts.Trainer, list[Sometimes]]:
        both = [Sometimes(), Sometimes()]
        both[1].count = 100
        trainer = trainer_of(
            tmp_path, Classifier(numbers(24)), epochs=4, callbacks=both, resume="auto", checkpointer_args=SAVING
        )

        @trainer.on(ts.Event.TRAIN_STEP_END, every=4)
        def note(trainer: ts.Trainer, step: int) -> None:
            fourth.append(step)
            trainer.user_state["noted"] = trainer.user_state.get("noted", 0) + 1

        if last is not None:
            trainer.on(ts.Event.TRAIN_STEP_END, when=lambda t: t.state.global_step == last)(
                lambda trainer: trainer.request_stop("enough")
            )
        trainer.train()
        return trainer, both

    _, first = run(stop_at)
    trainer, second = run()

    for one, other in zip(first, second, strict=True):
        assert one.third + other.third == [3, 6, 9, 12]
        assert one.epochs + [e for e in other.epochs if e not in one.epochs] == [1, 3]
    assert [callback.count for callback in second] == [12, 112]
    assert fourth == [4, 8, 12]
    assert trainer.user_state == {"noted": 3}


@pytest.mark.spec("FN-08")
def test_a_subscriber_that_never_ran_is_logged(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    trainer = trainer_of(tmp_path, Classifier(numbers(24)))

    def unused(trainer: ts.Trainer) -> None: ...

    def too_rare(trainer: ts.Trainer) -> None: ...

    trainer.on(ts.Event.VALIDATION_END)(unused)
    trainer.on(ts.Event.TRAIN_STEP_END, once=100)(too_rare)
    trainer.on(ts.Event.EXCEPTION)(lambda: None)  # a run without exceptions is normal
    trainer.train()

    told = [record.message for record in caplog.records if "has never run" in record.message]
    assert len(told) == 2
    assert any("unused" in line and "the event never occurred" in line for line in told)
    assert any("too_rare" in line and "3 times" in line for line in told)


def test_a_typo_in_the_name_of_a_method_is_logged(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    class Slip(ts.Callback):
        def on_train_step_ends(self, trainer: ts.Trainer) -> None: ...

    trainer_of(tmp_path, callbacks=[Slip])

    assert "Did you mean 'on_train_step_end'?" in caplog.text


@pytest.mark.spec("PA-36", "FN-35")
@pytest.mark.parametrize("who", ["hook", "callback", "function"])
def test_stop_training_saves_and_ends_the_run(who: str, tmp_path: Path) -> None:
    def enough(step: int) -> None:
        if step == 2:
            raise ts.StopTraining("that will do")

    class Module(Classifier):
        def on_end_train_step(self, global_step: int) -> None:
            if who == "hook":
                enough(global_step)

    class Stops(ts.Callback):
        def on_train_step_end(self, trainer: ts.Trainer, step: int) -> None:
            if who == "callback":
                enough(step)

    recorder, told = Recorder(), list[Any]()
    trainer = trainer_of(tmp_path, Module(numbers(40)), callbacks=[Stops, recorder], checkpointer_args=SAVING)
    trainer.on(ts.Event.TRAIN_STEP_END)(lambda trainer, step: enough(step) if who == "function" else None)
    trainer.on(ts.Event.STOP_TRAINING)(lambda trainer, reason: told.append(reason))
    trainer.on(ts.Event.TRAIN_END)(lambda trainer, status: told.append(status))
    trainer.train()

    assert trainer.state.global_step == 2
    assert trainer.stop_reason == "that will do"
    assert told == ["that will do", "stopped"]
    assert recorder.seen[-5:] == ["save_checkpoint", "checkpoint_saved", "stop_training", "train_end", "save_model"]


@pytest.mark.spec("F207", "FN-35")
def test_an_exception_names_its_subscriber_and_its_step(tmp_path: Path) -> None:
    class Broken(ts.Callback):
        def on_after_backward(self, trainer: ts.Trainer) -> None:
            self.no_such_attribute  # noqa: B018

    recorder = Recorder()
    trainer = trainer_of(tmp_path, callbacks=[Broken, recorder])
    trainer.on(ts.Event.EXCEPTION)(lambda trainer, error: [][0])
    with pytest.raises(AttributeError, match="no_such_attribute") as caught:
        trainer.train()

    notes = " ".join(caught.value.__notes__)
    assert "raised in Broken.on_after_backward, at Event.AFTER_BACKWARD" in notes
    assert "in epoch 0, global step 1" in notes
    assert "also, at Event.EXCEPTION: IndexError" in notes
    assert recorder.seen[-2:] == ["exception", "train_end"]


@pytest.mark.spec("F414", "FN-22")
def test_two_trainers_do_not_share_subscribers(tmp_path: Path) -> None:
    seen: list[str] = []
    one, other = (trainer_of(tmp_path, Classifier(numbers(8))) for _ in range(2))
    one.on(ts.Event.TRAIN_STEP_END)(lambda: seen.append("one"))
    other.train()
    assert not seen
    one.train()
    assert seen == ["one"]


@pytest.mark.parametrize("wrong", [[3], [dict], 3, "EMA"])
def test_an_object_other_than_a_callback_is_refused(wrong: Any, tmp_path: Path) -> None:
    with pytest.raises(ts.ConfigurationError, match="callbacks"):
        trainer_of(tmp_path, callbacks=wrong)


def test_one_callback_cannot_be_given_twice(tmp_path: Path) -> None:
    recorder = Recorder()
    with pytest.raises(ts.ConfigurationError, match="already"):
        trainer_of(tmp_path, callbacks=[recorder, recorder])


def test_the_verbs_of_a_step_are_unchanged_without_subscribers() -> None:
    def verb(*_: Any) -> None: ...

    windows: list[Any] = []
    assert with_batch_events(verb, verb, no_subscribers) == (verb, verb)
    assert with_fetch_events(windows, no_subscribers) is windows


def test_a_run_without_subscribers_dispatches_nothing_in_its_steps(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    called: list[str] = []
    original = Subscription.call

    def call(self: Subscription, *given: Any) -> None:
        called.append(self.label)
        original(self, *given)

    monkeypatch.setattr(Subscription, "call", call)
    trainer = trainer_of(tmp_path)
    trainer.on(ts.Event.TRAIN_END)(lambda: None)
    trainer.train()

    assert len(called) == 1


def test_the_documentation_has_the_table_of_events() -> None:
    page = (Path(__file__).resolve().parents[2] / "docs" / "callbacks.md").read_text()

    rows = [f"| `{e.name}` | {', '.join(f'`{name}`' for name in e.gives) or '–'} | {e.when} |" for e in ts.Event]
    assert "\n".join(rows) in page


def test_a_separate_evaluation_emits_events_and_restores_random_states(tmp_path: Path) -> None:
    recorder = Recorder()
    trainer = trainer_of(tmp_path, callbacks=[recorder])
    trainer.on(ts.Event.VALIDATION_END)(lambda: torch.rand(3))
    before = torch.get_rng_state()
    trainer.validate()

    seen = [name for name in recorder.seen if "batch" not in name]
    assert seen == ["init", "ready", "validation_begin", "validation_end"]
    assert not trainer.is_training
    assert torch.equal(before, torch.get_rng_state())
