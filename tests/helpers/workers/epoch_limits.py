"""Ranks that end epochs from a hook, and validate and save by time."""

from __future__ import annotations

import time
from typing import Any

import trainstack as ts
from tests.helpers.modules import Classifier, arguments, numbers, weights
from trainstack.ranks import global_rank


class _Unlike(Classifier):
    """Its ranks have different clocks and speeds."""

    def train_step(self, global_step: int, batch: Any, device: Any) -> Any:
        time.sleep(0.02 if global_rank() else 0.01)
        return super().train_step(global_step, batch, device)


class _Ends(ts.Callback):
    def on_train_step_end(self, trainer: Any, global_step: int) -> None:
        if trainer.state.epoch == 0 and trainer.state.steps_in_epoch == 2:
            trainer.end_epoch()


def shortened(directory: str) -> dict[str, Any]:
    """Two epochs of six steps, the first ended after two."""
    saves = ts.DefaultCheckpointerArguments(every_n_seconds=0.05, keep_best=0)
    every = ts.Every(time=0.05)
    args = arguments(directory, backend="ddp", epochs=2, validate_every=every, checkpointer_args=saves)
    trainer = ts.Trainer(_Unlike(numbers(48), validate=True), args, callbacks=[_Ends()])
    trainer.train()
    return {
        "steps": trainer.state.global_step,
        "validated": [record.step for record in trainer.history.records("val/loss")],
        "weights": weights(trainer.module).tolist(),
    }
