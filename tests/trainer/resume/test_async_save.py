"""Training while checkpoints are written in the background."""

from __future__ import annotations

import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch

import trainstack as ts
from tests.helpers.modules import Classifier, arguments, train, weights
from tests.helpers.patience import patience
from trainstack.checkpointing import filesystem, retention
from trainstack.trainer.core.intervals import NEVER


def saving(**changes: Any) -> ts.DefaultCheckpointerArguments:
    return ts.DefaultCheckpointerArguments(**{"every_n_steps": 3, "async_save": True, "keep_last": None, **changes})


def steps_saved(directory: Path) -> list[int | None]:
    return [info.global_step for info in ts.list_checkpoints(directory / "checkpoints") if info.kind == "checkpoint"]


def writers() -> list[str]:
    return [thread.name for thread in threading.enumerate() if thread.name.startswith("trainstack")]


def failing_once(monkeypatch: pytest.MonkeyPatch, when: threading.Event | None = None) -> None:
    sync_file, failures = filesystem.sync_file, [OSError("the disk is gone")]

    def fail(handle: Any) -> None:
        if failures and "-begin-" not in handle.name:
            assert when is None or when.wait(20)
            raise failures.pop()
        sync_file(handle)

    monkeypatch.setattr(filesystem, "sync_file", fail)


class WaitsForFailure(Classifier):
    """In step 4 it waits until the loop is notified of a failure, so that the failure is in that step."""

    trainer: ts.Trainer
    told = False

    def __init__(self) -> None:
        super().__init__()
        self.in_step_4 = threading.Event()

    def train_step(self, global_step: int, batch: Any, device: Any) -> Any:
        deadline = time.monotonic() + patience(20)
        if global_step == 4:
            self.in_step_4.set()
        while global_step == 4 and not self.told and time.monotonic() < deadline:
            self.told = self.trainer._ready().loop.next_due_step == 0
            time.sleep(0.001)
        return super().train_step(global_step, batch, device)


def test_a_failure_is_raised_after_the_current_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    module = WaitsForFailure()
    failing_once(monkeypatch, module.in_step_4)
    module.trainer = ts.Trainer(module, arguments(tmp_path, checkpointer_args=saving()))
    with pytest.raises(ts.CheckpointError, match="the disk is gone") as raised:
        module.trainer.train()
    assert isinstance(raised.value.__cause__, OSError)
    assert module.trainer.global_steps_finished == 4
    assert not writers()
    assert steps_saved(tmp_path) == []

    module.trainer.train()
    assert steps_saved(tmp_path) == [6]


def test_a_failure_during_other_due_work_is_not_lost(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    trainer = ts.Trainer(Classifier(), arguments(tmp_path, checkpointer_args=saving(), log_every=1))
    asked: list[int] = []
    monkeypatch.setattr(trainer.checkpointer, "poll", lambda: asked.append(trainer.state.global_step))
    run = trainer._ready()
    look = run.stopper.is_due

    def fails_first(step: int) -> bool:
        trainer.checkpointer._background.wake()  # type: ignore[attr-defined]
        return look(step)

    monkeypatch.setattr(run.stopper, "is_due", fails_first)
    trainer.train()
    assert asked == [1, 2, 3, 4, 5, 6]


def test_background_saves_add_no_work_to_steps(tmp_path: Path) -> None:
    trainer = ts.Trainer(Classifier(), arguments(tmp_path, checkpointer_args=saving(every_n_steps=None)))
    attended: list[int] = []
    module: Any = trainer.module
    module.on_end_train_step = lambda global_step: attended.append(trainer._ready().loop.next_due_step)
    trainer.train()
    assert min(attended) > 6
    assert max(attended) <= NEVER


def test_all_checkpoints_are_on_disk_when_train_returns(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sync_directory = filesystem.sync_directory

    def slow(path: Path) -> None:
        time.sleep(0.05)
        sync_directory(path)

    monkeypatch.setattr(filesystem, "sync_directory", slow)
    trainer = train(Classifier(), tmp_path, checkpointer_args=saving())
    assert steps_saved(tmp_path) == [3, 6]
    assert not writers()
    trainer.save_checkpoint(force=True)
    assert not writers(), "outside of train no later call waits for it"


def test_after_a_failure_at_the_end_train_saves_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    trainer = ts.Trainer(Classifier(), arguments(tmp_path, checkpointer_args=saving(every_n_steps=None)))
    failing_once(monkeypatch)
    with pytest.raises(ts.CheckpointError, match="the disk is gone"):
        trainer.train()
    assert steps_saved(tmp_path) == []
    trainer.train()
    assert steps_saved(tmp_path) == [6]


class Interrupted(Classifier):
    def train_step(self, global_step: int, batch: Any, device: Any) -> Any:
        if global_step == 4:
            raise KeyboardInterrupt
        return super().train_step(global_step, batch, device)


def test_an_interrupt_lets_the_running_save_finish(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    reached, sync_file = threading.Event(), filesystem.sync_file

    def slow(handle: Any) -> None:
        reached.set()
        time.sleep(0.05)
        sync_file(handle)

    monkeypatch.setattr(filesystem, "sync_file", slow)
    with pytest.raises(KeyboardInterrupt):
        train(Interrupted(), tmp_path, checkpointer_args=saving())
    assert reached.is_set()
    assert not writers()
    assert steps_saved(tmp_path) == [3]


def test_a_second_interrupt_abandons_the_save_completely(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    reached, may_continue, write = threading.Event(), threading.Event(), filesystem.write

    def held(handle: Any, data: Any) -> None:
        if "-begin-" not in handle.name:
            reached.set()
            assert may_continue.wait(20)
        write(handle, data)

    def interrupted() -> None:
        assert reached.wait(20)
        raise KeyboardInterrupt("the second")

    monkeypatch.setattr(filesystem, "write", held)
    trainer = ts.Trainer(Interrupted(), arguments(tmp_path, checkpointer_args=saving()))
    with monkeypatch.context() as patch:
        patch.setattr(trainer.checkpointer, "finish", interrupted)
        with pytest.raises(KeyboardInterrupt, match="the second"):
            trainer.train()
    assert len(writers()) == 1, "it did not wait"
    may_continue.set()
    trainer.checkpointer.finish()
    left = [path.name for path in (tmp_path / "checkpoints").iterdir() if ".lease-" not in path.name]
    assert left == ["checkpoint-begin-000000001"]


def test_the_next_training_waits_for_an_abandoned_save(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    reached, may_continue, deletes = threading.Event(), threading.Event(), retention.Retention.apply

    def held(*args: Any) -> None:
        if threading.current_thread() is not threading.main_thread():
            reached.set()
            assert may_continue.wait(20)
        deletes(*args)

    monkeypatch.setattr(retention.Retention, "apply", held)
    checkpointer = ts.DefaultCheckpointer(saving(save_dir=tmp_path))
    checkpointer.save(ts.Checkpoint(global_step=1), 1)
    assert reached.wait(20)
    checkpointer.abandon()
    begins = threading.Thread(target=checkpointer.begin_run, kwargs={"resumed": False})
    begins.start()
    begins.join(0.05)
    assert begins.is_alive()
    may_continue.set()
    begins.join(20)
    assert not writers()
    with pytest.raises(ts.CheckpointNotFoundError):
        checkpointer.load(True)  # it belongs to an earlier run now


def test_train_refuses_to_run_inside_itself(tmp_path: Path) -> None:
    class Nested(Classifier):
        trainer: ts.Trainer

        def on_end_train_step(self, global_step: int) -> None:
            if global_step == 4:
                self.trainer.train()

    module = Nested()
    module.trainer = ts.Trainer(module, arguments(tmp_path, checkpointer_args=saving()))
    with pytest.raises(ts.ConfigurationError, match=r"while it runs \(after global step 4\).*after it has returned"):
        module.trainer.train()
    assert steps_saved(tmp_path) == [3]
    del Nested.on_end_train_step
    ended = ts.Trainer(module, arguments(tmp_path, checkpointer_args=saving(), resume=True))
    ended.train()
    assert ended.global_steps_finished == 6


def test_a_failure_together_with_another_exception_becomes_its_note(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    failing_once(monkeypatch)
    trainer = ts.Trainer(Interrupted(), arguments(tmp_path, checkpointer_args=saving()))
    for look in ("watch", "poll"):  # the failure is not noticed before the end, even if it occurs in step 3
        monkeypatch.setattr(trainer.checkpointer, look, lambda *wake: None)
    with pytest.raises(KeyboardInterrupt) as raised:
        trainer.train()
    assert "also, a checkpoint is missing" in raised.value.__notes__[0]


def test_background_saves_resume_with_the_bits_of_foreground_saves(tmp_path: Path) -> None:
    ends = []
    for background in (False, True):
        directory, changes = tmp_path / str(background), {"checkpointer_args": saving(async_save=background)}
        torch.manual_seed(1)
        with pytest.raises(KeyboardInterrupt):
            train(Interrupted(dropout=0.2, optimizer=torch.optim.AdamW), directory, **changes)
        torch.manual_seed(2)
        module = Classifier(dropout=0.2, optimizer=torch.optim.AdamW)
        train(module, directory, resume=True, **changes)
        ends.append([weights(module), *(file_bytes(directory, name) for name in ("model", "state"))])
    assert torch.equal(ends[0][0], ends[1][0])
    assert ends[0][1:] == ends[1][1:]


def file_bytes(directory: Path, name: str) -> list[bytes]:
    return [
        (info.path / f"{name}.safetensors").read_bytes()
        for info in ts.list_checkpoints(directory / "checkpoints")
        if info.kind == "checkpoint"
    ]
