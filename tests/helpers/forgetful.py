"""Modules whose training depends on more than their weights."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from typing import Any

from tests.helpers.modules import Classifier

_global_steps_seen = 0


class Slow(Classifier):
    """Long enough to be killed in between; the loss of each step is multiplied by `factor()`."""

    def train_step(self, global_step: int, batch: Any, device: Any) -> Any:
        time.sleep(0.01)
        return super().train_step(global_step, batch, device) * self.factor()

    def factor(self) -> float:
        return 1.0


class Forgets(Slow):
    """Counts, and has nothing of it in the checkpoint."""

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
