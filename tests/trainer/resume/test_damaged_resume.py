"""A trainer with a damaged newest checkpoint or a full disk loses one checkpoint at most, and reports it."""

from __future__ import annotations

import errno
import logging
from pathlib import Path
from typing import Any

import pytest
import torch

import trainstack as ts
from tests.checkpointing.support import flip_bit
from tests.helpers.modules import Classifier, arguments, train, weights
from trainstack.checkpointing import filesystem

FILES = ("MANIFEST.json", "model.safetensors", "state.safetensors", "state.json")
FULL = OSError(errno.ENOSPC, "No space left on device")
NEWEST = "checkpoint-000000006"


def saving(**changes: Any) -> ts.DefaultCheckpointerArguments:
    return ts.DefaultCheckpointerArguments(**{"every_n_steps": 3, **changes})


def made() -> Classifier:
    torch.manual_seed(1)
    return Classifier(dropout=0.2, optimizer=torch.optim.AdamW, scheduler=True)


def steps_saved(directory: Path) -> list[int | None]:
    return [info.global_step for info in ts.list_checkpoints(directory / "checkpoints") if info.kind == "checkpoint"]


@pytest.mark.spec("F116")
@pytest.mark.parametrize("file", FILES)
@pytest.mark.parametrize("damage", ["0", "1", "half", "size-1", "a bit"])
def test_a_run_continues_from_the_checkpoint_before_a_damaged_one(
    tmp_path: Path, file: str, damage: str, caplog: pytest.LogCaptureFixture
) -> None:
    unbroken = train(made(), tmp_path, checkpointer_args=saving())
    newest = tmp_path / "checkpoints" / NEWEST
    data = (newest / file).read_bytes()
    if damage == "a bit":
        flip_bit(newest / file, len(data) // 2, 3)
    else:
        length = {"0": 0, "1": 1, "half": len(data) // 2, "size-1": len(data) - 1}[damage]
        (newest / file).write_bytes(data[:length])

    with pytest.raises(ts.CheckpointDamagedError, match=rf"{NEWEST}/{file} .*Load another checkpoint"):
        train(made(), tmp_path, checkpointer_args=saving(), resume=str(newest))
    with caplog.at_level(logging.WARNING, "trainstack"):
        resumed = ts.Trainer(made(), arguments(tmp_path, checkpointer_args=saving(), resume="auto"))
        assert resumed.plan.total_steps == 6
    assert resumed.global_steps_finished == 3
    assert f"{NEWEST}/{file}" in caplog.text
    resumed.train()
    assert torch.equal(weights(resumed.module), weights(unbroken.module))
    assert steps_saved(tmp_path)[-1] == 6, "the damaged one is replaced"


@pytest.mark.spec("F116")
@pytest.mark.parametrize("async_save", [False, True], ids=["foreground", "background"])
@pytest.mark.parametrize("at", ["open_new", "write", "sync_file", "rename"])
def test_a_run_ended_by_a_full_disk_can_continue(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, async_save: bool, at: str
) -> None:
    unbroken = train(made(), tmp_path / "unbroken")
    args = saving(async_save=async_save)
    original = getattr(filesystem, at)

    def full(*given: Any) -> Any:
        if steps_saved(tmp_path) == [3]:
            raise FULL
        return original(*given)

    with monkeypatch.context() as patch:
        patch.setattr(filesystem, at, full)
        with pytest.raises(ts.CheckpointError) as raised:
            train(made(), tmp_path, checkpointer_args=args)
    said = str(raised.value)
    assert f"{NEWEST} could not be written: [Errno {errno.ENOSPC}] No space left on device" in said
    assert "Earlier checkpoints are intact. Free space or repair the directory, or set save_dir to another one." in said
    assert steps_saved(tmp_path) == [3]

    resumed = train(made(), tmp_path, checkpointer_args=args, resume="auto")
    assert torch.equal(weights(resumed.module), weights(unbroken.module))
    assert steps_saved(tmp_path) == [3, 6]


@pytest.mark.parametrize("async_save", [False, True], ids=["foreground", "background"])
def test_a_full_disk_is_noticed_before_any_write(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, async_save: bool
) -> None:
    monkeypatch.setattr(filesystem, "free_bytes", lambda path: 10 if steps_saved(tmp_path) == [3] else None)
    with pytest.raises(ts.CheckpointError, match=r"does not fit into .*: 10 bytes are free. Free space, or"):
        train(made(), tmp_path, checkpointer_args=saving(async_save=async_save))
    assert steps_saved(tmp_path) == [3]
