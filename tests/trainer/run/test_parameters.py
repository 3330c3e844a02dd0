"""A step changes the right parameters by the right amount, and no others."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import trainstack as ts
from tests.helpers.modules import Classifier, arguments, numbers, train, weights
from tests.helpers.specs import stacks_that_run_here

every_stack = pytest.mark.parametrize("backend", stacks_that_run_here(trainer=False))


@every_stack
def test_clipping_and_scaling_see_the_same_parameters(backend: str, tmp_path: Path) -> None:
    """A trainable parameter in no optimizer must not enter the norm, because its gradient may still be scaled."""

    class HeadOnly(Classifier):
        def get_optimizers_schedulers(self, *_: Any) -> Any:
            return torch.optim.SGD(self.net[3].parameters(), lr=0.1)

    reference, module = HeadOnly(numbers(16)), HeadOnly(numbers(16))
    train(reference, tmp_path)
    train(module, tmp_path, backend=backend)

    begin = weights(HeadOnly(numbers(16)))
    moved, expected = ((weights(m) - begin).norm().item() for m in (module, reference))
    assert moved == pytest.approx(expected, rel=0.02)


def test_a_parameter_in_two_optimizers_is_refused(tmp_path: Path) -> None:
    class Twice(Classifier):
        def get_optimizers_schedulers(self, *_: Any) -> Any:
            return [torch.optim.SGD(self.parameters(), lr=0.1) for _ in range(2)], []

    with pytest.raises(ts.ModuleContractError, match="4 parameters that an earlier optimizer holds too"):
        train(Twice(), tmp_path)


def test_an_in_place_gradient_hook_affects_one_pass_only(tmp_path: Path) -> None:
    class Hooked(Classifier):
        def train_step(self, global_step: int, batch: Any, device: Any) -> Any:
            loss = super().train_step(global_step, batch, device)
            loss.register_hook(lambda gradient: gradient.mul_(0.5))
            return loss

    class Halved(Classifier):
        def train_step(self, global_step: int, batch: Any, device: Any) -> Any:
            loss = super().train_step(global_step, batch, device)
            return loss * 0.5 + loss.detach() * 0.5

    hooked, halved = Hooked(), Halved()
    train(hooked, tmp_path, clip_grads=False)
    train(halved, tmp_path, clip_grads=False)

    assert (weights(hooked) - weights(halved)).abs().max() < 1e-6


@pytest.mark.spec("F201")
def test_overridden_train_methods_are_called_around_validations(tmp_path: Path) -> None:
    class Merging(nn.Linear):
        merged = False

        def train(self, mode: bool = True) -> Any:
            self.merged = not mode
            return super().train(mode)

    class Watched(Classifier):
        def train_step(self, *given: Any, **named: Any) -> Any:
            merged["train"].append(layer.merged)
            return super().train_step(*given, **named)

        def val_step(self, *given: Any, **named: Any) -> Any:
            merged["val"].append(layer.merged)
            return super().val_step(*given, **named)

    merged: dict[str, list[bool]] = {"train": [], "val": []}
    module, layer = Watched(numbers(16), validate=True), Merging(3, 3)
    module.net.append(layer)
    train(module, tmp_path, epochs=3)

    assert merged["train"] == [False] * 6
    assert set(merged["val"]) == {True}


def test_parameters_added_later_are_trained_like_the_others(tmp_path: Path) -> None:
    class Growing(Classifier):
        def get_optimizers_schedulers(self, *_: Any) -> Any:
            self.made = torch.optim.SGD(self.net.parameters(), lr=0.1)
            return self.made

        def on_begin_train_epoch(self, global_step: int, epoch: int) -> None:
            if epoch == 1:
                self.late = nn.Parameter(torch.zeros(3))
                self.made.add_param_group({"params": [self.late]})

        def train_step(self, global_step: int, batch: Any, device: Any) -> Any:
            extra = self.late.sum() * 100 if hasattr(self, "late") else 0.0
            return super().train_step(global_step, batch, device) + extra

    module = Growing(numbers(16))
    train(module, tmp_path, epochs=2)

    assert 0 < module.late.detach().norm() <= 2 * 0.1 + 1e-6, "clipped to norm 1, and not added up over steps"


def test_skipping_judges_only_counted_values(tmp_path: Path) -> None:
    """A micro-batch of weight 0 has the loss 0/0; a value that is finite in float64 counts as finite."""

    class Padded(Classifier):
        def batch_weight(self, batch: Any) -> float:
            return float((batch[0][:, 0] > 0).sum())

        def train_step(self, global_step: int, batch: Any, device: Any) -> Any:
            keep = batch[0][:, 0] > 0
            return nn.functional.cross_entropy(self.net(batch[0][keep]), batch[1][keep])

    class Huge(Classifier):
        def train_step(self, global_step: int, batch: Any, device: Any) -> Any:
            return super().train_step(global_step, batch, device) * 1e60

    for module in (Padded(numbers(40)), Huge(numbers(40, dtype=torch.float64), dtype=torch.float64)):
        trainer = train(module, tmp_path, nonfinite="skip", gpu_batch_size_limit=1 if type(module) is Padded else 8)
        assert trainer.state.skipped_steps == 0


@every_stack
def test_a_skipped_step_does_not_change_running_statistics(backend: str, tmp_path: Path) -> None:
    class Normed(Classifier):
        def __init__(self) -> None:
            super().__init__(numbers(32))
            self.net.insert(1, nn.BatchNorm1d(8))

        def train_step(self, global_step: int, batch: Any, device: Any) -> Any:
            inputs = batch[0] * (float("nan") if global_step == 2 else 1.0)
            return nn.functional.cross_entropy(self.net(inputs), batch[1])

    module = Normed()
    trainer = train(module, tmp_path, backend=backend, nonfinite="skip")

    assert trainer.state.skipped_steps == 1
    assert torch.isfinite(module.net[1].running_mean).all()
    assert module.net[1].num_batches_tracked == 3


@every_stack
def test_training_continues_after_an_exception_between_any_two_verbs(backend: str, tmp_path: Path) -> None:
    class Outputs(Classifier):
        sizes: list[int]

        def on_end_train_step(self, global_step: int, losses: Any) -> None:
            self.sizes.append(len(losses))

    module = Outputs(numbers(32))
    module.sizes = []
    trainer = ts.Trainer(module, arguments(tmp_path, backend=backend, gpu_batch_size_limit=2))
    trainer._ready()
    for verb in ("backward", "clip", "step"):
        layer = list(trainer.trainer_backend.layers())[-1]
        original = getattr(layer, verb)

        def interrupted(*args: Any, _verb: str = verb, _layer: Any = layer) -> Any:
            delattr(_layer, _verb)
            raise KeyboardInterrupt

        if verb == "step" and backend.endswith("amp"):
            continue
        setattr(layer, verb, interrupted)
        with pytest.raises(KeyboardInterrupt):
            trainer.train()
        assert getattr(layer, verb).__func__ is original.__func__
    trainer.train()

    assert trainer.global_steps_finished == 4
    assert module.sizes == [4] * 4


def test_a_loss_that_is_a_parameter_is_recorded_before_updates(tmp_path: Path) -> None:
    class Bare(Classifier):
        def __init__(self) -> None:
            super().__init__(numbers(16))
            self.value = nn.Parameter(torch.tensor(2.0))

        def train_step(self, global_step: int, batch: Any, device: Any) -> Any:
            return self.value

    trainer = train(Bare(), tmp_path)

    assert trainer.history.get_latest_metric("train/loss_epoch") == pytest.approx((2.0 + 1.9) / 2)


def test_reading_the_trainers_plan_in_get_optimizers_schedulers_is_refused(tmp_path: Path) -> None:
    class Curious(Classifier):
        trainer: Any = None

        def get_optimizers_schedulers(self, *args: Any) -> Any:
            assert self.plan is not None
            _ = self.trainer.estimated_global_steps_per_epoch
            return super().get_optimizers_schedulers(*args)

    module = Curious()
    module.trainer = ts.Trainer(module, arguments(tmp_path))
    with pytest.raises(ts.ConfigurationError, match=r"Use self\.plan in get_optimizers_schedulers and"):
        module.trainer.train()


def test_a_module_in_half_precision_is_refused_by_amp(tmp_path: Path) -> None:
    with pytest.raises(ts.ConfigurationError, match="'amp' with a module in float16"):
        train(Classifier().half(), tmp_path, backend="sp-amp")
