"""The state that a user attaches to a run is saved with it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import trainstack as ts
from tests.helpers.modules import Classifier, arguments


class Counter:
    """Counts; only its state can be saved."""

    def __init__(self) -> None:
        self.count = 0
        self.notify = lambda: None

    def state_dict(self) -> dict[str, Any]:
        return {"count": self.count}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.count = state["count"]


def trainer(directory: Path, **changes: Any) -> ts.Trainer:
    saving = ts.DefaultCheckpointerArguments()
    return ts.Trainer(Classifier(), arguments(directory, checkpointer_args=saving, **changes))


@pytest.mark.spec("FN-50")
def test_saved_values_replace_those_given_before_training(tmp_path: Path) -> None:
    first = trainer(tmp_path)
    first.user_state.words = ["a", ("b", torch.tensor([1.5]))]
    first.user_state["count"] = 3
    first.train()
    resumed = trainer(tmp_path, epochs=2, resume=True)
    resumed.user_state.count = 0
    resumed.user_state.added_since = 1
    resumed.train()

    assert (resumed.user_state.count, resumed.user_state.added_since) == (3, 1)
    word, (letter, tensor) = resumed.user_state["words"]
    assert (word, letter, tensor.tolist()) == ("a", "b", [1.5])


@pytest.mark.spec("FN-50")
def test_an_object_is_saved_and_restored_by_its_state(tmp_path: Path) -> None:
    first = trainer(tmp_path)
    first.user_state.counter = Counter()
    first.user_state.counter.count = 7
    first.train()
    resumed = trainer(tmp_path, epochs=2, resume=True)
    resumed.user_state.counter = counter = Counter()
    resumed.train()

    assert resumed.user_state.counter is counter
    assert counter.count == 7


def test_an_object_that_is_missing_on_resume_is_named(tmp_path: Path) -> None:
    first = trainer(tmp_path)
    first.user_state.counter = Counter()
    first.train()
    for instead in ({}, {"counter": 3}):
        resumed = trainer(tmp_path, epochs=2, resume=True)
        resumed.user_state.update(instead)
        with pytest.raises(ts.CheckpointMismatchError, match=r"Write trainer\.user_state\.counter = \.\.\. before"):
            resumed.train()


def test_a_wrong_name_is_refused_with_the_known_names() -> None:
    state = ts.UserState(count=1, words=2)
    del state.words
    with pytest.raises(AttributeError, match=r"no 'words'; it has \['count'\]"):
        _ = state.words
    with pytest.raises(AttributeError, match="no 'words'"):
        del state.words
    with pytest.raises(AttributeError, match=r"write user_state\['items'\]"):
        state.items = 1
