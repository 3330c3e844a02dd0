"""A process that lost its run does not replace a checkpoint that its successor has written (H-5)."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.checkpointing.support import make_checkpoint
from trainstack.checkpointing import filesystem, read_checkpoint, write_checkpoint, writing
from trainstack.errors import CheckpointError


def write_slowly(folder: Path, monkeypatch: pytest.MonkeyPatch, before_rename: Any, step: int | None = 40) -> Path:
    """Write run-40; before its directory is renamed, `before_rename` is called."""
    sync, calls = filesystem.sync_directory, [before_rename]

    def slow(path: Path) -> None:
        if calls:
            calls.pop()()
        sync(path)

    monkeypatch.setattr(filesystem, "sync_directory", slow)
    return write_checkpoint(make_checkpoint(1, step=step), folder, "run-40")


@pytest.mark.parametrize("steps", [[40], [60], [40, 60]])
def test_the_successor_keeps_its_checkpoints(steps: list[int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def successor() -> None:
        for step in steps:
            write_checkpoint(make_checkpoint(2, step=step), tmp_path, f"run-{step}")
        writing._written_here.clear()  # it is another process

    with pytest.raises(
        CheckpointError, match=rf"run-40 was not written: another start of this run has written run-{steps[-1]}"
    ):
        write_slowly(tmp_path, monkeypatch, successor)

    assert sorted(path.name for path in tmp_path.iterdir()) == [f"run-{step}" for step in steps]
    for step in steps:
        assert (read_checkpoint(tmp_path / f"run-{step}").trainer_state or {})["mark"] == 2


@pytest.mark.parametrize(
    ("name", "step", "here"), [("run-20", 20, False), ("other-60", 60, False), ("run-60", 60, True)]
)
def test_unrelated_writes_do_not_stop_a_save(
    name: str, step: int, here: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def other() -> None:
        write_checkpoint(make_checkpoint(2, step=step), tmp_path, name)
        if not here:
            writing._written_here.clear()

    write_slowly(tmp_path, monkeypatch, other)
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted(["run-40", name])


def test_a_checkpoint_without_a_step_is_written_besides_others(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def other() -> None:
        write_checkpoint(make_checkpoint(2, step=60), tmp_path, "run-60")
        writing._written_here.clear()

    write_slowly(tmp_path, monkeypatch, other, step=None)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["run-40", "run-60"]


def test_a_step_that_is_trained_again_is_replaced(tmp_path: Path) -> None:
    write_checkpoint(make_checkpoint(1, step=60), tmp_path, "run-60")
    writing._written_here.clear()
    write_checkpoint(make_checkpoint(2, step=40), tmp_path, "run-40")
    write_checkpoint(make_checkpoint(3, step=60), tmp_path, "run-60")
    assert (read_checkpoint(tmp_path / "run-60").trainer_state or {})["mark"] == 3
