"""A layer declares its capabilities; a layer of a user is treated like a built-in one that declares the same."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch

import trainstack as ts
from tests.helpers.modules import REPRODUCIBLE, Classifier, arguments, numbers, train
from trainstack.backends.privacy_statement import PrivacyStatement
from trainstack.checkpointing.directory import read_manifest


class Mine(ts.AbstractTrainerBackendDecorator):
    """Declares everything that the privacy layer declares, and leaves the steps as they are."""

    private = True
    bounds_gradients = True
    hides_losses = True
    configured_by: ClassVar[Any] = {ts.DifferentialPrivacyArguments: "rules"}

    def __init__(self, inner: Any, *, rules: Any = None) -> None:
        super().__init__(inner)
        self.rules = rules

    def privacy_statement(self) -> PrivacyStatement:
        return PrivacyStatement(epsilon=None, delta=None, overrides=("my own mechanism",))


class Counted(Mine):
    """Hides the true number of records."""

    public_dataset_size = 24


class Plain(ts.AbstractTrainerBackendDecorator):
    """Declares nothing."""


class NanLoss(Classifier):
    """The loss of the second step is nan, its gradient is finite."""

    def train_step(self, global_step: int, batch: Any, device: Any) -> Any:
        loss = super().train_step(global_step, batch, device)
        return loss + (float("nan") if global_step == 2 else 0.0)


@pytest.fixture
def tokens() -> Iterator[None]:
    ts.register_layer("mine", slot=ts.Slot.PRIVACY)(Mine)
    ts.register_layer("plain", slot=ts.Slot.PRIVACY)(Plain)
    yield
    ts.unregister("mine")
    ts.unregister("plain")


def trained(backend: str, folder: Path, module: Any = None, **changes: Any) -> ts.Trainer:
    private = {"differential_privacy_args": REPRODUCIBLE} if "mine" in backend else {}
    saving = ts.DefaultCheckpointerArguments()
    return train(
        module or Classifier(numbers(32)), folder, backend=backend, checkpointer_args=saving, **private, **changes
    )


@pytest.mark.parametrize("backend", ["sp-mine", "sp-mine-bf16"])
def test_a_custom_layer_is_private(backend: str, tokens: None, tmp_path: Path) -> None:
    trainer = trained(backend, tmp_path)
    stack = trainer.trainer_backend
    newest = [info for info in ts.list_checkpoints(tmp_path / "checkpoints") if info.kind == "checkpoint"][-1].path

    assert stack.is_private
    assert next(iter(stack.layers())).rules is REPRODUCIBLE  # type: ignore[attr-defined]
    assert trainer.privacy_statement().overrides == ("my own mechanism",)
    assert "train/loss_epoch" not in trainer.history.get_metric_names()
    privacy = (read_manifest(newest).metadata or {})["privacy"]
    assert json.dumps(privacy).count("my own mechanism") == 1
    with pytest.raises(ts.ConfigurationError, match="find_lr: the run is private"):
        ts.find_lr(trainer)


def test_a_layer_that_declares_nothing_has_none_of_it(tokens: None, tmp_path: Path) -> None:
    trainer = trained("sp-plain", tmp_path)

    assert not trainer.trainer_backend.is_private
    assert "backend 'sp-plain' has no privacy layer" in trainer.privacy_statement().overrides[0]
    assert "train/loss_epoch" in trainer.history.get_metric_names()


def test_a_custom_layer_can_hide_the_number_of_records(tokens: None, tmp_path: Path) -> None:
    stack = Counted(ts.build_trainer_backend("sp"))
    trainer = ts.Trainer(Classifier(numbers(32)), arguments(tmp_path), trainer_backend=stack)

    assert trainer.plan.samples_per_epoch == 24


def test_bounded_gradients_make_a_nonfinite_loss_harmless(tokens: None, tmp_path: Path) -> None:
    module = NanLoss(numbers(32))
    trained("sp-mine", tmp_path / "bounded", module)

    assert all(torch.isfinite(p).all() for p in module.parameters())
    with pytest.raises(ts.NonFiniteError, match="the loss is nan"):
        trained("sp-plain", tmp_path / "plain", NanLoss(numbers(32)))


def test_arguments_find_the_layer_that_takes_them(tokens: None, tmp_path: Path) -> None:
    with pytest.raises(ts.ConfigurationError, match="'sp-mine' without differential_privacy_args"):
        arguments(tmp_path, backend="sp-mine")
    with pytest.raises(ts.ConfigurationError, match="'sp-plain', which has no privacy layer"):
        arguments(tmp_path, backend="sp-plain", differential_privacy_args=REPRODUCIBLE)

    given = arguments(tmp_path, backend="sp-mine", backend_options={"mine": {"rules": 3}})
    assert given.layer_options == {"mine": {"rules": 3}}
    given = arguments(
        tmp_path, backend="ddp-dp", distributed_training_args=PLACE, differential_privacy_args=REPRODUCIBLE
    )
    assert given.layer_options == {"ddp": {"place": PLACE}, "dp": {"args": REPRODUCIBLE}}


PLACE = ts.DistributedTrainingArguments(global_rank=0, world_size=1, local_rank=0)


def test_a_private_run_of_a_custom_layer_is_not_verified(tokens: None, tmp_path: Path) -> None:
    noisy = ts.DifferentialPrivacyArguments(delta=1e-4, noise_multiplier=1.0)
    saving = ts.DefaultCheckpointerArguments()
    args = arguments(tmp_path, backend="sp-mine", differential_privacy_args=noisy, checkpointer_args=saving)
    with pytest.raises(ts.ConfigurationError, match="a private run is never the same twice"):
        ts.verify_resume(Classifier, args)


@pytest.mark.processes
def test_a_stack_runs_after_an_import_of_the_backends_alone() -> None:
    program = """
from torch import nn, optim, zeros
from trainstack.backends import TrainerBackendArguments, build_trainer_backend
linear, stack = nn.Linear(1, 1), build_trainer_backend("sp")
stack.init(TrainerBackendArguments(model=linear, optimizers=[optim.SGD(linear.parameters())]))
print(stack.get_global_steps_completed())
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False, timeout=300)

    assert (done.stdout.strip(), done.stderr) == ("0", "")
