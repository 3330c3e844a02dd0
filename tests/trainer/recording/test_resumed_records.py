"""The step log of a run that is interrupted, killed and resumed."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch

import trainstack as ts
from tests.helpers.modules import Classifier, Noisy, arguments, numbers, train
from tests.helpers.step_logs import block_ends
from trainstack.step_log import contradicting_checkpoints, log_path, read_step_log

MADE: dict[str, Any] = {
    "epochs": 2,
    "log_every": 2,
    "record": "full",
    "checkpointer_args": ts.DefaultCheckpointerArguments(every_n_steps=4, keep_last=None),
}


class Failing(Classifier):
    """Fails in the step `fails_at`."""

    fails_at = 0
    factor = 1.0

    def train_step(self, global_step: int, batch: Any, device: Any) -> Any:
        if global_step == self.fails_at:
            raise RuntimeError("lost")
        return self.factor * super().train_step(global_step, batch, device)


def run(folder: Path, fails_at: int = 0, *, factor: float = 1.0, **changes: Any) -> ts.Trainer:
    torch.manual_seed(0)
    module = Failing(Noisy(40), dropout=0.3, scheduler=True, optimizer=torch.optim.AdamW)
    module.fails_at, module.factor = fails_at, factor
    trainer = ts.Trainer(module, arguments(folder, **{**MADE, **changes}))
    if fails_at:
        with pytest.raises(RuntimeError, match="lost"):
            trainer.train()
    else:
        trainer.train()
    return trainer


def test_a_resumed_run_has_the_record_of_an_unbroken_one(tmp_path: Path) -> None:
    """It fails after step 6 was recorded, in an epoch of 5 steps, and continues from step 5, and later from step 8."""
    run(tmp_path / "whole")
    run(tmp_path / "broken", 8)
    run(tmp_path / "broken", 10, resume=True)
    run(tmp_path / "broken", resume=True)

    whole, log = read_step_log(tmp_path / "whole"), read_step_log(tmp_path / "broken")
    assert log.entries.tobytes() == whole.entries.tobytes()
    assert [start.resumed_step for start in log.segments] == [0, 5, 8]
    assert [end.status for end in log.ends] == ["failed", "failed", "finished"]
    assert (log.repeated, log.contradictions, log.damage) == ({}, [], None)
    assert contradicting_checkpoints(tmp_path / "broken") == []
    for step in range(1, 11):
        mine, theirs = log.details(step), whole.details(step)
        assert mine is not None
        assert theirs is not None
        assert (mine.batch, mine.generators) == (theirs.batch, theirs.generators)
        assert mine.weights.tobytes() == theirs.weights.tobytes()
        assert mine.optimizer_states.tobytes() == theirs.optimizer_states.tobytes()
    assert all(start.resumed_head in log.heads for start in log.segments[1:])


def test_a_repeated_step_with_other_bits_is_found(tmp_path: Path) -> None:
    run(tmp_path, 8)
    run(tmp_path, resume=True, factor=1.5)
    assert read_step_log(tmp_path).repeated == {6: ("loss", "norm")}


def test_checkpoints_are_noted_with_the_root_of_their_tensors(tmp_path: Path) -> None:
    run(tmp_path)
    log = read_step_log(tmp_path)
    assert [note.step for note in log.checkpoints] == [4, 5, 8, 10]
    stored = {info.name: info for info in ts.list_checkpoints(tmp_path / "checkpoints") if info.kind == "checkpoint"}
    assert [note.name for note in log.checkpoints] == list(stored)
    assert all(note.root and note.manifest and note.head in log.heads for note in log.checkpoints)


def test_checkpoints_written_in_the_background_are_noted(tmp_path: Path) -> None:
    saving = ts.DefaultCheckpointerArguments(every_n_steps=4, keep_last=None, async_save=True)
    run(tmp_path, checkpointer_args=saving)
    log = read_step_log(tmp_path)
    assert log.checkpoints
    assert log.checkpoints[-1].step == 10
    assert all(note.head in log.heads for note in log.checkpoints)


def test_a_cut_tail_contradicts_the_checkpoints_after_it(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """It is cut between two blocks, so that the log alone looks intact."""
    run(tmp_path, 10)
    path = log_path(tmp_path, 0)
    os.truncate(path, block_ends(path)[6])  # after the steps 3 and 4
    assert read_step_log(tmp_path).damage is None
    found = contradicting_checkpoints(tmp_path)
    assert [one.partition("(global step ")[2][:1] for one in found] == ["5", "8"]

    run(tmp_path, resume=True)
    assert "lacks blocks that it had when the resumed checkpoint was written" in caplog.text
    (said,) = read_step_log(tmp_path).contradictions
    assert "segment 1 resumed a checkpoint of global step 8" in said


def test_an_incomplete_write_is_cut_at_the_next_start(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    run(tmp_path, 8)
    path = log_path(tmp_path, 0)
    size = path.stat().st_size
    os.truncate(path, size - 3)
    run(tmp_path, resume=True)
    log = read_step_log(tmp_path)
    assert "is continued after its intact part" in caplog.text
    assert (log.damage, log.contradictions) == (None, [])
    assert log.segments[1].cut is not None
    assert log.entries["step"].tolist() == list(range(1, 11))
    assert path.with_suffix(".cut-1").exists()


def test_a_run_continued_elsewhere_has_a_separate_log(tmp_path: Path) -> None:
    run(tmp_path / "first", 8)
    run(tmp_path / "second", resume=str(tmp_path / "first" / "checkpoints"))
    log = read_step_log(tmp_path / "second")
    assert log.entries["step"].tolist() == list(range(6, 11))
    assert (log.segments[0].number, log.segments[0].resumed_step, log.segments[0].resumed_head) == (0, 5, None)
    assert log.contradictions == []


def test_a_second_call_of_train_begins_a_segment(tmp_path: Path) -> None:
    trainer = train(Classifier(numbers(24)), tmp_path, writers=["csv"])
    trainer.train(epochs=2)
    log = read_step_log(tmp_path)
    assert [start.resumed_step for start in log.segments] == [0, 3]
    assert log.entries["step"].tolist() == [1, 2, 3, 4, 5, 6]
