"""Errors for names of other libraries suggest the names of this library."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import trainstack as ts
from tests.helpers.modules import Classifier, arguments, train


@pytest.mark.parametrize(("name", "meant"), [("evaluate", "validate"), ("run", "train"), ("run_config", "plan")])
def test_errors_for_names_of_other_trainers_suggest_ours(name: str, meant: str, tmp_path: Path) -> None:
    trainer = ts.Trainer(Classifier(), arguments(tmp_path))
    with pytest.raises(AttributeError, match=rf"Write trainer\..*{meant}"):
        getattr(trainer, name)
    assert not hasattr(trainer, "no_such_name")


def test_an_error_within_a_property_keeps_its_message(tmp_path: Path) -> None:
    class Own(ts.Trainer):
        @property
        def broken(self) -> Any:
            return self.module.no_such_part

    with pytest.raises(AttributeError, match="no_such_part"):
        _ = Own(Classifier(), arguments(tmp_path)).broken


def test_an_error_for_a_misspelt_name_has_its_module() -> None:
    with pytest.raises(AttributeError) as raised:
        _ = ts.Trainr
    assert (raised.value.name, raised.value.obj) == ("Trainr", ts)


def test_update_state_is_not_called_without_a_state(tmp_path: Path) -> None:
    class Own(Classifier):
        def get_state(self) -> dict[str, Any]:
            return {"own": super().get_state()}

        def update_state(self, state: Any) -> None:
            super().update_state(state["own"])

    args: dict[str, Any] = {"checkpointer_args": ts.DefaultCheckpointerArguments()}
    train(Own(), tmp_path, **args)
    assert train(Own(), tmp_path, epochs=2, resume="auto", **args).state.epoch == 2
