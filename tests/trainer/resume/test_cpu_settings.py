"""An exact resume depends on the order in which torch adds on the CPU."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import trainstack as ts
from tests.helpers.modules import Classifier, numbers, train
from trainstack.checkpointing.directory import read_manifest
from trainstack.trainer.start_description import merge_environments

SAVING = ts.DefaultCheckpointerArguments()


@pytest.fixture
def threads() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def train_to(folder: Path, epochs: int, **changes: Any) -> ts.Trainer:
    return train(Classifier(numbers(16)), folder, epochs=epochs, checkpointer_args=SAVING, **changes)


def warnings_in(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]


@pytest.mark.usefixtures("threads")
def test_another_number_of_threads_is_logged_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    torch.set_num_threads(2)
    trained = train_to(tmp_path, 1)
    manifest = read_manifest(ts.list_checkpoints(tmp_path / "checkpoints")[0].path)
    kept = manifest.metadata["start"]["environment"]
    assert {name: text for name, text in kept.items() if name.startswith("cpu ")} == {
        "cpu threads": "2",
        "cpu interop threads": str(torch.get_num_interop_threads()),
        "cpu capability": torch.backends.cpu.get_cpu_capability(),
    }
    trained.export(tmp_path / "export")
    assert "start" not in read_manifest(tmp_path / "export").metadata

    train_to(tmp_path, 2, resume=True)
    assert warnings_in(caplog) == []
    torch.set_num_threads(1)
    train_to(tmp_path, 3, resume=True)
    [said] = warnings_in(caplog)
    assert re.search(r"environment\.cpu threads +2 +1 +same samples, other bits", said)
    assert "To keep the saved values: set OMP_NUM_THREADS=2." in said


def test_another_cpu_is_logged(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    train_to(tmp_path, 1)
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: "VSX")
    train_to(tmp_path, 2, resume=True)
    assert re.search(r"environment\.cpu capability +\w+ +VSX +same samples, other bits", warnings_in(caplog)[0])


def test_a_checkpoint_without_settings_is_resumed_without_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("trainstack.trainer.resume.checkpoint_states.START", "before there was one")
    train_to(tmp_path, 1)
    monkeypatch.undo()
    train_to(tmp_path, 2, resume=True)
    assert warnings_in(caplog) == []


def test_equal_environments_of_ranks_are_merged() -> None:
    one = {"cpu threads": "2", "device": "cpu"}
    assert merge_environments([one, one]) == one
    assert merge_environments([one, one | {"cpu threads": "7"}]) == {"cpu threads": "2, 7", "device": "cpu"}
