"""`amp` and `bf16`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import trainstack as ts
from tests.helpers.modules import Classifier, arguments, numbers, train, weights


def scale_of(trainer: ts.Trainer) -> float:
    return float(trainer.trainer_backend.get_state()["amp"]["scale"])


@pytest.mark.spec("PMB-14")
def test_the_weights_stay_in_float32(tmp_path: Path) -> None:
    for backend in ("sp-amp", "sp-bf16"):
        module = Classifier()
        train(module, tmp_path, backend=backend)
        assert {p.dtype for p in module.parameters()} == {torch.float32}


@pytest.mark.spec("PMB-14")
def test_amp_equals_autocast_and_a_gradient_scaler_by_hand(tmp_path: Path) -> None:
    module, reference = InOrder(numbers(40)), InOrder(numbers(40))
    trainer = train(module, tmp_path, backend="sp-amp", backend_options={"amp": {"init_scale": 512.0}})
    optimizer, scaler = torch.optim.SGD(reference.parameters(), lr=0.1), torch.amp.GradScaler("cpu", init_scale=512.0)
    inputs, labels = reference.dataset.tensors
    for x, y in zip(inputs.split(8), labels.split(8), strict=True):
        optimizer.zero_grad()
        with torch.autocast("cpu", torch.float16):
            loss = nn.functional.cross_entropy(reference.net(x), y)
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        torch.nn.utils.clip_grad_norm_(reference.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()

    assert torch.equal(weights(module), weights(reference))
    assert scale_of(trainer) == 512.0


@pytest.mark.spec("F110", "F410")
def test_an_overflow_halves_the_scale_and_skips_all_optimizers(tmp_path: Path) -> None:
    """Only one of the two optimizers has a gradient that is inf; neither moves."""
    module = TwoOptimizers()
    trainer = train(module, tmp_path, backend="sp-amp", clip_grads=False)

    assert scale_of(trainer) == 65536.0 / 2
    assert torch.equal(module.after[1], module.after[2])
    assert not torch.equal(module.after[2][:20], module.after[3][:20])
    assert not torch.equal(module.after[2][-20:], module.after[3][-20:])
    assert trainer.state.skipped_steps == 1
    assert trainer.history.get_latest_metric("train/skipped_steps") == 1


def test_a_step_that_overflowed_does_not_change_buffers(tmp_path: Path) -> None:
    class Counts(TwoOptimizers):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("count", torch.zeros(()))

        def train_step(self, global_step: int, batch: Any, device: Any) -> Any:
            self.count += 1
            return super().train_step(global_step, batch, device)

    trainer = train(Counts(), tmp_path, backend="sp-amp", clip_grads=False, gpu_batch_size_limit=None)
    assert trainer.state.skipped_steps == 1
    assert int(trainer.module.count) == trainer.global_steps_finished - 1


def test_the_scale_grows_and_is_never_lost(tmp_path: Path) -> None:
    options = {"amp": {"init_scale": 4.0, "growth_interval": 3}}
    saving = ts.DefaultCheckpointerArguments()
    made: dict[str, Any] = {"backend": "sp-amp", "backend_options": options, "checkpointer_args": saving}
    trainer = train(Classifier(), tmp_path, **made)
    assert scale_of(trainer) == 16.0

    resumed = train(Classifier(), tmp_path, resume=True, epochs=2, **made)
    assert scale_of(resumed) == 64.0


@pytest.mark.parametrize("empty", [1, 2])
def test_a_step_without_any_gradient_leaves_the_scaler_ready(empty: int, tmp_path: Path) -> None:
    """Also in the first step of a run, before any loss was scaled."""
    module = SometimesEmpty(numbers(32))
    module.empty = empty
    trainer = train(module, tmp_path, backend="sp-amp")

    assert trainer.global_steps_finished == 4
    assert trainer.state.skipped_steps == 1


class InOrder(Classifier):
    def get_train_dataloader(self, sampler: Any, batch_size: int) -> Any:
        return torch.utils.data.DataLoader(self.dataset, batch_size=batch_size)


class SometimesEmpty(Classifier):
    seen, empty = 0, 2

    def batch_weight(self, batch: Any) -> float:
        self.seen += 1
        return 0.0 if self.seen == self.empty else 1.0


class TwoOptimizers(Classifier):
    def __init__(self) -> None:
        super().__init__(numbers(32))
        self.after: dict[int, torch.Tensor] = {}

    def get_optimizers_schedulers(self, *_: Any) -> Any:
        return [torch.optim.SGD(self.net[i].parameters(), lr=0.1) for i in (0, 3)], []

    def on_end_backward(self, global_step: int, loss: Any) -> None:
        if global_step == 2:
            self.net[0].weight.grad[0, 0] = float("inf")

    def on_end_train_step(self, global_step: int) -> None:
        self.after[global_step] = weights(self)


def test_options_reach_the_layer() -> None:
    stack = ts.build_trainer_backend("sp-amp", amp={"init_scale": 8.0})

    assert stack.get_state()["amp"]["scale"] == 8.0


def test_the_scaler_is_switched_off_in_the_string_only() -> None:
    for enabled in (False, True):
        with pytest.raises(
            ts.ConfigurationError, match=rf"enabled={enabled}: the backend string decides.*backend='sp'"
        ):
            ts.build_trainer_backend("sp-amp", amp={"enabled": enabled})


def test_layers_share_nothing(tmp_path: Path) -> None:
    one, other = (ts.Trainer(Classifier(), arguments(tmp_path, backend="sp-amp")) for _ in range(2))
    one.train()

    assert one.trainer_backend.get_state() != other.trainer_backend.get_state()
