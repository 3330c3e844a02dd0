"""When `DefaultCheckpointer` saves, under which name, and the checkpoint that it loads."""

from __future__ import annotations

import logging
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.checkpointing.support import make_checkpoint, mark_of
from trainstack.checkpointing import (
    Checkpoint,
    DefaultCheckpointer,
    DefaultCheckpointerArguments,
    list_checkpoints,
    manifest,
)
from trainstack.errors import (
    CheckpointMismatchError,
    CheckpointNotFoundError,
    ConfigurationError,
)


def checkpointer(directory: Path | None, **fields: Any) -> DefaultCheckpointer:
    save_dir = None if directory is None else str(directory)
    return DefaultCheckpointer(DefaultCheckpointerArguments(save_dir=save_dir, **fields))


def names(directory: Path) -> list[str]:
    """The entries of `directory`, without the pointers."""
    return sorted(path.name for path in directory.iterdir() if path.name.split("-")[-1] not in ("last", "best"))


def test_nothing_is_saved_when_switched_off(tmp_path: Path) -> None:
    off = checkpointer(tmp_path / "c", checkpoint=False, every_n_steps=5)
    assert off.save(make_checkpoint(), 0, force=True) is None
    assert off.save_model({"w": torch.ones(1)}, 0) is None
    assert off.every_n_steps is None
    assert not (tmp_path / "c").exists()


def test_saves_follow_the_period_unless_forced(tmp_path: Path) -> None:
    every_second = checkpointer(tmp_path, period=2)
    assert every_second.save(make_checkpoint(3), 3) is None
    assert every_second.save(make_checkpoint(4), 4) == str(tmp_path / "checkpoint-000004")
    assert every_second.save(make_checkpoint(5), 5, force=True) is not None
    assert names(tmp_path) == ["checkpoint-000004", "checkpoint-000005"]


def test_the_same_index_again_replaces(tmp_path: Path) -> None:
    one = checkpointer(tmp_path)
    one.save(make_checkpoint(4), 4)
    one.save(make_checkpoint(40), 4)
    assert names(tmp_path) == ["checkpoint-000004"]
    assert mark_of(one.load(True)) == 40


def test_names_have_prefix_number_and_extension(tmp_path: Path) -> None:
    one = checkpointer(tmp_path, file_prefix="run.1", file_ext="ckpt")
    one.save(make_checkpoint(1, step=12), 1)
    one.save(make_checkpoint(2), 2)
    one.save_model({"w": torch.ones(1)}, 3)
    assert names(tmp_path) == ["run.1-000000012.ckpt", "run.1-000002.ckpt", "run.1-model-000003.ckpt"]
    assert mark_of(one.load(True)) == 2


@pytest.mark.spec("F116")
def test_the_default_directory_is_that_of_the_first_use(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    one = checkpointer(None)
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path)
    one.save(make_checkpoint(1), 1)
    monkeypatch.chdir(tmp_path / "elsewhere")
    one.save(make_checkpoint(2), 2)
    assert names(tmp_path / "checkpoints") == ["checkpoint-000001", "checkpoint-000002"]


@pytest.mark.spec("F115")
def test_an_export_is_never_a_point_to_resume_from(tmp_path: Path) -> None:
    one = checkpointer(tmp_path)
    one.save(make_checkpoint(1, step=1), 1)
    export = one.save_model({"w": torch.ones(1)}, 1)
    assert export is not None
    assert mark_of(one.load(True)) == 1
    assert mark_of(checkpointer(None, load_dir=str(tmp_path)).load()) == 1
    with pytest.raises(CheckpointMismatchError, match="model export"):
        one.load(export)
    alone = checkpointer(tmp_path / "b", model_state_save_dir=str(tmp_path / "exports"))
    alone.save_model({"w": torch.ones(1)}, 2)
    assert names(tmp_path / "exports") == ["checkpoint-model-000002"]
    with pytest.raises(CheckpointNotFoundError):
        alone.load(tmp_path / "exports")


@pytest.mark.spec("F115")
def test_the_newest_checkpoint_is_the_one_written_last(tmp_path: Path) -> None:
    checkpointer(tmp_path).save(make_checkpoint(1, step=900), 9)
    checkpointer(tmp_path).save(make_checkpoint(2, step=100), 1)
    assert mark_of(checkpointer(tmp_path).load(True)) == 2
    assert [info.sequence for info in list_checkpoints(tmp_path)] == [1, 2]


def test_digits_in_paths_mean_nothing(tmp_path: Path) -> None:
    one = checkpointer(tmp_path / "run-7", file_prefix="best5", file_ext="h5")
    one.save(make_checkpoint(1, step=1), 1)
    one.save(make_checkpoint(2, step=2), 2)
    os.rename(tmp_path / "run-7" / "best5-000000001.h5", tmp_path / "run-7" / "kept99")
    assert mark_of(one.load(True)) == 2
    assert mark_of(one.load(tmp_path / "run-7" / "kept99")) == 1


@pytest.mark.spec("PMT-14")
def test_load_without_resume_reads_load_dir_only(tmp_path: Path) -> None:
    assert checkpointer(tmp_path).load() == Checkpoint()
    assert checkpointer(tmp_path, load_dir="").load(False).is_empty
    one = checkpointer(tmp_path)
    one.save(make_checkpoint(1), 1)
    one.save(make_checkpoint(2), 2)
    assert one.load().is_empty
    assert mark_of(checkpointer(None, load_dir=str(tmp_path)).load()) == 2
    named = checkpointer(None, load_dir=str(tmp_path), load_filename="checkpoint-000001")
    assert mark_of(named.load()) == 1
    assert mark_of(named.load(True)) == 1
    absolute = checkpointer(None, load_filename=str(tmp_path / "checkpoint-000001"))
    assert mark_of(absolute.load()) == 1


@pytest.mark.parametrize("resume", [True, "auto", "last", "best"])
@pytest.mark.parametrize("named", [None, "checkpoint-000001"])
def test_a_run_from_load_dir_continues_from_its_checkpoints(tmp_path: Path, resume: Any, named: str | None) -> None:
    def one() -> DefaultCheckpointer:
        return checkpointer(tmp_path / "mine", load_dir=str(tmp_path / "theirs"), load_filename=named)

    def measured(mark: int, loss: float) -> Checkpoint:
        return replace(make_checkpoint(mark), metadata={"metrics": {"val/loss": loss}})

    checkpointer(tmp_path / "theirs").save(measured(1, 0.1), 1)
    first = one()
    assert mark_of(first.load(resume)) == 1
    first.begin_run(resumed=True)
    first.save(measured(2, 0.5), 2)
    again = one()
    assert mark_of(again.load(resume)) == 2
    again.begin_run(resumed=True)
    assert mark_of(one().load(resume)) == 2
    assert mark_of(one().load(False)) == 1


def test_a_name_in_the_own_directory_is_loaded(tmp_path: Path) -> None:
    one = checkpointer(tmp_path, load_dir=str(tmp_path), load_filename="checkpoint-000001")
    one.save(make_checkpoint(1), 1)
    one.save(make_checkpoint(2), 2)
    assert mark_of(one.load(True)) == 1


@pytest.mark.spec("F115")
@pytest.mark.spec("PMT-14")
def test_a_missing_checkpoint_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    for load_dir in ("empty", "mistyped"):
        one = checkpointer(tmp_path, load_dir=str(tmp_path / load_dir))
        for resume in (None, True):
            with pytest.raises(CheckpointNotFoundError, match="resume='auto'"):
                one.load(resume)
        assert one.load("auto").is_empty
    for absent in (tmp_path / "mistyped", tmp_path / "empty"):
        with pytest.raises(CheckpointNotFoundError):
            checkpointer(tmp_path).load(absent)
    named = checkpointer(tmp_path, load_dir=str(tmp_path), load_filename="absent")
    with pytest.raises(CheckpointNotFoundError):
        named.load()
    assert named.load("auto").is_empty


@pytest.mark.spec("HZ-06")
def test_resume_accepts_a_checkpoint_or_a_directory_of_checkpoints(tmp_path: Path) -> None:
    one = checkpointer(tmp_path)
    first = one.save(make_checkpoint(1), 1)
    one.save(make_checkpoint(2), 2)
    other = checkpointer(tmp_path / "new")
    assert mark_of(other.load(first)) == 1
    assert mark_of(other.load(Path(str(first)))) == 1
    assert mark_of(other.load(tmp_path)) == 2


def test_a_runs_folder_stands_for_the_checkpoints_in_it(tmp_path: Path) -> None:
    run = tmp_path / "run"
    one = checkpointer(run / "checkpoints")
    one.save(make_checkpoint(1), 1)
    one.save_model({"w": torch.ones(1)}, 1)
    os.rename(run / "checkpoints" / "checkpoint-model-000001", run / "export")
    assert mark_of(checkpointer(tmp_path / "new").load(run)) == 1
    assert mark_of(checkpointer(tmp_path / "new", load_dir=str(run)).load(True)) == 1
    deleting = checkpointer(run / "checkpoints", delete_existing_checkpoints=True)
    with pytest.raises(ConfigurationError, match="delete_existing_checkpoints"):
        deleting.load(run)
    checkpointer(run).save(make_checkpoint(2), 2)
    assert mark_of(checkpointer(tmp_path / "new").load(run)) == 2


@pytest.mark.parametrize("resume", ["", 1, 0])
def test_a_resume_that_means_nothing_is_refused(tmp_path: Path, resume: Any) -> None:
    with pytest.raises(ConfigurationError, match="resume="):
        checkpointer(tmp_path).load(resume)


def test_prefixes_keep_runs_apart(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    a, b = checkpointer(tmp_path, file_prefix="a"), checkpointer(tmp_path, file_prefix="a-1")
    a.save(make_checkpoint(1), 1)
    with pytest.raises(CheckpointNotFoundError, match="set file_prefix to match"):
        b.load(True)
    with caplog.at_level(logging.WARNING, "trainstack"):
        assert b.load("auto").is_empty
    assert "a-000001" in caplog.text
    b.save(make_checkpoint(2), 2)
    assert mark_of(a.load(True)) == 1
    assert mark_of(b.load(True)) == 2


@pytest.mark.spec("F115")
def test_deleting_existing_checkpoints_touches_nothing_else(tmp_path: Path) -> None:
    checkpointer(tmp_path).save(make_checkpoint(1), 1)
    checkpointer(tmp_path).save_model({"w": torch.ones(1)}, 1)
    checkpointer(tmp_path, file_prefix="other").save(make_checkpoint(1), 1)
    checkpointer(tmp_path).save(make_checkpoint(2), 2)
    os.rename(tmp_path / "checkpoint-000002", tmp_path / "my-favourite")
    for name in ("script", "my_receipt", "note.ppt", "checkpoint-000009"):
        (tmp_path / name).write_text("mine")
    (tmp_path / "checkpoint-000007").mkdir()
    (tmp_path / "checkpoint-000007" / "notes").write_text("mine")
    before = names(tmp_path)
    fresh = checkpointer(tmp_path, delete_existing_checkpoints=True)
    assert names(tmp_path) == before
    assert fresh.load().is_empty
    fresh.save(make_checkpoint(3), 3)
    fresh.save(make_checkpoint(4), 4)
    assert names(tmp_path) == sorted({*before, "checkpoint-000003", "checkpoint-000004"} - {"checkpoint-000001"})


def test_deleting_the_checkpoint_to_load_is_refused(tmp_path: Path) -> None:
    saved = checkpointer(tmp_path / "a").save(make_checkpoint(1), 1)
    fresh = checkpointer(tmp_path / "a", delete_existing_checkpoints=True)
    for resume in (True, "auto", saved, tmp_path / "a"):
        with pytest.raises(ConfigurationError, match="delete_existing_checkpoints"):
            fresh.load(resume)
    with pytest.raises(ConfigurationError, match="delete_existing_checkpoints"):
        checkpointer(tmp_path / "a", load_dir=str(tmp_path / "a"), delete_existing_checkpoints=True).load()
    elsewhere = checkpointer(tmp_path / "b", load_dir=str(tmp_path / "a"), delete_existing_checkpoints=True)
    assert mark_of(elsewhere.load()) == 1
    for resume in (True, "auto"):
        with pytest.raises(ConfigurationError, match="resume=False to start over"):
            elsewhere.load(resume)


def test_a_newer_format_is_not_passed_over(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    one = checkpointer(tmp_path)
    one.save(make_checkpoint(1), 1)
    with monkeypatch.context() as patch:
        patch.setattr(manifest, "FORMAT_VERSION", 99)
        one.save(make_checkpoint(2), 2)
    with pytest.raises(CheckpointMismatchError, match="Upgrade"):
        one.load("auto")


@pytest.mark.processes
def test_only_leftovers_of_dead_writers_are_deleted(tmp_path: Path) -> None:
    import socket
    import subprocess
    import sys

    dead, zombie = [subprocess.Popen([sys.executable, "-c", ""]) for _ in range(2)]
    dead.wait()
    os.waitid(os.P_PID, zombie.pid, os.WEXITED | os.WNOWAIT)  # it has ended, and still has its pid
    token = "0" * 32
    host = socket.gethostname().replace("-", "_")
    own = [f".tmp-a-{host}-{dead.pid}", f".tmp-z-{host}-{zombie.pid}", f".tmp-b-{host}-{os.getppid()}"]
    foreign = [f".tmp-c-otherhost-{dead.pid}", f".tmp-d-otherhost-{dead.pid}"]
    for left in (".tmp-mine", *(f"{begin}-{token}" for begin in own + foreign)):
        (tmp_path / left).mkdir()
        (tmp_path / left / "MANIFEST.json").write_text("trainstack-checkpoint")
    os.utime(tmp_path / f".tmp-d-otherhost-{dead.pid}-{token}", (0, 0))
    checkpointer(tmp_path).save(make_checkpoint(1), 1)
    zombie.wait()
    assert [name[:6] for name in names(tmp_path)] == [".tmp-b", ".tmp-c", ".tmp-m", "checkp"]


def test_trainers_in_one_process_keep_each_others_temporary_files(tmp_path: Path) -> None:
    from trainstack.checkpointing import temp_dirs

    mine = temp_dirs.claim_temp_dir(tmp_path, temp_dirs.TEMPORARY, "a")
    mine.mkdir()
    checkpointer(tmp_path).save(make_checkpoint(1), 1)
    assert mine.exists()
    temp_dirs.release_temp_dir(mine)
    checkpointer(tmp_path).save(make_checkpoint(1), 1)
    assert not mine.exists()
