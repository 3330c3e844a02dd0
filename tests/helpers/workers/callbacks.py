"""The built-in callbacks over several processes."""

from __future__ import annotations

from typing import Any

import torch

import trainstack as ts
from tests.helpers.modules import Classifier, arguments, numbers, weights
from tests.helpers.workers import RANK
from trainstack import callbacks


def with_callbacks(directory: str, backend: str = "ddp", stop_at: int | None = None) -> dict[str, Any]:
    """Early stopping, averages, best weights and a frozen layer; `stop_at` that step the last process stops."""

    class Scored(Classifier):
        def on_end_val_epoch(self, global_step: int, *outputs: Any, key: str = "default") -> None:
            self.log("score", [5.0, 3.0, 4.0, 3.0, 9.0, 9.0][self.trained_epochs])

        @property
        def trained_epochs(self) -> int:
            return trainer.state.epoch

    module, ema = Scored(numbers(33), validate=True), callbacks.EMA(0.8)
    stopping = callbacks.EarlyStopping("score", mode="min", patience=2)
    best = callbacks.BestCheckpoint("score", mode="min")
    freezer = callbacks.Freezer("net.0", until_epoch=2)
    saving = ts.DefaultCheckpointerArguments()
    args = arguments(
        directory,
        backend=backend,
        train_batch_size=12,
        gpu_batch_size_limit=4,
        epochs=6,
        resume="auto",
        checkpointer_args=saving,
    )
    trainer = ts.Trainer(module, args, callbacks=[ema, stopping, best, freezer])
    frozen, first = set[bool](), Classifier(numbers(33)).net[0].weight.detach()

    @trainer.on(ts.Event.TRAIN_STEP_END)
    def look(trainer: ts.Trainer, step: int) -> None:
        frozen.add(torch.equal(first, module.net[0].weight) == (trainer.state.epoch < 2))
        if step == stop_at and trainer.world.size - 1 == RANK:
            raise ts.StopTraining("interrupted")

    trainer.train()
    averages = torch.cat([average.flatten() for average in ema.get_state()["averages"].values()])
    return {
        "weights": weights(module).tolist(),
        "averages": averages.tolist(),
        "frozen": frozen == {True},
        "steps": trainer.global_steps_finished,
        "reason": trainer.stop_reason,
    }


def callbacks_cut(directory: str) -> list[dict[str, Any]]:
    """A run that nothing stops, and one that the last process stops in the middle and that is resumed."""
    unbroken = with_callbacks(f"{directory}/unbroken")
    with_callbacks(f"{directory}/cut", stop_at=5)
    return [unbroken, with_callbacks(f"{directory}/cut")]
