"""Thresholds of early stopping, an average that begins late, and the removal of subscriptions."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import trainstack as ts
from tests.helpers.modules import Classifier, arguments


class Measures(Classifier):
    """Logs the given values, one an epoch."""

    def __init__(self, *values: float) -> None:
        super().__init__(validate=True)
        self.values = values

    def on_end_val_epoch(self, global_step: int, key: str = "default") -> None:
        self.log("val/x", self.values[self._log_sink.state.epoch])  # type: ignore[union-attr]


@pytest.mark.parametrize(
    ("values", "options", "epochs", "reason"),
    [
        ((3.0, 1.0, 0.5, 0.4), {"stopping_threshold": 1.0}, 2, "val/x became 1 at step 12, which is good enough"),
        ((3.0, 9.0, 10.0, 1.0), {"divergence_threshold": 9.0}, 3, "val/x became 10 at step 18, which is too bad"),
        ((0.5, 0.9, 0.1, 0.1), {"mode": "max", "divergence_threshold": 0.2}, 3, "which is too bad"),
        ((0.5, 0.9, 0.1, 0.1), {"mode": "max", "stopping_threshold": 0.9}, 2, "which is good enough"),
        ((100.0, 95.0, 80.0, 79.0), {"min_delta": 0.1, "min_delta_mode": "rel", "patience": 1}, 2, "not improved"),
    ],
)
def test_early_stopping_uses_thresholds_and_relative_differences(
    values: Any, options: Any, epochs: int, reason: str, tmp_path: Path
) -> None:
    stopping = ts.callbacks.EarlyStopping("val/x", **{"mode": "min", **options})
    trainer = ts.Trainer(Measures(*values), arguments(tmp_path, epochs=4), callbacks=[stopping])
    trainer.train()
    assert trainer.last_epoch == epochs - 1
    assert reason in str(trainer.stop_reason)


def test_an_unknown_mode_of_min_delta_is_refused() -> None:
    with pytest.raises(ts.ConfigurationError, match="write 'abs' or 'rel'"):
        ts.callbacks.EarlyStopping(min_delta_mode="percent")  # type: ignore[arg-type]


def test_ema_uses_start_step_and_every(tmp_path: Path) -> None:
    ema = ts.callbacks.EMA(0.5, warmup=False, start_step=2, every=3, use_at_end=False)
    weights: list[torch.Tensor] = []
    module = Classifier()

    def keep() -> None:
        weights.append(module.net[0].weight.detach().clone())  # type: ignore[union-attr,operator]

    trainer = ts.Trainer(module, arguments(tmp_path), callbacks=[ema])
    trainer.on(ts.Event.TRAIN_STEP_END)(keep)
    trainer.train()
    expected = (weights[1] + weights[2]) / 2  # the weights after step 2, and those of steps 3 and 6
    expected = (expected + weights[5]) / 2
    with ema.averaged():
        assert torch.allclose(module.net[0].weight, expected)  # type: ignore[union-attr,arg-type]
    assert ema.updates == 2
    with pytest.raises(ts.ConfigurationError, match=r"EMA\(every=0\): write a whole number, 1 or more"):
        ts.callbacks.EMA(every=0)


def test_a_subscription_can_be_removed(tmp_path: Path) -> None:
    seen: list[int] = []
    trainer = ts.Trainer(Classifier(), arguments(tmp_path, epochs=2))
    note = trainer.on(ts.Event.EPOCH_END)(lambda trainer, epoch: seen.append(epoch))
    trainer.on(ts.Event.TRAIN_EPOCH_BEGIN)(lambda trainer, epoch: epoch == 1 and trainer.off(note))
    trainer.train()
    assert seen == [0]
    with pytest.raises(ts.ConfigurationError, match="this function has no subscription"):
        trainer.off(note)
