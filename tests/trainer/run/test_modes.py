"""The modes, training or eval, in which the parts of a module train."""

from __future__ import annotations

import logging
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import trainstack as ts
from tests.helpers.modules import Classifier, arguments, numbers, train
from trainstack import callbacks as cb
from trainstack.trainer.core.modes import Decision, describe_modes


@pytest.fixture(autouse=True)
def info(caplog: pytest.LogCaptureFixture) -> Iterator[None]:
    with caplog.at_level(logging.INFO, "trainstack"):
        yield


def backbone() -> nn.Sequential:
    return nn.Sequential(nn.Linear(6, 6), nn.BatchNorm1d(6), nn.Sequential(nn.Dropout(0.5), nn.ReLU()))


class Parts(Classifier):
    """A frozen backbone in eval mode before a network; records the modes of some parts in each step."""

    def __init__(self, watched: str = "backbone backbone.1 net", **changes: Any) -> None:
        super().__init__(numbers(16), validate=True, **changes)
        self.backbone = backbone().requires_grad_(False)
        self.backbone.eval()
        self.net.append(nn.BatchNorm1d(3))
        self.watched, self.seen = watched.split(), list[tuple[bool, ...]]()

    def train_step(self, global_step: int, batch: Any, device: Any) -> Any:
        self.seen.append(tuple(self.get_submodule(name).training for name in self.watched))
        return super().train_step(global_step, (self.backbone(batch[0]), batch[1]), device)


def test_a_frozen_backbone_stays_in_eval_mode(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    saving = ts.DefaultCheckpointerArguments()
    module = Parts()
    trainer = ts.Trainer(module, arguments(tmp_path, checkpointer_args=saving, validate_every=1))
    trainer.train()
    module.eval()  # as a user does before reading outputs
    trainer.train(epochs=3)
    resumed = Parts()
    train(resumed, tmp_path, checkpointer_args=saving, resume=True, epochs=4)

    assert set(module.seen) == set(resumed.seen) == {(False, False, True)}
    assert len(module.seen) == 6
    assert torch.equal(module.backbone[1].running_mean, torch.zeros(6))  # type: ignore[arg-type]
    assert "1 part of the module stays in eval mode" in caplog.text
    assert "Parts had trainable parameters in eval mode and trains in training mode" in caplog.text


@pytest.mark.parametrize(
    ("prepare", "expected"),
    [
        (lambda m: m.net[4].eval(), (False, False, True, False)),  # a batch norm alone
        (lambda m: m.net[2].eval(), (False, False, True, True)),
        (lambda m: m.net.eval(), (False, False, True, True)),  # a network as from_pretrained gives it
        (lambda m: m.eval(), (True, True, True, True)),
        (lambda m: m.backbone.train(), (True, True, True, True)),
        (lambda m: m.backbone.requires_grad_(True), (True, True, True, True)),
        (lambda m: (m.backbone.train(), m.backbone[1].eval()), (True, False, True, True)),
        (lambda m: (m.backbone.train(), setattr(m.backbone, "training", False)), (True, True, True, True)),
        (lambda m: (m.eval(), setattr(m, "keep_modes", True)), (False, False, False, False)),
        (lambda m: setattr(m, "keep_modes", True), (False, False, True, True)),
    ],
)
def test_parts_without_trained_parameters_keep_eval_mode(
    prepare: Any, expected: tuple[bool, ...], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    module = Parts("backbone backbone.1 net net.4")
    prepare(module)
    before = {part: part.training for part in module.modules()}
    train(module, tmp_path)

    assert set(module.seen) == {expected}
    changed = not module.keep_modes and any(part.training is not before[part] for part in module.modules())
    assert ("trains in training mode" in caplog.text) is changed


@pytest.mark.parametrize(
    ("names", "said"),
    [(("a",), "a had .* and trains in training mode"), (("a", "b"), "a, b had .* and train in training")],
)
def test_the_description_of_modes_has_singular_and_plural(names: tuple[str, ...], said: str) -> None:
    assert re.match(said, describe_modes(nn.Module(), Decision({}, (), names)))


@pytest.mark.parametrize("hook", ["on_end_train_epoch", "on_end_val_epoch", "on_epoch_end", "on_end_train_step"])
@pytest.mark.parametrize("keep", [False, True])
def test_a_forgotten_eval_in_a_hook_ends_with_the_epoch(hook: str, keep: bool, tmp_path: Path) -> None:
    """In a step, where it may be intended, it lasts to the end of the epoch."""
    kind = type("Forgets", (Parts,), {hook: lambda self, *_, **__: self.eval() and None, "keep_modes": keep})
    module = kind("net")
    train(module, tmp_path, epochs=3)

    assert module.seen == ([(True,), (False,)] * 3 if hook == "on_end_train_step" else [(True,)] * 6)


def test_modes_set_when_an_epoch_begins_hold_for_it(tmp_path: Path) -> None:
    class Thaws(Parts):
        def on_begin_train_epoch(self, global_step: int, epoch: int) -> None:
            if epoch < 2:
                self.net[4].eval()

    module = Thaws("net.4")
    trainer = ts.Trainer(module, arguments(tmp_path, validate_every=1))
    trainer.on(ts.Event.TRAIN_STEP_END, once=1)(lambda trainer: trainer.request_stop("a break in the epoch"))
    for epochs in (2, 2, 4):
        trainer.train(epochs=epochs)

    assert module.seen == [(False,)] * 4 + [(True,)] * 4


def test_train_methods_are_called_only_when_the_mode_changes(tmp_path: Path) -> None:
    class Acts(nn.Linear):
        def train(self, mode: bool = True) -> Any:
            calls.append(mode)
            return super().train(mode)

    module, calls = Parts("net"), list[bool]()
    module.backbone.append(Acts(6, 6).requires_grad_(False).eval())
    module.net.append(Acts(3, 3))
    del calls[:]
    train(module, tmp_path)

    frozen, trained = [False], [True, False, True]  # when training begins, and around the validation
    assert sorted(calls) == sorted(frozen + trained)


def test_an_overridden_train_method_decides_for_its_parts(tmp_path: Path) -> None:
    class KeepsNorms(nn.Sequential):
        def train(self, mode: bool = True) -> Any:
            super().train(mode)
            self[1].eval()
            return self

    module = Parts("net net.0 net.1 net.2")
    module.net = KeepsNorms(nn.Linear(6, 3), nn.BatchNorm1d(3), nn.Dropout(0.1).eval())
    train(module, tmp_path, epochs=2)
    assert set(module.seen) == {(True, True, False, False)}


def test_find_lr_trains_in_the_same_modes_and_restores_them(tmp_path: Path) -> None:
    module = Parts()
    module.net.eval()
    ts.find_lr(ts.Trainer(module, arguments(tmp_path)), steps=3)
    assert set(module.seen) == {(False, False, True)}
    assert not module.net.training


def test_a_freezer_keeps_norms_in_eval_mode_despite_hooks(tmp_path: Path) -> None:
    class Trains(ts.SupervisedModule):
        def on_begin_train_epoch(self, global_step: int, epoch: int) -> None:
            self.train()

    def statistics(until: int | None, *epochs: int) -> float:
        model = nn.Sequential(nn.BatchNorm1d(6), nn.Linear(6, 3))
        module = Trains(model, nn.CrossEntropyLoss(), "sgd", numbers(24))
        trainer = ts.Trainer(module, arguments(tmp_path), callbacks=[cb.Freezer("model.0", until_epoch=until)])
        for count in epochs:
            trainer.train(epochs=count)
        return float(model[0].num_batches_tracked)  # type: ignore[arg-type]

    assert statistics(None, 2) == 0
    assert statistics(2, 1, 4) == statistics(2, 4) == 6, "two epochs of three steps each"


def test_a_private_run_trains_all_parts_in_training_mode(tmp_path: Path) -> None:
    class StaysInEval(nn.BatchNorm1d):
        def train(self, mode: bool = True) -> Any:
            return super().train(False)

    module = Classifier(numbers(16))
    module.net.append(StaysInEval(3).requires_grad_(False))
    module.net[2].eval()
    train(module, tmp_path, backend="sp-dp")
    assert module.net[2].training
    assert not module.net[4].training
    assert module.net[4].num_batches_tracked == 0
    kept = type("Kept", (Classifier,), {"keep_modes": True})(numbers(16))
    with pytest.raises(ts.ConfigurationError, match="keep_modes is True and the run is private"):
        train(kept, tmp_path / "kept", backend="sp-dp")
