"""A training owns its directories: a second one is refused, and one that lost them stops writing."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest

import trainstack as ts
from tests.helpers.modules import Classifier, arguments
from trainstack.checkpointing import Lease, lease_file

SAVING = ts.DefaultCheckpointerArguments(every_n_steps=1)


def trainer_in(folder: Path, module: Any = None, **changes: Any) -> ts.Trainer:
    made = {"checkpointer_args": SAVING, "resume": "auto", "lease_timeout_s": 2.0, **changes}
    return ts.Trainer(module or Classifier(), arguments(folder, **made))


def leases(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.glob(".lease-*"))


def test_a_training_holds_the_lease_and_releases_it(tmp_path: Path) -> None:
    held: list[Any] = []

    class Looks(Classifier):
        def on_end_train_step(self, global_step: int) -> None:
            lease = trainer._context.lease
            held.append(lease and lease.counter)

    trainer = trainer_in(tmp_path, Looks())
    trainer.train()
    assert held[0] == 1
    assert trainer._context.lease is None
    seen = lease_file.look(tmp_path)
    assert seen is not None
    assert seen.is_free
    assert ts.list_checkpoints(tmp_path / "checkpoints")[-1].lease == 1
    trainer.save_checkpoint(force=True)  # outside of train() a save takes the lease
    assert leases(tmp_path) == [".lease-000000002.json"]


def test_the_lease_names_the_run_after_a_resume(tmp_path: Path) -> None:
    words: list[str] = []

    class Looks(Classifier):
        def on_end_train_step(self, global_step: int) -> None:
            seen = lease_file.look(tmp_path)
            assert seen is not None
            words.append(seen.words)

    trainer_in(tmp_path, Looks(), epochs=1).train()
    trainer_in(tmp_path, Looks(), epochs=2, resume=True).train()
    [run_id] = {info.run_id for info in ts.list_checkpoints(tmp_path / "checkpoints")}
    assert {said.rpartition(" (")[2] for said in words} == {f"run {run_id})"}


@pytest.mark.parametrize("error", [KeyError, KeyboardInterrupt, SystemExit])
def test_the_lease_is_released_after_an_exception(tmp_path: Path, error: type[BaseException]) -> None:
    class Fails(Classifier):
        def on_end_train_step(self, global_step: int) -> None:
            raise error

    with pytest.raises(error):
        trainer_in(tmp_path, Fails()).train()
    trainer_in(tmp_path, resume=False, overwrite=True).train()
    assert leases(tmp_path) == [".lease-000000002.json"]


def test_a_second_training_is_refused_before_it_writes(tmp_path: Path) -> None:
    trainer_in(tmp_path, epochs=1).train()
    owner = Lease.acquire([tmp_path], timeout_s=2.0)
    before = {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*") if ".lease" not in path.name}
    second = trainer_in(tmp_path, epochs=2)
    with pytest.raises(ts.LeaseError, match=r"is in use by another run: process \d+ on .* holds it"):
        second.train()
    owner.release()
    assert {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*") if ".lease" not in path.name} == before


def test_a_training_that_lost_its_directory_stops_writing(tmp_path: Path) -> None:
    class Loses(Classifier):
        def on_end_train_step(self, global_step: int) -> None:
            if global_step == 3:
                mine = {**lease_file.this_process(), "host": "elsewhere", "machine": "another", "pid": 7}
                taken = {**mine, "counter": 9, "token": "t", "run_id": None, "timeout_s": 60.0}
                lease_file.claim(tmp_path, lease_file.LeaseRecord(**taken))

    with pytest.raises(ts.LeaseError, match="process 7 on elsewhere has taken it over"):
        trainer_in(tmp_path, Loses(), save_on_exception=True).train()
    steps = [info.global_step for info in ts.list_checkpoints(tmp_path / "checkpoints")]
    assert steps == [1, 2]
    assert not list((tmp_path / "checkpoints").glob(".[!l]*"))  # except the lease


def test_an_evaluation_takes_no_lease(tmp_path: Path) -> None:
    trainer_in(tmp_path, epochs=1).train()
    owner = Lease.acquire([tmp_path], timeout_s=2.0)
    trainer = trainer_in(tmp_path)
    trainer.validate()
    assert trainer.global_steps_finished > 0
    owner.release()


def test_a_checkpoint_chosen_before_another_runs_write_is_refused(tmp_path: Path) -> None:
    trainer_in(tmp_path, epochs=1).train()
    early = trainer_in(tmp_path, epochs=3)
    assert early.plan is not None  # which loads the newest checkpoint
    trainer_in(tmp_path, epochs=2).train()
    with pytest.raises(ts.CheckpointError, match="another run has written"):
        early.train()


def test_a_save_dir_elsewhere_is_leased_too(tmp_path: Path) -> None:
    saving = ts.DefaultCheckpointerArguments(save_dir=str(tmp_path / "saved"))
    trainer_in(tmp_path / "a", checkpointer_args=saving).train()
    owner = Lease.acquire([tmp_path / "saved"], timeout_s=2.0)
    with pytest.raises(ts.LeaseError, match="saved is in use"):
        trainer_in(tmp_path / "b", checkpointer_args=saving).train()
    owner.release()
    assert not (tmp_path / "b").exists()


def test_a_run_that_writes_nothing_takes_no_lease(tmp_path: Path) -> None:
    ts.Trainer(Classifier(), arguments(tmp_path / "a", writers=[], report=False)).train()
    assert not (tmp_path / "a").exists()


@pytest.mark.parametrize(("folder", "warns"), [("run", True), ("run/13", True), ("run/3", False), ("run-3-a", False)])
def test_an_array_task_with_a_shared_directory_causes_a_warning(
    folder: str, warns: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("SLURM_ARRAY_TASK_ID", "3")
    monkeypatch.setattr("os.path.abspath", lambda path: f"/{path}")  # the real path of this test has numbers
    with caplog.at_level(logging.WARNING):
        trainer_in(Path(folder), epochs=1).train()
    assert ("this is task 3 of a job array" in caplog.text) == warns
