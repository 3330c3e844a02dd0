"""Methods of other libraries' trainers and callbacks are refused with the method to write instead."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import trainstack as ts
from tests.helpers.modules import Classifier, arguments
from trainstack.trainer.events.event import FOREIGN_METHODS
from trainstack.trainer.module_checks import _TRAINER_METHODS, _TRAINER_VALUES


@pytest.mark.spec("PA-30", "PA-32", "PA-28")
@pytest.mark.parametrize("method", ["calculate_train_batch_loss", "create_scheduler", "backward_step", "training_step"])
def test_a_trainer_with_methods_of_another_library_is_refused(method: str, tmp_path: Path) -> None:
    kind = type("Mine", (ts.Trainer,), {method: lambda self, *args: None})
    with pytest.raises(
        ts.ConfigurationError, match=f"Mine defines {method}, which no trainer calls: for {method} write"
    ):
        kind(Classifier(), arguments(tmp_path))


@pytest.mark.parametrize("name", _TRAINER_VALUES)
def test_an_override_of_an_unused_property_is_refused(name: str, tmp_path: Path) -> None:
    kind = type("Mine", (ts.Trainer,), {name: property(lambda self: 3)})
    with pytest.raises(ts.ConfigurationError, match=f"Mine defines {name}, which no trainer calls: for {name} write"):
        kind(Classifier(), arguments(tmp_path))


def test_a_trainer_may_define_further_methods(tmp_path: Path) -> None:
    kind = type("Mine", (ts.Trainer,), {"send_mail": lambda self: None})
    assert kind(Classifier(), arguments(tmp_path)).last_epoch == -1
    assert not [name for name in _TRAINER_METHODS if hasattr(ts.Trainer, name)]


@pytest.mark.spec("PA-29")
@pytest.mark.parametrize("theirs", FOREIGN_METHODS)
def test_a_callback_with_a_foreign_event_name_is_refused(theirs: str, tmp_path: Path) -> None:
    def method(self: Any, trainer: Any, **more: Any) -> None: ...

    event = FOREIGN_METHODS[theirs]
    gives = "".join(f", {name}" for name in event.gives)
    callback = type("Mine", (ts.Callback,), {theirs: method})()
    with pytest.raises(
        ts.ConfigurationError, match=rf"Mine.{theirs} is .* Write def {event.method}\(self, trainer{gives}\)"
    ):
        ts.Trainer(Classifier(), arguments(tmp_path), callbacks=[callback])

    both = type("Mine", (ts.Callback,), {theirs: method, event.method: method})()
    assert ts.Trainer(Classifier(), arguments(tmp_path), callbacks=[both]).last_epoch == -1
