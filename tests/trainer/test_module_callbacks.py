"""`get_callbacks`: the callbacks that a module brings along."""

from __future__ import annotations

from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch

import trainstack as ts
from tests.helpers.modules import Classifier, arguments, numbers, weights
from trainstack import callbacks as cb


class Says(ts.Callback):
    """Writes its name at each begin of a training into `module.said`."""

    def __init__(self, name: str = "class") -> None:
        self.name = name

    def on_train_begin(self, trainer: ts.Trainer) -> None:
        trainer.module.said.append(self.name)


class Brings(Classifier):
    def __init__(self, brought: Any, **options: Any) -> None:
        super().__init__(numbers(24), **options)
        self.brought, self.said, self.calls = brought, list[str](), 0

    def get_callbacks(self) -> Any:
        self.calls += 1
        return self.brought


@pytest.mark.parametrize(
    "given", [None, Says("given"), [Says("given")], (Says("given"),)], ids=["none", "one", "list", "tuple"]
)
def test_callbacks_of_the_module_come_after_the_given_ones(given: Any, tmp_path: Path) -> None:
    module = Brings([Says("own"), Says])
    trainer = ts.Trainer(module, arguments(tmp_path, epochs=1), callbacks=given)
    trainer.train()
    assert module.said == [*(["given"] if given else []), "own", "class"]
    assert module.calls == 1


def test_a_callback_of_the_module_replaces_the_default_of_its_class(tmp_path: Path) -> None:
    own = cb.MovingAverage("train/loss", decay=0.5)
    trainer = ts.Trainer(Brings([own]), arguments(tmp_path, default_callbacks=True))
    assert [one for one in trainer.events.callbacks.values() if isinstance(one, cb.MovingAverage)] == [own]


def test_an_average_of_the_module_survives_a_resume_bit_for_bit(tmp_path: Path) -> None:
    class Averages(Classifier):
        def get_callbacks(self) -> Any:
            return [cb.EMA(0.9)]

    ends = []
    for folder, stops in (("whole", ()), ("cut", (4,))):
        for limit in (*stops, None):
            changes = {} if limit is None else {"max_steps": limit}
            trainer = ts.Trainer(Averages(numbers(24)), arguments(tmp_path / folder, resume="auto", epochs=3))
            trainer.train(**changes)
        ends.append(weights(trainer.module))
    given = ts.Trainer(Classifier(numbers(24)), arguments(tmp_path / "given", epochs=3), callbacks=[cb.EMA(0.9)])
    given.train()
    assert torch.equal(ends[0], ends[1])
    assert torch.equal(ends[0], weights(given.module))


@pytest.mark.parametrize(
    ("brought", "error", "message"),
    [
        (None, ts.ModuleContractError, r"Brings\.get_callbacks returned None\. Return a list of callbacks, or \[\]"),
        (Says(), ts.ModuleContractError, r"Brings\.get_callbacks returned <.*Says.*\. Return a list of callbacks"),
        ([print], ts.ConfigurationError, r"callbacks\[0\] is a builtin_function_or_method"),
    ],
    ids=["None", "one", "function"],
)
def test_other_values_than_lists_of_callbacks_are_refused(
    brought: Any, error: type[Exception], message: str, tmp_path: Path
) -> None:
    with pytest.raises(error, match=message):
        ts.Trainer(Brings(brought), arguments(tmp_path))


def test_a_private_run_refuses_a_callback_of_the_module_as_a_given_one(tmp_path: Path) -> None:
    module = Brings([cb.Freezer("net.0")])
    with pytest.raises(ts.ConfigurationError, match="Freezer cannot change the trainable parameters of a private run"):
        ts.Trainer(module, arguments(tmp_path, backend="sp-dp")).train()


def test_callbacks_that_nothing_reads_are_named(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    class Attribute(Classifier):
        callbacks = (Says,)

    class Lightning(Classifier):
        def configure_callbacks(self) -> Any:
            return [Says()]

    class Reads(Attribute):
        said: ClassVar[list[str]] = []

        def get_callbacks(self) -> Any:
            return self.callbacks

    for kind, message in (
        (Attribute, "Attribute.callbacks is never read by the trainer. Return these callbacks from get_callbacks"),
        (Lightning, "configure_callbacks is not a hook and is never called by the trainer. Write get_callbacks(self)."),
        (Reads, ""),
    ):
        caplog.clear()
        ts.Trainer(kind(numbers(24)), arguments(tmp_path / kind.__name__, epochs=1)).train()
        assert message in caplog.text
        assert ("callbacks" in caplog.text) == bool(message)
    assert Reads.said == ["class"]
