"""`EMA`: parameters of any kind, interruptions, and the weights of the module after training."""

from __future__ import annotations

import signal
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import trainstack as ts
from tests.helpers.modules import Classifier, arguments, numbers, weights
from trainstack import callbacks as cb

SAVING = ts.DefaultCheckpointerArguments(every_n_steps=1)


@pytest.mark.parametrize("use_at_end", [False, True])
@pytest.mark.parametrize("end", ["finished", "exception", "signal"])
def test_averages_replace_the_weights_of_finished_runs_only(use_at_end: bool, end: str, tmp_path: Path) -> None:
    class Ends(Classifier):
        trained: Tensor

        def on_end_train_step(self, global_step: int) -> None:
            self.trained = weights(self)
            if global_step == 3 and end == "exception":
                raise ValueError("the end")
            if global_step == 3 and end == "signal":
                signal.raise_signal(signal.SIGTERM)

    module, ema = Ends(numbers(24)), cb.EMA(0.5, use_at_end=use_at_end)
    trainer = ts.Trainer(module, arguments(tmp_path, epochs=2), callbacks=[ema])
    if end == "finished":
        trainer.train()
    else:
        with pytest.raises((ValueError, ts.Preempted)):
            trainer.train()

    with ema.averaged():
        averages = weights(module)
    expected = averages if use_at_end and end == "finished" else module.trained
    assert not torch.equal(averages, module.trained)
    assert torch.equal(weights(module), expected)


def test_a_skipped_step_after_a_resume_keeps_the_average(tmp_path: Path) -> None:
    class Overflows(Classifier):
        bad = 0

        def train_step(self, global_step: int, batch: Any, device: Any) -> Any:
            factor = float("inf") if global_step == self.bad else 1.0
            return super().train_step(global_step, batch, device) * factor

    made: dict[str, Any] = {"nonfinite": "skip", "checkpointer_args": SAVING}
    ts.Trainer(Overflows(numbers(24)), arguments(tmp_path, max_steps=2, **made), callbacks=[cb.EMA(0.5)]).train()
    module, ema = Overflows(numbers(24)), cb.EMA(0.5)
    module.bad = 3
    trainer = ts.Trainer(module, arguments(tmp_path, max_steps=3, resume=True, **made), callbacks=[ema])
    trainer.train()
    assert (trainer.state.global_step, trainer.state.skipped_steps) == (3, 1)
    assert ema.updates == 2


class Grows(Classifier):
    """Has complex weights, and another parameter from the second epoch on."""

    def __init__(self) -> None:
        super().__init__(numbers(16), validate=True)
        self.phase = nn.Parameter(torch.ones(3, dtype=torch.complex64))
        self.seen: dict[str, list[Tensor]] = {}

    def get_optimizers_schedulers(self, *_: Any) -> Any:
        self.made = torch.optim.SGD(self.parameters(), lr=0.1)
        return self.made

    def on_begin_train_epoch(self, global_step: int, epoch: int) -> None:
        if epoch == 1 and not hasattr(self, "late"):
            self.late = nn.Parameter(torch.zeros(3))
            self.made.add_param_group({"params": [self.late]})

    def train_step(self, global_step: int, batch: Any, device: Any) -> Any:
        loss = super().train_step(global_step, batch, device) + (self.phase - 1j).abs().sum()
        return loss + ((self.late - 1).abs().sum() if hasattr(self, "late") else 0.0)

    def on_end_train_step(self, global_step: int) -> None:
        for name in ("phase", "late"):
            if hasattr(self, name):
                self.seen.setdefault(name, []).append(getattr(self, name).detach().clone())


def test_complex_and_later_parameters_are_averaged(tmp_path: Path) -> None:
    module, ema = Grows(), cb.EMA(0.5, warmup=False)
    ts.Trainer(module, arguments(tmp_path, epochs=3), callbacks=[ema]).train()

    for name, first in (("phase", torch.ones(3, dtype=torch.complex64)), ("late", torch.zeros(3))):
        average = first
        for now in module.seen[name]:
            average = average + 0.5 * (now - average)
        torch.testing.assert_close(getattr(module, name).detach(), average)
        assert not torch.equal(getattr(module, name), module.seen[name][-1])


def test_averages_of_later_parameters_are_restored(tmp_path: Path) -> None:
    first, again = cb.EMA(0.5), cb.EMA(0.5)
    ts.Trainer(Grows(), arguments(tmp_path, epochs=2), callbacks=[first]).train()
    module = Grows()
    trainer = ts.Trainer(module, arguments(tmp_path), callbacks=[again])
    assert trainer.plan.steps_per_epoch == 2
    again.update_state(first.get_state())
    module.on_begin_train_epoch(2, 1)
    again.on_train_epoch_begin(trainer)

    averages = [ema.get_state()["averages"] for ema in (first, again)]
    assert list(averages[0]) == list(averages[1])
    assert torch.equal(averages[1]["late"], averages[0]["late"])
