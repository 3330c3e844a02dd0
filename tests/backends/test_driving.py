"""Driving a stack without a `Trainer`, under every legal string."""

from __future__ import annotations

from typing import Any
from unittest import mock

import pytest
import torch
from torch import nn

import trainstack as ts
from tests.helpers.modules import REPRODUCIBLE
from tests.helpers.specs import every_stack_without_a_trainer


class Square(ts.ModuleInterface):
    """The loss is the mean of x squared; its one parameter is the start of x."""

    def __init__(self, start: float = 3.0) -> None:
        super().__init__()
        self.x = nn.Parameter(torch.tensor([start]))
        self.calls: list[dict[str, Any]] = []

    def get_optimizers_schedulers(self, *_: Any) -> Any:
        return [], []

    def get_train_dataloader(self, *_: Any) -> Any:
        return None

    def train_step(self, global_step: int, batch: Any, device: Any) -> Any:
        return (self.x**2).sum(), batch

    val_step = train_step

    def forward(self, **kwargs: Any) -> Any:  # type: ignore[override]
        self.calls.append(kwargs)
        return super().forward(**kwargs)


def driven(spec: str, **changes: Any) -> tuple[Any, Square, Any]:
    module = Square()
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    backend = ts.build_trainer_backend(spec)
    backend.init(ts.TrainerBackendArguments(model=module, optimizers=[optimizer], device="cpu", **changes))
    return backend, module, optimizer


BATCHES = [torch.zeros(4, 3), torch.zeros(3, 3), torch.zeros(4, 3), torch.zeros(3, 3)]


@every_stack_without_a_trainer
class TestEveryStack:
    @pytest.mark.spec("B1", "PMT-25", "PMB-04")
    def test_one_global_step_trains_one_batch(self, spec: str) -> None:
        backend, module, optimizer = driven(spec, max_train_steps_per_epoch=1, clip_grads=False)
        callback = mock.Mock(spec=ts.CallbackInterface)
        with mock.patch.object(optimizer, "step", wraps=optimizer.step) as step:
            backend.train_dl(BATCHES, callback)

        assert len(module.calls) == 1
        assert module.calls[0]["batch"] is BATCHES[0]
        assert {k: v for k, v in module.calls[0].items() if k != "batch"} == {
            "stage": ts.Stage.TRAIN,
            "global_step": 1,
            "device": torch.device("cpu"),
        }
        assert step.call_count == 1
        assert module.x.item() == pytest.approx(3.0 - 0.1 * 6.0, abs=1e-2)
        (number, loss, batch), _ = callback.on_end_train_step.call_args
        assert (number, loss.tolist(), batch.shape) == (1, [9.0], (4, 3))

    @pytest.mark.spec("B2", "PMT-22")
    def test_validation_is_limited_and_has_the_global_step(self, spec: str) -> None:
        backend, module, _ = driven(spec, max_val_steps_per_epoch=1)
        module.train()
        outputs = backend.validate_dl(BATCHES)

        assert [(c["stage"], c["global_step"]) for c in module.calls] == [(ts.Stage.VAL, 0)]
        assert outputs[0].shape == (1,)
        assert module.training

    @pytest.mark.spec("B3", "B5", "PMB-05")
    def test_accumulated_steps_collect_all_outputs(self, spec: str) -> None:
        backend, module, optimizer = driven(spec, gradient_accumulation=2)
        with mock.patch.object(optimizer, "step", wraps=optimizer.step) as step:
            losses, batches = backend.train_dl(BATCHES, ts.CallbackInterface())

        assert (len(module.calls), step.call_count) == (4, 2)
        assert losses.shape == (4,)
        assert batches.shape == (14, 3)
        assert (backend.get_global_steps_completed(), backend.get_batches_completed()) == (2, 4)

    @pytest.mark.spec("B4")
    @pytest.mark.parametrize("start", [-10.0, -0.25, 0.25, 9.0])
    def test_gradients_are_clipped_by_norm(self, spec: str, start: float) -> None:
        backend, module, _ = driven(spec, max_train_steps_per_epoch=1)
        module.x.data.fill_(start)
        backend.train_dl(BATCHES, ts.CallbackInterface())

        moved = start - module.x.item()
        assert moved == pytest.approx(0.1 * max(-1.0, min(1.0, 2 * start)), abs=1e-3)

    def test_two_epochs_do_not_mix_their_windows(self, spec: str) -> None:
        backend, _, optimizer = driven(spec, gradient_accumulation=3)
        with mock.patch.object(optimizer, "step", wraps=optimizer.step) as step:
            for _ in range(2):
                backend.train_dl(BATCHES, ts.CallbackInterface())

        assert step.call_count == 4


def test_a_stack_with_nothing_to_train_is_refused() -> None:
    with pytest.raises(ts.ConfigurationError, match=r"Call backend\.init\(TrainerBackendArguments"):
        ts.build_trainer_backend("sp").train_dl(BATCHES, ts.CallbackInterface())


def test_private_training_needs_a_trainer() -> None:
    with pytest.raises(ts.PrivacyError, match="private training draws the records itself"):
        driven_privately()


def driven_privately() -> None:
    backend = ts.build_trainer_backend("sp-dp", dp={"args": REPRODUCIBLE})
    module = Square()
    backend.init(ts.TrainerBackendArguments(model=module, optimizers=[torch.optim.SGD(module.parameters(), lr=0.1)]))


def test_outputs_of_a_validation_need_no_loss(caplog: pytest.LogCaptureFixture) -> None:
    backend, module, _ = driven("sp")
    with mock.patch.object(module, "val_step", lambda global_step, batch, device: batch.sum(1)):
        (sums,) = backend.validate_dl(BATCHES)

    assert sums.shape == (14,)
    assert caplog.text == ""


def test_an_output_that_a_later_step_overwrites_is_refused() -> None:
    backend, module, _ = driven("sp")
    count = torch.zeros(1)

    def train_step(global_step: int, batch: Any, device: Any) -> Any:
        return module.x.sum(), count.add_(1)

    with (
        mock.patch.object(module, "train_step", train_step),
        pytest.raises(ts.ModuleContractError, match="was changed in place afterwards"),
    ):
        backend.train_dl(BATCHES, ts.CallbackInterface())
