"""Runs that share a folder of checkpoints, exports or logs: no run changes the files of another."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import Any

import pytest

import trainstack as ts
from tests.helpers.modules import Classifier, numbers
from trainstack.checkpointing.directory import list_checkpoints
from trainstack.trainer.run_record import read_record


@pytest.fixture(autouse=True)
def own_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def make(folder: str, hook: Any = None, **changes: Any) -> ts.Trainer:
    given = {"train_batch_size": 8, "log_every": 1, "progress": "none", "writers": ["csv"], "epochs": 2}
    trainer = ts.Trainer(Classifier(numbers(16)), ts.TrainerArguments(**{**given, **changes, "output_dir": folder}))
    if hook is not None:

        @trainer.on(ts.Event.TRAIN_STEP_END)
        def end(_: ts.Trainer, done: int) -> None:
            if trainer.state.global_step == 3:
                hook()

    return trainer


def train(folder: str, **changes: Any) -> ts.Trainer:
    trainer = make(folder, **changes)
    trainer.train()
    return trainer


def fail() -> None:
    raise ZeroDivisionError


def shared(name: str = "save_dir") -> dict[str, Any]:
    return {"checkpointer_args": ts.DefaultCheckpointerArguments(**{name: "shared"})}


def owners(folder: str) -> dict[str, str | None]:
    return {info.name: info.run_id for info in list_checkpoints(folder)}


def run_id_of(folder: str) -> str:
    record = read_record(Path(folder))
    assert record is not None
    return record.run_id


@pytest.mark.parametrize("name", ["save_dir", "model_state_save_dir"])
def test_overwrite_deletes_only_the_files_of_its_run(name: str) -> None:
    train("first", **shared(name))
    first = owners("shared")
    train("second", **shared(name))
    second = {one: run for one, run in owners("shared").items() if one not in first}
    assert set(second.values()) == {run_id_of("second")} != {run_id_of("first")}
    train("second", overwrite=True, **shared(name))

    assert {one: run for one, run in owners("shared").items() if one in first} == first
    assert run_id_of("second") not in second.values()
    assert set(owners("shared").values()) == {run_id_of("first"), run_id_of("second")}


def test_each_run_resumes_its_checkpoints_from_a_shared_folder() -> None:
    for folder in ("first", "second"):
        with pytest.raises(ZeroDivisionError):
            make(folder, fail, **shared()).train()
    assert train("first", resume="auto", **shared()).global_steps_finished == 4
    train("first", resume=True, epochs=3, **shared())
    assert train("second", resume="auto", **shared()).global_steps_finished == 4

    assert set(owners("shared").values()) == {run_id_of("first"), run_id_of("second")}
    by_run = {run: [name for name, one in owners("shared").items() if one == run] for run in owners("shared").values()}
    assert any("000000006" in name for name in by_run[run_id_of("first")])
    assert any("000000004" in name for name in by_run[run_id_of("second")])


def test_a_save_before_training_has_its_run_id() -> None:
    train("first", **shared())
    before = owners("shared")
    make("second", **shared()).save_checkpoint(force=True)

    (run_id,) = {run for name, run in owners("shared").items() if name not in before}
    assert run_id == run_id_of("second") not in before.values()


@pytest.mark.parametrize("changes", [{}, {"overwrite": True}, {"resume": "auto"}])
def test_logs_of_another_run_are_never_replaced(changes: dict[str, Any]) -> None:
    logging = {"writer_args": ts.WriterArguments(tb_log_dir="logs")}
    train("first", **logging)
    before = Path("logs/metrics.csv").read_bytes(), Path("logs/run.json").read_bytes()

    with pytest.raises(ts.ConfigurationError, match=r"^tb_log_dir='logs' already holds logs.*tb_log_dir='logs-2'"):
        make("second", **logging, **changes).train()
    assert before == (Path("logs/metrics.csv").read_bytes(), Path("logs/run.json").read_bytes())
    train("second", writer_args=ts.WriterArguments(tb_log_dir="logs-2"))  # the folder that the error suggests
    train("first", resume=True, epochs=3, **logging)
    train("first", overwrite=True, epochs=1, **logging)
    assert Path("logs/metrics.csv").stat().st_size < len(before[0])


@pytest.mark.parametrize("place", ["save_dir", "link", "output_dir", "tb_log_dir"])
def test_a_folder_that_a_training_writes_has_one_owner(place: str) -> None:
    Path("link").symlink_to("first/checkpoints")
    changes: dict[str, Any] = {}
    if place == "tb_log_dir":
        changes = {"writer_args": ts.WriterArguments(tb_log_dir="logs")}
    saving = {"save_dir": "first/checkpoints", "link": "link"}.get(place)

    def start_another() -> None:
        others = {"checkpointer_args": ts.DefaultCheckpointerArguments(save_dir=saving)} if saving else changes
        with pytest.raises(ts.LeaseError, match="is in use by another run"):
            make("first/checkpoints" if place == "output_dir" else "second", **others).train()

    hooked = ts.DefaultCheckpointerArguments(every_n_steps=None)
    make("first", start_another, checkpointer_args=hooked, **changes).train()

    assert set(owners("first/checkpoints").values()) == {run_id_of("first")}


@pytest.mark.parametrize("by", ["link", "move"])
def test_a_training_stops_if_its_folder_is_exchanged(by: str) -> None:
    train("other")
    before = owners("other/checkpoints"), Path("other/metrics.csv").read_bytes()
    Path("real").mkdir()
    Path("current").symlink_to("real")
    train("current", epochs=1)  # so that its lease has the higher number

    def exchange() -> None:
        if by == "link":
            os.unlink("current")
            os.symlink("other", "current")
        else:
            os.rename("real", "moved")
            shutil.copytree("other", "real")
        trainer._context.lease.verify()  # type: ignore[union-attr]

    trainer = make("current", exchange, resume=True)
    with pytest.raises(ts.LeaseError, match="the path leads to the folder of another run"):
        trainer.train()
    assert before == (owners("other/checkpoints"), Path("other/metrics.csv").read_bytes())
    if by == "move":
        assert before == (owners("real/checkpoints"), Path("real/metrics.csv").read_bytes())


def test_a_save_never_replaces_a_foreign_checkpoint() -> None:
    train("first")
    before = owners("first/checkpoints")
    second = train("second")
    for name in before:
        with pytest.raises(
            ts.CheckpointError, match=r"a checkpoint of another run \(.*\) has this name.*Write another path"
        ):
            second.save_checkpoint(path=f"first/checkpoints/{name}")
    for _ in range(2):
        second.save_checkpoint(path="extra/mine")  # a save without a run may be replaced

    assert owners("first/checkpoints") == before


def test_a_save_into_a_leased_folder_is_refused() -> None:
    second = train("second")

    def save() -> None:
        with pytest.raises(ts.CheckpointError, match=r"owns .*checkpoints, the folder of a run"):
            second.save_checkpoint(path="first/checkpoints/mine")

    first = make("first", save)
    first.train()
    first.save_checkpoint(path="first/checkpoints/mine")

    assert "mine" in owners("first/checkpoints")
