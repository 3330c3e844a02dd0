"""Losses and gradients that are nan or infinite."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import trainstack as ts
from tests.helpers.modules import Classifier, numbers, train
from tests.helpers.specs import stacks_that_run_here


def broken(**methods: Any) -> Classifier:
    """A classifier with some methods replaced."""
    return type("Broken", (Classifier,), methods)(numbers(16))


def steps(result: Any) -> dict[str, Any]:
    return {"train_step": lambda self, global_step, batch, device: result(self, batch)}


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
@pytest.mark.spec("F208")
def test_the_error_of_a_nonfinite_loss_names_its_place(value: float, tmp_path: Path) -> None:
    def train_step(self: Any, global_step: int, batch: Any, device: Any) -> Any:
        return Classifier.train_step(self, global_step, batch, device) * (value if global_step == 3 else 1.0)

    saving = ts.DefaultCheckpointerArguments(keep_last=None)
    with pytest.raises(ts.NonFiniteError, match=r"global step 3 \(epoch 1, step 1 of the epoch\), micro-batch 0"):
        train(broken(train_step=train_step), tmp_path, epochs=2, checkpointer_args=saving)

    assert [info.global_step for info in ts.list_checkpoints(tmp_path / "checkpoints")] == [2]


def test_a_gradient_that_is_not_finite_is_never_saved(tmp_path: Path) -> None:
    """The loss is finite, its gradient is not, and nothing measures gradients: the last step of the epoch."""

    def train_step(self: Any, global_step: int, batch: Any, device: Any) -> Any:
        loss = Classifier.train_step(self, global_step, batch, device)
        return loss + (self.net[0].weight * 0).abs().sqrt().sum() if global_step == 2 else loss

    for clip in (True, False):
        with pytest.raises(ts.NonFiniteError, match="global step 2"):
            train(
                broken(train_step=train_step),
                tmp_path / str(clip),
                clip_grads=clip,
                checkpointer_args=ts.DefaultCheckpointerArguments(keep_last=None),
            )
        assert ts.list_checkpoints(tmp_path / str(clip) / "checkpoints") == []


def test_steps_that_are_all_skipped_end_the_run(tmp_path: Path) -> None:
    module = broken(**steps(lambda s, b: s.net(b[0]).sum() * float("nan")))

    with pytest.raises(ts.NonFiniteError, match="50 global steps in a row"):
        train(module, tmp_path, nonfinite="skip", epochs=40)


@pytest.mark.parametrize("backend", stacks_that_run_here())
def test_a_loss_that_is_nan_is_hidden_by_no_layer(backend: str, tmp_path: Path) -> None:
    module = broken(**steps(lambda s, b: s.net(b[0]).sum() * float("nan")))
    # a gradient scaler skips steps that overflowed, so amp reports the loss only if it persists
    message = "50 global steps in a row" if "amp" in backend else r"the loss is nan (at global step 1|or inf)"

    with pytest.raises((ts.NonFiniteError, ts.PrivacyError), match=message):
        train(module, tmp_path, backend=backend, epochs=40)


@pytest.mark.parametrize("changes", [{}, {"clip_grads": False}, {"clip_grad_value": 1.0}])
def test_a_gradient_that_is_inf_is_hidden_by_no_clipping(changes: dict[str, Any], tmp_path: Path) -> None:
    def on_end_backward(self: Any, global_step: int, loss: Any) -> None:
        if global_step == 2:
            self.net[0].weight.grad[0, 0] = float("inf")

    where = "at global step 2" if changes.get("clip_grads", True) else r"weight 'net\.0\.weight' is inf or nan after "
    with pytest.raises(ts.NonFiniteError, match=where):
        train(broken(on_end_backward=on_end_backward), tmp_path, **changes)


def test_an_export_of_nan_weights_is_refused_by_default(tmp_path: Path) -> None:
    module = Classifier(numbers(8))
    trainer = train(module, tmp_path)
    with torch.no_grad():
        module.net[3].bias[0] = float("nan")
    with pytest.raises(ts.NonFiniteError, match=r"'net.3.bias' holds.*No export was written; write check_finite=False"):
        trainer.export(tmp_path / "export")
    assert not (tmp_path / "export").exists()
    trainer.export(tmp_path / "export", check_finite=False)
    assert ts.read_model(tmp_path / "export")["net.3.bias"].isnan().tolist() == [True, False, False]


def test_skipped_steps_with_others_between_do_not_end_training(tmp_path: Path) -> None:
    class Overflows(Classifier):
        def train_step(self, global_step: int, batch: Any, device: Any) -> Any:
            return super().train_step(global_step, batch, device) * (float("inf") if global_step % 2 else 1.0)

    trainer = train(Overflows(numbers(120)), tmp_path, train_batch_size=1, nonfinite="skip", log_every=4)
    assert (trainer.state.global_step, trainer.state.skipped_steps) == (120, 60)
