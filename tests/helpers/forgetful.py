"""Modules whose training depends on more than their weights."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from typing import Any

import torch

import trainstack as ts
from tests.helpers.modules import Classifier

_global_steps_seen = 0


class Slow(Classifier):
    """Slow enough to be killed within a run; the loss of each step is multiplied by `factor()`."""

    def train_step(self, global_step: int, batch: Any, device: Any) -> Any:
        time.sleep(0.01)
        return super().train_step(global_step, batch, device) * self.factor()

    def factor(self) -> float:
        return 1.0


class Forgets(Slow):
    """Counts steps, and does not store the count in the checkpoint."""

    seen = 0

    def factor(self) -> float:
        self.seen += 1
        return 1 + self.seen / 10


class Remembers(Forgets):
    def get_state(self) -> dict[str, Any]:
        return {**super().get_state(), "seen": self.seen}

    def update_state(self, state: Mapping[str, Any] | None) -> None:
        if state:
            rest = dict(state)
            self.seen = rest.pop("seen")
            super().update_state(rest)


class CountsOutside(Slow):
    def factor(self) -> float:
        global _global_steps_seen
        _global_steps_seen += 1
        return 1 + _global_steps_seen / 10


class NeverTheSame(Slow):
    def factor(self) -> float:
        return 1 + os.urandom(1)[0] / 256


class Fails(Slow):
    def factor(self) -> float:
        raise ValueError("the data is gone")


class Constant(Slow):
    """Ends each step with the same weights, for any weights at its begin."""

    def on_end_train_step(self, global_step: int, *outputs: Any) -> None:
        with torch.no_grad():
            for parameter in self.parameters():
                parameter.fill_(1.0)


class Forgetting(ts.Callback):
    """Counts steps and reports the count, but does not restore it."""

    def __init__(self) -> None:
        self.steps = 0

    def on_train_step_end(self, trainer: Any) -> None:
        self.steps += 1

    def get_state(self) -> dict[str, Any]:
        return {"steps": self.steps}

    def update_state(self, state: Mapping[str, Any]) -> None:
        pass


def forgets_in_a_callback() -> tuple[ts.ModuleInterface, list[ts.Callback]]:
    return Remembers(), [Forgetting()]
