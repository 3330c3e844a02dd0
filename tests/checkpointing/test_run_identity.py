"""The run that a directory belongs to: entries of kind "begin", run ids, and their damage."""

from __future__ import annotations

import errno
import os
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.checkpointing.support import flip_bit, make_checkpoint, mark_of
from trainstack.checkpointing import (
    DefaultCheckpointer,
    DefaultCheckpointerArguments,
    Lease,
    filesystem,
    list_checkpoints,
    read_checkpoint,
    retention,
    write_checkpoint,
)
from trainstack.checkpointing.directory import scan
from trainstack.errors import CheckpointDamagedError, CheckpointError, CheckpointMismatchError, CheckpointNotFoundError


def checkpointer(directory: Path, **fields: Any) -> DefaultCheckpointer:
    return DefaultCheckpointer(
        DefaultCheckpointerArguments(**{"save_dir": str(directory), "keep_last": None, **fields})
    )


def run_once(directory: Path, *steps: int) -> DefaultCheckpointer:
    """A fresh run that saves these steps."""
    saver = checkpointer(directory)
    saver.begin_run(resumed=False)
    for step in steps:
        saver.save(make_checkpoint(step, step=step), step)
    return saver


def begun(directory: Path) -> list[Path]:
    return sorted(directory.glob("*-begin-*"))


def test_every_checkpoint_carries_the_id_of_its_run(tmp_path: Path) -> None:
    first, second = run_once(tmp_path, 1, 2), run_once(tmp_path, 3)
    assert first.run_id
    assert second.run_id not in (None, first.run_id)
    assert [info.run_id for info in list_checkpoints(tmp_path)] == [first.run_id, first.run_id, second.run_id]
    assert read_checkpoint(tmp_path / "checkpoint-000000001").run_id == first.run_id
    assert [info.run_id for info in scan(tmp_path).begun] == [second.run_id, first.run_id]
    resumed = checkpointer(tmp_path)
    assert mark_of(resumed.load("auto")) == 3
    resumed.begin_run(resumed=True)
    resumed.save(make_checkpoint(4, step=4), 4)
    assert list_checkpoints(tmp_path)[-1].run_id == second.run_id
    assert len(begun(tmp_path)) == 2


def test_a_run_killed_before_its_first_checkpoint_keeps_its_id(tmp_path: Path) -> None:
    first = run_once(tmp_path)
    again = checkpointer(tmp_path)
    assert again.load("auto").is_empty
    again.begin_run(resumed=False)
    assert again.run_id == first.run_id
    assert len(begun(tmp_path)) == 1
    fresh = run_once(tmp_path)  # with resume=False it is another one
    assert fresh.run_id != first.run_id


def test_resuming_an_earlier_run_makes_it_the_current_one(tmp_path: Path) -> None:
    first = run_once(tmp_path, 1)
    run_once(tmp_path, 2)
    named = checkpointer(tmp_path)
    assert mark_of(named.load(tmp_path / "checkpoint-000000001")) == 1
    named.begin_run(resumed=True)
    assert named.run_id == first.run_id
    assert mark_of(checkpointer(tmp_path).load("auto")) == 1


def test_auto_refuses_any_damaged_beginning_and_lists_the_runs(tmp_path: Path) -> None:
    first = run_once(tmp_path, 1, 2)
    run_once(tmp_path)
    entry = begun(tmp_path)[-1]
    data = (entry / "MANIFEST.json").read_bytes()
    kept = tmp_path.parent / "kept"
    shutil.copytree(entry, kept)
    ways: list[bytes | None] = [data[:length] for length in range(0, len(data), 37)]
    for position in range(0, len(data), 11):
        flipped = bytearray(data)
        flipped[position] ^= 1 << (position % 8)
        ways.append(bytes(flipped))
    for way in [*ways, None]:
        (entry / "MANIFEST.json").unlink() if way is None else (entry / "MANIFEST.json").write_bytes(way)
        saver = checkpointer(tmp_path, keep_last=1)
        with pytest.raises(CheckpointDamagedError) as raised:
            saver.load("auto")
        assert str(entry) in str(raised.value)
        assert f"run {first.run_id}: its newest checkpoint is {tmp_path / 'checkpoint-000000002'}" in str(raised.value)
        saver._retention.apply(scan(tmp_path))
        assert len(list_checkpoints(tmp_path)) == 2  # checkpoints of an unknown run are not deleted
        shutil.rmtree(entry)
        shutil.copytree(kept, entry)
    assert mark_of(checkpointer(tmp_path).load(tmp_path / "checkpoint-000000001")) == 1
    shutil.rmtree(kept)


def test_a_damaged_beginning_before_the_newest_checkpoint_is_harmless(tmp_path: Path) -> None:
    run_once(tmp_path, 1)
    run_once(tmp_path, 2, 3)
    for entry in begun(tmp_path):
        flip_bit(entry / "MANIFEST.json", 40)
    assert mark_of(checkpointer(tmp_path).load("auto")) == 3
    checkpointer(tmp_path, keep_last=1, keep_best=0)._retention.apply(scan(tmp_path))
    assert [info.global_step for info in list_checkpoints(tmp_path)] == [1, 3]


def test_a_beginning_is_not_a_checkpoint(tmp_path: Path) -> None:
    run_once(tmp_path)
    with pytest.raises(CheckpointMismatchError, match="marks the beginning of a run"):
        checkpointer(tmp_path).load(begun(tmp_path)[0])
    assert list_checkpoints(tmp_path) == []


def test_a_later_checkpoint_of_another_run_is_an_error(tmp_path: Path) -> None:
    run_once(tmp_path, 1)
    slow = checkpointer(tmp_path)
    assert mark_of(slow.load("auto")) == 1
    other = checkpointer(tmp_path)
    other.load("auto")
    other.begin_run(resumed=True)
    other.save(make_checkpoint(2, step=2), 2)
    with pytest.raises(CheckpointError, match=r"another run has written .*checkpoint-000000002 since"):
        slow.begin_run(resumed=True)


# --- exports -----------------------------------------------------------------------------------------------


def export(saver: DefaultCheckpointer, value: float, step: int) -> str:
    return Path(saver.save_model({"w": torch.full((1,), value)}, -1, global_step=step) or "").name


def test_exports_are_numbered_by_step_and_never_replace_each_other(tmp_path: Path) -> None:
    saver = checkpointer(tmp_path)
    assert export(saver, 1.0, 2) == "checkpoint-model-000000002"
    assert export(saver, 2.0, 3) == "checkpoint-model-000000003"
    assert export(saver, 3.0, 3) == "checkpoint-model-000000003.2"
    assert export(saver, 3.0, 3) == "checkpoint-model-000000003.2"  # the same weights again
    assert export(saver, 4.0, 3) == "checkpoint-model-000000003.3"
    assert len(list_checkpoints(tmp_path)) == 4
    assert checkpointer(tmp_path).load("auto").is_empty


# --- read back before anything is deleted ------------------------------------------------------------------


@pytest.mark.parametrize("background", [False, True])
@pytest.mark.parametrize("file", ["model.safetensors", "state.safetensors", "state.json", "MANIFEST.json"])
def test_a_bit_flip_while_writing_costs_no_intact_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, file: str, background: bool
) -> None:
    saver = checkpointer(tmp_path, keep_last=1, keep_best=0, async_save=background)
    saver.save(make_checkpoint(1, step=1), 1)
    saver.finish()
    rename = filesystem.rename

    def damage(source: Path, target: Path) -> None:
        if target.name == "checkpoint-000000002":
            flip_bit(source / file, -20)
        rename(source, target)

    monkeypatch.setattr(filesystem, "rename", damage)
    saver.save(make_checkpoint(2, step=2), 2)
    saver.finish()
    assert mark_of(checkpointer(tmp_path).load("auto")) == 1
    saver.save(make_checkpoint(3, step=3), 3)
    saver.finish()
    assert mark_of(checkpointer(tmp_path).load("auto")) == 3
    assert (tmp_path / "checkpoint-000000002").exists()
    assert "checkpoint-000000002" in caplog.text.replace("saved", "")


def test_a_damaged_best_checkpoint_is_not_counted_as_kept(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    def save(saver: DefaultCheckpointer, step: int, value: float) -> None:
        checkpoint = make_checkpoint(step, step=step)
        checkpoint.metadata = {"metrics": {"val/loss": value}}
        saver.save(checkpoint, step)

    everything = checkpointer(tmp_path)
    for step, value in ((1, 2.0), (2, 1.0), (3, 3.0)):
        save(everything, step, value)
    flip_bit(tmp_path / "checkpoint-000000002" / "model.safetensors", -1)
    save(checkpointer(tmp_path, keep_last=1, keep_best=1), 4, 4.0)
    assert [info.global_step for info in list_checkpoints(tmp_path)] == [1, 2, 4]
    assert mark_of(checkpointer(tmp_path).load("best")) == 1
    assert caplog.text.count("a checkpoint is damaged, so an older one is kept in its place") == 1


def test_each_checkpoint_is_read_back_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    read: list[str] = []
    read_back = retention.read_back
    monkeypatch.setattr(retention, "read_back", lambda path: (read.append(path.name), read_back(path))[1])
    saver = checkpointer(tmp_path, keep_last=2, keep_best=0)
    for step in range(1, 7):
        saver.save(make_checkpoint(step, step=step), step)
    assert sorted(read) == [f"checkpoint-{step:09d}" for step in range(2, 7)]  # nothing is deleted before the third
    read.clear()
    checkpointer(tmp_path, keep_last=1, keep_best=0, verify="none").save(make_checkpoint(7, step=7), 7)
    assert read == []
    assert [info.global_step for info in list_checkpoints(tmp_path)] == [7]


def test_scrub_reads_everything(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from trainstack.cli.main import main

    run_once(tmp_path, 1, 2)
    assert main(["checkpoints", "scrub", str(tmp_path)]) == 0
    assert "3 entries, 0 with a problem" in capsys.readouterr().out
    flip_bit(tmp_path / "checkpoint-000000001" / "state.json", -1)
    assert main(["checkpoints", "scrub", str(tmp_path)]) == 1
    assert "state.json is damaged" in capsys.readouterr().out
    flip_bit(begun(tmp_path)[0] / "MANIFEST.json", 3)
    assert main(["checkpoints", "scrub", str(tmp_path), "--json"]) == 1
    assert main(["checkpoints", "scrub", str(tmp_path / "checkpoint-000000002")]) == 2


@pytest.mark.parametrize("keep_last", [None, 2])
@pytest.mark.parametrize("background", [False, True])
def test_a_save_of_the_owner_lists_the_checkpoints_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, keep_last: int | None, background: bool
) -> None:
    folder = tmp_path / "checkpoints"
    saver = checkpointer(folder, keep_last=keep_last, async_save=background)
    saver.load(None)
    saver.lease = Lease.acquire([tmp_path])
    listed: list[str] = []
    scandir = os.scandir

    def note(path: Any = ".") -> Any:
        listed.append(str(path))  # rmtree gives a descriptor
        return scandir(path)

    monkeypatch.setattr(os, "scandir", note)
    if sys.version_info < (3, 11):  # pathlib of Python 3.10 has a separate reference
        monkeypatch.setattr("pathlib._NormalAccessor.scandir", staticmethod(note))
    saver.begin_run(resumed=False)
    assert listed.count(os.fspath(folder)) == 1
    try:
        for step in range(1, 6):
            listed.clear()
            saver.save(make_checkpoint(step, step=step), step)
            saver.finish()
            assert listed.count(os.fspath(folder)) == (2 if step == 1 else 1)  # the first looks for leftovers
    finally:
        saver.lease.release()
    infos = list_checkpoints(folder)
    assert [info.global_step for info in infos] == ([1, 2, 3, 4, 5] if keep_last is None else [4, 5])
    assert len({info.sequence for info in infos}) == len(infos)
    assert saver.last() == infos[-1]


def test_the_list_of_checkpoints_after_a_save_equals_a_scan(tmp_path: Path) -> None:
    run_once(tmp_path, 1, 2)
    flip_bit(tmp_path / "checkpoint-000000001" / "MANIFEST.json", 40)
    for step in (3, 1, 2):  # a new one, one in place of a damaged one, one in place of an intact one
        before = scan(tmp_path)
        path = write_checkpoint(make_checkpoint(step, step=step), tmp_path, f"checkpoint-{step:09d}")
        added, found = before.including(path), scan(tmp_path)
        assert (added.intact, added.begun, list(added.broken)) == (found.intact, found.begun, list(found.broken))


def test_saving_into_an_unlistable_folder_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    saver = run_once(tmp_path, 1)

    def refuse(path: Any) -> Any:
        raise PermissionError(errno.EACCES, "Permission denied", os.fspath(path))

    monkeypatch.setattr(os, "scandir", refuse)
    with pytest.raises(CheckpointError, match=r"cannot be listed: .*Permission denied.*name another"):
        saver.save(make_checkpoint(2, step=2), 2)


def test_a_save_does_not_slow_down_with_the_number_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    saver = run_once(tmp_path, *range(1, 30))
    monkeypatch.setattr("trainstack.checkpointing.directory._COARSE_S", -1.0)
    scan(tmp_path)
    parsed: list[Path] = []
    parse = scan.__globals__["_read_entry"]
    monkeypatch.setattr(
        "trainstack.checkpointing.directory._read_entry", lambda path: parsed.append(path) or parse(path)
    )
    saver.save(make_checkpoint(30, step=30), 30)
    assert len(set(parsed)) <= 1


def test_a_missing_directory_is_an_error_and_not_created(tmp_path: Path) -> None:
    with pytest.raises(CheckpointNotFoundError, match="does not exist"):
        checkpointer(tmp_path / "none").load("last")
    assert not os.path.exists(tmp_path / "none")
