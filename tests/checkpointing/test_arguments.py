"""Arguments are checked where they are made, and every one of them is read."""

from __future__ import annotations

import dataclasses
import os
import re
from pathlib import Path
from typing import Any

import pytest

import trainstack.checkpointing
from tests.helpers.modules import InMemory
from trainstack.checkpointing import DefaultCheckpointerArguments
from trainstack.errors import ConfigurationError


@pytest.mark.parametrize(
    "fields",
    [
        {"period": 0},
        {"period": True},
        {"period": 1.5},
        {"every_n_steps": 0},
        {"every_n_steps": 0.0},
        {"every_n_steps": 1.5},
        {"every_n_steps": float("nan")},
        {"every_n_steps": "often"},
        {"every_n_epochs": 0},
        {"every_n_epochs": 1, "period": 2},
        {"keep_last": 0},
        {"keep_last": True},
        {"keep_best": -1, "keep_last": 1},
        {"keep_best": 2, "keep_last": None},
        {"verify": "sizes"},
        {"monitor": ""},
        {"monitor": "val/score"},
        {"mode": "least"},
        {"checkpoint": "no"},
        {"delete_existing_checkpoints": 1},
        {"save_dir": 3},
        {"file_prefix": ""},
        {"file_prefix": "a/b"},
        {"file_prefix": ".a"},
        {"file_ext": ".pt"},
        {"file_ext": "a\\b"},
        {"load_filename": "a"},
        {"load_filename": "a/b", "load_dir": "d"},
        {"load_filename": "..", "load_dir": "d"},
        {"log_level": "LOUD"},
        {"log_level": 10},
    ],
    ids=str,
)
def test_wrong_arguments_are_answered_with_a_correction(fields: dict[str, Any]) -> None:
    name, value = next(iter(fields.items()))
    with pytest.raises(ConfigurationError, match=rf"^{name}={re.escape(repr(value))}: .*Write "):
        DefaultCheckpointerArguments(**fields)


def test_legal_arguments_are_accepted_and_frozen() -> None:
    arguments = DefaultCheckpointerArguments(
        load_filename=os.path.abspath("x"), file_ext="ckpt", log_level="debug", every_n_steps=5
    )
    assert arguments.log_level == "debug"
    with pytest.raises(dataclasses.FrozenInstanceError):
        arguments.period = 2  # type: ignore[misc]


def test_every_argument_is_read() -> None:
    root = Path(trainstack.checkpointing.__file__).parent
    source = "".join(file.read_text() for file in root.glob("*.py"))
    for field in dataclasses.fields(DefaultCheckpointerArguments):
        assert re.search(rf"(args|self)\.{field.name}\b", source), field.name


@pytest.mark.spec("PMT-08")
def test_a_custom_checkpointer_needs_two_methods() -> None:
    own = InMemory()
    assert own.save_model({}, 1) is None
    assert own.every_n_steps is None
    assert own.load().is_empty
