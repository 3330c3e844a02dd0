"""Permissions of the files of a run."""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import trainstack as ts
from tests.helpers.modules import REPRODUCIBLE, Classifier, numbers
from trainstack import _files

pytestmark = pytest.mark.skipif(os.name == "nt", reason="Windows has no such modes")


@pytest.fixture(autouse=True)
def usual_umask() -> Iterator[None]:
    before = os.umask(0o022)
    yield
    os.umask(before)
    _files._private.clear()


def modes(folder: Path) -> set[tuple[str, str]]:
    """The kinds and modes of the folder and its entries."""
    found = set()
    for path in (folder, *folder.rglob("*")):
        mode = path.stat().st_mode
        found.add(("folder" if stat.S_ISDIR(mode) else "file", oct(stat.S_IMODE(mode))))
    return found


def train(folder: Path, **changes: Any) -> ts.Trainer:
    given = {"train_batch_size": 8, "log_every": 1, "progress": "none", "output_dir": folder}
    given["writers"] = ["csv", "jsonl", "tensorboard"]
    trainer = ts.Trainer(Classifier(numbers(32)), ts.TrainerArguments(**{**given, **changes}))
    trainer.train()
    trainer.export(folder / "export", overwrite=True)
    return trainer


PRIVATE = {("folder", "0o700"), ("file", "0o600")}


def test_private_files_are_readable_by_their_owner_only(tmp_path: Path) -> None:
    train(tmp_path / "run", private_files=True)
    train(tmp_path / "run", private_files=True, resume=True, epochs=2)

    assert modes(tmp_path / "run") == PRIVATE


@pytest.mark.usefixtures("unprobed")
def test_a_private_run_keeps_its_files_private(tmp_path: Path) -> None:
    train(tmp_path / "run", backend="sp-dp", differential_privacy_args=REPRODUCIBLE)

    assert modes(tmp_path / "run") == PRIVATE
    assert (tmp_path / "run" / "privacy-ledger.jsonl").exists()


@pytest.mark.parametrize("changes", [{}, {"private_files": False}])
def test_other_runs_follow_the_umask(changes: dict[str, Any], tmp_path: Path) -> None:
    train(tmp_path / "run", **changes)
    assert modes(tmp_path / "run") == {("folder", "0o755"), ("file", "0o644")}


def test_one_private_run_does_not_change_the_files_of_another(tmp_path: Path) -> None:
    train(tmp_path / "run", private_files=True)
    train(tmp_path / "run-2")

    assert ("file", "0o644") in modes(tmp_path / "run-2")
    assert ("folder", "0o700") not in modes(tmp_path / "run-2")


def test_folders_outside_of_output_dir_are_also_private(tmp_path: Path) -> None:
    saving = ts.DefaultCheckpointerArguments(save_dir=str(tmp_path / "saved"), model_state_save_dir=str(tmp_path / "m"))
    train(tmp_path / "run", private_files=True, checkpointer_args=saving)

    assert modes(tmp_path / "saved") == modes(tmp_path / "m") == PRIVATE


def test_a_private_folder_is_private_through_a_link(tmp_path: Path) -> None:
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to("real")
    trainer = train(tmp_path / "link", private_files=True)
    trainer.export(tmp_path / "real" / "by-its-real-path")

    assert modes(tmp_path / "real") == PRIVATE
