"""Several callbacks of one class get the states that match their settings, in any order."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import trainstack as ts
import trainstack.trainer.callbacks as cb
from tests.helpers.modules import Classifier, arguments
from trainstack.trainer.events.identities import match_keys


class Counts(ts.Callback):
    """Counts every n-th step."""

    def __init__(self, every: int) -> None:
        self.every, self.count = every, 0

    @ts.call_filter(every=2)
    def on_train_step_end(self, trainer: Any, step: int) -> None:
        self.count += self.every

    def get_state(self) -> dict[str, Any]:
        return {"count": self.count}

    def update_state(self, state: Any) -> None:
        self.count = state["count"]


def test_callbacks_in_another_order_keep_their_states(tmp_path: Path) -> None:
    def run(order: list[int], epochs: int) -> list[Any]:
        made: list[Any] = [Counts(every) for every in order]
        made += [cb.EarlyStopping("train/loss_epoch", patience=10 * every) for every in order]
        saving = ts.DefaultCheckpointerArguments()
        args = arguments(tmp_path, epochs=epochs, checkpointer_args=saving, resume="auto")
        ts.Trainer(Classifier(), args, callbacks=made).train()
        return [one.count if isinstance(one, Counts) else (one.patience, one.waited) for one in made]

    run([1, 5], 1)
    assert run([5, 1], 2)[:2] == [30, 6]
    assert run([5, 1, 1], 3)[:3] == [45, 9, 3]


@pytest.mark.parametrize(
    ("mine", "saved", "expected"),
    [
        ({"A": "x"}, {"A": "y"}, {}),
        ({"A": "x", "A-2": "y"}, {"A": "y", "A-2": "x"}, {"A": "A-2", "A-2": "A"}),
        ({"A": "x", "A-2": "x"}, {"A": "x", "A-2": "x"}, {"A": "A", "A-2": "A-2"}),
        ({"A": "y", "A-2": "z"}, {"A": "x", "A-2": "y"}, {"A-2": "A", "A": "A-2"}),
        ({"A": "p", "A-2": "q"}, {"A": "x", "A-2": "y"}, {"A": "A", "A-2": "A-2"}),
        ({"A": "y"}, {"A": "x", "A-2": "y"}, {"A-2": "A"}),
    ],
)
def test_states_are_matched_by_settings_first_then_by_order(mine: Any, saved: Any, expected: Any) -> None:
    assert match_keys({"A": list(mine)}, mine, saved) == expected
